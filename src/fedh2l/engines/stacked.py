"""Many nodes as one: networks, learners and servers whose tensors have a leading dimension of members.

They offer methods the same interface as one node does. Members are ordinary learners; what they hold is stacked when
a run begins or resumes, and written back to them when it is saved or ends.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap

from fedh2l.domain import Samples
from fedh2l.engines.convolutions import AsMatrices
from fedh2l.engines.draws import Draws
from fedh2l.errors import ConfigError, MethodError
from fedh2l.learner import Learner, Pool
from fedh2l.network import Network
from fedh2l.sampling import PrivatePurpose, draw_block, shuffle_block, stream_key, torch_seed
from fedh2l.server import Server


class StackedNetwork(Network):
    """Networks of one architecture; `parameters` is `(members, parameters)`."""

    def __init__(self, members: Sequence[Network]) -> None:
        first = members[0]
        self.members: list[Network] = list(members)
        self.module = first.module
        self.optimizer = first.optimizer
        self._plain_modes, self._modules = first._plain_modes, first._modules
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._shapes = [p.shape for _, p in named]
        self._sizes = [p.numel() for _, p in named]
        self._averaged_names = [name for name, b in self.module.named_buffers() if b.is_floating_point()]
        self.load()
        self.stackable = len(members) > 1
        """Whether the members are run as one, rather than one after the other."""
        self.recordable = True
        """Whether the models leave all values on the device, so that a CUDA graph can hold what they do."""

    def load(self) -> None:
        """Stacks what the members hold."""
        self.vector = torch.stack([member.parameters for member in self.members])
        rest = [member._untrained() for member in self.members]
        self.rest = {name: torch.stack([tensors[name].detach() for tensors in rest]) for name in rest[0]}
        parts = torch.split(self.vector, self._sizes, 1)
        self._leaves = [
            part.view(-1, *shape).detach().requires_grad_() for part, shape in zip(parts, self._shapes, strict=True)
        ]
        self.optimizer_states = _stack_nested([member.optimizer_states for member in self.members])

    @torch.no_grad()
    def save(self, places: Sequence[int]) -> None:
        """Hands the members at these places what is theirs."""
        for place in places:
            member = self.members[place]
            member.parameters.copy_(self.vector[place])
            for name, tensor in member._untrained().items():
                tensor.copy_(self.rest[name][place])
            member.optimizer_states = {
                phase: {name: value[place].clone() for name, value in state.items()}
                for phase, state in self.optimizer_states.items()
            }

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters, one row a member."""
        return self.vector

    def _untrained(self) -> dict[str, Tensor]:
        return self.rest

    def _averaged(self) -> list[Tensor]:
        return [self.rest[name] for name in self._averaged_names]

    def logits(self, inputs: Tensor, **how: Any) -> Tensor:
        """What the models, in training mode, say of inputs `(members, rows, …)`, with their graph."""
        self._set_mode(training=True)
        return self._call(inputs, how)

    @torch.no_grad()
    def predict(self, inputs: Tensor, **how: Any) -> Tensor:
        """Logits in evaluation mode."""
        self._set_mode(training=False)
        return self._call(inputs, how)

    def _call(self, inputs: Tensor, how: Mapping[str, Any]) -> Tensor:
        parameters = dict(zip(self._names, self._leaves, strict=True))

        tensors = {**parameters, **self.rest}
        if self.stackable:

            def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
                output: Tensor = functional_call(self.module, tensors, (x,), dict(how))
                return output

            with AsMatrices():
                said: Tensor = vmap(one, randomness="different")(tensors, inputs)
            return said
        outputs = []
        for place, member in enumerate(self.members):
            member.module.train(self.module.training)
            own = {name: tensor[place] for name, tensor in tensors.items()}
            outputs.append(functional_call(member.module, own, (inputs[place],), dict(how)))
        return torch.stack(outputs)

    def try_stacking(self, inputs: Tensor) -> None:
        """Sees whether these models can be run as one, with the same outcome, and recorded; not all layers can be."""
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            self._try_stacking(inputs)

    def _try_stacking(self, inputs: Tensor) -> None:
        rest = {name: value.clone() for name, value in self.rest.items()}
        if self.stackable:
            try:
                as_one = self.predict(inputs)
                with torch.no_grad():
                    self.logits(inputs)
            except Exception:  # whatever a user's layers may do
                self.stackable = False
            else:
                self.stackable = False  # members may look alike and yet compute something else
                one_by_one = self.predict(inputs)
                self.stackable = torch.allclose(as_one, one_by_one, rtol=1e-3, atol=1e-4)
        self._check_buffers(inputs, rest)
        if inputs.is_cuda:
            self.recordable = self._never_waits(inputs)
        for name, value in rest.items():
            self.rest[name].copy_(value)

    @torch.no_grad()
    def _check_buffers(self, inputs: Tensor, before: Mapping[str, Tensor]) -> None:
        """Refuses models that put new tensors in the place of their buffers, which would be lost here."""
        if not self.rest:
            return
        for name, value in before.items():
            self.rest[name].copy_(value)
        self.logits(inputs)
        own = copy.deepcopy(self.members[0].module).train()
        own(inputs[0])
        after = dict(own.named_buffers())
        if any(not torch.allclose(self.rest[name][0].double(), b.double(), rtol=1e-3) for name, b in after.items()):
            raise ConfigError(
                "run.engine: 'batched' cannot run models that replace their buffers rather than write to them"
            )

    def _never_waits(self, inputs: Tensor) -> bool:
        """Whether a step of these models reads nothing on the host."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.gradient(self.logits(inputs).sum((-2, -1)))
        except Exception:  # whatever a user's layers may do
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradients of losses `(members,)`, one row a member."""
        if loss.shape != self.vector.shape[:1]:
            raise MethodError(
                f"a loss of {len(self.vector)} stacked nodes has shape {tuple(loss.shape)}, one each was expected: "
                f"reduce with mean(-1) rather than mean()"
            )
        parts = torch.autograd.grad(loss.sum(), self._leaves, materialize_grads=True)
        return torch.cat([part.reshape(len(part), -1) for part in parts], 1)

    def shared(self) -> Tensor:
        """What parameter averaging exchanges, one row a member."""
        return torch.cat([self.vector, *(buffer.reshape(len(buffer), -1) for buffer in self._averaged())], -1)

    @torch.no_grad()
    def adopt(self, vector: Tensor) -> None:
        """Takes over rows in the layout of `shared`."""
        buffers = self._averaged()
        sizes = [self.vector.shape[1], *(buffer[0].numel() for buffer in buffers)]
        parameters, *values = torch.split(vector.to(self.vector.dtype), sizes, -1)
        self.vector.copy_(parameters)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value.view_as(buffer))


class Store:
    """All samples of a run in one tensor, so that a batch of many nodes is one look-up."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], tuple[int, Samples]] = {}
        self._size = 0
        self.inputs = torch.empty(0)
        self.labels = torch.empty(0)

    def add(self, samples: Samples) -> NDArray[np.int64]:
        """Where these samples are; the same ones are kept once."""
        key = (id(samples.inputs), id(samples.labels))
        if key not in self._parts:
            self._parts[key] = (self._size, samples)
            self._size += len(samples)
        start, _ = self._parts[key]
        return np.arange(start, start + len(samples))

    def close(self) -> None:
        """Puts everything in its place, once all is added."""
        parts = [samples for _, samples in self._parts.values()]
        self.inputs = torch.cat([part.inputs for part in parts])
        self.labels = torch.cat([part.labels for part in parts])

    def take(self, rows: Tensor) -> Samples:
        """Samples at places `(…)`, in that shape."""
        flat = rows.reshape(-1)
        inputs = self.inputs.index_select(0, flat).view(*rows.shape, *self.inputs.shape[1:])
        return Samples(inputs, self.labels.index_select(0, flat).view(rows.shape))


class StackedLearner(StackedNetwork, Learner):
    """Nodes with models of one architecture, of one federation or of several that run side by side.

    `places` are their places among all members of the run. What is "own" or "the t-th teacher" differs from member to
    member, so names of owners and senders are such words here.
    """

    members: list[Learner]  # type: ignore[assignment]

    def __init__(self, members: Sequence[Learner], places: Sequence[int], store: Store, draws: Draws) -> None:
        StackedNetwork.__init__(self, members)
        first = members[0]
        self.name = "own"
        self.classes, self.batch_size = first.classes, first.batch_size
        self.seed_set = first.seed_set
        self.places = torch.tensor(places, device=self.vector.device)
        self.records = {}
        self.public: Callable[[str, int, int], Samples]  # set by the engine, which knows who is taught by whom
        self._store, self._draws = store, draws
        self._tables: dict[Pool, tuple[Tensor, list[int]]] = {}
        self._materialised: dict[Pool, Samples] = {}
        for member in members:  # what may be asked for later must be in the store before it is closed
            store.add(member.private)
            for part in member.seed_set.parts.values():
                store.add(part)
        validation = [member.validation for member in members]
        self._validation_rows = [store.add(samples) for samples in validation if samples is not None]

    def load(self) -> None:
        """Stacks what the members hold."""
        super().load()
        self.memory = _stack([member.memory for member in self.members])
        self.reported = _stack([member.reported or {} for member in self.members]) or None
        self.best = _stack([member.best or {} for member in self.members]) or None
        networks = self.members[0].networks
        self.networks = {name: StackedNetwork([m.networks[name] for m in self.members]) for name in networks}

    def save(self, places: Sequence[int]) -> None:
        """Hands the members at these places what is theirs; what was recorded is the engine's to hand out."""
        super().save(places)
        for network in self.networks.values():
            assert isinstance(network, StackedNetwork)
            network.save(places)
        for place in places:
            member = self.members[place]
            member.memory = _slice(self.memory, place)
            member.reported = _slice(self.reported, place) if self.reported else None
            member.best = _slice(self.best, place) if self.best else None

    def keep_best(self, which: Tensor) -> None:
        """Remembers the reported weights of the members where `which` `(members,)` is true."""
        present = self.reported or self.weights()
        if self.best is None:
            self.best = {name: value.clone() for name, value in present.items()}
            return
        for name, value in self.best.items():
            mask = which.view(-1, *(1,) * (value.dim() - 1))
            self.best[name] = torch.where(mask, present[name], value)

    @property
    def validation(self) -> Samples | None:  # type: ignore[override]
        """Everybody's validation data, each member that of its own federation."""
        if "validation" not in self.__dict__:
            rows = torch.from_numpy(np.stack(self._validation_rows)).to(self.vector.device)
            self.__dict__["validation"] = self._store.take(rows)
        found: Samples = self.__dict__["validation"]
        return found

    def local_batch(self, round: int, pool: Pool) -> Samples:
        """The batches of a round, `(members, batch_size, …)`."""
        table, _ = self._table(pool)
        return self._store.take(table.gather(1, self.local_indices(round, pool)))

    def local_indices(self, round: int, pool: Pool) -> Tensor:
        """Where in their local pools the batches of a round are, `(members, batch_size)`."""
        _, sizes = self._table(pool)

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, "local-batch", r) for r in rounds for member in self.members]
            drawn = draw_block(sizes * len(rounds), min(self.batch_size, min(sizes)), keys)
            return drawn.reshape(len(rounds), len(self.members), -1)

        return self._draws.get(("local-batch", pool, id(self)), compute, round)

    def draw(self, purpose: PrivatePurpose, round: int, population: int, count: int) -> Tensor:
        """`count` of `population` indices of each member's own, `(members, count)`."""
        if count >= population:
            return torch.arange(population, device=self.vector.device).expand(len(self.members), -1)

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, purpose, r) for r in rounds for member in self.members]
            drawn = draw_block([population] * len(keys), count, keys)
            return drawn.reshape(len(rounds), len(self.members), -1)

        return self._draws.get((purpose, population, count, id(self)), compute, round)

    def order(self, purpose: PrivatePurpose, round: int, count: int) -> Tensor:
        """All `count` indices in a random order of each member's own, `(members, count)`."""

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, purpose, r) for r in rounds for member in self.members]
            return shuffle_block(count, keys).reshape(len(rounds), len(self.members), -1)

        return self._draws.get((purpose, count, id(self)), compute, round)

    def pool(self, kind: Pool) -> Samples:
        """The local pools, `(members, n, …)`; they must be of one size."""
        if kind not in self._materialised:
            table, sizes = self._table(kind)
            assert len(set(sizes)) == 1, "local pools of different sizes cannot be stacked"
            self._materialised[kind] = self._store.take(table)
        return self._materialised[kind]

    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        """The public batches of a round: each member's own, or those of each member's t-th teacher."""
        return self.public(owner, round, size)

    def public_subset(self, round: int, size: int) -> Samples:
        """Samples of everybody's public data, each member that of its own federation."""
        table, sizes = self._table("all-public")
        count = min(sizes)
        if size >= count:
            return self.pool("all-public")

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("alignment", m.seed_set.seed, "", r) for r in rounds for m in self.members]
            return draw_block(sizes * len(rounds), size, keys).reshape(len(rounds), len(self.members), -1)

        return self._store.take(table.gather(1, self._draws.get(("alignment", size, id(self)), compute, round)))

    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        """Addresses what the models draw from torch's own generator, by the first member's secret."""
        first = self.members[0]
        self._draws.seed(lambda r: torch_seed(purpose, first._secret, first.name, r), self.vector.device, round)

    def _table(self, kind: Pool) -> tuple[Tensor, list[int]]:
        """Where in the store the pools are, `(members, largest)`, and how large each is."""
        if kind not in self._tables:
            rows = [self._rows(member, kind) for member in self.members]
            sizes = [len(row) for row in rows]
            table = np.zeros((len(rows), max(sizes)), dtype=np.int64)
            for place, row in enumerate(rows):
                table[place, : len(row)] = row
            self._tables[kind] = (torch.from_numpy(table).to(self.vector.device), sizes)
        return self._tables[kind]

    def _rows(self, member: Learner, kind: Pool) -> NDArray[np.int64]:
        public = member.seed_set.parts
        parts = {
            "private": [member.private],
            "private+own-public": [member.private, public[member.name]],
            "private+all-public": [member.private, *public.values()],
            "all-public": list(public.values()),
        }[kind]
        return np.concatenate([self._store.add(part) for part in parts])

    @staticmethod
    def _key(member: Learner, purpose: PrivatePurpose, round: int) -> int:
        return stream_key(purpose, member._secret, member.name, round)


class StackedServer(Server):
    """The servers of several federations that run side by side."""

    def __init__(self, members: Sequence[Server], draws: Draws) -> None:
        self.members = list(members)
        self.roster, self.optimizer, self.device = members[0].roster, members[0].optimizer, members[0].device
        self._draws = draws
        self.load()

    def load(self) -> None:
        """Stacks what the members hold."""
        self.memory = _stack([member.memory for member in self.members])
        names = self.members[0].networks
        self.networks = {name: StackedNetwork([m.networks[name] for m in self.members]) for name in names}

    def save(self, place: int) -> None:
        """Hands the member at this place what is its own."""
        for network in self.networks.values():
            assert isinstance(network, StackedNetwork)
            network.save([place])
        self.members[place].memory = _slice(self.memory, place)

    def order(self, address: str, round: int, count: int) -> Tensor:
        """All `count` indices in the random order that belongs to an address at a round, `(members, count)`."""

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("server-batch", m.roster.seed, address, r) for r in rounds for m in self.members]
            return shuffle_block(count, keys).reshape(len(rounds), len(self.members), -1)

        return self._draws.get(("server-batch", address, count), compute, round)

    def seed_torch(self, round: int) -> None:
        """By the first federation's seed."""
        self._draws.seed(lambda r: torch_seed("torch-server", self.roster.seed, "", r), self.device, round)


def _stack(entries: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if any(entry.keys() != entries[0].keys() for entry in entries):
        raise ConfigError("run.engine: 'batched' needs nodes that remember the same things")
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def _stack_nested(entries: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    return {group: _stack([entry.get(group, {}) for entry in entries]) for group in entries[0]}


def _slice(entries: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: value[place].clone() for name, value in entries.items()}
