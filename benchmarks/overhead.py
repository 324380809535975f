"""How much time this project adds to a round: its time over that of a bare PyTorch loop doing the same work.

    python benchmarks/overhead.py [--blocks 20]

Both sides train four LeNets on Rotated MNIST shapes on one core, one after the other, evaluating every 50 rounds; this
project runs as `fedh2l run` does, with a run directory and the progress display. Blocks of 50 rounds of the two are
interleaved in one process, and the median of the ratios is what counts, so a noisy machine does not decide. Exits
with 1 above 1.05.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time

import torch
from bare import BareLoop
from rich.console import Console

from fedh2l.config import load_config
from fedh2l.reporting.progress import LiveProgress
from fedh2l.rundir import RunDirectory
from fedh2l.settings import CORES
from fedh2l.toml import to_toml
from fedh2l.trainer import Trainer

BLOCK = 50
LIMIT = 1.05


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 50 rounds of each side")
    blocks = max(10, parser.parse_args().blocks)
    torch.set_num_threads(1)
    os.environ[CORES] = "1"
    config, _ = load_config(None, [f"run.rounds={BLOCK * (blocks + 2)}", "run.device=cpu"])
    bare = BareLoop()
    with tempfile.TemporaryDirectory() as folder:
        progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True))
        trainer = Trainer(config.federation(), RunDirectory.claim(f"{folder}/run", to_toml(config)), [progress])
        progress.on_start(list(trainer.federation.roster.names), 1, config.run.rounds)
        pairs = []
        for block in range(blocks + 1):
            sides = {"ours": trainer.advance, "bare": lambda: (bare.rounds(BLOCK), bare.evaluate())}
            order = list(sides) if block % 2 else list(reversed(sides))  # neither side is always first
            pairs.append({side: timed(sides[side]) for side in order})
        progress.close()
    pairs = pairs[1:]  # the first is a warm-up
    ours, theirs = (statistics.median(pair[side] for pair in pairs) / BLOCK * 1e3 for side in ("ours", "bare"))
    ratio = statistics.median(pair["ours"] / pair["bare"] for pair in pairs)
    print(f"fedh2l {ours:.2f} ms a round, bare loop {theirs:.2f} ms (medians of {len(pairs)} interleaved blocks)")
    print(f"ratio {ratio:.3f}, at most {LIMIT} wanted")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
