"""The engine `batched`: nodes of one architecture are one computation, recorded as CUDA graphs on a GPU.

Other engines know nothing of it. Its state has the same form as that of `local`.
"""
