"""The recorder of a run or a peer: it evaluates, selects models, and writes metrics, checkpoints and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedh2l.engines.base import Models, Which
from fedh2l.errors import RunError
from fedh2l.experiment.settings import RunSettings
from fedh2l.hardware import resolve_device
from fedh2l.models.saved import pack_model, probe
from fedh2l.runs.checkpoints import Checkpoint
from fedh2l.runs.clock import Clock
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.selection import ModelSelection
from fedh2l.training.node import Node
from fedh2l.training.optimizers import OptimizerSettings

AUTOMATIC = 50
"""Rounds between decisions about automatic checkpoints."""

STATE_COPIES = 9
"""Size of a checkpoint in copies of the parameters: themselves, the best, and two optimiser states of three."""


class Recorder:
    """Records the training of some nodes: of all nodes in a simulation, of one in a peer."""

    def __init__(
        self,
        models: Models,
        nodes: Sequence[Node],
        settings: RunSettings,
        optimizer: OptimizerSettings,
        directory: RunDirectory | None,
        sent: Callable[[], int],
    ) -> None:
        """`sent` returns the number of bytes sent so far."""
        self.models, self.nodes, self.settings, self.directory = models, nodes, settings, directory
        self.names = [node.name for node in nodes]
        self.clock = Clock()
        self.selection = ModelSelection(self.names)
        self._optimizer, self._sent = optimizer, sent
        self.validation_size = sum(len(node.domain.validation) for node in nodes)
        device, dtype = resolve_device(settings.device), settings.torch_dtype
        self.tests = [node.domain.test.to(device, dtype) for node in nodes]

    def evaluation_is_due(self, round: int) -> bool:
        return round % self.settings.eval_every == 0 or round == self.settings.rounds

    def evaluate(self, round: int) -> dict[str, Any]:
        """Evaluate all models and keep the best ones. Return the line of metrics."""
        self.models.complete(count=round == self.settings.rounds)
        self.models.keep_best(self.selection.take(self.models.validate(), round))
        self.selection.take_views(self.models, self.tests, round, self.settings.selection == "last")
        entry = {
            "round": round,
            "nodes": self.selection.summary(self.models.series(), self.validation_size),
            "bytes": self._sent(),
            "seconds": self.seconds,
        }
        if self.directory:
            self.directory.append_metrics(entry)
        return entry

    @property
    def seconds(self) -> float:
        return round(self.clock.seconds, 3)

    def checkpoint_is_due(self, round: int) -> bool:
        """Return whether a checkpoint is due: at the configured interval, or as often as 2 % of the time allows."""
        every = self.settings.checkpoint_every
        if every == "auto":
            size = STATE_COPIES * self.models.parameter_bytes
            return round % AUTOMATIC == 0 and self.clock.affords_checkpoint(size)
        return every > 0 and round % every == 0

    def state(self, round: int, plain: Mapping[str, Any]) -> Checkpoint:
        """Return a checkpoint with the training state and the values in `plain`."""
        known = {**plain, **self.selection.state(), "seconds": self.clock.seconds, "settings": self.fingerprint()}
        return Checkpoint(round, self.models.state(), known)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.models.restore(checkpoint.tensors, checkpoint.round)
        self.selection.restore(checkpoint.plain)

    def forget_after(self, round: int, evaluated: int) -> None:
        """Remove metrics after round `evaluated`, and checkpoints after `round`."""
        if self.directory:
            self.directory.cut_metrics(evaluated)
            self.directory.checkpoints.drop_after(round)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that must be the same to continue from a checkpoint."""
        settings = self.settings
        return {
            "optimizer": self._optimizer.model_dump(),
            "dtype": settings.dtype,
            "precision or micro_batch": [settings.compute.bf16, settings.compute.rows],
            "models": [node.model_name for node in self.nodes],
            "size of models": self.models.parameter_bytes,
            "evaluation": [settings.eval_every, settings.selection_rule, settings.ema_decay],
        }

    def check(self, settings: Mapping[str, Any], what: str, remedy: str = "") -> None:
        """Refuse a checkpoint or result that was made with other settings. The error starts with `what`."""
        different = [key for key, value in self.fingerprint().items() if value != settings.get(key)]
        if different:
            raise RunError(f"the {what} with another {' and '.join(different)}; give what it was started with{remedy}")

    def test(self, which: Which, rounds: Sequence[int], save: bool = True) -> list[list[int]]:
        """Load the best or last models. Return their correct test samples per domain, and save them.

        `rounds` are the rounds that the models are from.
        """
        self.models.select(which)
        right = self.models.correct(self.tests)
        if save:
            self.save_models(which, rounds)
        return [right[name] for name in self.names]

    def save_models(self, which: str, rounds: Sequence[int]) -> None:
        """Write the present models to the run directory."""
        if self.directory:
            weights, first = self.models.state_dicts(), self.nodes[0]
            logits = self.models.logits(probe(first.input_shape, first.floating, self.settings.torch_dtype))
            for node, taken in zip(self.nodes, rounds, strict=True):
                data = pack_model(weights[node.name], logits[node.name], node.description(taken, which))
                self.directory.write_model(node.name, which, data)
