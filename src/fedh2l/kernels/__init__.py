"""Optional accelerators for small networks, compiled when first used.

They import PyTorch and nothing else of the package. Without them, PyTorch computes the same values.
"""
