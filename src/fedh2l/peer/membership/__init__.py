"""What members agree on before training: the roster and its versions, the seed set, and shares of the seed.

It opens no connections.
"""
