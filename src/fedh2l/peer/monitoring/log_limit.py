"""Limits on repeated log lines, so that other peers cannot fill the log."""

from __future__ import annotations

import logging
import threading
import time

MOST, WITHIN = 20, 60.0
"""Maximum number of lines of a kind per peer, and the window in seconds."""
KINDS = 1000
"""Maximum number of kinds that are counted. Above it, all counts are reset."""


class LogRateLimit(logging.Filter):
    """Passes the first lines of a kind, and later one line with the number of lines left out."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
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
