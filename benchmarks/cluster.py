"""Measure the time that Ray adds to a round: four nodes in actors of this machine against one process.

    python benchmarks/cluster.py [--blocks 12]

LeNet-5 × 4 on Rotated MNIST, batch 32, with evaluation every 50 rounds. The two engines take turns in blocks of 50
rounds. One process drives both. Exits with 1 if Ray adds more than 25 ms per round (median).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from fedh2l.experiment.config import load_config
from fedh2l.hardware import available_cores
from fedh2l.runs.trainer import Trainer

BLOCK = 50
MORE = 25.0


def trainer(engine: str) -> Trainer:
    changes = ["run.rounds=1000000", "run.checkpoint_every=0", f"run.engine={engine}"]
    if engine == "local":
        changes.append("run.device=cpu")
    made = Trainer(load_config(None, changes)[0].experiment())
    made.advance()  # starts threads and processes
    return made


def timed(side: Trainer) -> float:
    began = time.perf_counter()
    side.advance()
    return (time.perf_counter() - began) / BLOCK * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of 50 rounds of each side")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    here, there = trainer("local"), trainer("ray")
    pairs = [(timed(here), timed(there)) for _ in range(blocks)]
    there.engine.close()
    more = statistics.median(two - one for one, two in pairs)
    one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{available_cores()} cores, torch {torch.__version__}")
    print(f"local {one:.1f} ms a round, ray {two:.1f} ms: {more:+.1f} ms, at most {MORE:+.0f} wanted")
    return int(more > MORE)


if __name__ == "__main__":
    sys.exit(main())
