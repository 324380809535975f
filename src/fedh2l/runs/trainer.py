"""The course of a run: rounds, evaluations, checkpoints and the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fedh2l.engines.base import Engine, NodesLostError, Which
from fedh2l.engines.choice import engines_for
from fedh2l.errors import DivergedError, RunError, UnsoundMessageError, WriteError
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.hardware import resolve_device
from fedh2l.models.saved import pack_model, probe
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.checkpoints import Checkpoint, pack, restoring, unpack
from fedh2l.runs.clock import Clock
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.result import Result, node_results, summarise
from fedh2l.runs.selection import ModelSelection

log = logging.getLogger("fedh2l")

AUTOMATIC = 50
"""Rounds between decisions about automatic checkpoints."""

KEPT_BYTES = 200 * 10**6
"""A run that has ended keeps its last checkpoint if it is smaller than this."""

STATE_COPIES = 9
"""Size of a checkpoint in copies of the parameters: themselves, the best, and two optimiser states of three."""


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
        self.directory = directory
        self.callbacks = callbacks
        self.stop = stop
        self.engine = engine or engines_for([experiment])[0]
        self.round = 0
        self.selection = ModelSelection(experiment.roster.names)
        device, dtype = resolve_device(self.settings.device), self.settings.torch_dtype
        domains = [node.domain for node in experiment.nodes]
        self.save_models = True
        """Whether to write each node's models to the run directory."""
        self.extensible = True
        """Whether to keep the last checkpoint in the run directory, so that the run can be extended."""
        self._pending = False
        """Whether the present round is not evaluated yet. The last checkpoint is written before the evaluation, so an
        extended run evaluates that round only if it is due."""
        self._validation_size = sum(len(domain.validation) for domain in domains)
        self._tests = [domain.test.to(device, dtype) for domain in domains]
        self._clock = Clock()
        self._last_checkpoint: Path | None = None
        self._kept: Checkpoint | None = None
        """Newest checkpoint of a run without a directory."""

    def resume(self) -> bool:
        """Restore the newest sound checkpoint of the run directory. Return False if there is none."""
        assert self.directory is not None
        found = self.directory.checkpoints.newest()
        if found is not None:
            self._last_checkpoint, checkpoint = found
            self._restore(checkpoint)
            with restoring(self.directory.path):
                self._clock.before = float(checkpoint.plain["seconds"])
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

    def _begin(self) -> None:
        if self.directory:
            self.directory.sign(self.experiment.fingerprint)
            self._forget_what_follows(self.directory)
        self._clock.start()
        self._tell("on_start", list(self.experiment.roster.names), self.round + 1, self.settings.rounds)

    def _forget_what_follows(self, directory: RunDirectory) -> None:
        """Remove metrics and checkpoints of rounds after the restored checkpoint."""
        directory.cut_metrics(self.round - self._pending)
        directory.checkpoints.drop_after(self.round)

    def _arrive(self, round: int) -> None:
        """Complete a round: verify it, and evaluate or write a checkpoint if that is due."""
        self.round = round
        self._verify()
        self._pending = True
        if self.round == self.settings.rounds:
            self._keep_last()
        self._settle()
        if self.round < self.settings.rounds and self._checkpoint_due():
            self._checkpoint()

    def _settle(self) -> None:
        """Evaluate the present round if that is due and not done yet."""
        due = self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds
        if self._pending and due:
            self._evaluate()
        self._pending = False

    def _secure(self, lost: bool) -> None:
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
        if self.directory:
            self._forget_what_follows(self.directory)
        log.warning(
            "%s died after round %d; all nodes go on from round %d",
            " and ".join(f"node '{name}'" for name in lost) or "a node's process", reached, self.round,
        )  # fmt: skip

    def _halt(self) -> Interrupted:
        """Save the present round, so that the run can continue from it."""
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
            advice = "" if isinstance(error, UnsoundMessageError) else " A lower optimizer.lr may help."
            raise type(error)(f"{error}; training stopped. {kept}{advice}") from None

    def _evaluate(self) -> None:
        self.engine.complete(count=self.round == self.settings.rounds)
        self.engine.keep_best(self.selection.take(self.engine.validate(), self.round))
        self.selection.take_views(self.engine, self._tests, self.round, self.settings.selection == "last")
        entry = {
            "round": self.round,
            "nodes": self.selection.summary(self.engine.series(), self._validation_size),
            "bytes": self.engine.ledger.total,
            "seconds": round(self._clock.seconds, 3),
        }
        if self.directory:
            self.directory.append_metrics(entry)
        self._tell("on_evaluation", entry)

    def _finish(self) -> Result:
        names = self.experiment.roster.names
        counts: dict[Which, list[list[int]]] = {}
        rounds: dict[Which, list[int]] = {"last": [self.round] * len(names), "best": self.selection.best_rounds()}
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
            [node.model_name for node in self.experiment.nodes],
            counts[selection],
            counts["last"],
            totals,
            rounds[selection],
            [100 * right / self._validation_size for right in self.selection.validated(selection)],
        )
        averages, averages_last = summarise(nodes)
        result = Result(
            method=self.experiment.method.title,
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            selection=selection,
            nodes=nodes,
            average=averages,
            last=averages_last,
            matrix=[[100 * c / t for c, t in zip(row, totals, strict=True)] for row in counts[selection]],
            bytes=self.engine.ledger.summary(self.settings.rounds),
            conflict_rate=self.selection.conflict_rate,
            seconds=round(self._clock.seconds, 3),
            views=self.selection.view_averages(totals),
        )
        if self.directory:
            self.directory.write_result(result.to_dict())
            self.directory.checkpoints.keep_only(self.round)  # only the one from `_keep_last`
        return result

    def _save_models(self, which: Which, rounds: Sequence[int]) -> None:
        if self.directory and self.save_models:
            weights = self.engine.state_dicts()
            first = self.experiment.nodes[0]
            said = self.engine.logits(probe(first.input_shape, first.floating, self.settings.torch_dtype))
            for node, taken in zip(self.experiment.members, rounds, strict=True):
                data = pack_model(weights[node.name], said[node.name], node.description(taken, which))
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
            checkpoint = self._state()
            if self.directory is None:
                self._kept = unpack(pack(checkpoint))  # a copy that does not change
                return None
            path = self._write(self.directory, checkpoint)
        self._tell("on_checkpoint", self.round, path)
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
            "settings": self._fingerprint(),
            "rounds": self.settings.rounds,
            "pending": self._pending,
            **self.selection.state(),
            "ledger": self.engine.ledger.state(),
            "seconds": self._clock.seconds,
        }
        return Checkpoint(self.round, self.engine.state(), plain)

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
        now, then = self._fingerprint(), plain["settings"]
        different = [key for key in now if now[key] != then.get(key)]
        if different:
            raise RunError(
                f"the checkpoint is of a run with another {' and '.join(different)}; give what it was started with"
            )
        if self.directory:
            self.directory.check(self.experiment.fingerprint)
        self.experiment.check_rounds(max(plain["rounds"], checkpoint.round))
        self.engine.restore(checkpoint.tensors, checkpoint.round)
        self.round, self._pending = checkpoint.round, bool(plain["pending"])
        self.selection.restore(plain)
        self.engine.ledger.restore(plain["ledger"])

    def _fingerprint(self) -> dict[str, Any]:
        """Return the values that must be the same to continue from a checkpoint."""
        return {
            "roster (nodes, seed or method)": self.experiment.rules,
            "optimizer": self.experiment.optimizer.model_dump(),
            "dtype": self.settings.dtype,
            "precision or micro_batch": list(self.settings.compute),
            "models": [node.model_name for node in self.experiment.nodes],
            "size of models": self.engine.parameter_bytes,
            "evaluation": [self.settings.eval_every, self.settings.selection_rule, self.settings.ema_decay],
        }

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


def run_together(trainers: Sequence[Trainer]) -> list[Result]:
    """Train experiments in step, with engines that share one computation. Usually there is one trainer."""
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
                    for trainer in trainers:
                        trainer._settle()
                    while first.round < first.settings.rounds:
                        advance_together(trainers)
                    results = [trainer._finish() for trainer in trainers]
                except NodesLostError:  # also while other nodes are restarted
                    lost = True
        finally:
            for trainer in trainers:
                trainer.engine.close()
    for trainer, result in zip(trainers, results, strict=True):
        trainer._tell("on_end", result)
    return results


def advance_together(trainers: Sequence[Trainer]) -> None:
    """Train experiments in step to their next evaluation or checkpoint, and perform it."""
    first = trainers[0]
    if not all(first.engine.moves(trainer.engine) for trainer in trainers):
        raise ValueError("these experiments have separate engines; make their engines together with engines_for(…)")

    def keep_going(round: int) -> bool:
        wanted = [trainer._after_round(round) for trainer in trainers]  # call the callbacks of all trainers
        return all(wanted)

    reached = first.engine.advance(first.round + 1, first._next_event(), keep_going)
    for trainer in trainers:
        trainer._arrive(reached)
    if reached < first.settings.rounds and any(trainer.stop() for trainer in trainers):
        stopped = [trainer._halt() for trainer in trainers]  # save all of them
        raise stopped[0]


@contextmanager
def torch_settings(settings: RunSettings) -> Iterator[None]:
    """Set the run's number of threads, and restore it and torch's own generators at the end."""
    before = torch.get_num_threads()
    device = resolve_device(settings.device)
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(before)
