"""Kernels for NVIDIA GPUs, compiled by NVRTC. Kernels in C are in `kernels.cpu`."""
