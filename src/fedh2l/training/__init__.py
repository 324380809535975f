"""A node while it trains: its network, optimiser, losses, projection and metrics.

It does not know methods, engines or other nodes.
"""
