"""Comparison of methods: grids of runs and their tables."""
