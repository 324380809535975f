"""Metrics, checkpoints, models and result of a peer's training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fedh2l.engines.base import raise_earliest
from fedh2l.engines.local_nodes import LocalNodes
from fedh2l.errors import RunError, WriteError, shown
from fedh2l.hardware import resolve_device
from fedh2l.models.saved import pack_model, probe
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.settings import PeerConfig
from fedh2l.runs.checkpoints import Checkpoint, restoring
from fedh2l.runs.clock import Clock
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.selection import ModelSelection
from fedh2l.runs.trainer import AUTOMATIC, STATE_COPIES
from fedh2l.training.fingerprint import Fingerprint
from fedh2l.training.node import Node

log = logging.getLogger("fedh2l.peer")


LOOK = 50
"""Maximum number of rounds between two checks for faults."""


class Recorder:
    """Evaluates one node's model during training, and writes its files."""

    def __init__(self, config: PeerConfig, directory: RunDirectory, node: Node, local_nodes: LocalNodes) -> None:
        self.config, self.directory, self.node, self.local_nodes = config, directory, node, local_nodes
        self.selection = ModelSelection([node.name])
        self.summary: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.clock = Clock()

    def arrive(self, round: int, sent: int, look: bool) -> None:
        """Check for faults and evaluate after a round, if due. `sent` is the number of bytes sent so far.

        Faults are checked before each evaluation, every `LOOK` rounds, and if `look` is set. Each check reads the
        records since the last one, so rare checks cost more.
        """
        evaluate = round % self.config.run.eval_every == 0 or round == self.config.run.rounds
        if look or evaluate or round % LOOK == 0:
            raise_earliest(self.local_nodes.faults(round))
        if evaluate:
            self._evaluate(round, sent)

    def checkpoint_is_due(self, round: int) -> bool:
        """Return whether a checkpoint is due: at the configured interval, or as often as 2 % of the time allows."""
        every = self.config.run.checkpoint_every
        if every == "auto":
            size = STATE_COPIES * self.local_nodes.parameter_bytes
            return round % AUTOMATIC == 0 and self.clock.affords_checkpoint(size)
        return every > 0 and round % every == 0

    def _evaluate(self, now: int, sent: int) -> None:
        best = self.selection.take(self.local_nodes.validate(), now)
        self.local_nodes.keep_best(best)
        summary = self.selection.summary(self.local_nodes.series(), len(self.config.domain.validation))[self.node.name]
        self.summary = summary
        seconds = round(self.clock.seconds, 3)
        self.directory.append_metrics({"round": now, **summary, "bytes": sent, "seconds": seconds})
        about = {"round": now, "validation_ACC": summary["validation_ACC"]}
        log.info("round %d: validation ACC %.1f", now, summary["validation_ACC"], extra=about)
        if self.config.settings.snapshots:
            self._save_model(f"round-{now}", now)

    def _save_model(self, which: str, taken: int) -> None:
        node, (learner,) = self.node, self.local_nodes.learners
        with learner.showing(learner.shown):
            said = self.local_nodes.logits(probe(node.input_shape, node.floating, self.config.run.torch_dtype))[
                node.name
            ]
            data = pack_model(self.local_nodes.state_dicts()[node.name], said, node.description(taken, which))
        self.directory.write_model(node.name, which, data)

    def made_by(self, version: RosterVersion) -> dict[str, Any]:
        """Return the values that identify the agreement and the settings of a checkpoint or a result."""
        agreement = version.roster_file.agreement
        of = {"federation": agreement.federation, "seed": agreement.seed, "version": agreement.version}
        return {**of, "agreed": version.roster.digest.hex(), "settings": self._fingerprint()}

    def save(self, round: int, plain: dict[str, Any]) -> None:
        """Save a checkpoint with the training state and the values in `plain`."""
        with self.clock.checkpointing():
            known = {**plain, **self.selection.state(), "seconds": self.clock.seconds}
            try:
                self.directory.checkpoints.save(Checkpoint(round, self.local_nodes.state(), known))
            except OSError as error:
                raise WriteError(f"cannot write a checkpoint after round {round}: {error}") from error

    def newest(self, history: RosterHistory) -> Checkpoint | None:
        """Restore and return the newest valid checkpoint of this roster or an earlier version, or None."""
        found = self.directory.checkpoints.newest()
        if found is None:
            self.directory.cut_metrics(0)  # of rounds that were done before this peer was killed, and are done again
            return None
        _, checkpoint = found
        with restoring(self.directory.path):
            self._take_over(checkpoint, history)
        log.info("goes on after round %d", checkpoint.round)
        return checkpoint

    def _check(self, what: str, plain: Mapping[str, Any], history: RosterHistory) -> None:
        """Refuse what was made under another agreement, or with other settings, data or another model."""
        if not _is_of(plain, history):
            raise RunError(f"the {what} is of another agreement (roster or seed set); name another peer.out")
        now, then = self._fingerprint(), plain["settings"]
        different = [key for key in now if now[key] != then.get(key)]
        if different:
            raise RunError(
                f"the {what} is of a peer with another {' and '.join(different)}; give what it was started with, "
                "or name another peer.out"
            )
        self.directory.check(self.inputs)

    def _take_over(self, checkpoint: Checkpoint, history: RosterHistory) -> None:
        self._check("checkpoint", checkpoint.plain, history)
        self.local_nodes.restore(checkpoint.tensors)
        self.selection.restore(checkpoint.plain)
        self.clock.before = float(checkpoint.plain["seconds"])
        self.directory.cut_metrics(checkpoint.round)
        self.directory.checkpoints.drop_after(checkpoint.round)

    @property
    def inputs(self) -> dict[str, Fingerprint]:
        """Fingerprints of this node's data and model."""
        (learner,) = self.local_nodes.learners
        return {self.node.name: {"data": self.config.domain.own_digest, **learner.fingerprint}}

    def _fingerprint(self) -> dict[str, Any]:
        """Return the settings that must be unchanged to resume from a checkpoint."""
        return {
            "optimizer": self.config.optimizer.model_dump(),
            "dtype or ema_decay": [self.config.run.dtype, self.config.run.ema_decay],
            "model": self.node.model_name,
            "size of the model": self.local_nodes.parameter_bytes,
        }

    def result(self, rounds: int, history: RosterHistory) -> dict[str, Any] | None:
        """Return the stored result of all these rounds, under the present or an earlier agreement, else None."""
        found = self.directory.result()
        done = found.get("rounds") if found is not None else None
        if found is None or not isinstance(done, int) or done < rounds:
            return None
        try:
            self._check("result", found, history)
            return {**found, "done": list(map(str, found["done"]))}
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{self.directory.path}' holds a result that is not one of this version's peers "
                f"({type(error).__name__}: {shown(error, 80)}); name another peer.out"
            ) from error

    def finish(self, round_done: int, about: dict[str, Any]) -> dict[str, Any]:
        """Save the best and the last model. Return the result, with the test accuracy of the best model."""
        config, name, best = self.config, self.node.name, self.selection.best_rounds()[0]
        self.local_nodes.select("last")
        self._save_model("last", round_done)
        self.local_nodes.select("best")
        self._save_model("best", best)
        test = config.domain.test.to(resolve_device(config.run.device), config.run.torch_dtype)
        right = self.local_nodes.correct([test])[name][0]
        result = {
            "node": name,
            "rounds": round_done,
            "best_round": best,
            "test_ACC": 100 * right / len(test),
            "conflict_rate": self.selection.conflict_rate,
            "conflicts": self.selection.state()["conflicts"],
            **about,
            "seconds": round(self.clock.seconds, 3),
        }
        self.directory.write_result(result)
        return result


def _is_of(plain: Mapping[str, Any], history: RosterHistory) -> bool:
    """Return whether a checkpoint belongs to a loaded roster version, or to an earlier one of the same federation."""
    if any(version.roster.digest.hex() == plain["agreed"] for version in history.all):
        return True
    first = history.all[0].roster_file.agreement
    same = (plain["federation"], plain["seed"]) == (first.federation, first.seed)
    return same and plain["version"] < first.version
