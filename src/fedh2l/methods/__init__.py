"""FedH2L, FedH2L+ and the methods to compare with, one file each.

A method keeps no state and sees a node only through `training.learner`. It does not know engines or the network.
"""
