"""An experiment before its first round: nodes, a method and settings that fit together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedh2l.data.domain import Samples
from fedh2l.data.seedset import SeedSet
from fedh2l.errors import ConfigError, DataError
from fedh2l.experiment.settings import RaySettings, RunSettings
from fedh2l.hardware import resolve_device
from fedh2l.methods.base import Method, require_one_architecture
from fedh2l.methods.registry import METHODS
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.sampling import node_secret
from fedh2l.training.fingerprint import Fingerprint
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner, Training
from fedh2l.training.optimizers import OptimizerSettings

log = logging.getLogger("fedh2l")


@dataclass(frozen=True)
class Experiment:
    """All parts of a run. Construction checks that the run is possible."""

    nodes: Sequence[Node]
    method: Method
    settings: RunSettings
    optimizer: OptimizerSettings
    ray: RaySettings = field(default_factory=RaySettings)
    _models: dict[str, Fingerprint] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Fingerprints of the models of the latest learners."""

    def __post_init__(self) -> None:
        self.method.check(self.roster)
        self._check_average()
        self._check_domains()
        self._check_labels()
        self._check_validation()
        self._check_public()

    @cached_property
    def roster(self) -> Roster:
        """Roster of the members and their terms."""
        return self._agreed({"rounds": self.settings.rounds})

    @cached_property
    def rules(self) -> str:
        """Digest of members and terms without the number of rounds, which may grow."""
        return self._agreed({}).digest.hex()

    def _agreed(self, more: Mapping[str, int]) -> Roster:
        terms = {
            "method": {"name": self.method.title, **self.method.model_dump(mode="json")},
            "batch_size": self.settings.batch_size,
            "classes": list(self.nodes[0].domain.classes) if self.nodes else [],
            **more,
        }
        return Roster.agree(tuple(node.name for node in self.nodes), self.settings.seed, terms)

    def check_rounds(self, before: int) -> None:
        """Refuse to resume a run of `before` rounds if this one has fewer, or if its method cannot extend a run."""
        rounds = self.settings.rounds
        if rounds < before:
            raise ConfigError(
                f"run.rounds = {rounds}: this run was started with {before} rounds; give at least as many"
            )
        if rounds > before and self.method.depends_on_rounds:
            raise ConfigError(
                f"run.rounds = {rounds}: {self.method.title} plans its phases by the number of rounds, so a run of "
                f"{before} rounds cannot be extended; start a new one"
            )

    def learners(self) -> list[NodeLearner]:
        """Return the nodes' learners, in roster order, with their initial weights."""
        training = self.training().to(resolve_device(self.settings.device))
        learners = [NodeLearner(node, training, node_secret(self.settings.seed, node.name)) for node in self.members]
        if not self.method.heterogeneous:
            able = [name for name, method in METHODS.items() if method.heterogeneous]
            require_one_architecture(learners, self.method.title, able)
        self._models.update({learner.name: learner.fingerprint for learner in learners})
        return learners

    def training(self) -> Training:
        """Return what all nodes share, on the CPU."""
        settings, views = self.settings, self.nodes[0].domain.augmentation
        parts = {node.name: node.domain.public for node in self.nodes}
        return Training(
            seed_set=SeedSet(parts, settings.seed, views.public if views else None, self.labelled),
            validation=Samples.concatenate([node.domain.validation for node in self.nodes]),
            optimizer=self.optimizer,
            batch_size=settings.batch_size,
            dtype=settings.torch_dtype,
            compute=settings.compute,
            ema_decay=settings.ema_decay,
        )

    @property
    def fingerprint(self) -> dict[str, Fingerprint]:
        """Fingerprints of each node's data and model."""
        if not self._models:
            for learner in self.learners():
                learner.release()
        return {node.name: {"data": node.domain.digest, **self._models[node.name]} for node in self.nodes}

    @cached_property
    def members(self) -> Sequence[Node]:
        """Nodes with the models that the method trains. A method may derive them from the nodes' own models."""
        return self.method.adapt(self.nodes)

    def _check_average(self) -> None:
        if self.settings.ema_decay and not self.method.averages:
            raise ConfigError(f"run.ema_decay: the models of {self.method.title} cannot be averaged; set it to 0")

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
                    f"{node.input_shape}; every model must accept the public data of all nodes"
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
                    raise DataError(
                        f"the modules of nodes '{other}' and '{node.name}' share parameters; each node needs its own"
                    )

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

    def _check_validation(self) -> None:
        if not any(len(node.domain.validation) for node in self.nodes):
            raise DataError(
                "no node has validation data, so models cannot be selected. Add samples, or raise the share of "
                "validation data (data.validation, or fedh2l.Shares(validation=…))"
            )

    def _check_public(self) -> None:
        needed = self.method.needs_public_data()
        if needed == "none":
            return
        empty = [node.name for node in self.nodes if not len(node.domain.public)]
        if empty and (needed == "all" or len(empty) == len(self.nodes)):
            raise DataError(
                f"node '{empty[0]}' has no public data, and {self.method.title} needs some. Add samples, raise the "
                "share of public data (data.alpha, or fedh2l.Shares(public=…)), or choose a method that uses none, as "
                "fedavg"
            )
        if self.labelled:
            self._check_classes(self.nodes[0].domain.classes)
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
                f"class '{nowhere[0]}' is not in the public data of any node, so no node can teach it; "
                "add public samples of it"
            )
        for node in self.nodes:
            missing = [classes[c] for c in range(len(classes)) if c not in held[node.name]]
            if missing:
                log.warning("node '%s' has no public sample of: %s", node.name, ", ".join(missing))


def _bytes_to_numbers(node: Node) -> object:
    """Return the preprocessing and augmentation. They must be equal in all nodes, so that public batches are, too."""
    return node.domain.pixels, node.domain.augmentation
