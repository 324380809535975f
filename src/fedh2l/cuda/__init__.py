"""GPU kernels for small layers of many networks and for vectors as long as a model. Libraries are slow at these."""
