"""Output of the command line: results on standard output, everything else on standard error.

Printed text can come from other members: certificates, rosters, models, messages. So markup is off, and control
characters and newlines are escaped. They could move the cursor, change colours or forge lines. Only the program's own
code begins a line: each argument of `say`, `notice` and `show_error` is one.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from fedh2l.errors import shown


class _PlainConsole(Console):
    """A console that escapes control characters and newlines."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False})


err = _PlainConsole(stderr=True, highlight=False, markup=False)


def printable(*lines: str) -> str:
    """Escape the control characters of each line."""
    return "\n".join(shown(line, sys.maxsize) for line in lines)


def say(*lines: str) -> None:
    """Print lines on standard output."""
    sys.stdout.write(printable(*lines) + "\n")
    sys.stdout.flush()


def notice(*lines: str) -> None:
    """Print a notice on standard error."""
    err.print(Text(printable(*lines), style="yellow"), soft_wrap=True)


def show_error(*lines: str) -> None:
    """Print an error on standard error."""
    err.print(Text.assemble(("error: ", "bold red"), printable(*lines)), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print one line of JSON on standard output."""
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


class PlainLines(logging.Formatter):
    """Formats each log message as one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a method of logging
        return printable(record.getMessage())

    def formatException(self, ei: Any) -> str:  # noqa: N802 - a method of logging
        """Return an indented traceback. An exception may quote other members' text."""
        return printable(*(f"  {line}" for line in super().formatException(ei).splitlines()))
