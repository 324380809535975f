"""Methods that a configuration can name: built-in methods, methods of installed packages, and classes by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.plugins import import_object, installed, is_path
from fedh2l.registry import Builtin, Registry

if TYPE_CHECKING:
    from fedh2l.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    {
        "fedh2l": Builtin(
            "fedh2l.methods.fedh2l:FedH2L",
            "Each node trains on its own data, publishes posteriors on its public data, and learns from the others'.",
        ),
        "fedh2l-plus": Builtin(
            "fedh2l.methods.fedh2l_plus:FedH2LPlus",
            "FedH2L with four additions and other defaults.",
        ),
        "independent": Builtin(
            "fedh2l.methods.independent:Independent",
            "IND: every node trains alone on its private and its own public data.",
        ),
        "aggregation": Builtin(
            "fedh2l.methods.aggregation:Aggregation",
            "AGG: every node trains alone on its private data and all public data.",
        ),
        "fedmd": Builtin(
            "fedh2l.methods.fedmd:FedMD",
            "FedMD: models of any architecture agree on the logits of public data, then revisit their private data.",
        ),
        "fedavg": Builtin(
            "fedh2l.methods.fedavg:FedAvg",
            "FedAvg: nodes train one common model for K steps each, and a server averages the results.",
        ),
        "fedprox": Builtin(
            "fedh2l.methods.fedprox:FedProx",
            "FedProx: FedAvg with (μ/2)·‖w − w^t‖² added to each node's loss. w^t is the last global model.",
        ),
        "fml": Builtin(
            "fedh2l.methods.fml:FML",
            "FML: each node's own model and a common small model, the meme, teach each other. A server averages the "
            "memes.",
        ),
        "fedgkt": Builtin(
            "fedh2l.methods.fedgkt:FedGKT",
            "FedGKT: nodes train the first layers and a small head. A server trains the rest on their features.",
        ),
        "agnostic": Builtin(
            "fedh2l.methods.agnostic:Agnostic",
            "FedAgnostic: min over w of max over mixtures λ of the nodes' losses, Σ_k λ_k L_k(w).",
        ),
    }
)
DEFAULT = "fedh2l"
ENTRY_POINTS = "fedh2l.methods"
"""Group of entry points where packages name their methods."""


def installed_methods() -> Mapping[str, str]:
    """Return methods of installed packages, as `name: package.module:Class`. Built-in names take precedence."""
    return {name: path for name, path in installed(ENTRY_POINTS).items() if name not in METHODS}


def find_method(name: Any) -> type[Method]:
    """Return the class of a method by its name, or by `package.module:Class`."""
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    path = installed_methods().get(name, name) if isinstance(name, str) else ""
    if is_path(path):
        from fedh2l.methods.base import Method

        found = import_object(path, "method.name")
        if isinstance(found, type) and issubclass(found, Method):
            return found
        raise ConfigError(f"method.name: '{path}' is not a subclass of fedh2l.Method")
    known = [*METHODS, *installed_methods()]
    raise ConfigError(
        f"method.name: unknown method '{name}'.{did_you_mean(str(name), known)} "
        f"For your own method, write 'package.module:Class'."
    )


def make_method(raw: Mapping[str, Any]) -> Method:
    """Return a method from its name and parameters."""
    values = dict(raw)
    name = values.pop("name", DEFAULT)
    method = find_method(name).read(values, "method")
    if name not in METHODS:
        method._path = name
    return method
