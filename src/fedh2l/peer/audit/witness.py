"""Heads of other peers' audit logs, kept so that no peer can shorten its log unnoticed."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

from fedh2l.files import private_folder, private_opener
from fedh2l.peer.audit import Head, read_heads
from fedh2l.peer.refusals import PeerRefusedError, Refusal
from fedh2l.peer.transport import fedh2l_pb2 as pb

log = logging.getLogger("fedh2l.peer")


LONGEST = 200
"""Maximum number of characters of a signature."""


class Witnesses:
    """A file of heads per peer. `fedh2l audit --witness` reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._longest: dict[str, int] = {}
        self._lock = threading.Lock()

    def path(self, node: str) -> Path:
        """Return the path of the heads of a node."""
        return self._folder / f"{node}.jsonl"

    def take(self, node: str, claimed: pb.Head, key: Any) -> None:
        """Keep a head that is signed by `key`, unless its length is the last known one. Warn if it is shorter.

        Without a key, the signature is not checked.
        """
        head = Head(node, claimed.length, claimed.hash, claimed.signature)
        if not re.fullmatch("[0-9a-f]{64}", claimed.hash) or len(claimed.signature) > LONGEST:
            raise PeerRefusedError(f"'{node}' sent an invalid head of its audit log", Refusal.UNSOUND_HEAD)
        if key is not None and not head.is_signed_by(key):
            raise PeerRefusedError(f"'{node}' sent a head of its audit log that it did not sign", Refusal.UNSOUND_HEAD)
        with self._lock:
            known = self._known(node)
            if head.length < known:
                log.warning("the audit log of '%s' had %d lines, and now it has %d", node, known, head.length)
            elif head.length == known:
                return
            private_folder(self._folder)
            with open(self.path(node), "ab+", opener=private_opener) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                torn = file.read() not in (b"", b"\n")  # this peer was killed while writing
                file.write((b"\n" if torn else b"") + head.to_json().encode() + b"\n")
            self._longest[node] = max(known, head.length)

    def _known(self, node: str) -> int:
        if node not in self._longest:
            path = self.path(node)
            self._longest[node] = max((head.length for head in read_heads(path)), default=0) if path.exists() else 0
        return self._longest[node]
