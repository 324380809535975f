"""Parts of the command line that need more than the plain installation."""

from __future__ import annotations

from importlib.util import find_spec

from fedh2l.errors import ConfigError


def needs(extra: str, *modules: str) -> None:
    """Says what to install if a module of an extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(f"this needs {' and '.join(missing)}; pip install 'fedh2l[{extra}]'")
