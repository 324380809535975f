"""The server of methods that have one, with its state between exchanges."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedh2l.hardware import uploaded
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.sampling import shuffled, torch_seed
from fedh2l.training.compute import AS_USUAL, Compute
from fedh2l.training.learner import seed_generators
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings
from fedh2l.training.state import flattened, grouped


class Server:
    """Networks and tensors that a method keeps at a server. The server has no data but the messages it received."""

    def __init__(
        self, roster: Roster, optimizer: OptimizerSettings, device: torch.device, compute: Compute = AS_USUAL
    ) -> None:
        self.roster = roster
        self.optimizer = optimizer
        self.device = device
        self.compute = compute
        self.networks: dict[str, Network] = {}
        self.memory: dict[str, Tensor] = {}

    def further(self, name: str, module: nn.Module) -> Network:
        """Add a network that trains a copy of `module`."""
        self.networks[name] = Network(copy.deepcopy(module).to(self.device), self.optimizer, compute=self.compute)
        return self.networks[name]

    def order(self, address: str, round: int, count: int) -> Tensor:
        """Return all `count` indices in the random order of an address and a round."""
        drawn = shuffled(range(count), "server-batch", self.roster.seed, address, round)
        return uploaded(torch.tensor(drawn), self.device)

    def seed_torch(self, round: int) -> None:
        """Seed torch's own generator by address, for the server's networks."""
        seed_generators(torch_seed("torch-server", self.roster.seed, "", round), self.device)

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next exchange depends on, for a checkpoint."""
        networks = {f"network-{name}": network.state() for name, network in self.networks.items()}
        return flattened({"memory": {name: value.clone() for name, value in self.memory.items()}, **networks})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `state`."""
        groups = grouped(state, self.device)
        self.memory = groups.get("memory", {})
        for name, network in self.networks.items():
            network.restore(groups[f"network-{name}"])
