"""Training between peers of different organisations, without a server."""
