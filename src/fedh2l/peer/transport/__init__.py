"""Connections between peers over mutual TLS: servers, senders, limits and validation of incoming calls.

It does not train. The schema of the wire is `fedh2l.proto`.
"""
