"""Keys and certificates: the authority of a federation, requests, signatures and revocation.

Connections that use them are in `peer.transport`.
"""
