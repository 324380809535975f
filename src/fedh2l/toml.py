"""Writing a configuration as TOML, plain or with a comment for every key."""

from __future__ import annotations

import json
import re
import textwrap
from datetime import date, time
from typing import Any

from pydantic import BaseModel

from fedh2l.config import Config, NodeSettings


def to_toml(config: Config, comments: bool = False) -> str:
    """A configuration file that gives back `config`; with `comments`, each key is explained."""
    sections = config.sections()
    models: dict[str, BaseModel] = {
        "run": config.run,
        "data": config.data,
        "method": config.method,
        "optimizer": config.optimizer,
        "ray": config.ray,
    }
    lines: list[str] = []
    for section, model in models.items():
        if section not in sections:
            continue
        lines.append(f"[{section}]")
        lines += _entries(sections[section], type(model), comments)
        lines.append("")
    for node in sections["nodes"]:
        lines += ["[[nodes]]", *_entries(node, NodeSettings, comments and node is sections["nodes"][0]), ""]
    return "\n".join(lines)


def _entries(values: dict[str, Any], model: type[BaseModel], comments: bool) -> list[str]:
    lines = []
    for key, value in values.items():
        description = model.model_fields[key].description if key in model.model_fields else None
        if comments and description:
            lines += textwrap.wrap(description, 100, initial_indent="# ", subsequent_indent="#   ")
        if value is not None:
            lines.append(f"{toml_key(key)} = {toml_value(value)}")
        elif comments:
            lines.append(f"# {key} =")
    return lines


def toml_key(key: str) -> str:
    """A key, quoted where TOML wants it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def toml_value(value: Any) -> str:
    """One value in TOML's notation; JSON's strings and booleans are also TOML's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)  # 1e-05 and inf are TOML too
    if isinstance(value, (date, time)):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)
