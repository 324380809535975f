"""Experiments in step: nodes of one architecture are stacked, and all experiments run their rounds together.

Each round is one computation for all nodes of all experiments. They differ only in data: the indices of samples and
teachers, drawn by address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fedh2l.engines.batched.graphs import CAPACITY, GraphRecorder
from fedh2l.engines.batched.groups import Predictor, architectures_of, correct_counts, first_fault, in_order, not_finite
from fedh2l.engines.batched.learner import StackedLearner
from fedh2l.engines.batched.network import StackedNetwork
from fedh2l.engines.batched.random_buffer import RandomBuffers
from fedh2l.engines.batched.samples import Store
from fedh2l.engines.batched.server import StackedServer
from fedh2l.engines.batched.teacher_schedule import TeacherSchedule
from fedh2l.engines.local import LocalEngine
from fedh2l.engines.local_nodes import update_averages
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.methods.base import Method, check_declared
from fedh2l.protocol.messages import SERVER, Message, Posteriors
from fedh2l.training.node_learner import NodeLearner

T = TypeVar("T")

TOGETHER = 256
"""Largest number of stacked nodes. It is enough to fill a GPU, and more would only need more memory."""
FAULT = "fault of the message"
"""Record name of the faults of nodes' messages."""
ANSWER = "fault of the answer"
"""Record name of the faults of the server's answers."""


class StackedNodes:
    """Experiments in step: their learners are stacked by architecture, and run their rounds together."""

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self.engines = list(engines)
        self.method: Method = engines[0].method
        self.names = engines[0].roster.names
        self.learners: list[NodeLearner] = [learner for engine in engines for learner in engine.learners]
        self.device = self.learners[0].parameters.device
        self.draws = RandomBuffers(self.device)
        self.store = Store()
        self.groups = self._groups()
        self.store.close()
        self.server = StackedServer([engine.router.server for engine in engines], self.draws)
        self.round = 0
        """The last round done."""
        self.stale = False
        """Whether learners have newer state than the stacks."""
        self.records: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self._holders: dict[str, StackedLearner | StackedServer] = {
            **{f"group-{i}": group for i, group in enumerate(self.groups)},
            SERVER: self.server,
        }
        self.sent: tuple[Message, ...] = ()
        """Messages of the last exchange, for their kinds and sizes."""
        self._known: dict[str, tuple[int, Any]] = {}
        rosters = [engine.roster for engine in engines]
        self._teacher_schedule = TeacherSchedule(self.method, rosters, self.learners, self.store, self.draws)
        for group in self.groups:
            group.find_validation()
            group.public = self._teacher_schedule.batches_for(group.places, len(self.groups) == 1)
        self._recorder = self._new_recorder()

    def _groups(self) -> list[StackedLearner]:
        place = {id(learner): i for i, learner in enumerate(self.learners)}
        by_layout = architectures_of(self.learners)
        parts = [members[i : i + TOGETHER] for members in by_layout for i in range(0, len(members), TOGETHER)]
        return [
            StackedLearner(members, [place[id(member)] for member in members], self.store, self.draws)
            for members in parts
        ]

    def _new_recorder(self) -> GraphRecorder:
        """Test how the models can be run, and return a recorder without recordings."""
        recordable = True
        for group in self.groups:
            inputs = self.store.take(group._table("private")[0][:, :2]).inputs
            for network in (group.network, *group.networks.values()):
                assert isinstance(network, StackedNetwork)
                network.try_stacking(inputs)
                recordable = recordable and network.recordable
            for network in self.server.networks.values():
                assert isinstance(network, StackedNetwork)
                network.stackable = network.stackable and group.network.stackable
        return GraphRecorder(self._holders, self.draws, self._body, recordable and self.device.type == "cuda")

    # Rounds

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Run rounds and return the last one done."""
        if self.stale:
            self._load()
            self.round = first - 1
        if first != self.round + 1:
            raise RuntimeError(f"experiments that run as one are at round {self.round}, not {first - 1}")
        while self.round < last:
            block = range(self.round + 1, min(last, self.round + CAPACITY) + 1)
            kinds = [(round, self.method.kind_of_round(round)) for round in block]
            self.round, going_on = self._recorder.run(kinds, keep_going)
            if going_on:  # while the device is busy
                ahead = range(self.round + 1, min(self.engines[0].rounds, self.round + len(block)) + 1)
                self._recorder.prepare([(round, self.method.kind_of_round(round)) for round in ahead])
            self._collect()
            if not going_on:
                break
        return self.round

    def _body(self, round: int) -> tuple[Message, ...]:
        """Run one round of all nodes. Return one message for all nodes, and a server's answers."""
        self._teacher_schedule.new_round()
        crossed: tuple[Message, ...] = ()
        for event in rounds(self, self.method, (round,)):
            if isinstance(event, Exchange):
                deliver = self._exchange if self.method.decentralised else self._consult_server
                event.inboxes, crossed = deliver(event.sent, round)
        return crossed

    def local_step(self, round: int) -> None:
        for group in self.groups:
            group.seed_torch("torch-local", round)
            self.method.local_step(group, round)

    def emit(self, round: int) -> list[Message]:
        """Return one message per stack."""
        return [self._emit(group, round) for group in self.groups]

    def receive(self, inboxes: Sequence[Sequence[Message]], round: int) -> None:
        """Train each stack on its inbox."""
        for group, inbox in zip(self.groups, inboxes, strict=True):
            group.seed_torch("torch-mutual", round)
            self.method.receive(group, inbox, round)

    def update_averages(self, exchanged: bool) -> None:
        update_averages(self.groups, exchanged)

    def _emit(self, group: StackedLearner, round: int) -> Message:
        group.seed_torch("torch-emit", round)
        message = self.method.emit(group, round)
        check_declared(self.method, message)
        labels = None
        if isinstance(message, Posteriors):
            batch = group.public_batch("own", round, self.method.public_batch_rows(group.batch_size))
            message.check_shape(batch.labels.shape[-1], group.classes)
            labels = batch.labels
        group.record(round, **{FAULT: first_fault(message, labels)})
        return message

    def _exchange(self, sent: Sequence[Message], round: int) -> tuple[list[list[Message]], tuple[Message, ...]]:
        """Return inboxes and the messages. The t-th message of an inbox comes from each member's t-th teacher."""
        everybody = in_order(self.groups, sent)
        teachers = self._teacher_schedule.teachers(round)
        inboxes = []
        for group in self.groups:
            heard = teachers.index_select(0, group.places)
            inbox = []
            for t in range(heard.shape[1]):
                tensors = [tensor.index_select(0, heard[:, t]) for tensor in everybody.tensors()]
                inbox.append(everybody.remade(self._teacher_schedule.sender(t), round, tensors))
            inboxes.append(inbox)
        return inboxes, (everybody,)

    def _consult_server(self, sent: Sequence[Message], round: int) -> tuple[list[list[Message]], tuple[Message, ...]]:
        """Return inboxes with the server's answer, and the messages."""
        everybody = in_order(self.groups, sent)
        experiments, nodes = len(self.engines), len(self.names)
        columns = [tensor.view(experiments, nodes, *tensor.shape[1:]) for tensor in everybody.tensors()]
        messages = [
            everybody.remade(name, round, [column[:, place] for column in columns])
            for place, name in enumerate(self.names)
        ]
        self.server.seed_torch(round)
        answers = self.method.aggregate(self.server, messages, round)
        ordered = [answers[name] for name in self.names]
        first = ordered[0]
        parts = zip(*(answer.tensors() for answer in ordered), strict=True)
        stacked = [torch.stack(list(part), 1).flatten(0, 1) for part in parts]
        inboxes = []
        for group in self.groups:
            tensors = [tensor.index_select(0, group.places) for tensor in stacked]
            answer = first.remade(SERVER, round, tensors)
            group.record(round, **{ANSWER: first_fault(answer, None)})
            inboxes.append([answer])
        return inboxes, (everybody, *ordered)

    # Calls by the trainers

    def _collect(self) -> None:
        """Count the messages, and copy recorded values to the host."""
        for sent, done in self._recorder.exchanged():
            self.sent = sent
            self._count_traffic(sent, done)
        for (name, key), entries in self._recorder.records().items():
            holder = self._holders[name]
            assert isinstance(holder, StackedLearner)
            table = torch.stack([value for _, value in entries]).double().cpu().tolist()
            for column, place in enumerate(holder.places.tolist()):
                experiment, node = divmod(place, len(self.names))
                into = self.records.setdefault(f"{experiment}/{self.names[node]}", {}).setdefault(key, [])
                into += [(round, row[column]) for (round, _), row in zip(entries, table, strict=True)]

    def _count_traffic(self, sent: Sequence[Message], rounds: Sequence[int]) -> None:
        everybody, *answers = sent
        for experiment, engine in enumerate(self.engines):
            ledger = engine.ledger
            if answers:
                for name in self.names:
                    ledger.add(name, [SERVER], everybody, len(rounds))
                ledger.answered(dict(zip(self.names, answers, strict=True)), len(rounds))
            else:
                graphs = [self._teacher_schedule.graph(experiment, round) for round in rounds]
                counts = Counter(map(id, graphs))  # most methods return one object for all rounds
                for graph in {id(graph): graph for graph in graphs}.values():
                    ledger.heard(graph, lambda _: everybody, counts[id(graph)])

    def complete(self) -> Message | None:
        """Send the nodes the parts of their models that servers still hold. Return the message to each node."""
        return self._once("complete", self._complete)

    def _complete(self) -> Message | None:
        if self.stale:
            self._load()
        message = self.method.closing(self.server, self.round)
        if message is not None:
            for group in self.groups:
                whose = group.places.div(len(self.names), rounding_mode="floor")
                tensors = [tensor.index_select(0, whose) for tensor in message.tensors()]
                self.method.complete(group, message.remade(SERVER, self.round, tensors))
        return message

    def validate(self) -> list[int]:
        """Return each member's number of correct validation samples."""
        return self._once("validate", lambda: self._correct(lambda group: group.predict, True))

    def validate_views(self) -> dict[str, list[int]]:
        """Return counts as `validate` does for each extra evaluation of the method, by name."""
        names = self.method.views(self.groups[0])
        return self._once("views", lambda: {name: self._correct(self._view(name), False) for name in names})

    def _once(self, what: str, compute: Callable[[], T]) -> T:
        """Compute a value for all trainers when the first one needs it after a round."""
        if what not in self._known or self._known[what][0] != self.round:
            self._known[what] = (self.round, compute())
        found: T = self._known[what][1]
        return found

    def _view(self, name: str) -> Predictor:
        return lambda group: self.method.views(group)[name]

    def _correct(self, predictor: Predictor, reported: bool) -> list[int]:
        if self.stale:
            self._load()
        return correct_counts(self.groups, len(self.learners), predictor, reported)

    def keep_best(self, places: set[int]) -> None:
        """Save the present weights of these members as their best."""
        for group in self.groups:
            wanted = [place in places for place in group.places.tolist()]
            if any(wanted):
                group.keep_best(torch.tensor(wanted, device=self.device))

    def unsound(self) -> list[list[str]]:
        """Return the names of each member's parameters that are not finite."""
        return self._once("unsound", lambda: not_finite(self.groups, len(self.learners)))

    def save(self, experiment: int) -> None:
        """Copy the state of an experiment to its learners and its server."""
        if self.stale:
            return  # they have newer state
        for group in self.groups:
            group.save(self._of(experiment, group))
        self.server.save(experiment)

    def save_weights(self, experiment: int) -> None:
        """Copy the weights of an experiment to its learners. Other state may be invalid if the run failed."""
        if not self.stale:
            for group in self.groups:
                group.network.save(self._of(experiment, group))

    def _of(self, experiment: int, group: StackedLearner) -> list[int]:
        """Return the positions in a group of an experiment's members."""
        return [i for i, place in enumerate(group.places.tolist()) if place // len(self.names) == experiment]

    def _load(self) -> None:
        """Stack the state of learners and servers after a restore."""
        self.stale = False
        self._known.clear()
        for group in self.groups:
            group.load()
        self.server.load()
        self._recorder = self._new_recorder()
