"""Groups of stacked nodes: the grouping by architecture, and computations over all groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedh2l.engines.batched.learner import StackedLearner
from fedh2l.protocol.messages import Message
from fedh2l.protocol.messages.base import correct_count
from fedh2l.training.learner import architectures
from fedh2l.training.metrics import EVALUATION_ROWS
from fedh2l.training.node_learner import NodeLearner

EVALUATED = 1 << 15
"""Samples per evaluation step, summed over all stacked nodes."""

Predictor = Callable[[StackedLearner], Callable[[Tensor], Tensor]]
"""Returns the function from inputs to logits of a group."""


def architectures_of(learners: Sequence[NodeLearner]) -> list[list[NodeLearner]]:
    """Group learners by their models: class, layout and trained parameters."""
    groups: dict[tuple[str, str, str], list[NodeLearner]] = {}
    for learner in learners:
        (layout,) = architectures([learner])
        trained = str([name for name, p in learner.module.named_parameters() if p.requires_grad])
        classes = str([type(module) for module in learner.module.modules()])
        groups.setdefault((f"{learner.module} {classes}", layout, trained), []).append(learner)
    return list(groups.values())


def in_order(groups: Sequence[StackedLearner], sent: Sequence[Message]) -> Message:
    """Return the messages of all groups as one message, in the order of the members."""
    if len(sent) == 1:
        return sent[0]
    order = torch.argsort(torch.cat([group.places for group in groups]))
    parts = zip(*(message.tensors() for message in sent), strict=True)
    tensors = [torch.cat(list(part)).index_select(0, order) for part in parts]
    return sent[0].remade("everybody", sent[0].round, tensors)


def first_fault(message: Message, labels: Tensor | None) -> Tensor:
    """Return 0 for each sound message, else 1 + the index of its first fault, `(members,)`."""
    flags = message.faults(labels)
    return torch.where(flags.any(-1), 1 + flags.to(torch.int8).argmax(-1), 0)


def correct_counts(groups: Sequence[StackedLearner], members: int, predictor: Predictor, reported: bool) -> list[int]:
    """Return each member's number of correct validation samples. `reported` uses the weights to evaluate."""
    counts = [0] * members
    for group in groups:
        validation = group.validation
        assert validation is not None
        rows = max(1, min(EVALUATION_ROWS, EVALUATED // len(group.members)))
        inputs, labels = (torch.split(part, rows, 1) for part in (validation.inputs, validation.labels))
        with group.showing(group.shown if reported else None), torch.no_grad():
            predict = predictor(group)
            parts = [correct_count(predict(x), y) for x, y in zip(inputs, labels, strict=True)]
            right = torch.stack(parts).sum(0).tolist()
        for place, count in zip(group.places.tolist(), right, strict=True):
            counts[place] = count
    return counts


def not_finite(groups: Sequence[StackedLearner], members: int) -> list[list[str]]:
    """Return the names of each member's parameters that are not finite."""
    found: list[list[str]] = [[] for _ in range(members)]
    for group in groups:
        for words, network in group.in_training():
            finite = torch.isfinite(network.parameters).all(-1).tolist()
            for place, fine in zip(group.places.tolist(), finite, strict=True):
                found[place] += [] if fine else [words]
    return found
