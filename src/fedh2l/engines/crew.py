"""Nodes at work side by side, in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fedh2l.errors import RunError
from fedh2l.learner import Learner
from fedh2l.sampling import PrivatePurpose
from fedh2l.settings import CORES, available_cores

T = TypeVar("T")


class Crew:
    """Lets learners act at once where that changes nothing.

    PyTorch leaves Python's lock while it computes, so threads are enough. What cannot be shared is torch's generator:
    the first time that learners act in a phase they do so in turn, each with the generator seeded for it, and if one
    of them draws from it, all take turns from then on.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners = learners
        self._on_cpu = learners[0].parameters.device.type == "cpu"
        self._pool: ThreadPoolExecutor | None = None
        self._tried: set[PrivatePurpose] = set()
        """Phases in which learners have taken turns once."""
        self._random = False
        """Whether one of them drew from torch's generator."""

    def each(
        self, phase: PrivatePurpose, round: int, action: Callable[[Learner], T], learners: Sequence[Learner]
    ) -> list[T]:
        """What the action gives for each learner, in order."""
        if phase in self._tried and not self._random and len(learners) > 1 and self._open():
            return self._at_once(action, learners)
        results = []
        for learner in learners:
            learner.seed_torch(phase, round)
            state = torch.default_generator.get_state() if self._on_cpu and phase not in self._tried else None
            results.append(action(learner))
            self._random = self._random or (state is not None and _drawn_from(state))
        self._tried.add(phase)
        return results

    def _at_once(self, action: Callable[[Learner], T], learners: Sequence[Learner]) -> list[T]:
        assert self._pool is not None
        state = torch.default_generator.get_state()
        results = list(self._pool.map(action, learners))
        if _drawn_from(state):
            raise RunError(
                f"a model draws from torch's generator in some rounds only, so nodes cannot train side by side; "
                f"set the environment variable {CORES}=1"
            )
        return results

    def map(self, action: Callable[[Learner], T]) -> list[T]:
        """As `each`, for what draws nothing."""
        if self._tried and not self._random and self._open():
            return self._at_once(action, self._learners)
        return [action(learner) for learner in self._learners]

    def _open(self) -> bool:
        """Whether there are cores for more than one learner."""
        if self._pool is None and self._on_cpu:
            workers = min(len(self._learners), available_cores() // torch.get_num_threads())
            if workers < 2:
                return False
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fedh2l-node")
        return self._pool is not None

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _drawn_from(state: Tensor) -> bool:
    """Whether torch's generator is no longer in this state."""
    return not torch.equal(state, torch.default_generator.get_state())
