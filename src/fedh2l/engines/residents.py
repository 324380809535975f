"""The nodes that live in one process: side by side on a CPU, one after the other where they would be in the way.

An engine has one set of residents, or several, each in a process of its own; what crosses between nodes is the
engine's business (`hub.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Fault, Which
from fedh2l.engines.crew import Crew
from fedh2l.learner import Learner
from fedh2l.messages import Message, Posteriors
from fedh2l.methods.base import Method, check_declared
from fedh2l.metrics import count_correct
from fedh2l.topology import Graph


class Residents:
    """Learners of one federation, and what a round asks of each of them.

    The order in which they take their turns within a phase makes no difference, so they take them at once, in
    threads, as far as there are cores. Models that draw from torch's own generator (dropout) share it, so they take
    theirs one after the other.
    """

    def __init__(self, learners: Sequence[Learner], method: Method) -> None:
        self.learners = list(learners)
        self.method = method
        self._crew = Crew(self.learners)
        self._sent: list[tuple[Message, Tensor]] = []
        """Messages since the last look at them, with their faults, still on the device."""
        self._signals: list[tuple[Posteriors, Tensor]] = []
        """Signals since then, with the labels of their batches: they are small, and searched for faults together."""
        self._last: dict[str, dict[str, Tensor]] = {}
        self._passes_teach = False
        """Whether a pass forward was seen to change a model, so that none is done ahead."""

    def local_steps(self, round: int) -> None:
        """Every node trains on what it holds."""
        self._crew.each("torch-local", round, lambda learner: self.method.local_step(learner, round), self.learners)
        if not self.method.exchanges(round):
            average(self.learners, exchanged=False)

    def emit(self, round: int) -> dict[str, Message]:
        """What all nodes send."""
        messages = self._crew.each("torch-emit", round, lambda node: self.method.emit(node, round), self.learners)
        for sender, message in zip(self.learners, messages, strict=True):
            self._accept(sender, message)
        return {sender.name: message for sender, message in zip(self.learners, messages, strict=True)}

    def _accept(self, learner: Learner, message: Message) -> None:
        """Holds a message to the same rules as a network would; its faults are read later, all at once."""
        check_declared(self.method, message)
        if isinstance(message, Posteriors):
            rows = self.method.public_batch_rows(learner.batch_size)
            batch = learner.public_batch(learner.name, message.round, rows)
            message.check_shape(len(batch), learner.classes)
            self._signals.append((message, batch.labels))
        else:
            self._sent.append((message, message.faults()))

    def anticipate(self, senders: Graph, round: int) -> None:
        """What can be done of `receive` while messages are on their way; for several nodes it would need much memory.

        What goes wrong here goes wrong again in `receive`, where it is told.
        """
        if len(self.learners) > 1 or self._passes_teach:
            return
        (learner,) = self.learners
        buffers = [buffer.clone() for buffer in learner.module.buffers()]
        with suppress(Exception):
            self._crew.each(
                "torch-mutual", round, lambda node: self.method.anticipate(node, senders[node.name], round), [learner]
            )
        if not all(torch.equal(now, then) for now, then in zip(learner.module.buffers(), buffers, strict=True)):
            learner.ready, self._passes_teach = None, True  # it would learn twice, if this is in vain
            with torch.no_grad():
                for now, then in zip(learner.module.buffers(), buffers, strict=True):
                    now.copy_(then)

    def receive(self, inboxes: Mapping[str, Sequence[Message]], round: int) -> None:
        """Every node learns from its inbox."""
        self._crew.each(
            "torch-mutual",
            round,
            lambda learner: self.method.receive(learner, inboxes[learner.name], round),
            self.learners,
        )
        for learner in self.learners:
            learner.ready = None  # whatever was not asked for
        average(self.learners, exchanged=True)

    def forget(self) -> None:
        """No node learns any more from what it has received."""
        for learner in self.learners:
            self.method.forget(learner)

    def complete(self, message: Message) -> None:
        """Brings to every node what a server still held of its model."""
        for learner in self.learners:
            self.method.complete(learner, message)

    def faults(self, round: int) -> list[Fault]:
        """What is unsound since the last call, up to `round`: losses, parameters, messages."""
        found: list[Fault] = []
        for learner in self.learners:
            for what, network in learner.in_training():
                if not bool(torch.isfinite(network.parameters).all()):
                    found.append(Fault(round, 3, learner.name, f"{what} are not finite"))
            for name, entries in learner.records.items():
                finite = torch.isfinite(torch.stack([value for _, value in entries])).tolist()
                if not all(finite):
                    order = 0 if name.startswith("local") else 2  # a message comes between the two steps
                    found.append(
                        Fault(entries[finite.index(False)][0], order, learner.name, f"its {name} is not finite")
                    )
        found += refused(self._sent + _examined(self._signals), order=1)
        self._sent, self._signals = [], []
        return found

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

    def validate(self) -> dict[str, int]:
        """For each node, how many samples of everybody's validation data its model gets right."""
        return {name: right for name, (right,) in self.correct([self._validation]).items()}

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """For each node, how many samples of each set its model gets right."""

        def count(learner: Learner) -> list[int]:
            with learner.showing(learner.shown):
                return [count_correct(learner.predict, samples) for samples in sets]

        return dict(zip((learner.name for learner in self.learners), self._crew.map(count), strict=True))

    def validate_views(self) -> dict[str, dict[str, int]]:
        """As `validate`, for everything else that the method wants to be tested, by name."""
        names = [learner.name for learner in self.learners]
        counts = {}
        for view in self.method.views(self.learners[0]):
            right = self.correct_view(view, names, [self._validation])
            counts[view] = {name: right[name][0] for name in names}
        return counts

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """As `correct`, for one view of those of these nodes that are here."""
        return {
            learner.name: [count_correct(self.method.views(learner)[view], samples) for samples in sets]
            for learner in self.learners
            if learner.name in names
        }

    @property
    def _validation(self) -> Samples:
        validation = self.learners[0].validation
        assert validation is not None
        return validation

    def keep_best(self, names: Iterable[str]) -> None:
        """Remembers the present weights of those of these nodes that are here as their best."""
        wanted = set(names)
        for learner in self.learners:
            if learner.name in wanted:
                learner.best = learner.shown or learner.weights()

    @property
    def selected(self) -> bool:
        """Whether training is over, and models hold what was selected."""
        return bool(self._last)

    def select(self, which: Which) -> None:
        """Puts the best or last weights in every model; the last ones are remembered when they first give way."""
        if not self._last:
            self._last = {learner.name: learner.shown or learner.weights() for learner in self.learners}
        for learner in self.learners:
            learner.end_of_training()
            learner.load_weights(learner.best if which == "best" and learner.best else self._last[learner.name])

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """The state dict of each node's model."""
        return {learner.name: learner.module.state_dict() for learner in self.learners}

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """What each node's model says of `inputs` `(n, …)`, on the CPU: `(n, classes)`."""
        said = {}
        for learner in self.learners:
            with learner.exactly():
                said[learner.name] = learner.predict(inputs.to(learner.parameters.device)).cpu()
        return said

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on, under `node/…`."""
        return {f"{learner.name}/{key}": value for learner in self.learners for key, value in learner.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands each learner its own of what `state` returned."""
        self._sent, self._signals, self._last = [], [], {}
        for learner in self.learners:
            learner.restore(under(learner.name, state))

    @property
    def parameter_bytes(self) -> int:
        """The size of all models' parameters."""
        return sum(learner.parameters.nbytes for learner in self.learners)

    def close(self) -> None:
        """Gives the modules back."""
        self._crew.close()
        for learner in self.learners:
            learner.release()


def average(learners: Iterable[Learner], exchanged: bool) -> None:
    """At the end of a round: a model that only an exchange makes, as parameter averaging does, is averaged after it."""
    for learner in learners:
        if learner.decay and (exchanged or learner.reported is None):
            learner.average()


def _examined(signals: Sequence[tuple[Posteriors, Tensor]]) -> list[tuple[Message, Tensor]]:
    """Signals with their faults, which are searched for in all that are alike at once."""
    alike: dict[tuple[object, ...], list[tuple[Posteriors, Tensor]]] = {}
    for message, labels in signals:
        alike.setdefault((message.values.shape, message.flagged), []).append((message, labels))
    found: list[tuple[Message, Tensor]] = []
    for group in alike.values():
        first = group[0][0]
        tensors = [torch.stack(part) for part in zip(*(message.tensors() for message, _ in group), strict=True)]
        together = first.remade(first.sender, first.round, tensors)
        flags = together.faults(torch.stack([labels for _, labels in group]))
        found += [(message, own) for (message, _), own in zip(group, flags, strict=True)]
    return found


def refused(sent: Sequence[tuple[Message, Tensor]], order: float) -> list[Fault]:
    """The messages that a receiver would refuse, by faults that are read from the device all at once."""
    if not sent or not bool(torch.cat([faults for _, faults in sent]).any()):
        return []
    return [
        Fault(message.round, order, message.sender, f"it sent {message.FAULTS[faults.tolist().index(True)]}")
        for message, faults in sent
        if bool(faults.any())
    ]


def under(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries `name/…` of an engine's state, without that name."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
