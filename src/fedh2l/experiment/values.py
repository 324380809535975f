"""Values of a configuration before they are checked: read from a file, and changed by `--set` and `--method`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedh2l import files
from fedh2l.errors import ConfigError, did_you_mean, shown
from fedh2l.experiment.settings import RunSettings
from fedh2l.methods.base import Method
from fedh2l.methods.registry import DEFAULT, METHODS, find_method

SECTIONS = ("run", "data", "method", "optimizer", "ray", "nodes")
DEFAULT_DATA = "rotated-mnist"

Raw = dict[str, Any]
"""Values by section and key."""
Change = tuple[list[str], Any]
"""Path of a key, and its new value."""


def read_toml(path: Path) -> Raw:
    """Return the content of a TOML file. All its sections must be known."""
    try:
        raw = files.read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file '{path}'; `fedh2l init` writes one to start from") from None
    except files.UnreadableError as error:
        raise ConfigError(f"'{path}': {shown(error)}") from error
    for name, section in raw.items():
        if name in RunSettings.model_fields and not isinstance(section, dict):
            raise ConfigError(f"'{path}': {name} stands in no section; write it under [run]")
        _check_section_name(name)
        if not isinstance(section, list if name == "nodes" else dict):
            header = "[[nodes]]" if name == "nodes" else f"[{name}]"
            raise ConfigError(f"'{path}': write {name} as a section, {header}")
    return raw


def _check_section_name(name: str) -> None:
    if name not in SECTIONS:
        raise ConfigError(f"unknown section [{shown(name, 80)}].{did_you_mean(name, SECTIONS)}")


def parse_change(text: str) -> Change:
    """Return the key and the value of `section.key=value`."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {text}: write --set section.key=value, for example --set method.interval=5")
    _check_section_name(path[0])
    return path, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """Return a TOML value. Text that is not TOML is returned as a string, so that quotes can be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply(raw: Raw, change: Change) -> None:
    """Set one key. A node is given by its name or its position."""
    path, value = change
    key, here = ".".join(path), raw
    for step in path[:-1]:
        if isinstance(here, list):
            names = [entry.get("name") if isinstance(entry, dict) else None for entry in here]
            place = names.index(step) if step in names else int(step) if step.isdecimal() else len(here)
            if place >= len(here):
                raise ConfigError(f"--set {key}: '{step}' is not a node; use a name or 0 to {len(here) - 1}")
            here = here[place]
        else:
            here = here.setdefault(step, {})
        if not isinstance(here, (dict, list)):
            raise ConfigError(f"--set {key}: '{step}' is a value, not a section")
    if isinstance(here, list):
        raise ConfigError(f"--set {key}: say which key of a node, for example nodes.0.model=mlp")
    here[path[-1]] = value


def drop_other_data(raw: Raw, changes: Sequence[Change]) -> None:
    """Drop the file's other `[data]` keys if `data.name` is changed: keys of one dataset do not fit another."""
    named = [value for path, value in changes if path == ["data", "name"]]
    if named and named[-1] != raw.get("data", {}).get("name", DEFAULT_DATA):
        raw["data"] = {}


def choose_method(raw: Raw, method: str | None, changes: Sequence[Change]) -> list[str]:
    """Let `--method`, or a change of `method.name`, replace the file's method. Return notices to show.

    The parameters of the old method are dropped, because they do not fit the new one. Other sections keep the file's
    values. Notices list those that only suit the old method, or that the new method would set differently.
    """
    named = [value for path, value in changes if path == ["method", "name"]]
    chosen = method if method is not None else named[-1] if named else None
    if chosen is None:
        return []
    written = raw.get("method", {})
    before = written.get("name", DEFAULT)
    if before == chosen:
        raw["method"] = {**written, "name": chosen}
        return []
    raw["method"] = {"name": chosen}
    dropped = sorted(set(written) - {"name"})
    asked = f"--method {method}" if method is not None else f"method.name = {chosen!r}"
    notices = [f"{asked}: ignored these [method] keys of the file: {', '.join(dropped)}"] if dropped else []
    return notices + (_left_over(raw, METHODS[before], find_method(chosen)) if before in METHODS else [])


def _left_over(raw: Raw, before: type[Method], chosen: type[Method]) -> list[str]:
    """Return notices about the file's values that suit the old method, or that the new method would set differently."""
    labelled = raw.get("data", {}).get("public_labels", True)
    old, new = ({k: v for k, v in m.recommends(labelled).items() if k[:7] != "method."} for m in (before, chosen))
    found = []
    for key in dict.fromkeys([*old, *new]):
        section, _, name = key.partition(".")
        written = raw.get(section, {})
        if name in written and written[name] != new.get(key) and (key in new or written[name] == old[key]):
            wish = f"{chosen.name} recommends {new[key]!r}" if key in new else f"it suits {before.name}"
            found.append(f"{key} stays {written[name]!r}, as in the file; {wish}")
    return found
