"""Optional dependencies: parts of the package that need an extra."""

from __future__ import annotations

from importlib.util import find_spec

from fedh2l.errors import ConfigError

PEER = ("cryptography", "grpc", "google.protobuf", "grpc_health", "prometheus_client")
"""The modules of the extra `peer`."""


def needs(extra: str, *modules: str) -> None:
    """Raise an error that names the extra to install if one of its modules is missing."""
    missing = [module for module in modules if not _there(module)]
    if missing:
        raise ConfigError(f"this needs {' and '.join(missing)}; pip install 'fedh2l[{extra}]'")


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False
