"""What a peer keeps of its training: metrics, checkpoints, models and its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fedh2l.checkpoints import Checkpoint
from fedh2l.clock import Clock
from fedh2l.engines.base import raise_earliest
from fedh2l.engines.residents import Residents
from fedh2l.errors import RunError
from fedh2l.models.saved import pack_model, probe
from fedh2l.node import Node
from fedh2l.peer.charter import Agreement
from fedh2l.peer.settings import PeerConfig
from fedh2l.peer.terms import Terms
from fedh2l.rundir import RunDirectory
from fedh2l.settings import resolve_device
from fedh2l.standing import Standing
from fedh2l.trainer import AUTOMATIC, STATE_COPIES

log = logging.getLogger("fedh2l.peer")


LOOK = 50
"""Rounds between two looks at whether all is sound, at most."""


class Keeper:
    """Looks after one node's model from round to round."""

    def __init__(self, config: PeerConfig, directory: RunDirectory, node: Node, residents: Residents) -> None:
        self.config, self.directory, self.node, self.residents = config, directory, node, residents
        self.standing = Standing([node.name])
        self.summary: dict[str, float] = {}
        """What the last evaluation found."""
        self.clock = Clock()

    def arrive(self, round: int, sent: int, look: bool) -> None:
        """After a round: evaluates where that is due; `sent` are the bytes so far.

        Sees that all is sound, if asked to, before an evaluation, and now and then: it costs more the longer ago the
        last evaluation was.
        """
        evaluate = round % self.config.run.eval_every == 0 or round == self.config.run.rounds
        if look or evaluate or round % LOOK == 0:
            raise_earliest(self.residents.faults(round))
        if evaluate:
            self._evaluate(round, sent)

    def checkpoint_is_due(self, round: int) -> bool:
        """As often as was asked for, or as 2 % of the time allow."""
        every = self.config.run.checkpoint_every
        if every == "auto":
            size = STATE_COPIES * self.residents.parameter_bytes
            return round % AUTOMATIC == 0 and self.clock.affords_checkpoint(size)
        return every > 0 and round % every == 0

    def _evaluate(self, now: int, sent: int) -> None:
        best = self.standing.take(self.residents.validate(), now)
        self.residents.keep_best(best)
        summary = self.standing.summary(self.residents.series(), len(self.config.domain.validation))[self.node.name]
        self.summary = summary
        seconds = round(self.clock.seconds, 3)
        self.directory.append_metrics({"round": now, **summary, "bytes": sent, "seconds": seconds})
        about = {"round": now, "validation_ACC": summary["validation_ACC"]}
        log.info("round %d: validation ACC %.1f", now, summary["validation_ACC"], extra=about)
        if self.config.settings.snapshots:
            self._save_model(f"round-{now}", now)

    def _save_model(self, which: str, taken: int) -> None:
        node, (learner,) = self.node, self.residents.learners
        with learner.showing(learner.shown):
            said = self.residents.logits(probe(node.input_shape, node.floating, self.config.run.torch_dtype))[node.name]
            data = pack_model(self.residents.state_dicts()[node.name], said, node, taken, which)
        self.directory.write_model(node.name, which, data)

    def save(self, round: int, agreement: Agreement, plain: dict[str, Any]) -> None:
        """A checkpoint, with what else the peer must remember."""
        with self.clock.checkpointing():
            of = {"federation": agreement.federation, "seed": agreement.seed, "version": agreement.version}
            of |= {"settings": self._fingerprint()}
            known = {**of, **plain, **self.standing.state(), "seconds": self.clock.seconds}
            try:
                self.directory.checkpoints.save(Checkpoint(round, self.residents.state(), known))
            except OSError as error:
                raise RunError(f"cannot write a checkpoint after round {round}: {error}") from error

    def newest(self, terms: Terms) -> Checkpoint | None:
        """Takes over the newest sound checkpoint of what was agreed on, now or before, if there is one."""
        found = self.directory.checkpoints.newest()
        if found is None:
            return None
        _, checkpoint = found
        if not _is_of(checkpoint.plain, terms):
            raise RunError("the checkpoint is of another agreement (roster or seed set); name another peer.out")
        now, then = self._fingerprint(), checkpoint.plain["settings"]
        different = [key for key in now if now[key] != then.get(key)]
        if different:
            raise RunError(
                f"the checkpoint is of a peer with another {' and '.join(different)}; give what it was started with, "
                "or name another peer.out"
            )
        self.residents.restore(checkpoint.tensors)
        self.standing.restore(checkpoint.plain)
        self.clock.before = checkpoint.plain["seconds"]
        self.directory.cut_metrics(checkpoint.round)
        self.directory.checkpoints.drop_after(checkpoint.round)
        log.info("goes on after round %d", checkpoint.round)
        return checkpoint

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from."""
        return {
            "optimizer": self.config.optimizer.model_dump(),
            "dtype or average": [self.config.run.dtype, self.config.run.average],
            "model": self.node.model_name,
            "size of the model": self.residents.parameter_bytes,
        }

    def result(self, rounds: int) -> dict[str, Any] | None:
        """What was written when all these rounds were done; None if they were not."""
        found = self.directory.result()
        return found if found is not None and found["rounds"] >= rounds else None

    def finish(self, round_done: int, about: dict[str, Any]) -> dict[str, Any]:
        """The best and the last model, and how the best does on this node's own test data."""
        config, name, best = self.config, self.node.name, self.standing.best_rounds()[0]
        self.residents.select("last")
        self._save_model("last", round_done)
        self.residents.select("best")
        self._save_model("best", best)
        test = config.domain.test.to(resolve_device(config.run.device), config.run.torch_dtype)
        right = self.residents.correct([test])[name][0]
        result = {
            "node": name,
            "rounds": round_done,
            "best_round": best,
            "test_ACC": 100 * right / len(test),
            "conflict_rate": self.standing.conflict_rate,
            "conflicts": self.standing.state()["conflicts"],
            **about,
            "seconds": round(self.clock.seconds, 3),
        }
        self.directory.write_result(result)
        return result


def _is_of(plain: Mapping[str, Any], terms: Terms) -> bool:
    """Whether a checkpoint is of a version of the roster that is here, or of one before those that are."""
    if any(term.roster.digest.hex() == plain["agreed"] for term in terms.all):
        return True
    first = terms.all[0].charter.agreement
    same = (plain["federation"], plain["seed"]) == (first.federation, first.seed)
    return same and plain["version"] < first.version
