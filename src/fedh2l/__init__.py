"""FedH2L: federated learning between nodes that share neither data nor models.

Each node trains on its own data and publishes only its posteriors on a small public set; the others learn from them
by mutual distillation, as far as that does not conflict with their own data. See `train` to start.
"""

from fedh2l.api import load, train
from fedh2l.callbacks import Callback
from fedh2l.data.splits import Shares
from fedh2l.domain import Domain, Samples
from fedh2l.errors import FedH2LError
from fedh2l.methods.base import Method
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings as Optimizer
from fedh2l.result import Result
from fedh2l.settings import RaySettings
from fedh2l.version import __version__

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
