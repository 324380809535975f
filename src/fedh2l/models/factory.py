"""From the name of a model to a module: built-in names and `package.module:factory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedh2l.errors import ModelError, did_you_mean
from fedh2l.models.lenet import LeNet, LeNetWide
from fedh2l.models.small import cnn, mlp
from fedh2l.plugins import import_object, is_path

MODELS: dict[str, Callable[..., nn.Module]] = {"lenet": LeNet, "lenet-wide": LeNetWide, "mlp": mlp, "cnn": cnn}


@dataclass(frozen=True)
class Recipe:
    """How to build a model again: a built-in name or `package.module:factory`, and its arguments."""

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, num_classes: int, input_shape: Sequence[int], where: str = "model") -> nn.Module:
        """A new module with `num_classes` outputs; `where` names the place in error messages."""
        return self.call(self._find(where), self.arguments, num_classes, input_shape, where)

    def takes_classes(self, where: str = "model") -> bool:
        """Whether the number of classes can be passed to the factory."""
        return takes_classes(self._find(where))

    @staticmethod
    def call(
        factory: Callable[..., Any],
        arguments: Mapping[str, Any],
        num_classes: int,
        input_shape: Sequence[int],
        where: str,
    ) -> nn.Module:
        """What `factory` builds; `num_classes` and `input_shape` are passed if it takes them and `arguments` do not."""
        accepted = _accepted(factory)
        arguments = dict(arguments)
        if takes_classes(factory):
            arguments.setdefault("num_classes", num_classes)
        if "input_shape" in accepted:
            arguments.setdefault("input_shape", tuple(input_shape))
        try:
            module = factory(**arguments)
        except Exception as error:  # any factory of a user's may fail in any way
            raise ModelError(f"{where} could not be built: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{where}: its factory returned {type(module).__name__}, not an nn.Module")
        return module

    def _find(self, where: str) -> Callable[..., Any]:
        if self.factory in MODELS:
            return MODELS[self.factory]
        if not is_path(self.factory):
            raise ModelError(
                f"{where}: unknown model '{self.factory}'.{did_you_mean(self.factory, MODELS)} "
                f"A model of your own is 'package.module:factory'."
            )
        factory = import_object(self.factory, where)
        if not callable(factory):
            raise ModelError(f"{where}: '{self.factory}' is not a function or class")
        found: Callable[..., Any] = factory
        return found

    @staticmethod
    def of(source: Callable[..., Any] | nn.Module) -> Recipe:
        """The recipe of a class, function or module instance; arguments of an instance cannot be known."""
        if isinstance(source, nn.Sequential):
            return Recipe("")  # its layers are not arguments that could be written down
        target = type(source) if isinstance(source, nn.Module) else source
        name = getattr(target, "__qualname__", "")
        return Recipe("" if "<" in name or not name else f"{target.__module__}:{name}")


def takes_classes(factory: Callable[..., Any]) -> bool:
    """Whether a factory has an argument `num_classes`, or any."""
    return not {"num_classes", "**"}.isdisjoint(_accepted(factory))


def _accepted(factory: Callable[..., Any]) -> set[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def check_model(module: nn.Module, example: torch.Tensor, num_classes: int, where: str) -> None:
    """Refuses a model that cannot be trained here: nothing to train, other outputs than logits `(n, num_classes)`.

    It is tried on a batch in both modes, since layers such as batch norm behave differently in each.
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
        except Exception as error:  # any model of a user's may fail in any way
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
