"""Audit log of sent messages: a hash chain, its signed heads that other peers keep, and its verification.

This package records messages. It does not choose which messages are sent.
"""

from fedh2l.peer.audit.head import AuditError, Head, read_heads
from fedh2l.peer.audit.log import AuditLog, line_hash
from fedh2l.peer.audit.report import Report, audit

__all__ = ["AuditError", "AuditLog", "Head", "Report", "audit", "line_hash", "read_heads"]
