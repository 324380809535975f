"""Kernels in C for a CPU, compiled by the machine's compiler. Kernels for GPUs are in `kernels.cuda`."""
