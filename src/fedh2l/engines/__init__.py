"""Engines: what carries messages between nodes and decides where they run."""
