"""Objects that users name as `package.module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fedh2l.errors import ConfigError


def is_path(name: str) -> bool:
    """Whether a name is `package.module:attribute` rather than one of ours."""
    return ":" in name


def import_object(path: str, where: str) -> Any:
    """The object at `package.module:attribute`; modules in the working directory are found too.

    `where` is the configuration key that holds the path, for the error message.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{where}: '{path}' is not of the form 'package.module:attribute'")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ConfigError(f"{where}: cannot import '{module_name}' ({error})") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: module '{module_name}' has no '{attribute}'") from error
    return found
