"""A federation before its first round: nodes that fit together, a method and settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedh2l.domain import Samples
from fedh2l.errors import ConfigError, DataError
from fedh2l.learner import Learner
from fedh2l.methods.base import Method, require_one_architecture
from fedh2l.methods.registry import METHODS
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.roster import Roster
from fedh2l.sampling import node_secret
from fedh2l.seedset import SeedSet
from fedh2l.settings import RaySettings, RunSettings, resolve_device

log = logging.getLogger("fedh2l")


@dataclass(frozen=True)
class Federation:
    """Everything that a run consists of; making one checks that it can be run."""

    nodes: Sequence[Node]
    method: Method
    settings: RunSettings
    optimizer: OptimizerSettings
    ray: RaySettings = field(default_factory=RaySettings)

    def __post_init__(self) -> None:
        self.method.check(self.roster)
        self._check_average()
        self._check_domains()
        self._check_labels()
        self._check_public()

    @cached_property
    def roster(self) -> Roster:
        """The members and their terms."""
        terms = {
            "method": {"name": self.method.title, **self.method.model_dump(mode="json")},
            "rounds": self.settings.rounds,
            "batch_size": self.settings.batch_size,
            "classes": list(self.nodes[0].domain.classes) if self.nodes else [],
        }
        return Roster.agree(tuple(node.name for node in self.nodes), self.settings.seed, terms)

    def learners(self) -> list[Learner]:
        """The nodes at work, in roster order, with their initial weights."""
        device, dtype = resolve_device(self.settings.device), self.settings.torch_dtype
        parts = {node.name: node.domain.public for node in self.nodes}
        views = self.nodes[0].domain.augmentation
        seed_set = SeedSet(parts, self.settings.seed, views.public if views else None, self.labelled).to(device, dtype)
        validation = Samples.concatenate([node.domain.validation for node in self.nodes]).to(device, dtype)
        learners = [
            Learner(
                node,
                seed_set,
                node_secret(self.settings.seed, node.name),
                self.optimizer,
                self.settings.batch_size,
                device,
                dtype,
                validation,
                self.settings.compute,
                self.settings.average,
            )
            for node in self.members
        ]
        if not self.method.heterogeneous:
            able = [name for name, method in METHODS.items() if method.heterogeneous]
            require_one_architecture(learners, self.method.title, able)
        return learners

    @cached_property
    def members(self) -> Sequence[Node]:
        """The nodes with the models that the method trains, which it may have made from theirs."""
        return self.method.adapt(self.nodes)

    def _check_average(self) -> None:
        average = self.settings.average
        if average and not self.method.averages:
            raise ConfigError(
                f"run.average: {self.method.title} trains models of which there is no average; leave it at 0"
            )
        if not average and self.method.wants_average:
            raise ConfigError("method.teacher = 'average': no average is kept; set run.average, to 0.99 say")

    def _check_domains(self) -> None:
        first = self.nodes[0]
        for node in self.nodes[1:]:
            if node.domain.classes != first.domain.classes:
                raise DataError(
                    f"nodes '{first.name}' and '{node.name}' do not have the same classes in the same order: "
                    f"{list(first.domain.classes)} and {list(node.domain.classes)}"
                )
            if node.input_shape != first.input_shape:
                raise DataError(
                    f"nodes '{first.name}' and '{node.name}' have inputs of different shapes: {first.input_shape} and "
                    f"{node.input_shape}; a node's model must be able to read everybody's public data"
                )
            if _bytes_to_numbers(node) != _bytes_to_numbers(first):
                raise DataError(
                    f"nodes '{first.name}' and '{node.name}' have images that are preprocessed or augmented "
                    "differently; a public image must be the same to everybody"
                )
        owner: dict[int, str] = {}
        for node in self.nodes:
            for parameter in node.model.parameters() if isinstance(node.model, torch.nn.Module) else ():
                other = owner.setdefault(id(parameter), node.name)
                if other != node.name:
                    raise DataError(f"nodes '{other}' and '{node.name}' were given modules that share parameters")

    @property
    def labelled(self) -> bool:
        """Whether public data has labels."""
        return self.nodes[0].domain.public_labels

    def _check_labels(self) -> None:
        first = self.nodes[0]
        for node in self.nodes[1:]:
            if node.domain.public_labels != self.labelled:
                raise DataError(
                    f"of nodes '{first.name}' and '{node.name}' only one has public data with labels; a public sample "
                    "must be the same to everybody"
                )
        needed = [] if self.labelled else self.method.needs_labels()
        if needed:
            raise ConfigError(
                f"public data has no labels (data.public_labels = false), and they are needed by {', '.join(needed)}"
            )

    def _check_public(self) -> None:
        classes = self.nodes[0].domain.classes
        if self.labelled:
            self._check_classes(classes)
        rows = self.method.public_batch_rows(self.settings.batch_size)
        for node in self.nodes:
            size = len(node.domain.public)
            if size < rows:
                log.info(
                    "node '%s' has %d public samples, fewer than a batch of %d: all are used each time",
                    node.name, size, rows,
                )  # fmt: skip

    def _check_classes(self, classes: Sequence[str]) -> None:
        held = {node.name: set(node.domain.public.labels.tolist()) for node in self.nodes}
        nowhere = [classes[c] for c in range(len(classes)) if not any(c in own for own in held.values())]
        if nowhere:
            raise DataError(
                f"class '{nowhere[0]}' is in nobody's public data, so nobody could teach it; add public samples of it"
            )
        for node in self.nodes:
            missing = [classes[c] for c in range(len(classes)) if c not in held[node.name]]
            if missing:
                log.warning("node '%s' has no public sample of: %s", node.name, ", ".join(missing))


def _bytes_to_numbers(node: Node) -> object:
    """What must be alike in all nodes for a public batch to be the same to all of them."""
    return node.domain.pixels, node.domain.augmentation
