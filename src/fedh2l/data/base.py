"""The base class of datasets: a section of the configuration that can create domains."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, PrivateAttr

from fedh2l.errors import ConfigError, DataError, FedH2LError
from fedh2l.plugins import import_object
from fedh2l.section import Section

if TYPE_CHECKING:
    from fedh2l.data.domain import Domain, Samples

Share = Annotated[float, Field(gt=0, lt=1)]


class WholeDomain(NamedTuple):
    """All labelled samples of a domain, without splits."""

    name: str
    classes: tuple[str, ...]
    samples: Samples
    preprocessing: Mapping[str, Any]

    @staticmethod
    def of(domain: Domain) -> WholeDomain:
        """Return the splits of a domain together."""
        from fedh2l.data.domain import Samples

        public = [domain.public] if domain.public_labels else []
        samples = Samples.concatenate([domain.private, *public, domain.validation, domain.test])
        return WholeDomain(domain.name, domain.classes, samples, domain.preprocessing)


def model_for(shape: Sequence[int]) -> str:
    """Return a built-in model that takes inputs of this shape."""
    if tuple(shape) == (1, 28, 28):
        return "lenet"
    return "cnn" if len(shape) == 3 else "mlp"


class Dataset(Section):
    """A multi-domain dataset. Its fields are the keys of the `[data]` section."""

    name: ClassVar[str]

    public_labels: bool = Field(
        True,
        description="Whether public data has labels. false drops them, and nodes learn from posteriors alone.",
    )

    @property
    def title(self) -> str:
        """Return the value of `data.name`."""
        return self.name

    @property
    def note(self) -> str:
        """Return a short note for readers of results. Most datasets have none."""
        return ""

    def resolved(self) -> Dataset:
        """Return the same dataset with all defaults filled in, for the configuration in the run directory."""
        return self

    def suitable_model(self, seed: int) -> str:
        """Return the built-in model for nodes that name none."""
        return "lenet"

    def origin(self, domain: str) -> str:
        """Return an identifier of the source of a domain's samples. Domains with the same source may share samples."""
        return self.title

    def whole(self, seed: int, preprocessing: Mapping[str, Any]) -> list[WholeDomain]:
        """Return all samples of each domain, prepared as for a model with this preprocessing if possible."""
        return [WholeDomain.of(domain) for domain in self.domains(seed)]

    @abstractmethod
    def domain_names(self, seed: int) -> list[str]:
        """Return the names of the domains, in order."""

    @abstractmethod
    def domains(self, seed: int) -> list[Domain]:
        """Return the domains. All randomness comes from `seed`."""


class FunctionDataset(Dataset):
    """Data from a user's function: `package.module:function` takes the other keys of `[data]` and returns domains.

    The run's seed and `public_labels` are passed too if the function takes arguments of these names.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    _path: str = PrivateAttr("")
    _loaded: dict[int, list[Domain]] = PrivateAttr(default_factory=dict)
    _offered: dict[str, Any] = PrivateAttr(default_factory=dict)

    @staticmethod
    def of(path: str, arguments: dict[str, Any]) -> FunctionDataset:
        """Return a dataset that calls the function at `path` with `arguments`."""
        dataset = FunctionDataset.read(arguments, "data")
        dataset._path = path
        return dataset

    def offer(self, name: str, value: Any) -> None:
        """Pass this argument to the function if it takes one of this name."""
        self._offered[name] = value

    @property
    def title(self) -> str:
        """Return the function's path."""
        return self._path

    def suitable_model(self, seed: int) -> str:
        """Return a model that takes the inputs of the first domain."""
        domains = self.domains(seed)
        return model_for(domains[0].private.inputs.shape[1:]) if domains else "lenet"

    def origin(self, domain: str) -> str:
        """Return the function with the arguments that usually name the place of the samples."""
        given = self.model_extra or {}
        return f"{self.title} {given.get('root')} {given.get('files')}"

    def domain_names(self, seed: int) -> list[str]:
        """Return the names of the domains that the function returns."""
        return [domain.name for domain in self.domains(seed)]

    def domains(self, seed: int) -> list[Domain]:
        """Return the function's domains. It is called once per seed."""
        if seed not in self._loaded:
            self._loaded[seed] = self._call(seed)
        return self._loaded[seed]

    def _call(self, seed: int) -> list[Domain]:
        from fedh2l.data.domain import Domain

        function: Callable[..., Any] = import_object(self._path, "data.name")
        if not callable(function):
            raise ConfigError(f"data.name: '{self._path}' is not a function")
        arguments: dict[str, Any] = dict(self.model_extra or {})
        offered = {"seed": seed, "public_labels": self.public_labels, **self._offered}
        for name, value in offered.items():
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
        except Exception as error:  # a user's function may fail in any way
            raise DataError(f"data.name: {self._path} failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, (list, tuple)) or not all(isinstance(domain, Domain) for domain in result):
            raise DataError(f"data.name: {self._path} must return a list of fedh2l.Domain objects")
        return list(result)
