"""Logs of a process that runs for days: a line for each event, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum

KNOWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; the rest is what the event itself brings."""


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


class _Lines(logging.Formatter):
    """Time, level, text; as a JSON object, also what the event is about: a peer, a round."""

    def __init__(self, how: LogFormat, node: str) -> None:
        super().__init__()
        self._how, self._node = how, node

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())  # others may forge lines
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._how is LogFormat.TEXT:
            return f"{when} {record.levelname.lower():7} {text}"
        about = {key: value for key, value in record.__dict__.items() if key not in KNOWN}
        known = {"time": when, "level": record.levelname.lower(), "node": self._node, "message": text}
        return json.dumps({**about, **known}, default=str)


def use_format(how: LogFormat, node: str) -> None:
    """From now on all logs go to standard error as whole lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(how, node))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
