"""A model in training: a module, its parameters as one vector, and its optimiser states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from fedh2l.data.pixels import Pixels
from fedh2l.kernels.adam import State
from fedh2l.kernels.pooled import allowing
from fedh2l.training.compute import AS_USUAL, Compute
from fedh2l.training.optimizers import OptimizerSettings
from fedh2l.training.parameters import FlatParameters
from fedh2l.training.state import check_alike, grouped

NUMBERS = 8_000_000
"""Input values per forward pass in evaluation."""
SMALLEST = 16

Phase = Literal["local", "mutual"]


class Network:
    """A network in training: a node's own model, or a further one that a method keeps on a node or server."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSettings,
        pixels: Pixels | None = None,
        compute: Compute = AS_USUAL,
    ) -> None:
        self.module = module
        self.pixels = pixels
        """How image bytes become model inputs. None: inputs are not images, or are numbers already."""
        self.compute = compute
        self.flat = FlatParameters(module)
        self.optimizer = optimizer
        self.optimizer_states: dict[str, State] = {}
        self._modules = list(module.modules())
        self._plain_modes = all(_has_plain_mode(m) for m in self._modules)
        self._norms = norms_of(module)
        self._channels_last = None if pixels is not None and self.parameters.is_cuda else False
        """Whether images use the channels-last layout, which suits convolutions on a GPU. None: not known yet."""

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters as one vector `(parameters,)`."""
        return self.flat.vector

    def logits(self, inputs: Tensor, frozen: bool = False, **how: Any) -> Tensor:
        """Return logits `(rows, classes)` of inputs `(rows, …)` in training mode, with their graph.

        With `frozen`, batch norm uses its present statistics, as in evaluation, and does not update them.
        """
        self._set_mode(training=True)
        pieces = 1 if self.compute.rows is None else math.ceil(len(inputs) / self.compute.rows)
        if self._norms:
            pieces = min(pieces, max(len(inputs) // 2, 1))  # batch norm needs two rows for a variance
        if pieces <= 1 and not frozen:
            return self._logits(inputs, how)
        with self._unlearning(frozen):
            if pieces <= 1:
                return self._logits(inputs, how)
            return torch.cat([self._lightly(part, frozen, how) for part in torch.tensor_split(inputs, pieces)])

    @property
    def has_norms(self) -> bool:
        """Whether the model has batch norm."""
        return bool(self._norms)

    @torch.no_grad()
    def predict(self, inputs: Tensor, **how: Any) -> Tensor:
        """Return logits `(rows, classes)` in evaluation mode, as a teacher or in a test."""
        self._set_mode(training=False)
        rows = self.compute.rows or rows_at_once(inputs)
        if rows >= len(inputs):
            return self._logits(inputs, how)
        return torch.cat([self._logits(part, how) for part in torch.split(inputs, rows)])

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Disable mixed precision and micro-batches for a while."""
        asked, self.compute = self.compute, self.compute.exactly()
        try:
            yield
        finally:
            self.compute = asked

    @contextmanager
    def _unlearning(self, frozen: bool) -> Iterator[None]:
        if not frozen:
            yield
            return
        self._switch(self._norms, False)
        try:
            yield
        finally:
            self._switch(self._norms, self.module.training)

    def _lightly(self, inputs: Tensor, frozen: bool, how: Mapping[str, Any]) -> Tensor:
        """Return logits with activation checkpointing: the backward pass computes the activations again."""

        @contextmanager
        def again() -> Iterator[None]:
            training, buffers = self.module.training, [buffer.clone() for buffer in self.module.buffers()]
            self._set_mode(training=True)
            try:
                with self._unlearning(frozen):
                    yield
            finally:
                self._set_mode(training)
                with torch.no_grad():  # the first pass has updated the statistics
                    for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                        buffer.copy_(value)

        logits: Tensor = checkpoint(
            lambda part: self._logits(part, how),
            inputs,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), again()),
        )
        return logits

    def _logits(self, inputs: Tensor, how: Mapping[str, Any]) -> Tensor:
        if self.pixels is not None:
            inputs = self.pixels(inputs, self.parameters.dtype)
        if self._channels_last is None:
            self._channels_last = self._takes_channels_last(inputs, how)
        if self._channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if self.compute.bf16:
            with torch.autocast(inputs.device.type, torch.bfloat16):
                mixed: Tensor = self.module(inputs, **how)
            return mixed.to(self.parameters.dtype)
        with allowing(self.compute.kernels):
            output: Tensor = self.module(inputs, **how)
        return output

    @torch.no_grad()
    def _takes_channels_last(self, inputs: Tensor, how: Mapping[str, Any]) -> bool:
        """Return whether the model accepts the channels-last layout.

        A model that calls `view` on the output of a layer does not.
        """
        modes = [layer.training for layer in self._modules]
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        few = inputs[:2].contiguous(memory_format=torch.channels_last)
        try:
            with torch.random.fork_rng([inputs.device]):
                for training in (False, True) if len(few) > 1 else (False,):
                    self._set_mode(training)
                    self.module(few, **how)
        except RuntimeError:
            return False
        finally:
            self._set_mode(modes[0])
            for layer, mode in zip(self._modules, modes, strict=True):
                layer.training = mode
            for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        return True

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss with respect to `parameters`, `(parameters,)`."""
        return self.flat.gradient(loss)

    @torch.no_grad()
    def step(self, gradient: Tensor, phase: Phase) -> None:
        """Take one optimiser step, with the learning rate and the optimiser state of a phase."""
        if phase not in self.optimizer_states:
            self.optimizer_states[phase] = self.optimizer.initial_state(self.parameters)
        self._update(gradient, self.optimizer_states[phase], self.optimizer.rate(phase))

    def _update(self, gradient: Tensor, state: State, rate: float) -> None:
        self.optimizer.step(self.parameters, gradient, state, rate, compiled=self.compute.kernels)

    def shared(self) -> Tensor:
        """Return a new vector for parameter averaging: trained parameters, then floating-point buffers."""
        return torch.cat([self.parameters, *(b.detach().reshape(-1) for b in self._averaged())])

    @torch.no_grad()
    def adopt(self, vector: Tensor) -> None:
        """Load a vector in the layout of `shared`. Optimiser states stay."""
        sizes = [self.parameters.numel(), *(buffer.numel() for buffer in self._averaged())]
        parameters, *buffers = torch.split(vector.to(self.parameters.dtype), sizes)
        self.parameters.copy_(parameters)
        for buffer, value in zip(self._averaged(), buffers, strict=True):
            buffer.copy_(value.view_as(buffer))

    def vector_of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return weights, as `weights` returns them, in the layout of `shared`."""
        parameters = weights["parameters"]
        buffers = [weights[f"rest.{name}"] for name in self._averaged_names()]
        return torch.cat([parameters, *(buffer.reshape(*parameters.shape[:-1], -1) for buffer in buffers)], -1)

    def weights_of(self, vector: Tensor) -> dict[str, Tensor]:
        """Return weights from a vector in the layout of `shared`. Other tensors, such as counters, stay the same."""
        weights = self.weights()
        names = ["parameters", *(f"rest.{name}" for name in self._averaged_names())]
        sizes = [weights[name][(0,) * (vector.dim() - 1)].numel() for name in names]
        for name, value in zip(names, torch.split(vector, sizes, -1), strict=True):
            weights[name] = value.view_as(weights[name])
        return weights

    def predict_as(self, vector: Tensor, inputs: Tensor) -> Tensor:
        """Return predictions with the weights in `vector`. The model's own weights stay."""
        present = self.shared()
        self.adopt(vector)
        logits = self.predict(inputs)
        self.adopt(present)
        return logits

    def _averaged_names(self) -> list[str]:
        return [name for name, buffer in self.module.named_buffers() if buffer.is_floating_point()]

    def _averaged(self) -> list[Tensor]:
        """Return the floating-point buffers, such as means and variances of batch norm. Counters are not averaged."""
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights: trained parameters in one vector, buffers and frozen parameters."""
        rest = {f"rest.{name}": tensor.detach().clone() for name, tensor in self._untrained().items()}
        return {"parameters": self.parameters.clone(), **rest}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load a result of `weights`."""
        self.parameters.copy_(weights["parameters"])
        for name, tensor in self._untrained().items():
            tensor.copy_(weights[f"rest.{name}"])

    def _untrained(self) -> dict[str, Tensor]:
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        return {**frozen, **dict(self.module.named_buffers())}

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on, for a checkpoint."""
        state = {f"model.{name}": value for name, value in self.weights().items()}
        for phase, optimizer in self.optimizer_states.items():
            state |= {f"optimizer.{phase}.{name}": value for name, value in optimizer.items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state`. Entries of other groups are ignored."""
        groups = grouped(state, self.parameters.device)
        self.check_weights(groups["model"])
        self.load_weights(groups["model"])
        self.optimizer_states = {}
        for key, value in groups.get("optimizer", {}).items():
            phase, _, name = key.partition(".")
            self.optimizer_states.setdefault(phase, {})[name] = value
        for phase, found in self.optimizer_states.items():
            check_alike(found, self.optimizer.initial_state(self.parameters.to("meta")), f"the optimizer ({phase})")

    def check_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse weights from a checkpoint that do not fit this model."""
        rest = {f"rest.{name}": tensor for name, tensor in self._untrained().items()}
        check_alike(weights, {"parameters": self.parameters, **rest}, "the model")

    def _set_mode(self, training: bool) -> None:
        """Set the mode as `module.train(training)` does, but faster if no layer redefines it."""
        if not self._plain_modes:
            self.module.train(training)
        elif self.module.training is not training:
            self._switch(self._modules, training)

    def _switch(self, layers: Sequence[nn.Module], training: bool) -> None:
        """Set the mode of these layers only. A plain attribute assignment on a module is slow."""
        for layer in layers:
            if self._plain_modes:
                layer.__dict__["training"] = training
            else:
                layer.training = training


def rows_at_once(inputs: Tensor) -> int:
    """Return how many inputs `(rows, …)` to evaluate at once. Large images need small batches."""
    return max(SMALLEST, NUMBERS // max(inputs[:1].numel(), 1))


def _has_plain_mode(layer: nn.Module) -> bool:
    """Return whether the layer's mode is a plain attribute, whose assignment has no further effects."""
    kind = type(layer)
    return kind.train is nn.Module.train and kind.__setattr__ is nn.Module.__setattr__ and "training" in vars(layer)


def norms_of(module: nn.Module) -> list[nn.Module]:
    """Return the batch norm layers of a model."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
