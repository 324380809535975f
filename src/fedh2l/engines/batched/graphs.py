"""Rounds as CUDA graphs: each kind of round is recorded once and then replayed.

Between rounds, the state of a method is kept in tensors at fixed addresses. A recorded round reads them, and writes
memories, optimiser states and reported weights back to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedh2l.engines.batched.learner import StackedLearner
from fedh2l.engines.batched.random_buffer import RandomBuffer, RandomBuffers
from fedh2l.engines.batched.server import StackedServer
from fedh2l.errors import MethodError
from fedh2l.protocol.messages import Message
from fedh2l.training.learner import seed_generators
from fedh2l.training.network import Network

Path = tuple[str, ...]
Holders = Mapping[str, StackedLearner | StackedServer]
Records = dict[tuple[str, str], list[tuple[int, Tensor]]]
"""Rounds and values `(members,)`, by holder and name."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Pause garbage collection: freeing the memory of an old graph would end a recording."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Slot(NamedTuple):
    """Path, shape and type of a tensor with a fixed address."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


CAPACITY = 64
"""Rounds prepared at a time."""


class PersistentState:
    """Tensors with fixed addresses, for the state of a run between rounds."""

    def __init__(self, holders: Holders) -> None:
        self.holders = holders
        self.tensors: dict[Slot, Tensor] = {}

    def slots(self) -> frozenset[Slot]:
        """Return the slots of the present state. Rounds that start with the same slots do the same work."""
        return frozenset(_slot(path, tensor) for path, tensor in self._leaves())

    def settle(self) -> None:
        """Copy the state after a round to its fixed tensors."""
        found = {_slot(path, tensor): tensor for path, tensor in self._leaves()}
        homes = {tensor.untyped_storage().data_ptr() for tensor in self.tensors.values()}
        moved = {
            slot: tensor.clone() if tensor.untyped_storage().data_ptr() in homes else tensor
            for slot, tensor in found.items()
            if tensor is not self.tensors.get(slot)
        }
        for slot, tensor in moved.items():
            if slot in self.tensors:
                self.tensors[slot].copy_(tensor)
            else:
                self._check(slot)
                self.tensors[slot] = tensor.clone()
        self.restore(frozenset(found))

    def _check(self, slot: Slot) -> None:
        """Refuse state of stacked nodes without a leading dimension of nodes."""
        holder = self.holders[slot.path[0]]
        if slot.shape[:1] != (len(holder.members),):
            raise MethodError(
                f"'{slot.path[-1]}' in {slot.path[1]} has shape {slot.shape}; of {len(holder.members)} stacked nodes "
                f"it needs a leading dimension of nodes"
            )

    def restore(self, slots: frozenset[Slot]) -> None:
        """Give every holder the tensors of these slots, and no others."""
        paths = {slot.path: self.tensors[slot] for slot in slots}
        for name, holder in self.holders.items():
            holder.memory = _at(paths, (name, "memory"))
            if isinstance(holder, StackedLearner):
                holder.reported = _at(paths, (name, "reported")) or None
                _restore_states(paths, (name, "own"), holder.network)
            for key, network in holder.networks.items():
                _restore_states(paths, (name, f"network-{key}"), network)

    def _leaves(self) -> Iterator[tuple[Path, Tensor]]:
        for name, holder in self.holders.items():
            yield from (((name, "memory", key), value) for key, value in holder.memory.items())
            networks: dict[str, Network] = {f"network-{key}": value for key, value in holder.networks.items()}
            if isinstance(holder, StackedLearner):
                networks["own"] = holder.network
                yield from (((name, "reported", key), value) for key, value in (holder.reported or {}).items())
            for label, network in networks.items():
                for phase, state in network.optimizer_states.items():
                    yield from (((name, label, phase, key), value) for key, value in state.items())


@dataclass
class Recording:
    """One kind of round. The first run allocates tensors, the second is recorded."""

    buffer: RandomBuffer
    graph: torch.cuda.CUDAGraph | None = None
    after: frozenset[Slot] = frozenset()
    """Slots of the state after the round."""
    log: dict[str, tuple[list[str], Tensor]] = field(default_factory=dict)
    """Names and values `(capacity, names, members)` of recorded scalars, by holder."""
    sent: tuple[Message, ...] = ()
    """Messages of the round: one for all nodes, then the server's answers. Only their sizes count."""
    random: bool = True
    """Whether the round draws from torch's own generator (dropout)."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """Rounds since the log was read, with their positions in the log."""

    def read_log(self) -> Records:
        """Return the values recorded since the last call, on the host."""
        done, self.rounds = self.rounds, []
        if not done:
            return {}
        records = {}
        for holder, (names, room) in self.log.items():
            table = room.cpu()
            for place, name in enumerate(names):
                records[holder, name] = [(round, table[position, place]) for round, position in done]
        return records


class GraphRecorder:
    """Runs rounds. The first of each kind runs directly, the second is recorded, and all others are replayed."""

    def __init__(
        self, holders: Holders, draws: RandomBuffers, body: Callable[[int], tuple[Message, ...]], records: bool
    ) -> None:
        self.persistent = PersistentState(holders)
        self.recordings: dict[tuple[object, frozenset[Slot]], Recording] = {}
        self._holders, self._draws, self._body = holders, draws, body
        self._device = draws.device
        self._pool = torch.cuda.graph_pool_handle() if records else None
        self.persistent.settle()

    def run(self, kinds: Sequence[tuple[int, object]], keep_going: Callable[[int], bool]) -> tuple[int, bool]:
        """Run rounds of these kinds, at most `CAPACITY`. Return the last one done, and whether to continue."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._run(kinds, keep_going)

    def _run(self, kinds: Sequence[tuple[int, object]], keep_going: Callable[[int], bool]) -> tuple[int, bool]:
        slots = self.persistent.slots()
        ready: set[object] = set()
        positions = _positions(kinds)
        done = kinds[0][0] - 1
        for round, kind in kinds:
            key = (kind, slots)
            recording = self.recordings.get(key)
            if recording is None:
                recording = self.recordings[key] = Recording(RandomBuffer.empty(CAPACITY, self._device))
                recording.buffer.filled = positions[round]
                recording.buffer.counter.fill_(positions[round])
                self._perform(recording, round)
                recording.random = self._drew()
                recording.buffer.sealed = True
            else:
                if key not in ready:
                    ready.add(key)
                    recording.buffer.fill([r for r, k in kinds if k == kind])
                recording.buffer.counter.fill_(positions[round])
                self._repeat(recording, round)
            recording.rounds.append((round, positions[round]))
            if recording.after != slots:
                slots = recording.after
                self.persistent.restore(slots)
            done = round
            if not keep_going(round):
                return done, False
        return done, True

    def prepare(self, kinds: Sequence[tuple[int, object]]) -> None:
        """Compute the draws of later rounds, for the kinds of rounds in the last block."""
        for (kind, _), recording in self.recordings.items():
            rounds = [round for round, k in kinds if k == kind]
            if rounds and recording.rounds:
                recording.buffer.prepare(rounds)

    def _repeat(self, recording: Recording, round: int) -> None:
        """Run a round of a known kind: replay it, or run it again if it cannot be recorded."""
        if recording.random and recording.buffer.seed is not None:
            seed_generators(recording.buffer.seed(round), self._device)
        if self._pool is None:
            self._perform(recording, round)
            return
        if recording.graph is None:
            recording.graph = torch.cuda.CUDAGraph()
            with undisturbed(), torch.cuda.graph(recording.graph, pool=self._pool):
                self._perform(recording, round)
        recording.graph.replay()

    def _drew(self) -> bool:
        """Return whether a round drew from torch's own generator since it was seeded."""
        if self._device.type != "cuda":
            return True
        offset = torch.cuda.get_rng_state(self._device)[8:]
        return bool(offset.any())

    def _perform(self, recording: Recording, round: int) -> None:
        """Run or record one round, from its draws to its log."""
        buffer = recording.buffer
        self._draws.buffer, self._draws.now = buffer, round
        try:
            recording.sent = self._body(round)
        finally:
            self._draws.buffer = None
        self._write_log(recording)
        self.persistent.settle()
        recording.after = self.persistent.slots()

    def _write_log(self, recording: Recording) -> None:
        for name, records in self._take_records().items():
            rows = []
            for entries in records.values():
                values = [value.double() for _, value in entries]
                rows.append(values[0] if len(values) == 1 else torch.stack(values).mean(0))  # several digest steps
            table = torch.stack(rows)
            if name not in recording.log:
                room = torch.zeros(CAPACITY, *table.shape, dtype=torch.float64, device=table.device)
                recording.log[name] = (list(records), room)
            if recording.log[name][0] != list(records):
                raise MethodError(
                    f"a round records {', '.join(records)}, the first of its kind {', '.join(recording.log[name][0])}; "
                    f"tell such rounds apart in kind_of_round"
                )
            recording.log[name][1].index_copy_(0, recording.buffer.counter, table.unsqueeze(0))

    def exchanged(self) -> list[tuple[tuple[Message, ...], list[int]]]:
        """Return the messages since the records were last read, and their rounds."""
        return [
            (recording.sent, [round for round, _ in recording.rounds])
            for recording in self.recordings.values()
            if recording.sent and recording.rounds
        ]

    def records(self) -> Records:
        """Return the values recorded since the last call, by round, on the host."""
        collected: Records = {}
        for recording in self.recordings.values():
            for key, entries in recording.read_log().items():
                collected.setdefault(key, []).extend(entries)
        return {key: sorted(entries, key=lambda entry: entry[0]) for key, entries in collected.items()}

    def _take_records(self) -> dict[str, dict[str, list[tuple[int, Tensor]]]]:
        taken = {}
        for name, holder in self._holders.items():
            if isinstance(holder, StackedLearner) and holder.records:
                taken[name], holder.records = holder.records, {}
        return taken


def _positions(kinds: Sequence[tuple[int, object]]) -> dict[int, int]:
    """Return each round's position among the rounds of its kind."""
    seen: dict[object, int] = {}
    positions = {}
    for round, kind in kinds:
        positions[round] = seen.get(kind, 0)
        seen[kind] = positions[round] + 1
    return positions


def _slot(path: Path, tensor: Tensor) -> Slot:
    return Slot(path, tuple(tensor.shape), tensor.dtype)


def _at(paths: Mapping[Path, Tensor], at: Path) -> dict[str, Tensor]:
    return {path[-1]: paths[path] for path in sorted(paths) if path[: len(at)] == at}


def _restore_states(paths: Mapping[Path, Tensor], at: Path, network: Network) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for path in sorted(paths):
        if path[: len(at)] == at:
            phase, name = path[len(at) :]
            states.setdefault(phase, {})[name] = paths[path]
    network.optimizer_states = states
