"""The description of an experiment: settings, configuration files, presets, and the nodes they build.

Nothing here trains. Engines and runs are built from it.
"""
