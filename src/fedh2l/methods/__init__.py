"""Federated methods. Each has one file and is found by its name."""
