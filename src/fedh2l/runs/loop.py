"""The loop of a run: train to the next event, and let the trainers record it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from fedh2l.engines.base import NodesLostError
from fedh2l.experiment.settings import RunSettings
from fedh2l.hardware import resolve_device
from fedh2l.runs.result import Result

if TYPE_CHECKING:
    from fedh2l.runs.trainer import Trainer


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
                trainer.begin()
            results, lost = None, False
            while results is None:
                try:
                    for trainer in trainers:
                        trainer.secure(lost)
                    lost = False
                    for trainer in trainers:
                        trainer.settle()
                    while first.round < first.settings.rounds:
                        advance_together(trainers)
                    results = [trainer.finish() for trainer in trainers]
                except NodesLostError:  # also while other nodes are restarted
                    lost = True
        finally:
            for trainer in trainers:
                trainer.engine.close()
    for trainer, result in zip(trainers, results, strict=True):
        for callback in trainer.callbacks:
            callback.on_end(result)
    return results


def advance_together(trainers: Sequence[Trainer]) -> None:
    """Train experiments in step to their next evaluation or checkpoint, and perform it."""
    first = trainers[0]
    if not all(first.engine.moves(trainer.engine) for trainer in trainers):
        raise ValueError("these experiments have separate engines; make their engines together with engines_for(…)")

    def keep_going(round: int) -> bool:
        wanted = [trainer.after_round(round) for trainer in trainers]  # call the callbacks of all trainers
        return all(wanted)

    reached = first.engine.advance(first.round + 1, first.next_event(), keep_going)
    for trainer in trainers:
        trainer.arrive(reached)
    if reached < first.settings.rounds and any(trainer.stop() for trainer in trainers):
        stopped = [trainer.halt() for trainer in trainers]  # save all of them
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
