"""Measure what compiled kernels gain on one core of a CPU, against PyTorch alone.

    python benchmarks/kernels.py [--repeats 60] [--blocks 8]

Both sides take turns in one process. Times are medians of the processor's time, so other work on the machine counts
little. The ratio is the median of the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fedh2l.experiment.config import load_config
from fedh2l.hardware import CORES
from fedh2l.models.lenet import LeNet, LeNetWide
from fedh2l.runs.trainer import Trainer
from fedh2l.training.compute import Compute
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings
from fedh2l.training.projection import project

BLOCK = 10
Work = Callable[[bool], object]


def compare(name: str, work: Work, repeats: int, per: int = 1) -> None:
    """Print the time of PyTorch alone, the time with kernels, and their ratio."""
    pairs = []
    for repeat in range(repeats + 1):
        times = {}
        for kernels in (True, False) if repeat % 2 else (False, True):
            began = time.process_time()
            work(kernels)
            times[kernels] = (time.process_time() - began) / per
        pairs.append(times)
    pairs = pairs[1:]  # the first repeat is a warm-up
    alone, compiled = (1e3 * statistics.median(pair[kernels] for pair in pairs) for kernels in (False, True))
    ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
    print(f"| {name} | {alone:.3g} ms | {compiled:.3g} ms | {ratio:.2f} |", flush=True)


def layers(model: type, rows: int) -> Work:
    torch.manual_seed(0)
    network, x, y = Network(model(), OptimizerSettings()), torch.rand(rows, 1, 28, 28), torch.randint(10, (rows,))

    def work(kernels: bool) -> None:
        network.compute = Compute(kernels=kernels)
        network.gradient(F.cross_entropy(network.logits(x), y))

    return work


def step(size: int) -> Work:
    settings, vector, gradient = OptimizerSettings(), torch.randn(size), torch.randn(size)
    state = settings.initial_state(vector)
    return lambda kernels: settings.step(vector, gradient, state, 1e-3, compiled=kernels)


def projection(size: int) -> Work:
    a, b = torch.randn(size), torch.randn(size)
    return lambda kernels: project(a, b - a, compiled=kernels)


def rounds(*changes: str) -> Work:
    fixed = ["run.rounds=1000000", f"run.eval_every={BLOCK}", "run.device=cpu", "run.engine=local"]
    trainers = {
        kernels: Trainer(load_config(None, [*fixed, *changes, f"run.kernels={name}"])[0].experiment())
        for kernels, name in ((True, "auto"), (False, "off"))
    }
    return lambda kernels: trainers[kernels].advance()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="repeats of each operation")
    parser.add_argument("--blocks", type=int, default=8, help=f"blocks of {BLOCK} rounds of each method")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ[CORES] = "1"
    print("| operation | PyTorch alone | kernels | ratio |\n| --- | --- | --- | --- |")
    for name, model in (("LeNet-5", LeNet), ("wide LeNet", LeNetWide)):
        for rows in (32, 96):
            compare(f"{name}, forward and backward, {rows} digits", layers(model, rows), given.repeats)
    compare("AMSGrad step of a LeNet-5", step(61_706), given.repeats)
    compare("projection for a LeNet-5", projection(61_706), given.repeats)
    for method in ("fedh2l", "fedh2l-plus"):
        compare(f"round of {method}, four LeNet-5", rounds(f"method.name={method}"), given.blocks, BLOCK)


if __name__ == "__main__":
    main()
