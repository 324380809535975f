"""Parts of the command line that need more than the plain installation."""

from __future__ import annotations

from importlib.util import find_spec

from fedh2l.errors import ConfigError


def needs(extra: str, *modules: str) -> None:
    """Says what to install if a module of an extra is missing."""
    missing = [module for module in modules if not _there(module)]
    if missing:
        raise ConfigError(f"this needs {' and '.join(missing)}; pip install 'fedh2l[{extra}]'")


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
