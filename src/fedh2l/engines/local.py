"""All nodes in one process: side by side on a CPU, one after the other where they would get in each other's way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Fault, Which, raise_earliest
from fedh2l.engines.crew import Crew
from fedh2l.learner import Learner
from fedh2l.ledger import Ledger
from fedh2l.messages import SERVER, Message, Posteriors
from fedh2l.methods.base import Method, check_declared
from fedh2l.metrics import count_correct
from fedh2l.roster import Roster
from fedh2l.server import Server

log = logging.getLogger("fedh2l")


class LocalEngine(Engine):
    """Runs the rounds of a federation whose learners are all here.

    `learners` are in roster order. The order in which they take their turns within a phase makes no difference, so
    they take them at once, in threads, as far as there are cores. Models that draw from torch's own generator
    (dropout) share it, so they take theirs one after the other.
    """

    def __init__(self, learners: Sequence[Learner], method: Method, roster: Roster, rounds: int) -> None:
        self.learners = list(learners)
        self.roster = roster
        self.rounds = rounds
        self.ledger = Ledger()
        self.method = method.fitted(self.learners, rounds)
        self.server = Server(roster, learners[0].optimizer, learners[0].parameters.device)
        self.method.prepare(self.server, self.learners)
        if not self.method.decentralised and not any(self.method.exchanges(round) for round in range(1, rounds + 1)):
            log.warning("%s exchanges nothing within %d rounds: its interval is longer", self.method.title, rounds)
        self._crew = Crew(self.learners)
        self._flags: list[tuple[Message, Tensor]] = []
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
        self._crew.each("torch-local", round, lambda learner: self.method.local_step(learner, round), self.learners)
        if self.method.exchanges(round):
            if self.method.decentralised:
                self._exchange(round)
            else:
                self._consult_server(round)

    def _exchange(self, round: int) -> None:
        """Nodes hear each other."""
        teachers = self.method.teachers(self.roster, round)
        sent = self._emit(round)
        self._receive({name: [sent[teacher] for teacher in heard] for name, heard in teachers.items()}, round)
        self.ledger.heard(teachers, lambda sender: sent[sender])

    def _consult_server(self, round: int) -> None:
        """Nodes hear what a server makes of what all of them sent."""
        sent = self._emit(round)
        messages = [sent[name] for name in self.roster.names]
        self.server.seed_torch(round)
        answers = self.method.aggregate(self.server, messages, round)
        self._receive({name: [answers[name]] for name in self.roster.names}, round)
        for message in messages:
            self.ledger.add(message.sender, [SERVER], message)
        self.ledger.answered({name: answers[name] for name in self.roster.names})
        for answer in {id(answer): answer for answer in answers.values()}.values():
            self._flag(answer)

    def _emit(self, round: int) -> dict[str, Message]:
        """What all nodes send."""
        messages = self._crew.each("torch-emit", round, lambda node: self.method.emit(node, round), self.learners)
        for sender, message in zip(self.learners, messages, strict=True):
            self._accept(sender, message)
        return {sender.name: message for sender, message in zip(self.learners, messages, strict=True)}

    def _accept(self, learner: Learner, message: Message) -> None:
        """Holds a message to the same rules as a network would; its flags are read at the next `verify`."""
        labels = None
        if isinstance(message, Posteriors):
            rows = self.method.public_batch_rows(learner.batch_size)
            batch = learner.public_batch(learner.name, message.round, rows)
            message.check_shape(len(batch), learner.classes)
            labels = batch.labels
        check_declared(self.method, message)
        self._flag(message, labels)

    def _flag(self, message: Message, labels: Tensor | None = None) -> None:
        self._flags.append((message, message.faults(labels)))

    def _receive(self, inboxes: Mapping[str, Sequence[Message]], round: int) -> None:
        """Every node learns from its inbox."""
        self._crew.each(
            "torch-mutual",
            round,
            lambda learner: self.method.receive(learner, inboxes[learner.name], round),
            self.learners,
        )

    def verify(self) -> None:
        """Reads all losses and flags at once, so that no round waits for the device."""
        found: list[Fault] = []
        for learner in self.learners:
            if not bool(torch.isfinite(learner.parameters).all()):
                found.append(Fault(self._round_done, 3, learner.name, "its parameters are not finite"))
            for name, entries in learner.records.items():
                finite = torch.isfinite(torch.stack([value for _, value in entries])).tolist()
                if not all(finite):
                    order = 0 if name.startswith("local") else 2  # a message comes between the two steps
                    found.append(
                        Fault(entries[finite.index(False)][0], order, learner.name, f"its {name} is not finite")
                    )
        if self._flags and bool(torch.cat([flags for _, flags in self._flags]).any()):
            for message, flags in self._flags:
                if bool(flags.any()):
                    reason = message.FAULTS[flags.tolist().index(True)]
                    when = 1.5 if message.sender == SERVER else 1  # its answer follows from what nodes sent
                    found.append(Fault(message.round, when, message.sender, f"it sent {reason}"))
        self._flags = []
        raise_earliest(found)

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

    def complete(self, count: bool) -> None:
        """Brings what the server still holds of the nodes' models to them."""
        message = self.method.closing(self.server, self._round_done)
        if message is None:
            return
        for learner in self.learners:
            self.method.complete(learner, message)
        if count:
            self.ledger.add(SERVER, self.roster.names, message)

    def validate(self) -> dict[str, int]:
        """Evaluates model after model."""
        validation = self.learners[0].validation
        assert validation is not None
        return {name: right for name, (right,) in self.correct([validation]).items()}

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Evaluates model after model."""

        def count(learner: Learner) -> list[int]:
            with learner.showing(learner.reported):
                return [count_correct(learner.predict, samples) for samples in sets]

        return dict(zip((learner.name for learner in self.learners), self._crew.map(count), strict=True))

    def validate_views(self) -> dict[str, dict[str, int]]:
        """View after view, model after model."""
        validation = self.learners[0].validation
        assert validation is not None
        counts = {}
        for view in self.method.views(self.learners[0]):
            right = self.correct_view(view, self.roster.names, [validation])
            counts[view] = {name: right[name][0] for name in self.roster.names}
        return counts

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """As `correct`, for one view of some nodes."""
        chosen = [learner for learner in self.learners if learner.name in names]
        return {
            learner.name: [count_correct(self.method.views(learner)[view], samples) for samples in sets]
            for learner in chosen
        }

    def keep_best(self, names: Iterable[str]) -> None:
        """Copies weights."""
        wanted = set(names)
        for learner in self.learners:
            if learner.name in wanted:
                learner.best = learner.reported or learner.weights()

    def select(self, which: Which) -> None:
        """Swaps weights; the last ones are remembered when they first give way."""
        if not self._last:
            self._last = {learner.name: learner.reported or learner.weights() for learner in self.learners}
        for learner in self.learners:
            learner.reported = None
            learner.load_weights(learner.best if which == "best" and learner.best else self._last[learner.name])

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """As torch gives them."""
        return {learner.name: learner.module.state_dict() for learner in self.learners}

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """Model after model."""
        return {learner.name: learner.predict(inputs.to(learner.parameters.device)).cpu() for learner in self.learners}

    def state(self) -> dict[str, Tensor]:
        """The states of all learners and of the server, each under its name."""
        holders = {**{learner.name: learner.state() for learner in self.learners}, SERVER: self.server.state()}
        return {f"{name}/{key}": value for name, state in holders.items() for key, value in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands each holder its own."""
        holders: dict[str, Learner | Server] = {learner.name: learner for learner in self.learners}
        for name, holder in {**holders, SERVER: self.server}.items():
            prefix = f"{name}/"
            holder.restore({key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)})

    @property
    def parameter_bytes(self) -> int:
        """Of all learners."""
        return sum(learner.parameters.nbytes for learner in self.learners)

    def close(self) -> None:
        """Gives the modules back."""
        self._crew.close()
        for learner in self.learners:
            learner.release()
