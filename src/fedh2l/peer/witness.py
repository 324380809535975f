"""What other peers said of their audit logs, kept so that none of them can shorten its own unseen."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import Head, read_heads
from fedh2l.peer.circle import PeerRefusedError

log = logging.getLogger("fedh2l.peer")


LONGEST = 200
"""Characters of a signature at most."""


class Witnesses:
    """A file of heads for each of the others; `fedh2l audit --witness` reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._longest: dict[str, int] = {}
        self._lock = threading.Lock()

    def path(self, node: str) -> Path:
        """Where the word of a node is kept."""
        return self._folder / f"{node}.jsonl"

    def take(self, node: str, said: pb.Head, key: Any) -> None:
        """Keeps a head that is signed by `key` and no shorter than what was there; without a key, as it is."""
        head = Head(node, said.length, said.hash, said.signature)
        if not re.fullmatch("[0-9a-f]{64}", said.hash) or len(said.signature) > LONGEST:
            raise PeerRefusedError(f"'{node}' gives a head of its audit log that is none")
        if key is not None and not head.is_signed_by(key):
            raise PeerRefusedError(f"'{node}' gives a head of its audit log that it did not sign")
        with self._lock:
            known = self._known(node)
            if head.length < known:
                log.warning("the audit log of '%s' had %d lines, and now it has %d", node, known, head.length)
            elif head.length == known:
                return
            self._folder.mkdir(exist_ok=True)
            with open(self.path(node), "ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                torn = file.read() not in (b"", b"\n")  # this peer was killed just then
                file.write((b"\n" if torn else b"") + head.to_json().encode() + b"\n")
            self._longest[node] = max(known, head.length)

    def _known(self, node: str) -> int:
        if node not in self._longest:
            path = self.path(node)
            self._longest[node] = max((head.length for head in read_heads(path)), default=0) if path.exists() else 0
        return self._longest[node]
