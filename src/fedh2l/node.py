"""What an organisation brings to a federation: a name, a model and its own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedh2l.domain import Domain
from fedh2l.models.factory import Recipe, check_model
from fedh2l.sampling import torch_seed


@dataclass(frozen=True)
class Node:
    """A participant before training.

    `model` is a built-in name, `package.module:factory`, a class or function that builds a module, or a module. All
    but the last start from weights drawn by the run's seed and the node's name; a module is trained as it is given.
    """

    name: str
    model: str | Callable[..., nn.Module] | nn.Module
    domain: Domain
    model_args: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    """What it asks a Ray cluster for: num_cpus, num_gpus, memory in bytes, or resources of the cluster's own."""

    @property
    def recipe(self) -> Recipe:
        """How to build this node's model again."""
        if isinstance(self.model, str):
            return Recipe(self.model, dict(self.model_args))
        recipe = Recipe.of(self.model)
        return Recipe(recipe.factory, dict(self.model_args))

    @property
    def model_name(self) -> str:
        """What to call the model in tables."""
        if isinstance(self.model, str):
            return self.model
        return type(self.model).__name__ if isinstance(self.model, nn.Module) else self.recipe.factory or "model"

    @property
    def input_shape(self) -> Sequence[int]:
        """The shape of one input."""
        return tuple(self.domain.private.inputs.shape[1:])

    @property
    def floating(self) -> bool:
        """Whether inputs are measurements, which take on the run's type, or indices, which do not."""
        return self.domain.private.inputs.is_floating_point()

    def build(self, secret: str, batch_size: int) -> nn.Module:
        """The module, checked on a batch; its initial weights come from the node's secret."""
        where = f"node '{self.name}': model '{self.model_name}'"
        example = self.domain.public.take(range(min(batch_size, len(self.domain.public))))
        with torch.random.fork_rng(devices=[]):  # built on the CPU, whatever the run's device
            torch.default_generator.manual_seed(torch_seed("initial-weights", secret, self.name))
            module = self.model if isinstance(self.model, nn.Module) else self._construct(where)
            check_model(module, example.inputs, len(self.domain.classes), where)  # lazy layers draw weights here
        return module

    def _construct(self, where: str) -> nn.Module:
        if isinstance(self.model, str):
            return self.recipe.build(len(self.domain.classes), self.input_shape, where)
        assert callable(self.model)
        return Recipe.call(self.model, self.model_args, len(self.domain.classes), self.input_shape, where)
