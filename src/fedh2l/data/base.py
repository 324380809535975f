"""What a dataset is: parameters that are a section of the configuration, and a way to make domains of them."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field, PrivateAttr

from fedh2l.errors import ConfigError, DataError, FedH2LError
from fedh2l.plugins import import_object
from fedh2l.section import Section

if TYPE_CHECKING:
    from fedh2l.domain import Domain


class Dataset(Section):
    """A multi-domain dataset. Its fields are the keys of the `[data]` section."""

    name: ClassVar[str]

    public_labels: bool = Field(
        True,
        description="whether public data has labels; false: they are dropped, and nodes learn from posteriors alone",
    )

    @property
    def title(self) -> str:
        """What `data.name` says."""
        return self.name

    @property
    def note(self) -> str:
        """What a reader of numbers must know of the data, in a few words; nothing, for most."""
        return ""

    @abstractmethod
    def domain_names(self, seed: int) -> list[str]:
        """The names of the domains, in order."""

    @abstractmethod
    def domains(self, seed: int) -> list[Domain]:
        """The domains, with everything random in them drawn by `seed`."""


class FunctionDataset(Dataset):
    """Data of the user's own: `package.module:function`, called with the other keys of `[data]`, returns domains.

    The run's seed and `public_labels` are passed too if the function takes arguments of these names.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    _path: str = PrivateAttr("")
    _loaded: dict[int, list[Domain]] = PrivateAttr(default_factory=dict)

    @staticmethod
    def of(path: str, arguments: dict[str, Any]) -> FunctionDataset:
        """The function at `path`, to be called with `arguments`."""
        dataset = FunctionDataset.read(arguments, "data")
        dataset._path = path
        return dataset

    @property
    def title(self) -> str:
        """The function's path."""
        return self._path

    def domain_names(self, seed: int) -> list[str]:
        """The names of the domains that the function returns."""
        return [domain.name for domain in self.domains(seed)]

    def domains(self, seed: int) -> list[Domain]:
        """What the function returns, called once a seed."""
        if seed not in self._loaded:
            self._loaded[seed] = self._call(seed)
        return self._loaded[seed]

    def _call(self, seed: int) -> list[Domain]:
        from fedh2l.domain import Domain

        function: Callable[..., Any] = import_object(self._path, "data.name")
        if not callable(function):
            raise ConfigError(f"data.name: '{self._path}' is not a function")
        arguments: dict[str, Any] = dict(self.model_extra or {})
        for name, value in (("seed", seed), ("public_labels", self.public_labels)):
            if name in inspect.signature(function).parameters:
                arguments.setdefault(name, value)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"[data]: {self._path} does not take these keys: {error}") from error
        try:
            result = function(**arguments)
        except FedH2LError:
            raise
        except Exception as error:  # any function of a user's may fail in any way
            raise DataError(f"data.name: {self._path} failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, (list, tuple)) or not all(isinstance(domain, Domain) for domain in result):
            raise DataError(f"data.name: {self._path} must return a list of fedh2l.Domain objects")
        return list(result)
