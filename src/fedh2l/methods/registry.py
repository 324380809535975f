"""The methods that can be named in a configuration: ours, those of installed packages, and classes by their path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.methods.aggregation import Aggregation
from fedh2l.methods.agnostic import Agnostic
from fedh2l.methods.base import Method
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.fedgkt import FedGKT
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.fedh2l_plus import FedH2LPlus
from fedh2l.methods.fedmd import FedMD
from fedh2l.methods.fedprox import FedProx
from fedh2l.methods.fml import FML
from fedh2l.methods.independent import Independent
from fedh2l.plugins import import_object, is_path

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (FedH2L, FedH2LPlus, Independent, Aggregation, FedMD, FedAvg, FedProx, FML, FedGKT, Agnostic)
}
ENTRY_POINTS = "fedh2l.methods"
"""The group of entry points in which a package names methods of its own."""


@cache
def installed_methods() -> Mapping[str, str]:
    """Methods of other installed packages, as `name: package.module:Class`; a name of ours is not theirs to take."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return {name: path for name, path in sorted(found.items()) if name not in METHODS}


def find_method(name: Any) -> type[Method]:
    """The class of a method by its name, or by `package.module:Class`."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    path = installed_methods().get(name, name) if isinstance(name, str) else ""
    if is_path(path):
        found = import_object(path, "method.name")
        if isinstance(found, type) and issubclass(found, Method):
            return found
        raise ConfigError(f"method.name: '{path}' is not a subclass of fedh2l.Method")
    known = [*METHODS, *installed_methods()]
    raise ConfigError(
        f"method.name: unknown method '{name}'.{did_you_mean(str(name), known)} "
        f"A method of your own is 'package.module:Class'."
    )


def make_method(raw: Mapping[str, Any]) -> Method:
    """A method from its name and parameters."""
    values = dict(raw)
    name = values.pop("name", FedH2L.name)
    method = find_method(name).read(values, "method")
    if name not in METHODS:
        method._path = name
    return method
