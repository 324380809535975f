"""Kernels for a GPU, for what libraries are slow at: small layers of many networks, and vectors as long as a model."""
