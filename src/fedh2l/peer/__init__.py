"""Peers of different organisations, each with its own data and model, and no server between them."""
