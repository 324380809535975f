"""The built-in datasets, one file each. They are registered in `data.registry`."""
