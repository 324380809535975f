"""The course of a run: rounds, evaluations, checkpoints and the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedh2l.engines.base import Engine, Which
from fedh2l.engines.choice import engines_for
from fedh2l.errors import DivergedError, RunError, UnsoundMessageError, WriteError
from fedh2l.experiment.experiment import Experiment
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.checkpoints import Checkpoint, pack, restoring, unpack
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.loop import advance_together, run_together
from fedh2l.runs.recorder import AUTOMATIC, Recorder
from fedh2l.runs.result import Result

log = logging.getLogger("fedh2l")

KEPT_BYTES = 200 * 10**6
"""A run that has ended keeps its last checkpoint if it is smaller than this."""


class Interrupted(Exception):  # noqa: N818 - an outcome rather than an error
    """Raised after a request to stop. The run can continue from `checkpoint` if it has a directory."""

    def __init__(self, round: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round
        self.checkpoint = checkpoint


class Trainer:
    """Trains an experiment to its last round, from the start or from a checkpoint."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory | None = None,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        engine: Engine | None = None,
    ) -> None:
        self.experiment = experiment
        self.settings = experiment.settings
        self.callbacks = callbacks
        self.stop = stop
        self.engine = engine or engines_for([experiment])[0]
        self.round = 0
        self.recorder = Recorder(
            self.engine,
            experiment.members,
            self.settings,
            experiment.optimizer,
            directory,
            lambda: self.engine.ledger.total,
        )
        self.save_models = True
        """Whether to write each node's models to the run directory."""
        self.extensible = True
        """Whether to keep the last checkpoint in the run directory, so that the run can be extended."""
        self._pending = False
        """Whether the present round is not evaluated yet. The last checkpoint is written before the evaluation, so an
        extended run evaluates that round only if it is due."""
        self._last_checkpoint: Path | None = None
        self._kept: Checkpoint | None = None
        """Newest checkpoint of a run without a directory."""

    @property
    def directory(self) -> RunDirectory | None:
        """Directory of the run, if it has one."""
        return self.recorder.directory

    @directory.setter
    def directory(self, directory: RunDirectory | None) -> None:
        self.recorder.directory = directory

    def resume(self) -> bool:
        """Restore the newest sound checkpoint of the run directory. Return False if there is none."""
        assert self.directory is not None
        found = self.directory.checkpoints.newest()
        if found is not None:
            self._last_checkpoint, checkpoint = found
            self._restore(checkpoint)
            with restoring(self.directory.path):
                self.recorder.clock.before = float(checkpoint.plain["seconds"])
        return found is not None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Close the engine if an error comes before `run`, which closes it otherwise: it may hold processes."""
        try:
            yield
        except BaseException:
            self.engine.close()
            raise

    def run(self) -> Result:
        """Train, and put the model that the selection rule picks into each node's module."""
        return run_together([self])[0]

    def advance(self) -> None:
        """Train to the next evaluation or checkpoint, whichever comes first, and perform it."""
        advance_together([self])

    def begin(self) -> None:
        if self.directory:
            self.directory.sign(self.experiment.fingerprint)
            self.recorder.forget_after(self.round, self.round - self._pending)
        self.recorder.clock.start()
        names = list(self.experiment.roster.names)
        self.tell(lambda callback: callback.on_start(names, self.round + 1, self.settings.rounds))

    def arrive(self, round: int) -> None:
        """Complete a round: verify it, and evaluate or write a checkpoint if that is due."""
        self.round = round
        self._verify()
        self._pending = True
        if self.round == self.settings.rounds:
            self._keep_last()
        self.settle()
        if self.round < self.settings.rounds and self.recorder.checkpoint_is_due(self.round):
            self._checkpoint()

    def settle(self) -> None:
        """Evaluate the present round if that is due and not done yet."""
        if self._pending and self.recorder.evaluation_is_due(self.round):
            entry = self.recorder.evaluate(self.round)
            self.tell(lambda callback: callback.on_evaluation(entry))
        self._pending = False

    def secure(self, lost: bool) -> None:
        """Roll back if nodes were lost. Otherwise make sure that there is a checkpoint to go back to."""
        if lost:
            self._roll_back()
        if self.engine.fragile and self._last_checkpoint is None and self._kept is None:
            self._checkpoint()

    def _roll_back(self) -> None:
        """Restart lost nodes, and restore all nodes from the newest checkpoint.

        Without a checkpoint no round has been done, so there is nothing to restore.
        """
        reached, lost = self.round, self.engine.revive()
        checkpoint = self._kept
        if self.directory and self._last_checkpoint is not None:
            found = self.directory.checkpoints.newest()
            if found is None:
                raise RunError("nodes were lost, and there is no readable checkpoint to return to")
            self._last_checkpoint, checkpoint = found
        if checkpoint is not None:
            self._restore(checkpoint)
        self.recorder.forget_after(self.round, self.round - self._pending)
        log.warning(
            "%s died after round %d; all nodes go on from round %d",
            " and ".join(f"node '{name}'" for name in lost) or "a node's process", reached, self.round,
        )  # fmt: skip

    def halt(self) -> Interrupted:
        """Save the present round, so that the run can continue from it."""
        return Interrupted(self.round, self._checkpoint())

    def next_event(self) -> int:
        every = self.settings.checkpoint_every
        periods = [self.settings.eval_every, AUTOMATIC if every == "auto" else every or self.settings.rounds]
        return min(self.settings.rounds, *(self.round - self.round % period + period for period in periods))

    def after_round(self, round: int) -> bool:
        self.tell(lambda callback: callback.on_round(round))
        return not self.stop()

    def _verify(self) -> None:
        try:
            self.engine.verify()
        except DivergedError as error:
            last = self._last_checkpoint
            kept = f"The last good checkpoint is {last}." if last else "There is no checkpoint before it."
            advice = "" if isinstance(error, UnsoundMessageError) else " A lower optimizer.lr may help."
            raise type(error)(f"{error}; training stopped. {kept}{advice}") from None

    def finish(self) -> Result:
        recorder, selection, experiment = self.recorder, self.recorder.selection, self.experiment
        rounds: dict[Which, list[int]] = {"last": [self.round] * len(recorder.names), "best": selection.best_rounds()}
        last = recorder.test("last", rounds["last"], self.save_models)
        best = recorder.test("best", rounds["best"], self.save_models)
        chosen = self.settings.selection
        self.engine.select(chosen)
        totals = [len(test) for test in recorder.tests]
        result = Result.from_counts(
            experiment.method.title,
            self.settings,
            {node.name: node.model_name for node in experiment.nodes},
            best if chosen == "best" else last,
            last,
            totals,
            rounds[chosen],
            [100 * right / recorder.validation_size for right in selection.validated(chosen)],
            bytes=self.engine.ledger.summary(self.settings.rounds),
            conflict_rate=selection.conflict_rate,
            seconds=recorder.seconds,
            views=selection.view_averages(totals),
        )
        if self.directory:
            self.directory.write_result(result.to_dict())
            self.directory.checkpoints.keep_only(self.round)  # only the one from `_keep_last`
        return result

    def _checkpoint(self) -> Path | None:
        if self.directory is None and not self.engine.fragile:
            return None
        with self.recorder.clock.checkpointing():
            checkpoint = self._state()
            if self.directory is None:
                self._kept = unpack(pack(checkpoint))  # a copy that does not change
                return None
            path = self._write(self.directory, checkpoint)
        self.tell(lambda callback: callback.on_checkpoint(self.round, path))
        return path

    def _keep_last(self) -> None:
        """Save the state after the last round, before the final steps, so that the run can be extended."""
        if self.directory is None or not self.extensible:
            return
        checkpoint = self._state()
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        if size < KEPT_BYTES or self.settings.keep_checkpoint:
            self._write(self.directory, checkpoint)

    def _state(self) -> Checkpoint:
        plain = {
            "rules": self.experiment.rules,
            "rounds": self.settings.rounds,
            "pending": self._pending,
            "ledger": self.engine.ledger.state(),
        }
        return self.recorder.state(self.round, plain)

    def _write(self, directory: RunDirectory, checkpoint: Checkpoint) -> Path:
        try:
            self._last_checkpoint = directory.checkpoints.save(checkpoint)
        except OSError as error:
            raise WriteError(f"cannot write a checkpoint after round {self.round}: {error}") from error
        return self._last_checkpoint

    def _restore(self, checkpoint: Checkpoint) -> None:
        with restoring(self.directory.path if self.directory else "memory"):
            self._take_over(checkpoint)

    def _take_over(self, checkpoint: Checkpoint) -> None:
        plain = checkpoint.plain
        self.recorder.check(plain["settings"], "checkpoint is of a run")
        if plain["rules"] != self.experiment.rules:
            raise RunError(
                "the checkpoint is of a run with another roster (nodes, seed or method); give what it was started with"
            )
        if self.directory:
            self.directory.check(self.experiment.fingerprint)
        self.experiment.check_rounds(max(plain["rounds"], checkpoint.round))
        self.recorder.restore(checkpoint)
        self.round, self._pending = checkpoint.round, bool(plain["pending"])
        self.engine.ledger.restore(plain["ledger"])

    def tell(self, event: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            event(callback)
