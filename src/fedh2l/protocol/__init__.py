"""What all nodes must agree on: random numbers, members, topology and messages.

It knows neither data nor networks. Connections between real peers are in `peer.transport`.
"""
