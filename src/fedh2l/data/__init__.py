"""Datasets: one file each, found by name."""
