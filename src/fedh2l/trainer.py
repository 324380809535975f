"""The course of a run: rounds, evaluations, checkpoints, the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fedh2l.callbacks import Callback
from fedh2l.checkpoints import Checkpoint, pack, unpack
from fedh2l.clock import Clock
from fedh2l.engines.base import Engine, NodesLostError, Which
from fedh2l.engines.choice import engines_for
from fedh2l.errors import DivergedError, RunError
from fedh2l.federation import Federation
from fedh2l.models.saved import pack_model, probe
from fedh2l.result import Result, node_results, summarise
from fedh2l.rundir import RunDirectory
from fedh2l.settings import RunSettings, resolve_device
from fedh2l.standing import Standing

log = logging.getLogger("fedh2l")

AUTOMATIC = 50
"""How many rounds apart automatic checkpoints are considered."""

STATE_COPIES = 9
"""A checkpoint holds about this many times the parameters: themselves, the best, two optimiser states of three."""


class Interrupted(Exception):  # noqa: N818 - an outcome rather than an error
    """The run was asked to stop; `checkpoint` is where it can go on from, if it has a directory."""

    def __init__(self, round: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round
        self.checkpoint = checkpoint


class Trainer:
    """Trains a federation to its last round, from the start or from a checkpoint."""

    def __init__(
        self,
        federation: Federation,
        directory: RunDirectory | None = None,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        engine: Engine | None = None,
    ) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.directory = directory
        self.callbacks = callbacks
        self.stop = stop
        self.engine = engine or engines_for([federation])[0]
        self.round = 0
        self.standing = Standing(federation.roster.names)
        device, dtype = resolve_device(self.settings.device), self.settings.torch_dtype
        domains = [node.domain for node in federation.nodes]
        self.save_models = True
        """Whether a run directory gets each node's models."""
        self._validation_size = sum(len(domain.validation) for domain in domains)
        self._tests = [domain.test.to(device, dtype) for domain in domains]
        self._clock = Clock()
        self._last_checkpoint: Path | None = None
        self._kept: Checkpoint | None = None
        """The newest checkpoint of a run that has no directory."""

    def resume(self) -> bool:
        """Takes up the newest sound checkpoint of the run directory; False if there is none."""
        assert self.directory is not None
        found = self.directory.checkpoints.newest()
        if found is not None:
            self._last_checkpoint, checkpoint = found
            self._restore(checkpoint)
            self._clock.before = checkpoint.plain["seconds"]
        return found is not None

    def run(self) -> Result:
        """Trains, and leaves in each node's module the model that the selection rule picks."""
        return run_together([self])[0]

    def advance(self) -> None:
        """Goes on to the next evaluation or checkpoint, whichever comes first, and does it."""
        advance_together([self])

    def _begin(self) -> None:
        if self.directory:
            self._forget_what_follows(self.directory)
        self._clock.start()
        self._tell("on_start", list(self.federation.roster.names), self.round + 1, self.settings.rounds)

    def _forget_what_follows(self, directory: RunDirectory) -> None:
        """What was written after the checkpoint that is gone on from."""
        directory.cut_metrics(self.round)
        directory.checkpoints.drop_after(self.round)

    def _arrive(self, round: int) -> None:
        """Does what belongs to a round: evaluation, checkpoint, stopping."""
        self.round = round
        self._verify()
        evaluates = self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds
        if evaluates:
            self._evaluate()
        if self.round < self.settings.rounds and self._checkpoint_due():
            self._checkpoint()

    def _secure(self, lost: bool) -> None:
        """After a loss, goes back; otherwise sees to it that there is something to go back to."""
        if lost:
            self._roll_back()
        if self.engine.fragile and self._last_checkpoint is None and self._kept is None:
            self._checkpoint()

    def _roll_back(self) -> None:
        """Brings lost nodes back, and everybody to the newest checkpoint; before the first one, nothing was done."""
        reached, lost = self.round, self.engine.revive()
        checkpoint = self._kept
        if self.directory and self._last_checkpoint is not None:
            found = self.directory.checkpoints.newest()
            if found is None:
                raise RunError("nodes were lost, and no sound checkpoint is left to go back to")
            self._last_checkpoint, checkpoint = found
        if checkpoint is not None:
            self._restore(checkpoint)
        if self.directory:
            self._forget_what_follows(self.directory)
        log.warning(
            "%s died after round %d; all nodes go on from round %d",
            " and ".join(f"node '{name}'" for name in lost) or "a node's process", reached, self.round,
        )  # fmt: skip

    def _halt(self) -> Interrupted:
        """Saves the round, so that the run can go on from it."""
        return Interrupted(self.round, self._checkpoint())

    def _next_event(self) -> int:
        every = self.settings.checkpoint_every
        periods = [self.settings.eval_every, AUTOMATIC if every == "auto" else every or self.settings.rounds]
        return min(self.settings.rounds, *(self.round - self.round % period + period for period in periods))

    def _after_round(self, round: int) -> bool:
        self._tell("on_round", round)
        return not self.stop()

    def _verify(self) -> None:
        try:
            self.engine.verify()
        except DivergedError as error:
            last = self._last_checkpoint
            kept = f"The last good checkpoint is {last}." if last else "There is no checkpoint before it."
            raise DivergedError(f"{error}; training stopped. {kept} A lower optimizer.lr may help.") from None

    def _evaluate(self) -> None:
        self.engine.complete(count=self.round == self.settings.rounds)
        self.engine.keep_best(self.standing.take(self.engine.validate(), self.round))
        self.standing.take_views(self.engine, self._tests, self.round, self.settings.selection == "last")
        entry = {
            "round": self.round,
            "nodes": self.standing.summary(self.engine.series(), self._validation_size),
            "bytes": self.engine.ledger.total,
            "seconds": round(self._clock.seconds, 3),
        }
        if self.directory:
            self.directory.append_metrics(entry)
        self._tell("on_evaluation", entry)

    def _finish(self) -> Result:
        names = self.federation.roster.names
        counts: dict[Which, list[list[int]]] = {}
        rounds: dict[Which, list[int]] = {"last": [self.round] * len(names), "best": self.standing.best_rounds()}
        order: list[Which] = ["last", "best"]
        for which in order:
            self.engine.select(which)
            right = self.engine.correct(self._tests)
            counts[which] = [right[name] for name in names]
            self._save_models(which, rounds[which])
        selection = self.settings.selection
        self.engine.select(selection)
        totals = [len(test) for test in self._tests]
        nodes = node_results(
            names,
            [node.model_name for node in self.federation.nodes],
            counts[selection],
            counts["last"],
            totals,
            rounds[selection],
            [100 * right / self._validation_size for right in self.standing.validated(selection)],
        )
        averages, averages_last = summarise(nodes)
        result = Result(
            method=self.federation.method.title,
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            selection=selection,
            nodes=nodes,
            average=averages,
            last=averages_last,
            matrix=[[100 * c / t for c, t in zip(row, totals, strict=True)] for row in counts[selection]],
            bytes=self.engine.ledger.summary(self.settings.rounds),
            conflict_rate=self.standing.conflict_rate,
            seconds=round(self._clock.seconds, 3),
            views=self.standing.view_averages(totals),
        )
        if self.directory:
            self.directory.write_result(result.to_dict())
            self.directory.checkpoints.clear()  # of large models they are gigabytes, and nothing is left to resume
        return result

    def _save_models(self, which: Which, rounds: Sequence[int]) -> None:
        if self.directory and self.save_models:
            weights = self.engine.state_dicts()
            first = self.federation.nodes[0]
            said = self.engine.logits(probe(first.input_shape, first.floating, self.settings.torch_dtype))
            for node, taken in zip(self.federation.members, rounds, strict=True):
                data = pack_model(weights[node.name], said[node.name], node, taken, which)
                self.directory.write_model(node.name, which, data)

    def _checkpoint_due(self) -> bool:
        every = self.settings.checkpoint_every
        if every == "auto":
            return self._clock.affords_checkpoint(STATE_COPIES * self.engine.parameter_bytes)
        return every > 0 and self.round % every == 0

    def _checkpoint(self) -> Path | None:
        if self.directory is None and not self.engine.fragile:
            return None
        with self._clock.checkpointing():
            plain = {
                "settings": self._fingerprint(),
                **self.standing.state(),
                "ledger": self.engine.ledger.state(),
                "seconds": self._clock.seconds,
            }
            checkpoint = Checkpoint(self.round, self.engine.state(), plain)
            if self.directory is None:
                self._kept = unpack(pack(checkpoint))  # nothing that goes on changing
                return None
            try:
                path = self.directory.checkpoints.save(checkpoint)
            except OSError as error:
                raise RunError(f"cannot write a checkpoint after round {self.round}: {error}") from error
        self._last_checkpoint = path
        self._tell("on_checkpoint", self.round, path)
        return path

    def _restore(self, checkpoint: Checkpoint) -> None:
        plain = checkpoint.plain
        now, then = self._fingerprint(), plain["settings"]
        different = [key for key in now if now[key] != then.get(key)]
        if different:
            raise RunError(
                f"the checkpoint is of a run with another {' and '.join(different)}; give what it was started with"
            )
        self.engine.restore(checkpoint.tensors)
        self.round = checkpoint.round
        self.standing.restore(plain)
        self.engine.ledger.restore(plain["ledger"])

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from."""
        return {
            "roster (nodes, seed, method or rounds)": self.federation.roster.digest.hex(),
            "optimizer": self.federation.optimizer.model_dump(),
            "dtype": self.settings.dtype,
            "precision or micro_batch": list(self.settings.compute),
            "models": [node.model_name for node in self.federation.nodes],
            "size of models": self.engine.parameter_bytes,
            "evaluation": [self.settings.eval_every, self.settings.selection_rule, self.settings.average],
            "data": [node.domain.digest for node in self.federation.nodes],
        }

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


def run_together(trainers: Sequence[Trainer]) -> list[Result]:
    """Trains federations in step, whose engines share one computation; one trainer alone is the usual case."""
    first = trainers[0]
    with ExitStack() as stack:
        for trainer in trainers:
            if trainer.directory:
                stack.enter_context(trainer.directory.locked())
        stack.enter_context(torch_settings(first.settings))
        try:
            for trainer in trainers:
                trainer._begin()
            results, lost = None, False
            while results is None:
                try:
                    for trainer in trainers:
                        trainer._secure(lost)
                    lost = False
                    while first.round < first.settings.rounds:
                        advance_together(trainers)
                    results = [trainer._finish() for trainer in trainers]
                except NodesLostError:  # also while others are brought back
                    lost = True
        finally:
            for trainer in trainers:
                trainer.engine.close()
    for trainer, result in zip(trainers, results, strict=True):
        trainer._tell("on_end", result)
    return results


def advance_together(trainers: Sequence[Trainer]) -> None:
    """Goes on with federations in step to their next evaluation or checkpoint, and does it."""
    first = trainers[0]
    if not all(first.engine.moves(trainer.engine) for trainer in trainers):
        raise ValueError("these federations have engines of their own; make them by engines_for(…)")

    def keep_going(round: int) -> bool:
        wanted = [trainer._after_round(round) for trainer in trainers]  # all of them hear of it
        return all(wanted)

    reached = first.engine.advance(first.round + 1, first._next_event(), keep_going)
    for trainer in trainers:
        trainer._arrive(reached)
    if reached < first.settings.rounds and any(trainer.stop() for trainer in trainers):
        stopped = [trainer._halt() for trainer in trainers]  # all of them are saved
        raise stopped[0]


@contextmanager
def torch_settings(settings: RunSettings) -> Iterator[None]:
    """A run's number of threads, with torch's own generators left as they were found."""
    before = torch.get_num_threads()
    device = resolve_device(settings.device)
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(before)
