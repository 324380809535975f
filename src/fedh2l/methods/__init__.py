"""Methods of federated learning: one file each, found by name."""
