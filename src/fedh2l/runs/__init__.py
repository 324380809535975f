"""The course of a run: evaluation, model selection, checkpoints, its directory and its result.

It sees engines only through `engines.base`.
"""
