"""The nodes in one process: in parallel on CPU cores, or one after the other.

An engine has one set of local nodes, or several in separate processes. Engines deliver the messages (`router.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.engines.base import Fault, Models, Which, raise_earliest
from fedh2l.engines.thread_pool import NodeThreads
from fedh2l.methods.base import Method, check_declared
from fedh2l.protocol.messages import Message, Posteriors
from fedh2l.training.learner import Learner
from fedh2l.training.metrics import count_correct
from fedh2l.training.node_learner import NodeLearner

Outbox = dict[str, Message]
"""The message of each node."""
Inboxes = Mapping[str, Sequence[Message]]
"""The messages for each node."""


class LocalNodes(Models):
    """Runs the nodes in this process, in threads if there are enough cores.

    The order of nodes within a phase makes no difference, so they run in parallel. Models that draw from torch's own
    generator (dropout) share it, so they run one after the other.
    """

    def __init__(self, learners: Sequence[NodeLearner], method: Method) -> None:
        self.learners = list(learners)
        self.method = method
        self._threads = NodeThreads(self.learners)
        self._sent: list[tuple[Message, Tensor]] = []
        """Messages since the last check, with their faults on the device."""
        self._signals: list[tuple[Posteriors, Tensor]] = []
        """Posteriors since the last check, with the labels of their batches. They are small, and checked together."""
        self._last: dict[str, dict[str, Tensor]] = {}
        self.round = 0
        """The present round."""

    def local_step(self, round: int) -> None:
        """Train every node on its local data."""
        self.round = round
        self._threads.each("torch-local", round, lambda learner: self.method.local_step(learner, round), self.learners)

    def emit(self, round: int) -> Outbox:
        """Return the messages of all nodes."""
        messages = self._threads.each("torch-emit", round, lambda node: self.method.emit(node, round), self.learners)
        for sender, message in zip(self.learners, messages, strict=True):
            self._accept(sender, message)
        return {sender.name: message for sender, message in zip(self.learners, messages, strict=True)}

    def _accept(self, learner: Learner, message: Message) -> None:
        """Validate an outgoing message. Faults are collected on the device and read at the next evaluation."""
        check_declared(self.method, message)
        if isinstance(message, Posteriors):
            rows = self.method.public_batch_rows(learner.batch_size)
            batch = learner.public_batch(learner.name, message.round, rows)
            message.check_shape(len(batch), learner.classes)
            self._signals.append((message, batch.labels))
        else:
            self._sent.append((message, message.faults()))

    def receive(self, inboxes: Inboxes, round: int) -> None:
        """Train every node on its inbox."""
        self._threads.each(
            "torch-mutual",
            round,
            lambda learner: self.method.receive(learner, inboxes[learner.name], round),
            self.learners,
        )

    def update_averages(self, exchanged: bool) -> None:
        """Update the moving averages of all nodes."""
        update_averages(self.learners, exchanged)

    def forget(self) -> None:
        """Drop received messages, so that no node trains on them again."""
        for learner in self.learners:
            self.method.forget(learner)

    def complete(self, count: bool) -> None:
        """Do nothing: without a server, the nodes hold their models themselves."""

    def take(self, message: Message) -> None:
        """Give every node the part of its model that a server still held."""
        for learner in self.learners:
            self.method.complete(learner, message)

    def verify(self) -> None:
        """Read all losses and flags at once, so that no round waits for the device."""
        raise_earliest(self.faults())

    def faults(self) -> list[Fault]:
        """Return the faults since the last call: losses, parameters, messages."""
        found: list[Fault] = []
        for learner in self.learners:
            for what, network in learner.in_training():
                if not bool(torch.isfinite(network.parameters).all()):
                    found.append(Fault(self.round, 3, learner.name, f"{what} are not finite"))
            for name, entries in learner.records.items():
                finite = torch.isfinite(torch.stack([value for _, value in entries])).tolist()
                if not all(finite):
                    order = 0 if name.startswith("local") else 2  # a message comes between the two steps
                    found.append(
                        Fault(entries[finite.index(False)][0], order, learner.name, f"its {name} is not finite")
                    )
        labels = {id(message): labels for message, labels in self._signals}
        found += refused(self._sent + _examined(self._signals), 1, labels)
        self._sent, self._signals = [], []
        return found

    def series(self) -> dict[str, dict[str, list[float]]]:
        collected = {}
        for learner in self.learners:
            collected[learner.name] = {
                name: torch.stack([value for _, value in entries]).double().tolist()
                for name, entries in learner.records.items()
            }
            learner.records = {}
        return collected

    def validate(self) -> dict[str, int]:
        return {name: right for name, (right,) in self.correct([self._validation]).items()}

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        def count(learner: NodeLearner) -> list[int]:
            with learner.showing(learner.shown):
                return [count_correct(learner.predict, samples) for samples in sets]

        return dict(zip((learner.name for learner in self.learners), self._threads.map(count), strict=True))

    def validate_views(self) -> dict[str, dict[str, int]]:
        names = [learner.name for learner in self.learners]
        counts = {}
        for view in self.method.views(self.learners[0]):
            right = self.correct_view(view, names, [self._validation])
            counts[view] = {name: right[name][0] for name in names}
        return counts

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
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
        wanted = set(names)
        for learner in self.learners:
            if learner.name in wanted:
                learner.best = learner.shown or learner.network.weights()

    @property
    def selected(self) -> bool:
        """Whether training is over and the models have their selected weights."""
        return bool(self._last)

    def select(self, which: Which) -> None:
        """Load the best or last weights into every model. The first call saves the last weights."""
        if not self._last:
            self._last = {learner.name: learner.shown or learner.network.weights() for learner in self.learners}
        for learner in self.learners:
            learner.end_of_training()
            learner.network.load_weights(learner.best if which == "best" and learner.best else self._last[learner.name])

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        return {learner.name: learner.module.state_dict() for learner in self.learners}

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        logits = {}
        for learner in self.learners:
            with learner.network.exactly():
                logits[learner.name] = learner.predict(inputs.to(learner.parameters.device)).cpu()
        return logits

    def state(self) -> dict[str, Tensor]:
        return {f"{learner.name}/{key}": value for learner in self.learners for key, value in learner.state().items()}

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        self.round = round
        self._sent, self._signals, self._last = [], [], {}
        for learner in self.learners:
            learner.restore(under(learner.name, state))

    @property
    def parameter_bytes(self) -> int:
        return sum(learner.parameters.nbytes for learner in self.learners)

    def close(self) -> None:
        """Stop the threads and release the modules."""
        self._threads.close()
        for learner in self.learners:
            learner.release()


def update_averages(learners: Iterable[Learner], exchanged: bool) -> None:
    """Update the averages of the weights to evaluate. If only exchanges set them (FedAvg), update after exchanges."""
    for learner in learners:
        if learner.decay and (exchanged or learner.reported is None):
            learner.average()


def _examined(signals: Sequence[tuple[Posteriors, Tensor]]) -> list[tuple[Message, Tensor]]:
    """Return posteriors with their faults. Messages of one shape are checked together."""
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


def refused(
    sent: Sequence[tuple[Message, Tensor]], order: float, labels: Mapping[int, Tensor] | None = None
) -> list[Fault]:
    """Return the faults of messages that a receiver would refuse. All flags are read from the device at once.

    `labels` are those of the messages' batches, by the id of the message.
    """
    if not sent or not bool(torch.cat([faults for _, faults in sent]).any()):
        return []
    found = []
    for message, faults in sent:
        if bool(faults.any()):
            place = faults.tolist().index(True)
            what = message.explain(place, (labels or {}).get(id(message)))
            found.append(Fault(message.round, order, message.sender, what, diverged=place == 0))
    return found


def under(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries `name/…` of an engine's state, without that name."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
