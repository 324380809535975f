"""CUDA graphs imitated on a CPU, to test what is recorded where there is no GPU.

While recording, every operation of torch is noted and what it wrote is undone; repeating runs the noted operations
again, on the same tensors, and no Python. Then everything that was made while recording and does not live on is
spoilt, as if its memory had been given to somebody else, and reading a value on the host is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedh2l.engines.batched.graphs import GraphRecorder, Recording
from fedh2l.training.learner import seed_generators

HOST_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::_unique2"}
COUNTS = {"recorded": 0, "repeated": 0}


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Imitation(TorchDispatchMode):
    """Records what happens within it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor], bool]] = []
        self.made: list[torch.Tensor] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in HOST_READS:
            raise RuntimeError(f"{name} waits for the device, which a recording cannot")
        written = []
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors(kwargs.get(argument.name, args[place] if place < len(args) else None))
        touched = written or (tensors(args[3:5]) if "batch_norm" in name else [])  # writes its statistics unsaid
        mine = {storage(tensor) for tensor in self.made}
        for tensor in touched:
            if storage(tensor) not in mine and storage(tensor) not in self._before:
                self._before[storage(tensor)] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        given = {storage(tensor) for tensor in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        outputs = tensors(result)
        if written:
            self.operations.append((func, args, kwargs, [], True))
        elif not outputs or not all(storage(output) in given for output in outputs):  # else it is a view
            self.made += outputs
            self.operations.append((func, args, kwargs, outputs, False))
        self._kept.append((args, kwargs, result))
        return result

    def undo(self) -> None:
        for target, copy in self._before.values():
            target.copy_(copy)

    @torch.no_grad()
    def repeat(self, alive: set[int]) -> None:
        for func, args, kwargs, outputs, in_place in self.operations:
            result = func(*args, **kwargs)
            if not in_place:
                for old, new in zip(outputs, tensors(result), strict=True):
                    old.copy_(new)
        for tensor in self.made:
            if storage(tensor) not in alive:
                tensor.fill_(float("nan") if tensor.is_floating_point() else tensor.dtype == torch.bool or -77)


class ImitatingRecorder(GraphRecorder):
    """Records on a CPU."""

    def _repeat(self, recording: Recording, round: int) -> None:
        if recording.random and recording.buffer.seed is not None:
            seed_generators(recording.buffer.seed(round), self._device)
        if recording.graph is None:
            COUNTS["recorded"] += 1
            with Imitation() as imitation:
                self._perform(recording, round)
            imitation.undo()
            recording.graph = imitation
        COUNTS["repeated"] += 1
        recording.graph.repeat({storage(tensor) for tensor in self.persistent.tensors.values()})
