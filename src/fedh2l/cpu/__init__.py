"""CPU replacements for operations that are slow in PyTorch."""
