"""Training between organisations: one process per member, without a server.

Methods, models and data are those of a simulation. Only connections, membership and audit are added here.
"""
