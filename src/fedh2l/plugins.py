"""Objects that users name as `package.module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fedh2l.errors import ConfigError
from fedh2l.models.vision import declare_missing_operators, mismatched

WANTED = {"torchvision": "fedh2l[vision]", "timm": "timm"}
"""What to install for packages that models come from."""


def is_path(name: str) -> bool:
    """Whether a name is `package.module:attribute` rather than one of ours."""
    return ":" in name


def search(folder: str) -> None:
    """Lets modules in `folder` be named."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if not mismatched(error):
            raise
    declare_missing_operators()
    return importlib.import_module(name)


def import_object(path: str, where: str) -> Any:
    """The object at `package.module:attribute`, also of a module in the working directory or beside a config file.

    `where` is the configuration key that holds the path, for the error message.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{where}: '{path}' is not of the form 'package.module:attribute'")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{where}: write '{path}' with dots, as it would be imported: '{dotted}:{attribute}'")
    search(os.getcwd())
    try:
        found: Any = _import(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        hint = (
            f"pip install '{WANTED[missing]}'" if missing in WANTED else f"it should be installed, or in {os.getcwd()}"
        )
        raise ConfigError(f"{where}: cannot import '{module_name}' ({error}); {hint}") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: module '{module_name}' has no '{attribute}'") from error
    except Exception as error:  # any module of a user's may fail in any way
        raise ConfigError(f"{where}: importing '{module_name}' failed: {type(error).__name__}: {error}") from error
    return found
