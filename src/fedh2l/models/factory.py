"""Construction of modules from built-in names and `package.module:factory`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fedh2l.errors import ModelError, did_you_mean
from fedh2l.models.registry import MODELS
from fedh2l.plugins import import_object, installed, is_path, safe_arguments


@dataclass(frozen=True)
class Recipe:
    """Instructions to build a model again: a built-in name or `package.module:factory`, and its arguments."""

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, num_classes: int, input_shape: Sequence[int], where: str = "model") -> nn.Module:
        """Return a new module with `num_classes` outputs. `where` names its place in error messages."""
        arguments = safe_arguments(self.factory, self.arguments)
        return self.call(self._find(where), arguments, num_classes, input_shape, where)

    def takes_classes(self, where: str = "model") -> bool:
        """Return whether the factory takes the number of classes."""
        return takes_classes(self._find(where))

    @staticmethod
    def call(
        factory: Callable[..., Any],
        arguments: Mapping[str, Any],
        num_classes: int,
        input_shape: Sequence[int],
        where: str,
    ) -> nn.Module:
        """Call `factory`. It gets `num_classes` and `input_shape` if it takes them and `arguments` lacks them."""
        accepted = _accepted(factory)
        arguments = dict(arguments)
        if takes_classes(factory):
            arguments.setdefault("num_classes", num_classes)
        if "input_shape" in accepted:
            arguments.setdefault("input_shape", tuple(input_shape))
        try:
            module = factory(**arguments)
        except Exception as error:  # a user's factory may fail in any way
            raise ModelError(f"{where} could not be built: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{where}: its factory returned {type(module).__name__}, not an nn.Module")
        return module

    def _find(self, where: str) -> Callable[..., Any]:
        if self.factory in MODELS:
            return MODELS[self.factory]
        others = installed("fedh2l.models")
        path = others.get(self.factory, self.factory)
        if not is_path(path):
            raise ModelError(
                f"{where}: unknown model {self.factory!r}.{did_you_mean(self.factory, [*MODELS, *others])} "
                f"For your own model, write 'package.module:factory'."
            )
        factory = import_object(path, where)
        if not callable(factory):
            raise ModelError(f"{where}: '{self.factory}' is not a function or class")
        found: Callable[..., Any] = factory
        return found

    def obstacle(self) -> str | None:
        """Return why a saved model cannot be built from this recipe elsewhere, or None."""
        if self.factory and not is_path(self.factory):
            return None
        module, _, name = self.factory.partition(":")
        if module == "__main__":
            return "its class is defined in the script that runs; fedh2l.load needs allow=['__main__'] there"
        found: Any = sys.modules.get(module)
        try:
            factory = attrgetter(name)(found) if found is not None else None
        except AttributeError:
            return f"{module} has no {name}"
        if not self.factory:
            return "it was not built by a class or function that has a name"
        missing = _required(factory) - {"num_classes", "input_shape", *self.arguments}
        return f"the arguments that it was built with are not known: {', '.join(sorted(missing))}" if missing else None

    @staticmethod
    def of(source: Callable[..., Any] | nn.Module) -> Recipe:
        """Return the recipe of a class, function or module instance. The arguments of an instance are not known."""
        if isinstance(source, nn.Sequential):
            return Recipe("")  # its layers cannot be stored as arguments
        target = type(source) if isinstance(source, nn.Module) else source
        name = getattr(target, "__qualname__", "")
        return Recipe("" if "<" in name or not name else f"{target.__module__}:{name}")


def takes_classes(factory: Callable[..., Any]) -> bool:
    """Return whether a factory takes `num_classes`, by name or by `**`."""
    return not {"num_classes", "**"}.isdisjoint(_accepted(factory))


def _required(factory: Any) -> set[str]:
    """Return the arguments without a default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.default is p.empty and p.kind in plain}


def _accepted(factory: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def check_model(module: nn.Module, example: torch.Tensor, num_classes: int, where: str) -> None:
    """Raise an error for a model that cannot be trained: no parameters, or outputs that are not `(n, num_classes)`.

    It is run on a batch in both modes, since layers such as batch norm differ between them.
    """
    trainable = next((p for p in module.parameters() if p.requires_grad), None)
    if trainable is None:
        raise ModelError(f"{where} has no parameters to train")
    if any(not isinstance(value, torch.Tensor) for value in module.state_dict().values()):
        raise ModelError(f"{where} has extra state that is not a tensor, which cannot be saved")
    example = example.to(trainable.device, trainable.dtype if example.is_floating_point() else None)
    was_training, before = module.training, example.clone()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for training in (False, True):
        try:
            with torch.no_grad():
                output = module.train(training)(example)
        except Exception as error:  # a user's model may fail in any way
            mode = " in training mode" if training else ""
            hint = (
                "" if example.is_floating_point() else f" (inputs are {example.dtype}: give images as floats, 0 to 1)"
            )
            raise ModelError(
                f"{where} fails{mode} on an input of shape {tuple(example.shape)}: {error}{hint}"
            ) from error
        expected = (len(example), num_classes)
        if not isinstance(output, torch.Tensor) or tuple(output.shape) != expected:
            got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ModelError(
                f"{where} returns {got} for {len(example)} inputs; {expected} was expected: one logit for each of the "
                f"{num_classes} classes"
            )
    if not torch.equal(example, before):
        raise ModelError(f"{where} changes its input in place, which would change the data; let it work on a copy")
    module.train(was_training)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers.get(name, buffer))
