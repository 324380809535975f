"""The methods that can be named in a configuration."""

from __future__ import annotations

from fedh2l.methods.base import Method
from fedh2l.methods.fedh2l import FedH2L

METHODS: dict[str, type[Method]] = {method.name: method for method in (FedH2L,)}
