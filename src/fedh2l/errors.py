"""What can go wrong in a way that a user can mend, each with a message that names the place and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedH2LError(Exception):
    """Base of every error that fedh2l raises on purpose; the command line prints it without a traceback."""

    exit_code = 2


class ConfigError(FedH2LError):
    """A configuration key, option or argument is wrong."""


class DataError(FedH2LError):
    """The data of a node or of the federation cannot be trained on as it is."""


class ModelError(FedH2LError):
    """A model cannot be imported, built, loaded or used with this data."""


class RunError(FedH2LError):
    """A run directory or checkpoint cannot be written, read or resumed."""


class MethodError(FedH2LError):
    """A method does something that it may not."""


class MessageError(FedH2LError):
    """A message between nodes does not follow the protocol."""


class DivergedError(FedH2LError):
    """Training produced a value that is not a number."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A tail for 'unknown …' messages: the nearest valid name, and all of them."""
    names = sorted(known)
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    guess = f" Did you mean '{near[0]}'?" if near else ""
    return f"{guess} Valid: {', '.join(names)}."
