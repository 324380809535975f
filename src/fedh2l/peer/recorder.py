"""The recorder of a peer: it also binds checkpoints and results to the agreement of the members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fedh2l.engines.local_nodes import LocalNodes
from fedh2l.errors import RunError, WriteError, shown
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.settings import PeerConfig
from fedh2l.runs.checkpoints import Checkpoint, restoring
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.recorder import Recorder
from fedh2l.training.fingerprint import Fingerprint
from fedh2l.training.node import Node

log = logging.getLogger("fedh2l.peer")

LOOK = 50
"""Maximum number of rounds between two checks for faults."""
OTHER_OUT = ", or name another peer.out"


class PeerRecorder(Recorder):
    """Records the training of one node, and continues only what was made under its members' agreement."""

    directory: RunDirectory

    def __init__(
        self, config: PeerConfig, directory: RunDirectory, node: Node, local_nodes: LocalNodes, sent: Callable[[], int]
    ) -> None:
        super().__init__(local_nodes, [node], config.run, config.optimizer, directory, sent)
        self.config, self.node, self.local_nodes = config, node, local_nodes
        self.summary: dict[str, float] = {}
        """Metrics of the last evaluation."""

    def arrive(self, round: int, look: bool) -> None:
        """Check for faults and evaluate after a round, if due.

        Faults are checked before each evaluation, every `LOOK` rounds, and if `look` is set. Each check reads the
        records since the last one, so rare checks cost more.
        """
        due = self.evaluation_is_due(round)
        if look or due or round % LOOK == 0:
            self.models.verify()
        if not due:
            return
        self.summary = self.evaluate(round)["nodes"][self.node.name]
        about = {"round": round, "validation_ACC": self.summary["validation_ACC"]}
        log.info("round %d: validation ACC %.1f", round, self.summary["validation_ACC"], extra=about)
        if self.config.settings.snapshots:
            (learner,) = self.local_nodes.learners
            with learner.showing(learner.shown):
                self.save_models(f"round-{round}", [round])

    def made_by(self, version: RosterVersion) -> dict[str, Any]:
        """Return the values that identify the agreement and the settings of a checkpoint or a result."""
        agreement = version.roster_file.agreement
        of = {"federation": agreement.federation, "seed": agreement.seed, "version": agreement.version}
        return {**of, "agreed": version.roster.digest.hex(), "settings": self.fingerprint()}

    def save(self, round: int, plain: dict[str, Any]) -> None:
        """Save a checkpoint with the training state and the values in `plain`."""
        with self.clock.checkpointing():
            try:
                self.directory.checkpoints.save(self.state(round, plain))
            except OSError as error:
                raise WriteError(f"cannot write a checkpoint after round {round}: {error}") from error

    def newest(self, history: RosterHistory) -> Checkpoint | None:
        """Restore and return the newest valid checkpoint of this roster or an earlier version, or None."""
        found = self.directory.checkpoints.newest()
        if found is None:
            self.directory.cut_metrics(0)  # of rounds that were done before this peer was killed
            return None
        _, checkpoint = found
        with restoring(self.directory.path):
            self._check_agreement("checkpoint", checkpoint.plain, history)
            self.restore(checkpoint)
            self.clock.before = float(checkpoint.plain["seconds"])
            self.forget_after(checkpoint.round, checkpoint.round)
        log.info("goes on after round %d", checkpoint.round)
        return checkpoint

    def _check_agreement(self, what: str, plain: Mapping[str, Any], history: RosterHistory) -> None:
        """Refuse what was made under another agreement, or with other settings, data or another model."""
        if not _is_of(plain, history):
            raise RunError(f"the {what} is of another agreement (roster or seed set); name another peer.out")
        self.check(plain["settings"], f"{what} is of a peer", OTHER_OUT)
        self.directory.check(self.inputs)

    @property
    def inputs(self) -> dict[str, Fingerprint]:
        """Fingerprints of this node's data and model."""
        (learner,) = self.local_nodes.learners
        return {self.node.name: {"data": self.config.domain.own_digest, **learner.fingerprint}}

    def result(self, rounds: int, history: RosterHistory) -> dict[str, Any] | None:
        """Return the stored result of all these rounds, under the present or an earlier agreement, else None."""
        found = self.directory.result()
        done = found.get("rounds") if found is not None else None
        if found is None or not isinstance(done, int) or done < rounds:
            return None
        try:
            own = found["peer"]
            self._check_agreement("result", own, history)
            return {**found, "peer": {**own, "done": list(map(str, own["done"]))}}
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{self.directory.path}' holds a result that is not one of this version's peers "
                f"({type(error).__name__}: {shown(error, 80)}); name another peer.out"
            ) from error

    def finish(self, round: int, method: str, sent: Mapping[str, int], own: dict[str, Any]) -> dict[str, Any]:
        """Save both models, and write the result. It has the form of a simulation's result.

        A peer has its own domain only, so values over all domains are null. `own` are values that only peers have.
        """
        selection, run = self.selection, self.config.run
        best_round = selection.best_rounds()[0]
        ((last,),) = self.test("last", [round])
        ((best,),) = self.test("best", [best_round])
        total = len(self.tests[0])
        own_best, own_last = ({"ACC": None, "WDP": 100 * right / total, "CDP": None} for right in (best, last))
        validation = 100 * selection.validated("best")[0] / self.validation_size
        about = {"name": self.node.name, "model": self.node.model_name, "round": best_round, "validation": validation}
        result = {
            "method": method,
            "seed": run.seed,
            "rounds": round,
            "selection": "best",
            "nodes": [{**about, **own_best, "last": own_last}],
            "average": own_best,
            "last": own_last,
            "matrix": [[100 * best / total]],
            "bytes": {
                "total": sum(sent.values()), "per_round": sum(sent.values()) / round, "payload": None,
                "multicast": None, "edges": {f"{self.node.name}->{name}": size for name, size in sent.items()},
            },
            "conflict_rate": selection.conflict_rate,
            "seconds": self.seconds,
            "views": {},
            "peer": {**own, "conflicts": selection.state()["conflicts"]},
        }  # fmt: skip
        self.directory.write_result(result)
        return result


def _is_of(plain: Mapping[str, Any], history: RosterHistory) -> bool:
    """Return whether a checkpoint belongs to a loaded roster version, or to an earlier one of the same federation."""
    if any(version.roster.digest.hex() == plain["agreed"] for version in history.all):
        return True
    first = history.all[0].roster_file.agreement
    same = (plain["federation"], plain["seed"]) == (first.federation, first.seed)
    return same and plain["version"] < first.version
