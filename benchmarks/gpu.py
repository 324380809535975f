"""Measure milliseconds per round on one GPU, with all nodes as one computation, against a plain loop over nodes.

    python benchmarks/gpu.py [--blocks 20]

LeNet-5 × 4 on Rotated MNIST, batch 32, with evaluation every 50 rounds. One federation is timed, and eight (seeds) at
once. Exits with 1 if one takes more than 1.5 ms, if eight take more than 5 ms, or if one is less than 20 times as fast
as the plain loop of the same run. The limits are for an H200. Without a GPU it does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from bare import BareLoop

from fedh2l.engines.choice import engines_for
from fedh2l.experiment.config import load_config
from fedh2l.runs.loop import advance_together
from fedh2l.runs.trainer import Trainer

BLOCK = 50
ONE, EIGHT, FASTER = 1.5, 5.0, 20.0


def trainers(federations: int) -> list[Trainer]:
    made = []
    for seed in range(federations):
        changes = ["run.device=cuda", "run.rounds=1000000", "run.checkpoint_every=0", f"run.seed={seed}"]
        made.append(load_config(None, changes)[0].experiment())
    return [Trainer(f, engine=engine) for f, engine in zip(made, engines_for(made), strict=True)]


def timed(work) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / BLOCK * 1e3


def median(work, blocks: int) -> float:
    for _ in range(2):  # the first rounds record CUDA graphs
        work()
    return statistics.median(timed(work) for _ in range(blocks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 50 rounds of each side")
    blocks = parser.parse_args().blocks
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return 0
    torch.set_num_threads(1)
    plain = BareLoop("cuda")
    slow = median(lambda: (plain.rounds(BLOCK), plain.evaluate()), max(2, blocks // 10))
    times = {}
    for federations in (1, 8):
        group = trainers(federations)
        times[federations] = median(lambda group=group: advance_together(group), blocks)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"one federation {times[1]:.2f} ms a round, at most {ONE} wanted")
    print(f"eight federations {times[8]:.2f} ms a round, at most {EIGHT} wanted")
    print(f"plain loop {slow:.1f} ms, {slow / times[1]:.1f} times as long; at least {FASTER:.0f} wanted")
    return int(times[1] > ONE or times[8] > EIGHT or slow / times[1] < FASTER)


if __name__ == "__main__":
    sys.exit(main())
