"""Errors that a user can fix. Each message names the place and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches


class FedH2LError(Exception):
    """Base of all errors that fedh2l raises on purpose. The command line prints them without a traceback.

    Each argument is one line of the message. Lines may quote other people's files, so control characters and newlines
    are escaped.
    """

    exit_code = 2

    def __str__(self) -> str:
        return "\n".join(shown(line, sys.maxsize) for line in self.args)


class ConfigError(FedH2LError):
    """A configuration key, option or argument is wrong."""


class DataError(FedH2LError):
    """The data of a node or of the federation is not fit for training."""


class ModelError(FedH2LError):
    """A model cannot be imported, built, loaded or used with this data."""


class RunError(FedH2LError):
    """A run directory or checkpoint cannot be written, read or resumed."""


class WriteError(RunError):
    """A file cannot be written now, for example because the disk is full. A later attempt may succeed."""

    exit_code = 1


class MethodError(FedH2LError):
    """A method does something that is not allowed."""


class MessageError(FedH2LError):
    """A message between nodes does not follow the protocol."""


class DivergedError(FedH2LError):
    """Training produced a value that is NaN or infinite."""

    exit_code = 1


class UnsoundMessageError(DivergedError):
    """A message has finite values, but breaks the rules of its kind. The method that sent it is wrong."""


def shown(text: object, most: int = 500) -> str:
    """Return outside text for one line of output. Unprintable characters are escaped, a long rest is cut."""
    cut = str(text)
    cut = cut if len(cut) <= most else f"{cut[:most]}…"
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in cut)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an 'unknown …' message: the nearest valid name, and all valid names."""
    names = [shown(name, 80) for name in sorted(known)]
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    guess = f" Did you mean '{near[0]}'?" if near else ""
    return f"{guess} Valid: {', '.join(names)}."
