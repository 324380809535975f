"""A participant of a federation before training: a name, a model and its own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedh2l.data.domain import Domain
from fedh2l.data.pixels import ready
from fedh2l.errors import ModelError
from fedh2l.models.factory import Recipe, check_model, takes_classes
from fedh2l.models.pretrained import fit_head, settle, start_from
from fedh2l.protocol.sampling import torch_seed

FEW = 4
"""Inputs to test a new model on. The test runs on the CPU, where a batch of large images takes seconds."""


@dataclass(frozen=True)
class Node:
    """A participant before training.

    `model` is a built-in name, `package.module:factory`, a class or function that builds a module, or a module. A
    module keeps its weights. The others start from weights drawn from the run's seed and the node's name.
    """

    name: str
    model: str | Callable[..., nn.Module] | nn.Module
    domain: Domain
    model_args: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources to request from a Ray cluster: num_cpus, num_gpus, memory in bytes, or custom ones."""
    weights: str | None = None
    """Initial weights: a file, or the name of torchvision weights. By default random."""

    @property
    def recipe(self) -> Recipe:
        """Recipe to build this node's model again."""
        if isinstance(self.model, str):
            return Recipe(self.model, dict(self.model_args))
        recipe = Recipe.of(self.model)
        return Recipe(recipe.factory, dict(self.model_args))

    @property
    def model_name(self) -> str:
        """Name of the model in tables."""
        if isinstance(self.model, str):
            return self.model
        return type(self.model).__name__ if isinstance(self.model, nn.Module) else self.recipe.factory or "model"

    @property
    def input_shape(self) -> Sequence[int]:
        return tuple(self.domain.private.inputs.shape[1:])

    @property
    def floating(self) -> bool:
        """Whether inputs are measurements or pixels, which get the run's type. Indices keep their type."""
        return self.domain.private.inputs.is_floating_point() or self.domain.pixels is not None

    def description(self, round: int, which: str) -> dict[str, Any]:
        """Return the description of a saved model: its origin, and what is needed to build and use it."""
        return {
            "node": self.name,
            "which": which,
            "round": round,
            "factory": self.recipe.factory,
            "arguments": dict(self.recipe.arguments),
            "classes": self.domain.classes,
            "input_shape": self.input_shape,
            "preprocessing": dict(self.domain.preprocessing),
            "floating": self.floating,
        }

    def build(self, secret: str, batch_size: int) -> nn.Module:
        """Build the module and check it on a few inputs. Initial weights come from the node's secret."""
        where = f"node '{self.name}': model '{self.model_name}'"
        source = self.domain.public if len(self.domain.public) else self.domain.private
        example = source.take(range(min(batch_size, len(source), FEW)))
        inputs = ready(example.inputs, self.domain.pixels, torch.float32)
        with torch.random.fork_rng(devices=[]):  # built on the CPU, whatever the run's device
            torch.default_generator.manual_seed(torch_seed("initial-weights", secret, self.name))
            if not isinstance(self.model, nn.Module):
                module = self._construct(where, inputs)
            elif self.weights is None:
                module = self.model
            else:
                raise ModelError(f"{where}: a module keeps its own weights; load other weights into it yourself")
            check_model(module, inputs, len(self.domain.classes), where)  # lazy layers draw weights here
        return module

    def _construct(self, where: str, inputs: Tensor) -> nn.Module:
        classes = len(self.domain.classes)
        if isinstance(self.model, str):
            module = self.recipe.build(classes, self.input_shape, where)
            fits = self.recipe.takes_classes(where)
        else:
            assert callable(self.model)
            module = Recipe.call(self.model, self.model_args, classes, self.input_shape, where)
            fits = takes_classes(self.model)
        if not fits:
            fit_head(module, inputs[:1], classes)
        if self.weights is not None:
            settle(module, inputs[:1])
            start_from(module, self.weights, self.recipe.factory, where)
        return module
