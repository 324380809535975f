"""Comparing methods: grids of runs, and the tables that come out of them."""
