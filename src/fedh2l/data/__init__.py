"""Samples, domains, splits, the seed set and augmentation.

Datasets are in `data.datasets`, one file each. Nothing here knows a network or a node.
"""
