"""Parallel execution of nodes in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fedh2l.errors import RunError
from fedh2l.hardware import CORES, available_cores
from fedh2l.protocol.sampling import PrivatePurpose
from fedh2l.training.node_learner import NodeLearner

T = TypeVar("T")


class NodeThreads:
    """Runs learners in parallel where the result is the same.

    PyTorch releases Python's lock while it computes, so threads are enough. But threads share torch's generator. In the
    first round, learners therefore run one after the other in each phase, with the generator seeded for each. If one of
    them draws from the generator, learners never run in parallel.
    """

    def __init__(self, learners: Sequence[NodeLearner]) -> None:
        self._learners = learners
        self._on_cpu = learners[0].parameters.device.type == "cpu"
        self._pool: ThreadPoolExecutor | None = None
        self._tried: set[PrivatePurpose] = set()
        """Phases that learners have once run one after the other."""
        self._random = False
        """Whether a learner has drawn from torch's generator."""

    def each(
        self, phase: PrivatePurpose, round: int, action: Callable[[NodeLearner], T], learners: Sequence[NodeLearner]
    ) -> list[T]:
        """Return the result of the action for each learner, in order."""
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

    def _at_once(self, action: Callable[[NodeLearner], T], learners: Sequence[NodeLearner]) -> list[T]:
        assert self._pool is not None
        state = torch.default_generator.get_state()
        results = list(self._pool.map(action, learners))
        if _drawn_from(state):
            raise RunError(
                f"a model draws from torch's generator in some rounds only, so nodes cannot train side by side; "
                f"set the environment variable {CORES}=1"
            )
        return results

    def map(self, action: Callable[[NodeLearner], T]) -> list[T]:
        """Return the result for each learner of an action that draws nothing."""
        if self._tried and not self._random and self._open():
            return self._at_once(action, self._learners)
        return [action(learner) for learner in self._learners]

    def _open(self) -> bool:
        """Return whether there are cores for more than one learner. Start the threads if so."""
        if self._pool is None and self._on_cpu:
            workers = min(len(self._learners), available_cores() // torch.get_num_threads())
            if workers < 2:
                return False
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fedh2l-node")
        return self._pool is not None

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _drawn_from(state: Tensor) -> bool:
    """Return whether torch's generator is no longer in this state."""
    return not torch.equal(state, torch.default_generator.get_state())
