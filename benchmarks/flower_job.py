"""The Flower side of `flower.py`, in its own environment: FedAvg in Flower's simulation.

    python flower_job.py ROUNDS CPUS_OF_A_CLIENT

Four clients, LeNet-5, one SGD step on a batch of 32 per round, no evaluation. The last line of the output is the median
of the seconds between rounds.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

CLIENTS, BATCH, SAMPLES = 4, 32, 750
ROUNDS, CPUS = int(sys.argv[1]), float(sys.argv[2])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


client_app = ClientApp()
kept: dict[str, object] = {}
"""Objects that a worker process keeps between rounds."""


@client_app.train()
def train(message: Message, context: Context) -> Message:
    if not kept:
        torch.set_num_threads(1)
        kept.update(model=lenet(), inputs=torch.randn(SAMPLES, 1, 28, 28), labels=torch.randint(10, (SAMPLES,)))
    model, inputs, labels = kept["model"], kept["inputs"], kept["labels"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randint(SAMPLES, (BATCH,))
    nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that records the time after each round's average."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.times: list[float] = []

    def aggregate_train(self, *arguments, **options):
        result = super().aggregate_train(*arguments, **options)
        self.times.append(time.perf_counter())
        return result


server_app = ServerApp()
strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy.start(grid=grid, initial_arrays=ArrayRecord(lenet().state_dict()), num_rounds=ROUNDS)


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": CPUS, "num_gpus": 0.0}},
    )
    rounds = [two - one for one, two in zip(strategy.times, strategy.times[1:], strict=False)]
    print(statistics.median(rounds[len(rounds) // 5 :]))
