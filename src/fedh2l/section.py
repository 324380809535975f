"""Base class of configuration sections: documented keys, with error messages for invalid values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedh2l.errors import ConfigError, did_you_mean, shown

RENAMED = {
    "run.average": "run.ema_decay",
    "run.processes": "run.engine = 'processes'",
    "roster.average": "ema_decay",
    "optimizer.mutual_lr": "optimizer.mutual_lr_scale, a multiple of optimizer.lr",
    "method.pace": "optimizer.mutual_lr_scale",
    "method.kl": "method.kl_weight; 0 turns distillation off",
    "method.ce": "method.ce_weight; 0 turns cross-entropy off",
    "method.revisit": "method.replay, of fedh2l-plus",
}
"""Former keys and their replacements."""
LONGEST = 200
"""Longest quotation of a value in an error message, in characters."""


class Section(BaseModel):
    """Frozen keys with types, bounds and descriptions. Invalid values raise `ConfigError`.

    Methods, datasets and settings are sections: their fields are the keys of `[method]`, `[data]`, `[run]`, …
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _WrongValuesError(type(self), error) from None

    @classmethod
    def read(cls, values: Any, where: str) -> Self:
        """Return the section with these values. `where` is its place in the configuration, for error messages."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where} = {values!r}: it should be a table of keys and values")
        try:
            return cls(**values)
        except _WrongValuesError as error:
            raise ConfigError(*error.explain(where)) from None


class _WrongValuesError(ConfigError):
    def __init__(self, section: type[Section], error: ValidationError) -> None:
        self.section, self.problems = section, error.errors()
        super().__init__(*self.explain(section.__name__))

    def explain(self, where: str) -> Iterable[str]:
        """Return one line per key: its place, its value and the valid values."""
        return dict.fromkeys(_problem(self.section, problem, where) for problem in self.problems)


def _problem(section: type[Section], problem: Any, where: str) -> str:
    place = [shown(step, 80) for step in problem["loc"]]
    key = f"{where}.{place[0]}" if place else where
    if problem["type"] == "extra_forbidden":
        if key in RENAMED:
            return f"{key}: this key is now {RENAMED[key]}"
        return f"{key}: unknown key.{did_you_mean(place[0], section.model_fields)}"
    if problem["type"] == "missing":
        return f"{key}: this key is required"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return f"{key} = {_quoted(problem['input'])}: {message}"


def _quoted(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
