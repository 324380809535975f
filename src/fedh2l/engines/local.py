"""All nodes in one process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Which
from fedh2l.errors import DivergedError
from fedh2l.learner import Learner
from fedh2l.ledger import Ledger
from fedh2l.messages import FAULTS, Posteriors, check_shape, faults
from fedh2l.methods.base import Method
from fedh2l.metrics import count_correct
from fedh2l.roster import Roster


class LocalEngine(Engine):
    """Runs the rounds of a federation whose learners are all here.

    `learners` are in roster order. The order in which they take their turns within a phase makes no difference.
    """

    def __init__(self, learners: Sequence[Learner], method: Method, roster: Roster) -> None:
        self.learners = list(learners)
        self.method = method
        self.roster = roster
        self.ledger = Ledger()
        self._flags: list[tuple[Posteriors, Tensor]] = []
        self._last: dict[str, dict[str, Tensor]] = {}
        self._round_done = 0

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Runs rounds one by one."""
        for round in range(first, last + 1):
            self._round(round)
            self._round_done = round
            if not keep_going(round):
                return round
        return last

    def _round(self, round: int) -> None:
        method = self.method
        for learner in self.learners:
            learner.seed_torch("torch-local", round)
            method.local_step(learner, round)
        if not method.exchanges(round):
            return
        teachers = method.teachers(self.roster, round)
        receivers: dict[str, list[str]] = {}
        for name, heard in teachers.items():
            for teacher in heard:
                receivers.setdefault(teacher, []).append(name)
        sent = {}
        for learner in self.learners:
            if learner.name in receivers:
                learner.seed_torch("torch-emit", round)
                sent[learner.name] = self._accept(learner, method.emit(learner, round))
        for learner in self.learners:
            learner.seed_torch("torch-mutual", round)
            method.receive(learner, [sent[name] for name in teachers[learner.name]], round)
        for sender, message in sent.items():
            self.ledger.count(message, receivers[sender])

    def _accept(self, sender: Learner, message: Posteriors) -> Posteriors:
        """Holds a message to the same rules as a network would; its flags are read at the next `verify`."""
        rows = self.method.public_batch_rows(sender.batch_size)
        batch = sender.public_batch(sender.name, message.round, rows)
        check_shape(message, len(batch), sender.classes)
        self._flags.append((message, faults(message, batch.labels)))
        return message

    def verify(self) -> None:
        """Reads all losses and flags at once, so that no round waits for the device."""
        found = []
        for learner in self.learners:
            if not bool(torch.isfinite(learner.parameters).all()):
                found.append((self._round_done, 3, learner.name, "its parameters are not finite"))
            for name, entries in learner.records.items():
                finite = torch.isfinite(torch.stack([value for _, value in entries])).tolist()
                if not all(finite):
                    order = 0 if name.startswith("local") else 2  # a message comes between the two steps
                    found.append((entries[finite.index(False)][0], order, learner.name, f"its {name} is not finite"))
        if self._flags and bool(torch.stack([flags for _, flags in self._flags]).any()):
            for message, flags in self._flags:
                if bool(flags.any()):
                    reason = FAULTS[flags.tolist().index(True)]
                    found.append((message.round, 1, message.sender, f"it sent {reason}"))
        self._flags = []
        if found:
            round, _, node, what = min(found)
            raise DivergedError(f"node '{node}', round {round}: {what}")

    def series(self) -> dict[str, dict[str, list[float]]]:
        """What each node recorded since the last call, scalar by scalar."""
        collected = {}
        for learner in self.learners:
            collected[learner.name] = {
                name: torch.stack([value for _, value in entries]).double().tolist()
                for name, entries in learner.records.items()
            }
            learner.records = {}
        return collected

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Evaluates model after model."""
        return {learner.name: [count_correct(learner.module, samples) for samples in sets] for learner in self.learners}

    def keep_best(self, names: Iterable[str]) -> None:
        """Copies weights."""
        wanted = set(names)
        for learner in self.learners:
            if learner.name in wanted:
                learner.best = learner.weights()

    def select(self, which: Which) -> None:
        """Swaps weights; the last ones are remembered when they first give way."""
        if not self._last:
            self._last = {learner.name: learner.weights() for learner in self.learners}
        for learner in self.learners:
            learner.load_weights(learner.best if which == "best" and learner.best else self._last[learner.name])

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """As torch gives them."""
        return {learner.name: learner.module.state_dict() for learner in self.learners}

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """Model after model."""
        return {learner.name: learner.predict(inputs.to(learner.parameters.device)).cpu() for learner in self.learners}

    def state(self) -> dict[str, Tensor]:
        """The states of all learners, each under its name."""
        return {f"{learner.name}/{key}": v for learner in self.learners for key, v in learner.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands each learner its own."""
        for learner in self.learners:
            prefix = f"{learner.name}/"
            learner.restore({key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)})

    @property
    def parameter_bytes(self) -> int:
        """Of all learners."""
        return sum(learner.parameters.nbytes for learner in self.learners)

    def close(self) -> None:
        """Gives the modules back."""
        for learner in self.learners:
            learner.release()
