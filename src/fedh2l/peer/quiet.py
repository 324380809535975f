"""Logs that nobody can fill: what is said again and again is said now and then, with how often it was."""

from __future__ import annotations

import logging
import threading
import time

MOST, WITHIN = 20, 60.0
"""Lines of one kind about one peer that are written within so many seconds."""
KINDS = 1000
"""Kinds that are told apart; then all are forgotten."""


class Quiet(logging.Filter):
    """Lets the first lines of a kind through, and then one that says how many more there were."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        kind = (str(record.msg), str(getattr(record, "peer", "")))
        now = time.monotonic()
        with self._lock:
            if len(self._kinds) > KINDS:
                self._kinds.clear()
            began, count = self._kinds.get(kind, (now, 0))
            if now - began >= WITHIN:
                if count > MOST:
                    record.msg = f"{record.msg} (and {count - MOST} more like this in the last minute)"
                began, count = now, 0
            self._kinds[kind] = (began, count + 1)
        return count < MOST
