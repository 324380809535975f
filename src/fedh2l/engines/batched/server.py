"""The servers of several experiments as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.engines.batched.network import StackedNetwork, stack, take_member
from fedh2l.engines.batched.random_buffer import RandomBuffers
from fedh2l.protocol.sampling import shuffle_block, stream_key, torch_seed
from fedh2l.training.server import Server


class StackedServer(Server):
    """The servers of several experiments in step."""

    def __init__(self, members: Sequence[Server], draws: RandomBuffers) -> None:
        self.members = list(members)
        self.roster, self.optimizer, self.device = members[0].roster, members[0].optimizer, members[0].device
        self._draws = draws
        self.load()

    def load(self) -> None:
        """Stack the state of the members."""
        self.memory = stack([member.memory for member in self.members])
        names = self.members[0].networks
        self.networks = {name: StackedNetwork([m.networks[name] for m in self.members]) for name in names}

    def save(self, place: int) -> None:
        """Copy the state of the member at this place back to it."""
        for network in self.networks.values():
            assert isinstance(network, StackedNetwork)
            network.save([place])
        self.members[place].memory = take_member(self.memory, place)

    def order(self, address: str, round: int, count: int) -> Tensor:
        """Return all `count` indices in the random order of an address and a round, `(members, count)`."""

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("server-batch", m.roster.seed, address, r) for r in rounds for m in self.members]
            return shuffle_block(count, keys).reshape(len(rounds), len(self.members), -1)

        return self._draws.get(("server-batch", address, count), compute, round)

    def seed_torch(self, round: int) -> None:
        """Seed torch's own generator by address, with the first experiment's seed."""
        self._draws.seed(lambda r: torch_seed("torch-server", self.roster.seed, "", r), self.device, round)
