"""Federated learning by mutual distillation, without a server.

Each node trains its own network on its own data, and sends class probabilities on a small public dataset to the other
nodes. They learn from them where that does not conflict with their own data. Start with `train`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedh2l.api import load, train
    from fedh2l.data.domain import Domain, Samples
    from fedh2l.data.splits import Shares
    from fedh2l.errors import FedH2LError
    from fedh2l.experiment.settings import RaySettings
    from fedh2l.methods.base import Method
    from fedh2l.methods.fedh2l import FedH2L
    from fedh2l.runs.callbacks import Callback
    from fedh2l.runs.result import Result
    from fedh2l.training.node import Node
    from fedh2l.training.optimizers import OptimizerSettings as Optimizer
    from fedh2l.version import __version__
else:
    _PLACES = {
        "Callback": "runs.callbacks:Callback",
        "Domain": "data.domain:Domain",
        "FedH2L": "methods.fedh2l:FedH2L",
        "FedH2LError": "errors:FedH2LError",
        "Method": "methods.base:Method",
        "Node": "training.node:Node",
        "Optimizer": "training.optimizers:OptimizerSettings",
        "RaySettings": "experiment.settings:RaySettings",
        "Result": "runs.result:Result",
        "Samples": "data.domain:Samples",
        "Shares": "data.splits:Shares",
        "__version__": "version:__version__",
        "load": "api:load",
        "train": "api:train",
    }

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: PyTorch takes seconds, and not every command needs it."""
        if name not in _PLACES:
            raise AttributeError(f"module 'fedh2l' has no attribute {name!r}")
        module, _, attribute = _PLACES[name].partition(":")
        globals()[name] = getattr(import_module(f"fedh2l.{module}"), attribute)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Callback",
    "Domain",
    "FedH2L",
    "FedH2LError",
    "Method",
    "Node",
    "Optimizer",
    "RaySettings",
    "Result",
    "Samples",
    "Shares",
    "__version__",
    "load",
    "train",
]
