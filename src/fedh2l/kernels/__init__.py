"""Optional accelerators for small networks, compiled when first used. `README.md` says what they gain.

Each operation has one entry point, with its definition in PyTorch beside it: `adam`, `projection` and `pooled`. They
import PyTorch and nothing else of the package.
"""
