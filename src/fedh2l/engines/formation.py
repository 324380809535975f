"""Federations in step: nodes of one architecture stacked, and the rounds that all of them take together.

Each round is one computation for all nodes of all federations. What differs between them is data: indices of samples
and of teachers, drawn by address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.draws import Draws
from fedh2l.engines.graphs import CAPACITY, Recorder
from fedh2l.engines.local import LocalEngine
from fedh2l.engines.stacked import StackedNetwork
from fedh2l.engines.stacked_nodes import StackedLearner, StackedServer, Store
from fedh2l.errors import ConfigError
from fedh2l.learner import Learner, architectures
from fedh2l.ledger import Ledger
from fedh2l.losses import correct_count
from fedh2l.messages import SERVER, Message, Posteriors
from fedh2l.methods.base import Method, check_declared
from fedh2l.metrics import EVALUATION_ROWS
from fedh2l.sampling import draw_block, stream_key
from fedh2l.topology import Graph

RAGGED = "nodes hear different numbers of teachers"
FAULT = "fault of the message"
"""Under which the flags of what nodes sent are recorded."""
ANSWER = "fault of the answer"
"""And of what the server answered."""


class Formation:
    """Federations in step: their learners stacked by architecture, and the rounds that all of them take together."""

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        self.engines = list(engines)
        self.method: Method = engines[0].method
        self.names = engines[0].roster.names
        self.learners: list[Learner] = [learner for engine in engines for learner in engine.learners]
        self.device = self.learners[0].parameters.device
        self.draws = Draws(self.device)
        self.store = Store()
        self.groups = self._groups()
        self.store.close()
        self.server = StackedServer([engine.server for engine in engines], self.draws)
        self.round = 0
        """The last round done."""
        self.stale = False
        """Whether learners hold something newer than what is stacked."""
        self.records: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self._holders: dict[str, StackedLearner | StackedServer] = {
            **{f"group-{i}": group for i, group in enumerate(self.groups)},
            SERVER: self.server,
        }
        self._public = {learner: self.store.add(learner.seed_set.parts[learner.name]) for learner in self.learners}
        self._public_table = torch.from_numpy(np.stack(list(self._public.values()))).to(self.device)
        self._sent: tuple[Message, ...] = ()
        self._known_graphs: dict[int, tuple[Graph, NDArray[np.int64]]] = {}
        self._this_round: dict[tuple[str, int, int], Tensor | Samples] = {}
        """What several ask for in one round: who teaches whom, and everybody's public batch."""
        self._validated: tuple[int, list[int]] = (-1, [])
        self._viewed: tuple[int, dict[str, list[int]]] = (-1, {})
        for group in self.groups:
            group.public = self._public_for(group)
        self._recorder = self._new_recorder()

    def _groups(self) -> list[StackedLearner]:
        place = {id(learner): i for i, learner in enumerate(self.learners)}
        by_layout = architectures_of(self.learners)
        return [
            StackedLearner(members, [place[id(member)] for member in members], self.store, self.draws)
            for members in by_layout
        ]

    def _new_recorder(self) -> Recorder:
        """Sees what the models allow, and starts with nothing recorded."""
        recordable = True
        for group in self.groups:
            inputs = self.store.take(group._table("private")[0][:, :2]).inputs
            for network in (group, *group.networks.values()):
                assert isinstance(network, StackedNetwork)
                network.try_stacking(inputs)
                recordable = recordable and network.recordable
            for network in self.server.networks.values():
                assert isinstance(network, StackedNetwork)
                network.stackable = network.stackable and group.stackable
        return Recorder(self._holders, self.draws, self._body, recordable and self.device.type == "cuda")

    # Rounds

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Runs rounds; returns the last one done."""
        if self.stale:
            self._load()
            self.round = first - 1
        if first != self.round + 1:
            raise RuntimeError(f"federations that run as one are at round {self.round}, not {first - 1}")
        while self.round < last:
            block = range(self.round + 1, min(last, self.round + CAPACITY) + 1)
            kinds = [(round, self.method.kind_of_round(round)) for round in block]
            self.round, going_on = self._recorder.run(kinds, keep_going)
            if going_on:  # while the device is at work
                ahead = range(self.round + 1, min(self.engines[0].rounds, self.round + len(block)) + 1)
                self._recorder.prepare([(round, self.method.kind_of_round(round)) for round in ahead])
            self._collect()
            if not going_on:
                break
        return self.round

    def _body(self, round: int) -> tuple[Message, ...]:
        """One round of all nodes; returns what crossed: the message of all nodes as one, and a server's answers."""
        self._this_round.clear()
        for group in self.groups:
            group.seed_torch("torch-local", round)
            self.method.local_step(group, round)
        if not self.method.exchanges(round):
            return ()
        sent = [self._emit(group, round) for group in self.groups]
        return self._exchange(sent, round) if self.method.decentralised else self._consult_server(sent, round)

    def _emit(self, group: StackedLearner, round: int) -> Message:
        group.seed_torch("torch-emit", round)
        message = self.method.emit(group, round)
        check_declared(self.method, message)
        labels = None
        if isinstance(message, Posteriors):
            batch = group.public_batch("own", round, self.method.public_batch_rows(group.batch_size))
            message.check_shape(batch.labels.shape[-1], group.classes)
            labels = batch.labels
        group.record(round, **{FAULT: _first_fault(message, labels)})
        return message

    def _exchange(self, sent: Sequence[Message], round: int) -> tuple[Message, ...]:
        """Nodes hear each other: the t-th message of an inbox comes from each member's t-th teacher."""
        everybody = self._in_order(sent)
        teachers = self._teachers(round)
        for group in self.groups:
            heard = teachers.index_select(0, group.places)
            inbox = []
            for t in range(heard.shape[1]):
                tensors = [tensor.index_select(0, heard[:, t]) for tensor in everybody.tensors()]
                inbox.append(everybody.assemble(f"teacher {t}", round, tensors, everybody.flagged))
            group.seed_torch("torch-mutual", round)
            self.method.receive(group, inbox, round)
        return (everybody,)

    def _consult_server(self, sent: Sequence[Message], round: int) -> tuple[Message, ...]:
        everybody = self._in_order(sent)
        federations, nodes = len(self.engines), len(self.names)
        columns = [tensor.view(federations, nodes, *tensor.shape[1:]) for tensor in everybody.tensors()]
        messages = [
            everybody.assemble(name, round, [column[:, place] for column in columns], everybody.flagged)
            for place, name in enumerate(self.names)
        ]
        self.server.seed_torch(round)
        answers = self.method.aggregate(self.server, messages, round)
        ordered = [answers[name] for name in self.names]
        first = ordered[0]
        parts = zip(*(answer.tensors() for answer in ordered), strict=True)
        stacked = [torch.stack(list(part), 1).flatten(0, 1) for part in parts]
        for group in self.groups:
            tensors = [tensor.index_select(0, group.places) for tensor in stacked]
            answer = first.assemble(SERVER, round, tensors, first.flagged)
            group.record(round, **{ANSWER: _first_fault(answer, None)})
            group.seed_torch("torch-mutual", round)
            self.method.receive(group, [answer], round)
        return (everybody, *ordered)

    def _in_order(self, sent: Sequence[Message]) -> Message:
        """What all groups sent as one message, in the order of the members."""
        if len(sent) == 1:
            return sent[0]
        order = torch.argsort(torch.cat([group.places for group in self.groups]))
        parts = zip(*(message.tensors() for message in sent), strict=True)
        tensors = [torch.cat(list(part)).index_select(0, order) for part in parts]
        return sent[0].assemble("everybody", sent[0].round, tensors, sent[0].flagged)

    def _teachers(self, round: int) -> Tensor:
        """The places of each member's teachers, `(members, teachers)`."""
        key = ("teachers", round, 0)
        if key not in self._this_round:
            self._this_round[key] = self._draw_teachers(round)
        found = self._this_round[key]
        assert isinstance(found, Tensor)
        return found

    def _draw_teachers(self, round: int) -> Tensor:

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            tables = [self._places(federation, r) for r in rounds for federation in range(len(self.engines))]
            if len({table.shape for table in tables}) > 1:
                raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
            return np.stack(tables).reshape(len(rounds), len(self.learners), -1)

        return self.draws.get("teachers", compute, round)

    def _places(self, federation: int, round: int) -> NDArray[np.int64]:
        """The places of the teachers of a federation's members, `(nodes, teachers)`."""
        roster = self.engines[federation].roster
        graph = self.method.teachers(roster, round)
        known = self._known_graphs.get(federation)
        if known is None or known[0] is not graph:  # most methods give one object for all rounds
            counts = {len(heard) for heard in graph.values()}
            if len(counts) > 1:
                raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
            offset = federation * len(self.names)
            rows = [[offset + roster.index[teacher] for teacher in graph[name]] for name in self.names]
            known = self._known_graphs[federation] = (graph, np.array(rows, dtype=np.int64))
        return known[1]

    def _public_for(self, group: StackedLearner) -> Callable[[str, int, int], Samples]:
        """What a group's members see of public data: their own batch, or that of their t-th teacher."""

        alone = len(self.groups) == 1

        def public(owner: str, round: int, size: int) -> Samples:
            everybody = self._everybodys_batch(round, size)
            if owner == "own":
                return everybody if alone else _members(everybody, group.places)
            if owner in self.names:
                federation = group.places.div(len(self.names), rounding_mode="floor")
                return _members(everybody, federation * len(self.names) + self.names.index(owner))
            teachers = self._teachers(round)
            mine = teachers if alone else teachers.index_select(0, group.places)
            return _members(everybody, mine[:, int(owner.removeprefix("teacher "))])

        return public

    def _everybodys_batch(self, round: int, size: int) -> Samples:
        """The public batches of all members, `(members, size, …)`."""
        key = ("public batch", round, size)
        if key not in self._this_round:
            self._this_round[key] = self.store.take(self._public_rows(round, size))
        found = self._this_round[key]
        assert isinstance(found, Samples)
        return found

    def _public_rows(self, round: int, size: int) -> Tensor:
        """Where in the store everybody's public batch of a round is, `(members, size)`."""
        population = self._public_table.shape[1]
        if size >= population:
            return self._public_table

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("public-batch", m.seed_set.seed, m.name, r) for r in rounds for m in self.learners]
            drawn = draw_block([population] * len(keys), size, keys)
            return drawn.reshape(len(rounds), len(self.learners), size)

        return self._public_table.gather(1, self.draws.get(("public-batch", size), compute, round))

    # What the trainers ask

    def _collect(self) -> None:
        """Counts what was sent, and brings what was recorded to the host."""
        for sent, rounds in self._recorder.exchanged():
            self._sent = sent
            self._count_traffic(sent, rounds)
        for (name, key), entries in self._recorder.records().items():
            holder = self._holders[name]
            assert isinstance(holder, StackedLearner)
            table = torch.stack([value for _, value in entries]).double().cpu().tolist()
            for column, place in enumerate(holder.places.tolist()):
                federation, node = divmod(place, len(self.names))
                into = self.records.setdefault(f"{federation}/{self.names[node]}", {}).setdefault(key, [])
                into += [(round, row[column]) for (round, _), row in zip(entries, table, strict=True)]

    def _count_traffic(self, sent: Sequence[Message], exchanges: Sequence[int]) -> None:
        everybody, *answers = sent
        for engine in self.engines:
            if answers:
                self._count_server(engine.ledger, everybody, answers, len(exchanges))
                continue
            for graph, times in self._graphs(engine, exchanges):
                receivers: dict[str, list[str]] = {}
                for name, heard in graph.items():
                    for teacher in heard:
                        receivers.setdefault(teacher, []).append(name)
                for sender, names in receivers.items():
                    engine.ledger.add(sender, names, everybody, times)

    def _graphs(
        self, engine: LocalEngine, exchanges: Sequence[int]
    ) -> Iterable[tuple[Mapping[str, tuple[str, ...]], int]]:
        """Who heard whom in these rounds, and in how many of them."""
        graphs = [self.method.teachers(engine.roster, round) for round in exchanges]
        if all(graph is graphs[0] for graph in graphs):
            return [(graphs[0], len(graphs))]
        return [(graph, 1) for graph in graphs]

    def _count_server(self, ledger: Ledger, everybody: Message, answers: Sequence[Message], times: int) -> None:
        together: dict[int, list[str]] = {}
        for name, answer in zip(self.names, answers, strict=True):
            ledger.add(name, [SERVER], everybody, times)
            together.setdefault(id(answer), []).append(name)
        for name, answer in zip(self.names, answers, strict=True):
            if together[id(answer)][0] == name:
                ledger.add(SERVER, together[id(answer)], answer, times)

    def validate(self) -> list[int]:
        """How many validation samples each member gets right; computed once a round for all."""
        if self._validated[0] != self.round:
            self._validated = (self.round, self._counts(lambda group: group.predict, True))
        return self._validated[1]

    def validate_views(self) -> dict[str, list[int]]:
        """As `validate`, for everything else that the method wants to be tested."""
        if self._viewed[0] != self.round:
            names = self.method.views(self.groups[0])
            self._viewed = (self.round, {name: self._counts(partial(self._view, name), False) for name in names})
        return self._viewed[1]

    def _view(self, name: str, group: StackedLearner) -> Callable[[Tensor], Tensor]:
        return self.method.views(group)[name]

    def _counts(self, predictor: Callable[[StackedLearner], Callable[[Tensor], Tensor]], reported: bool) -> list[int]:
        if self.stale:
            self._load()
        counts = [0] * len(self.learners)
        for group in self.groups:
            validation = group.validation
            assert validation is not None
            inputs, labels = (torch.split(part, EVALUATION_ROWS, 1) for part in (validation.inputs, validation.labels))
            with group.showing(group.reported if reported else None), torch.no_grad():
                predict = predictor(group)
                parts = [correct_count(predict(x), y) for x, y in zip(inputs, labels, strict=True)]
                right = torch.stack(parts).sum(0).tolist()
            for place, count in zip(group.places.tolist(), right, strict=True):
                counts[place] = count
        return counts

    def keep_best(self, places: set[int]) -> None:
        """Remembers the present weights of these members as their best."""
        for group in self.groups:
            wanted = [place in places for place in group.places.tolist()]
            if any(wanted):
                group.keep_best(torch.tensor(wanted, device=self.device))

    def sound(self) -> list[bool]:
        """Whether each member's parameters are finite."""
        found = [True] * len(self.learners)
        for group in self.groups:
            finite = torch.isfinite(group.parameters).all(-1).tolist()
            for place, fine in zip(group.places.tolist(), finite, strict=True):
                found[place] = fine
        return found

    def save(self, federation: int) -> None:
        """Hands the learners and the server of a federation what is theirs."""
        if self.stale:
            return  # they have it
        for group in self.groups:
            group.save(self._of(federation, group))
        self.server.save(federation)

    def save_weights(self, federation: int) -> None:
        """Hands the learners of a federation their models, whatever state a run that failed left the rest in."""
        if not self.stale:
            for group in self.groups:
                StackedNetwork.save(group, self._of(federation, group))

    def _of(self, federation: int, group: StackedLearner) -> list[int]:
        """Which members of a group are of a federation."""
        return [i for i, place in enumerate(group.places.tolist()) if place // len(self.names) == federation]

    def _load(self) -> None:
        """Stacks what learners and servers hold, after they were restored."""
        self.stale = False
        self._validated, self._viewed = (-1, []), (-1, {})
        for group in self.groups:
            group.load()
        self.server.load()
        self._recorder = self._new_recorder()


def architectures_of(learners: Sequence[Learner]) -> list[list[Learner]]:
    """Learners by what their models are: class, layout, and which parameters are trained."""
    groups: dict[tuple[str, str, str], list[Learner]] = {}
    for learner in learners:
        (layout,) = architectures([learner])
        trained = str([name for name, p in learner.module.named_parameters() if p.requires_grad])
        classes = str([type(module) for module in learner.module.modules()])
        groups.setdefault((f"{learner.module} {classes}", layout, trained), []).append(learner)
    return list(groups.values())


def _members(samples: Samples, places: Tensor) -> Samples:
    """The samples of these members, `(places, rows, …)`."""
    return Samples(samples.inputs.index_select(0, places), samples.labels.index_select(0, places))


def _first_fault(message: Message, labels: Tensor | None) -> Tensor:
    """0 where a member's message is sound, else 1 + the place of its first fault, `(members,)`."""
    flags = message.faults(labels)
    return torch.where(flags.any(-1), 1 + flags.to(torch.int8).argmax(-1), 0)
