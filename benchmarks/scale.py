"""Measure FedH2L with many nodes on one GPU: time, memory and bytes per round, and accuracy after a number of rounds.

    python benchmarks/scale.py [--nodes 4,16,64,128,256,512,1024] [--peers 0,1,2,4,8] [--budget 1000] [--json FILE]

Every node has LeNet-5, its own angle, and 200 private and 40 public digits. They are drawn with replacement by the
node's own class shares (Dirichlet, 1). A node has all others as teachers (`peers_per_round = 0`, up to 64 nodes), or k
that are drawn in each round. Accuracy is on 1,000 digits that no node has, at the angles of all nodes.

Exits with 1 in one of these cases, if measured:

- time grows faster than (N·k)^1.1 from 128 nodes on;
- 1,024 nodes with k = 4 take more than 250 ms per round or more than 40 GB;
- k = 4 loses more than 1.5 points against all teachers at 64 nodes.

With `--device cpu` there are no limits. Without a GPU and without this option it does nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedh2l
from fedh2l.data.datasets.mnist import embedded_digits
from fedh2l.data.datasets.rotated_mnist import rotate_clockwise
from fedh2l.data.domain import Samples
from fedh2l.engines.batched.engine import BatchedEngine
from fedh2l.engines.choice import engines_for
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.training.optimizers import OptimizerSettings

HELD_OUT = 100
"""Digits per class that are held out for testing."""
PRIVATE, PUBLIC = 200, 40
WARM, TIMED = 2, 5
"""Warm-up and timed blocks of 10 rounds."""
EXPONENT, MILLISECONDS, GIGABYTES, POINTS = 1.1, 250.0, 40.0, 1.5


def digits() -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return all images, their labels, and the indices of each class."""
    images, labels = embedded_digits()
    places = [np.flatnonzero(labels == digit).tolist() for digit in range(10)]
    return torch.from_numpy(images).float().div(255).unsqueeze(1), torch.from_numpy(labels), places


def angle(place: int, count: int) -> float:
    return 180.0 * place / count


def make_nodes(count: int, model: str) -> list[fedh2l.Node]:
    images, labels, places = digits()
    draw = np.random.default_rng(0)
    nodes = []
    for node in range(count):
        shares = draw.dirichlet(np.ones(10))
        classes = draw.choice(10, PRIVATE + PUBLIC + 2, p=shares)
        chosen = [places[c][draw.integers(HELD_OUT, len(places[c]))] for c in classes]
        turned = Samples(rotate_clockwise(images[chosen], angle(node, count)), labels[chosen])
        parts = torch.split(torch.arange(len(chosen)), [PRIVATE, PUBLIC, 1, 1])
        private, public, validation, test = (turned.take(part) for part in parts)
        name = f"n{node}"
        domain = fedh2l.Domain(name, tuple("0123456789"), private, public, validation, test)
        nodes.append(fedh2l.Node(name, model, domain))
    return nodes


def test_set(count: int) -> Samples:
    images, labels, places = digits()
    chosen = [place for of_class in places for place in of_class[:HELD_OUT]]
    turns = np.random.default_rng(1).integers(count, size=len(chosen))
    turned = [rotate_clockwise(images[[p]], angle(int(t), count)) for p, t in zip(chosen, turns, strict=True)]
    return Samples(torch.cat(turned), labels[chosen])


class Run:
    """A federation in which each node has k teachers per round. 0 means all others."""

    def __init__(self, nodes: list[fedh2l.Node], k: int, device: str, seed: int = 0) -> None:
        settings = RunSettings(rounds=1_000_000, seed=seed, device=device, engine="batched").resolved()
        method = fedh2l.FedH2L(peers_per_round=k)
        self.count, self.k, self.device = len(nodes), k, device
        self.engine = engines_for([Experiment(nodes, method, settings, OptimizerSettings())])[0]
        assert isinstance(self.engine, BatchedEngine)
        self.round = 0

    def advance(self, rounds: int) -> None:
        self.engine.advance(self.round + 1, self.round + rounds, lambda _: True)
        self.round += rounds
        self.engine.verify()
        self.engine.series()

    def timed(self) -> float:
        """Return milliseconds per round, the median of a few blocks."""
        times = []
        for _ in range(WARM + TIMED):
            began = time.perf_counter()
            self.advance(10)
            if self.device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / 10 * 1e3)
        return float(np.median(times[WARM:]))

    def memory(self) -> float:
        """Return the peak memory in GB. On a CPU, it is the peak of the whole process."""
        if self.device == "cuda":
            return torch.cuda.max_memory_reserved() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

    def accuracy(self, tests: Samples) -> float:
        """Return the mean accuracy of all nodes in percent."""
        self.engine.stacked.save(0)
        right = self.engine.correct([tests.to(torch.device(self.device), torch.float32)])
        return 100 * sum(counts[0] for counts in right.values()) / (self.count * len(tests))


def clear(device: str) -> None:
    gc.collect()  # cycles keep the CUDA graphs of the last run alive
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def slope(points: list[tuple[float, float]]) -> float:
    """Return the exponent of a power law fitted to points."""
    x, y = (np.log([point[i] for point in points]) for i in (0, 1))
    return float(np.polyfit(x, y, 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="4,16,64,128,256,512,1024")
    parser.add_argument("--peers", default="0,1,2,4,8")
    parser.add_argument("--budget", type=int, default=1000, help="rounds after which accuracy is taken")
    parser.add_argument("--accuracy", default="64", help="for which numbers of nodes accuracy is taken")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    logging.getLogger("fedh2l").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    peers = [int(k) for k in options.peers.split(",")]
    accurate = {int(n) for n in options.accuracy.split(",") if n}
    rows = []
    print(f"{'nodes':>6} {'k':>4} {'ms/round':>9} {'GB':>6} {'kB/round':>9} {'accuracy':>9} {'start s':>8}")
    for count in (int(n) for n in options.nodes.split(",")):
        nodes, tests = make_nodes(count, options.model), test_set(count)
        for k in peers:
            if k >= count or (k == 0 and count > 64):
                continue
            clear(options.device)
            began = time.perf_counter()
            run = Run(nodes, k, options.device)
            start = time.perf_counter() - began
            row = {"nodes": count, "k": k, "ms": run.timed(), "GB": run.memory(), "start": start}
            row["bytes"] = run.engine.ledger.total / run.round
            if count in accurate:
                run.advance(options.budget - run.round)
                row["accuracy"] = run.accuracy(tests)
            run.engine.close()
            rows.append(row)
            shown = f"{row['accuracy']:9.2f}" if "accuracy" in row else f"{'':9}"
            print(
                f"{count:6} {k or 'all':>4} {row['ms']:9.2f} {row['GB']:6.2f} {row['bytes'] / 1e3:9.1f} {shown} "
                f"{start:8.1f}",
                flush=True,
            )
            del run
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": rows}, indent=1))
    return judge(rows) if options.device == "cuda" else 0


def judge(rows: list[dict]) -> int:
    """Print each measurement with its limit. Return 1 if one exceeds it."""
    short = False

    def held(fine: bool, text: str) -> None:
        nonlocal short
        short = short or not fine
        print(("holds: " if fine else "FALLS SHORT: ") + text)

    large = [(row["nodes"] * row["k"], row["ms"]) for row in rows if row["nodes"] >= 128 and row["k"]]
    if len({work for work, _ in large}) > 2:
        exponent = slope(large)
        held(exponent <= EXPONENT, f"time grows as (N·k)^{exponent:.2f} from 128 nodes on, at most {EXPONENT} wanted")
    for k in sorted({row["k"] for row in rows if row["k"]}):
        points = [(row["nodes"], row["ms"]) for row in rows if row["nodes"] >= 128 and row["k"] == k]
        if len(points) > 2:
            exponent = slope(points)
            held(exponent <= EXPONENT, f"k = {k}: as N^{exponent:.2f}, at most {EXPONENT} wanted")
    for row in rows:
        if row["nodes"] == 1024 and row["k"] == 4:
            held(
                row["ms"] <= MILLISECONDS, f"1,024 nodes, k = 4: {row['ms']:.0f} ms, at most {MILLISECONDS:.0f} wanted"
            )
            held(row["GB"] <= GIGABYTES, f"1,024 nodes, k = 4: {row['GB']:.1f} GB, at most {GIGABYTES:.0f} wanted")
    accuracy = {row["k"]: row["accuracy"] for row in rows if row["nodes"] == 64 and "accuracy" in row}
    if {0, 4} <= accuracy.keys():
        lost = accuracy[0] - accuracy[4]
        held(lost <= POINTS, f"64 nodes, k = 4: {lost:+.2f} points lost to hearing all, at most {POINTS} wanted")
    if not math.isfinite(sum(row["ms"] for row in rows)):
        held(False, "a time is not a number")
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
