"""Measure the gain from parallel nodes: this project's time per round over that of a plain loop.

    python benchmarks/cores.py [--blocks 8]

The plain loop (`bare.py`) trains four LeNets one after another in PyTorch. It is timed with 1, 2, 4, … threads per
operation, up to the number of cores, and the fastest is used.

This project trains the nodes in parallel. It is timed with one thread per node, with all cores divided among the nodes,
and with half of them, since a reported core is often half of a physical one (`run.threads`). The fastest is used.

Blocks of 25 rounds are interleaved. Neither side saves anything. Exits with 1 above 1.15 on fewer than 16 cores, or
above 0.5 on 16 or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from bare import BareLoop

from fedh2l.experiment.config import load_config
from fedh2l.hardware import available_cores
from fedh2l.runs.trainer import Trainer

BLOCK, NODES = 25, 4


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / BLOCK * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="blocks of 25 rounds of each side")
    blocks = parser.parse_args().blocks
    cores = available_cores()
    threads = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    trainers = {}
    for each in sorted({1, max(1, cores // NODES // 2), max(1, cores // NODES)}):
        changes = ["run.device=cpu", "run.rounds=1000000", f"run.eval_every={BLOCK}", f"run.threads={each}"]
        changes.append("run.checkpoint_every=0")
        trainers[f"ours, {each} each"] = (each, Trainer(load_config(None, changes)[0].experiment()))
    bare = BareLoop()
    times: dict[str, list[float]] = {}

    def ours(each: int, trainer: Trainer) -> None:
        torch.set_num_threads(each)
        trainer.advance()

    def plain(count: int) -> None:
        torch.set_num_threads(count)
        bare.rounds(BLOCK)
        bare.evaluate()

    for block in range(blocks + 1):
        took = {name: timed(lambda m=made: ours(*m)) for name, made in trainers.items()}
        took |= {f"{count} threads": timed(lambda c=count: plain(c)) for count in threads}
        if block:  # the first block is a warm-up
            for name, value in took.items():
                times.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours_best, best = (min((n for n in medians if (n in trainers) is mine), key=medians.get) for mine in (True, False))
    ratio = statistics.median(a / b for a, b in zip(times[ours_best], times[best], strict=True))
    limit = 0.5 if cores >= 16 else 1.15
    print(", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()), f"on {cores} cores")
    print(f"{ours_best}, over the plain loop at its best ({best}): {ratio:.3f}, at most {limit} wanted")
    for _, trainer in trainers.values():
        trainer.engine.close()
    return int(ratio > limit)


if __name__ == "__main__":
    sys.exit(main())
