"""A section of the configuration: a set of documented keys that says what is wrong with values it cannot take."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedh2l.errors import ConfigError, did_you_mean


class Section(BaseModel):
    """Keys with their types, bounds and descriptions, frozen; wrong values raise `ConfigError`.

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
        """The section with these values; `where` is its place in the configuration, for error messages."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where} = {values!r}: it should be a table of keys and values")
        try:
            return cls(**values)
        except _WrongValuesError as error:
            raise ConfigError(error.explain(where)) from None


class _WrongValuesError(ConfigError):
    def __init__(self, section: type[Section], error: ValidationError) -> None:
        self.section, self.problems = section, error.errors()
        super().__init__(self.explain(section.__name__))

    def explain(self, where: str) -> str:
        """One line a key: its place, its value, and what would be right."""
        return "\n".join(dict.fromkeys(_problem(self.section, problem, where) for problem in self.problems))


def _problem(section: type[Section], problem: Any, where: str) -> str:
    place = [str(step) for step in problem["loc"]]
    key = f"{where}.{place[0]}" if place else where
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key.{did_you_mean(place[0], section.model_fields)}"
    if problem["type"] == "missing":
        return f"{key}: this key is required"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    return f"{key} = {problem['input']!r}: {message}"
