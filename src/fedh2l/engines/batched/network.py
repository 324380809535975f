"""Many networks as one, with a leading dimension of members in every tensor.

Members are ordinary networks. Their tensors are stacked when a run begins or resumes, and copied back to them when the
run is saved or ends.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedh2l.data.pixels import ready
from fedh2l.engines.batched.layers import STACKED
from fedh2l.engines.batched.overrides import FunctionOverrides
from fedh2l.errors import ConfigError, MethodError
from fedh2l.kernels.pooled import allowing
from fedh2l.training.network import Network

log = logging.getLogger("fedh2l")


class StackedNetwork(Network):
    """Networks of one architecture; `parameters` is `(members, parameters)`."""

    def __init__(self, members: Sequence[Network]) -> None:
        first = members[0]
        self.members: Sequence[Network] = tuple(members)
        self.module = first.module
        self.optimizer, self.pixels = first.optimizer, first.pixels
        self.compute = first.compute
        self._plain_modes, self._modules, self._norms = first._plain_modes, first._modules, first._norms
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._shapes = [p.shape for _, p in named]
        self._sizes = [p.numel() for _, p in named]
        self.load()
        self.stackable = len(members) > 1
        """Whether the members run as one, rather than one after the other."""
        self.recordable = True
        """Whether the models keep all values on the device, so that they can be recorded as a CUDA graph."""

    def load(self) -> None:
        """Stack the tensors of the members."""
        self.vector = torch.stack([member.parameters for member in self.members])
        rest = [member._untrained() for member in self.members]
        self.rest = {name: torch.stack([tensors[name].detach() for tensors in rest]) for name in rest[0]}
        parts = torch.split(self.vector, self._sizes, 1)
        self._leaves = [
            part.view(-1, *shape).detach().requires_grad_() for part, shape in zip(parts, self._shapes, strict=True)
        ]
        self.optimizer_states = stack_nested([member.optimizer_states for member in self.members])

    @torch.no_grad()
    def save(self, places: Sequence[int]) -> None:
        """Copy the tensors of the members at these places back to them."""
        for place in places:
            member = self.members[place]
            member.parameters.copy_(self.vector[place])
            for name, tensor in member._untrained().items():
                tensor.copy_(self.rest[name][place])
            member.optimizer_states = {
                phase: {name: value[place].clone() for name, value in state.items()}
                for phase, state in self.optimizer_states.items()
            }

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters, one row per member."""
        return self.vector

    def _untrained(self) -> dict[str, Tensor]:
        return self.rest

    def _averaged(self) -> list[Tensor]:
        return [self.rest[name] for name in self._averaged_names()]

    def logits(self, inputs: Tensor, frozen: bool = False, **how: Any) -> Tensor:
        """Return logits of inputs `(members, rows, …)` in training mode, with their graph."""
        self._set_mode(training=True)
        with self._unlearning(frozen):
            return self._call(inputs, how, frozen)

    @torch.no_grad()
    def predict(self, inputs: Tensor, **how: Any) -> Tensor:
        """Return logits in evaluation mode."""
        self._set_mode(training=False)
        return self._call(inputs, how)

    def _call(self, inputs: Tensor, how: Mapping[str, Any], frozen: bool = False) -> Tensor:
        if self.pixels is not None:
            inputs = self.pixels(inputs, self.vector.dtype)
        parameters = dict(zip(self._names, self._leaves, strict=True))
        tensors = {**parameters, **self.rest}
        if self.stackable:

            def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
                output: Tensor = functional_call(self.module, tensors, (x,), dict(how))
                return output

            with allowing(self.compute.kernels), FunctionOverrides(STACKED):
                stacked: Tensor = vmap(one, randomness="different")(tensors, inputs)
            return stacked
        outputs = []
        for place, member in enumerate(self.members):
            member.module.train(self.module.training)
            own = {name: tensor[place] for name, tensor in tensors.items()}
            with member._unlearning(frozen):
                outputs.append(functional_call(member.module, own, (inputs[place],), dict(how)))
        return torch.stack(outputs)

    def try_stacking(self, inputs: Tensor) -> None:
        """Test whether these models give the same results as one, and whether they can be recorded."""
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            self._try_stacking(inputs)

    def _try_stacking(self, inputs: Tensor) -> None:
        rest = {name: value.clone() for name, value in self.rest.items()}
        if self.stackable:
            try:
                as_one = self.predict(inputs)
                with torch.no_grad():
                    self.logits(inputs)
            except Exception as error:  # a user's layers may fail in any way
                self._give_up(f"{type(error).__name__}: {error}")
            else:
                self.stackable = False  # members may have equal layers and still compute something else
                one_by_one = self.predict(inputs)
                self.stackable = torch.allclose(as_one, one_by_one, rtol=1e-3, atol=1e-4)
                if not self.stackable:
                    self._give_up("stacked, they give other results than one by one")
        self._check_buffers(inputs, rest)
        if inputs.is_cuda:
            self.recordable = self._never_waits(inputs)
        for name, value in rest.items():
            self.rest[name].copy_(value)

    def _give_up(self, why: str) -> None:
        self.stackable = False
        kind, reason = type(self.module).__name__, why.strip().splitlines()[0]
        log.info("%d models of class %s are run one after the other: %s", len(self.members), kind, reason)

    @torch.no_grad()
    def _check_buffers(self, inputs: Tensor, before: Mapping[str, Tensor]) -> None:
        """Refuse models that replace their buffers by new tensors, which would be lost here."""
        if not self.rest:
            return
        for name, value in before.items():
            self.rest[name].copy_(value)
        self.logits(inputs)
        own = copy.deepcopy(self.members[0].module).train()
        own(ready(inputs[0], self.pixels, self.vector.dtype))
        after = dict(own.named_buffers())
        if any(not torch.allclose(self.rest[name][0].double(), b.double(), rtol=1e-3) for name, b in after.items()):
            raise ConfigError(
                "run.engine: 'batched' cannot run models that replace their buffers rather than write to them"
            )

    def _never_waits(self, inputs: Tensor) -> bool:
        """Return whether a step of these models reads nothing on the host."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.gradient(self.logits(inputs).sum((-2, -1)))
        except Exception as error:  # a user's layers may fail in any way
            log.info("rounds are not recorded: %s", str(error).strip().partition("\n")[0])
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradients of losses `(members,)`, one row per member."""
        if loss.shape != self.vector.shape[:1]:
            raise MethodError(
                f"a loss of {len(self.vector)} stacked nodes has shape {tuple(loss.shape)}, but needs one value per "
                f"node. Reduce with mean(-1) rather than mean()"
            )
        parts = torch.autograd.grad(loss.sum(), self._leaves, materialize_grads=True)
        return torch.cat([part.reshape(len(part), -1) for part in parts], 1)

    def shared(self) -> Tensor:
        """Return the vectors for parameter averaging, one row per member."""
        return torch.cat([self.vector, *(buffer.reshape(len(buffer), -1) for buffer in self._averaged())], -1)

    @torch.no_grad()
    def adopt(self, vector: Tensor) -> None:
        """Load rows in the layout of `shared`."""
        buffers = self._averaged()
        sizes = [self.vector.shape[1], *(buffer[0].numel() for buffer in buffers)]
        parameters, *values = torch.split(vector.to(self.vector.dtype), sizes, -1)
        self.vector.copy_(parameters)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value.view_as(buffer))


def stack(entries: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the members' tensors by name, with a leading dimension of members."""
    if any(entry.keys() != entries[0].keys() for entry in entries):
        raise ConfigError("run.engine: 'batched' needs nodes that remember the same things")
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def stack_nested(entries: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Apply `stack` to each group."""
    return {group: stack([entry.get(group, {}) for entry in entries]) for group in entries[0]}


def take_member(entries: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    """Return a copy of one member's tensors."""
    return {name: value[place].clone() for name, value in entries.items()}
