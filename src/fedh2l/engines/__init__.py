"""The round loop, and the engines that run it: `local`, `processes`, `ray` and `batched`.

An engine moves messages between nodes. Evaluation, checkpoints and files are in `runs`.
"""
