"""Where the command line writes: results to standard output, everything meant for people to standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

err = Console(stderr=True, highlight=False)


def notice(text: str) -> None:
    """Something the user should know."""
    err.print(Text(text, style="yellow"), soft_wrap=True)


def show_error(text: str) -> None:
    """Why the command did not do what it was asked to."""
    err.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def print_json(data: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()
