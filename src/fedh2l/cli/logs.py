"""Logs of a long-running process: one line per event, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum

from fedh2l.cli.console import PlainLines, printable

KNOWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""Attributes of every log record. Others belong to the event."""


class LogFormat(StrEnum):
    """Format of a line."""

    TEXT = "text"
    JSON = "json"


class _Lines(PlainLines):
    """Formats time, level and text. JSON also has the attributes of the event, such as peer and round."""

    def __init__(self, how: LogFormat, node: str) -> None:
        super().__init__()
        self._how, self._node = how, node

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        text = printable(record.getMessage())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._how is LogFormat.TEXT:
            return f"{when} {record.levelname.lower():7} {text}"
        about = {key: value for key, value in record.__dict__.items() if key not in KNOWN}
        known = {"time": when, "level": record.levelname.lower(), "node": self._node, "message": text}
        return json.dumps({**about, **known}, default=str)


def use_format(how: LogFormat, node: str) -> None:
    """Send all logs to standard error, one line per event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(how, node))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
