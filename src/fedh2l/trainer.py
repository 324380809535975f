"""The course of a run: rounds, evaluations, checkpoints, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fedh2l.callbacks import Callback
from fedh2l.checkpoints import Checkpoint
from fedh2l.domain import Samples
from fedh2l.engines.local import LocalEngine
from fedh2l.errors import DivergedError, RunError
from fedh2l.federation import Federation
from fedh2l.learner import Learner
from fedh2l.metrics import count_correct
from fedh2l.models.saved import pack_model
from fedh2l.result import Result, node_results, summarise
from fedh2l.rundir import RunDirectory

log = logging.getLogger("fedh2l")

CHECKPOINT_SHARE = 0.02
"""How much of the run time automatic checkpoints may take."""


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
    ) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.directory = directory
        self.callbacks = callbacks
        self.stop = stop
        self.learners: list[Learner] = federation.learners()
        self.engine = LocalEngine(self.learners, federation.method, federation.roster)
        self.round = 0
        self.best: dict[str, tuple[int, int]] = {}
        """For each node, the validation samples that its best model got right, and the round of that model."""
        self._conflicts = [0.0, 0]  # how many, of how many mutual steps
        device = self.learners[0].parameters.device
        domains = [node.domain for node in federation.nodes]
        self._validation = Samples.concatenate([d.validation for d in domains]).to(device, self.settings.torch_dtype)
        self._tests = [d.test.to(device, self.settings.torch_dtype) for d in domains]
        self._clock = _Clock()
        self._last_checkpoint: Path | None = None

    def resume(self) -> bool:
        """Takes up the newest sound checkpoint of the run directory; False if there is none."""
        assert self.directory is not None
        checkpoint = self.directory.checkpoints.newest()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.directory.cut_metrics(self.round)
        return checkpoint is not None

    def run(self) -> Result:
        """Trains, and leaves in each node's module the model that the selection rule picks."""
        with _torch_settings(self.settings.threads):
            self._clock.start()
            self._tell("on_start", list(self.federation.roster.names), self.round + 1, self.settings.rounds)
            while self.round < self.settings.rounds:
                self._advance()
            result = self._finish()
        self._tell("on_end", result)
        return result

    def _advance(self) -> None:
        target = self._next_event()
        self.round = self.engine.advance(self.round + 1, target, self._after_round)
        stopped = self.round < target
        evaluates = self.round % self.settings.eval_every == 0 or self.round == self.settings.rounds
        if evaluates or stopped or self._checkpoint_round():
            self._verify()
        if evaluates:
            self._evaluate()
        if self.round == self.settings.rounds:
            return
        if stopped or self.stop():
            raise Interrupted(self.round, self._checkpoint())
        if self._checkpoint_round() or (evaluates and self._checkpoint_pays()):
            self._checkpoint()

    def _next_event(self) -> int:
        periods = [self.settings.eval_every]
        if isinstance(self.settings.checkpoint_every, int) and self.settings.checkpoint_every:
            periods.append(self.settings.checkpoint_every)
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
        series = self.engine.series()
        nodes: dict[str, dict[str, Any]] = {}
        for learner in self.learners:
            name, right = learner.name, count_correct(learner.module, self._validation)
            if name not in self.best or right > self.best[name][0]:
                self.best[name] = (right, self.round)
                learner.best = learner.weights()
            recorded = series[name]
            nodes[name] = {"validation_ACC": 100 * right / len(self._validation), "best_round": self.best[name][1]}
            nodes[name] |= {key: fmean(values) for key, values in recorded.items() if key != "conflict"}
            conflicts = recorded.get("conflict", [])
            if conflicts:
                nodes[name]["conflict_rate"] = fmean(conflicts)
                self._conflicts[0] += sum(conflicts)
                self._conflicts[1] += len(conflicts)
        entry = {
            "round": self.round,
            "nodes": nodes,
            "bytes": self.engine.ledger.total,
            "seconds": round(self._clock.seconds, 3),
        }
        if self.directory:
            self.directory.append_metrics(entry)
        self._tell("on_evaluation", entry)

    def _finish(self) -> Result:
        totals = [len(test) for test in self._tests]
        last = self._test_counts()
        self._save_models("last", dict.fromkeys(self.best, self.round))
        last_weights = [learner.weights() for learner in self.learners]
        for learner in self.learners:
            assert learner.best is not None
            learner.load_weights(learner.best)
        best = self._test_counts()
        self._save_models("best", {name: round for name, (_, round) in self.best.items()})
        chosen, rounds = best, [self.best[name][1] for name in self.federation.roster.names]
        if self.settings.selection == "last":
            chosen, rounds = last, [self.round] * len(totals)
            for learner, weights in zip(self.learners, last_weights, strict=True):
                learner.load_weights(weights)
        nodes = self.federation.nodes
        results = node_results(
            [node.name for node in nodes], [node.model_name for node in nodes], chosen, last, totals, rounds
        )
        for learner in self.learners:
            learner.flat.release()
        average, average_last = summarise(results)
        result = Result(
            method=self.federation.method.name,
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            selection=self.settings.selection,
            nodes=results,
            average=average,
            last=average_last,
            matrix=[[100 * c / t for c, t in zip(row, totals, strict=True)] for row in chosen],
            bytes=self.engine.ledger.summary(self.settings.rounds),
            conflict_rate=self._conflicts[0] / self._conflicts[1] if self._conflicts[1] else 0.0,
            seconds=round(self._clock.seconds, 3),
        )
        if self.directory:
            self.directory.write_result(result.to_dict())
        return result

    def _test_counts(self) -> list[list[int]]:
        return [[count_correct(learner.module, test) for test in self._tests] for learner in self.learners]

    def _save_models(self, which: str, rounds: dict[str, int]) -> None:
        if self.directory:
            for learner, node in zip(self.learners, self.federation.nodes, strict=True):
                data = pack_model(learner.module, node, rounds[node.name], which)
                self.directory.write_model(node.name, which, data)

    def _checkpoint_round(self) -> bool:
        every = self.settings.checkpoint_every
        return isinstance(every, int) and every > 0 and self.round % every == 0

    def _checkpoint_pays(self) -> bool:
        if self.settings.checkpoint_every != "auto" or self.directory is None:
            return False
        return self._clock.affords(sum(v.nbytes for learner in self.learners for v in learner.state().values()))

    def _checkpoint(self) -> Path | None:
        if self.directory is None:
            return None
        with self._clock.checkpointing():
            tensors = {
                f"{learner.name}/{name}": value for learner in self.learners for name, value in learner.state().items()
            }
            plain = {
                "digest": self.federation.roster.digest.hex(),
                "best": self.best,
                "conflicts": self._conflicts,
                "ledger": self.engine.ledger.state(),
                "seconds": self._clock.seconds,
            }
            path = self.directory.checkpoints.save(Checkpoint(self.round, tensors, plain))
        self._last_checkpoint = path
        self._tell("on_checkpoint", self.round, path)
        return path

    def _restore(self, checkpoint: Checkpoint) -> None:
        plain = checkpoint.plain
        if plain["digest"] != self.federation.roster.digest.hex():
            raise RunError("the checkpoint is of a run with other nodes, method or settings")
        for learner in self.learners:
            prefix = f"{learner.name}/"
            learner.restore({k.removeprefix(prefix): v for k, v in checkpoint.tensors.items() if k.startswith(prefix)})
        self.round = checkpoint.round
        self.best = {name: (right, round) for name, (right, round) in plain["best"].items()}
        self._conflicts = plain["conflicts"]
        self.engine.ledger.restore(plain["ledger"])
        self._clock.before = plain["seconds"]

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


class _Clock:
    """Seconds of training, over all the processes that a run took, and what checkpoints cost of them."""

    def __init__(self) -> None:
        self.before = 0.0
        self._started = time.perf_counter()
        self._spent = 0.0
        self._last_cost: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._started

    def affords(self, size: int) -> bool:
        """Whether another checkpoint of `size` bytes keeps all of them under their share of this process's time."""
        cost = self._last_cost if self._last_cost is not None else 0.02 + size / 100e6  # a guess before the first
        return self._spent + cost <= CHECKPOINT_SHARE * (time.perf_counter() - self._started)

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._last_cost = time.perf_counter() - began
        self._spent += self._last_cost


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """A run's number of threads, with torch's own generators left as they were found."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(before)
