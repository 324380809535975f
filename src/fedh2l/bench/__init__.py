"""Grids of runs that compare methods over seeds, with statistics, tables and figures.

A single run is in `runs`.
"""
