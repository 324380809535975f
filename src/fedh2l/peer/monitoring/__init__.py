"""The status of a peer for its operator: status page, metrics, health and limits on log lines.

Other members cannot read any of it.
"""
