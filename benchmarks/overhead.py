"""Measure the time that this project adds to a round, against a bare PyTorch loop with the same work.

    python benchmarks/overhead.py [--blocks 20] [--kernels off]
    python benchmarks/overhead.py --suite pacs --root FOLDER [--rounds 300] [--models heterogeneous] [--size 112]

Both sides train four LeNets on Rotated MNIST shapes on one core, one after another, and evaluate every 50 rounds. This
project runs like `fedh2l run`, with a run directory and the progress display. Blocks of 50 rounds are interleaved in
one process. The result is the median of the ratios, which is robust to a noisy machine. Exits with 1 above 1.05.

With `--suite pacs`, it trains the paper's federation on the images of PACS. It measures the overhead: the share of time
outside forward passes with their losses, backward passes and optimiser steps. It counts from the end of the first round
to the last evaluation. Exits with 1 above 10 %. The time of the first round, which loads a GPU's libraries, is printed
separately, together with the time after the last round for testing and saving models.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bare import BareLoop
from rich.console import Console

from fedh2l.experiment.config import load_config
from fedh2l.experiment.presets import KINDS, PRESETS
from fedh2l.experiment.toml import to_toml
from fedh2l.hardware import CORES
from fedh2l.methods import fedh2l
from fedh2l.report.progress import LiveProgress
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Trainer
from fedh2l.training.network import Network

BLOCK = 50
LIMIT = 1.05
ELSE = 0.10


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Stopwatch(Callback):
    """Measures the time inside some functions, from the end of the first round to the last evaluation."""

    def __init__(self, **watched: list[tuple[object, str]]) -> None:
        self.seconds = dict.fromkeys(watched, 0.0)
        self.parts: dict[str, float] = {}
        self.began = self.ended = 0.0
        for part, functions in watched.items():
            for owner, name in functions:
                setattr(owner, name, self._watched(part, getattr(owner, name)))

    def on_round(self, round: int) -> None:
        if round == 1:
            self.seconds = dict.fromkeys(self.seconds, 0.0)
            self.began = now()

    def on_evaluation(self, metrics: dict) -> None:
        self.parts, self.ended = dict(self.seconds), time.perf_counter()

    def _watched(self, part, function):
        def watched(*arguments, **how):
            began = now()
            try:
                return function(*arguments, **how)
            finally:
                self.seconds[part] += now() - began

        return watched


def now() -> float:
    """Return the time after all work on the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def on_images(given: argparse.Namespace) -> int:
    os.environ[CORES] = "1"  # nodes run one after another, so times add up
    settings = [f"data.root={given.root}", f"data.size={given.size}", f"run.rounds={given.rounds}", "run.engine=local"]
    config, _ = load_config(None, [*PRESETS[f"pacs-{given.models}"], *settings])
    with tempfile.TemporaryDirectory() as folder:
        watch = Stopwatch(
            forward=[(Network, "_said"), (fedh2l, "cross_entropy"), (fedh2l, "mutual_losses")],
            backward=[(Network, "gradient")],
            optimiser=[(Network, "_update")],
        )
        directory = RunDirectory.claim(f"{folder}/run", to_toml(config))
        whole = timed(Trainer(config.experiment(), directory, [watch]).run)
        left = sorted(path.name for path in RunDirectory(Path(folder) / "run").path.iterdir())
    training = watch.ended - watch.began
    share = 1 - sum(watch.parts.values()) / training
    print(
        f"{given.rounds - 1} rounds and their evaluations on {config.run.device}, {given.models} models, "
        f"{config.data.note}: {training:.1f} s"
    )
    print(", ".join(f"{name} {100 * seconds / training:.1f} %" for name, seconds in watch.parts.items()))
    print(f"first round, tests at the end and saved models: {whole - training:.1f} s; kept: {', '.join(left)}")
    print(f"everything else {100 * share:.1f} %, at most {100 * ELSE:.0f} % wanted")
    return int(share > ELSE or "checkpoints" in left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 50 rounds of each side")
    parser.add_argument("--kernels", choices=("auto", "off"), default="auto", help="run.kernels")
    parser.add_argument("--suite", choices=("pacs",), help="how a training on images spends its time, instead")
    parser.add_argument("--root", help="of --suite: the folder of the images")
    parser.add_argument("--rounds", type=int, default=300, help="of --suite")
    parser.add_argument("--models", choices=KINDS, default="heterogeneous", help="of --suite")
    parser.add_argument("--size", type=int, default=112, help="of --suite: width and height of images")
    given = parser.parse_args()
    if given.suite:
        if not given.root:
            parser.error("--suite needs --root")
        return on_images(given)
    blocks = max(10, given.blocks)
    torch.set_num_threads(1)
    os.environ[CORES] = "1"
    config, _ = load_config(
        None, [f"run.rounds={BLOCK * (blocks + 2)}", "run.device=cpu", f"run.kernels={given.kernels}"]
    )
    bare = BareLoop()
    with tempfile.TemporaryDirectory() as folder:
        progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True))
        trainer = Trainer(config.experiment(), RunDirectory.claim(f"{folder}/run", to_toml(config)), [progress])
        progress.on_start(list(trainer.experiment.roster.names), 1, config.run.rounds)
        pairs = []
        for block in range(blocks + 1):
            sides = {"ours": trainer.advance, "bare": lambda: (bare.rounds(BLOCK), bare.evaluate())}
            order = list(sides) if block % 2 else list(reversed(sides))  # the order alternates
            pairs.append({side: timed(sides[side]) for side in order})
        progress.close()
    pairs = pairs[1:]  # the first block is a warm-up
    ours, theirs = (statistics.median(pair[side] for pair in pairs) / BLOCK * 1e3 for side in ("ours", "bare"))
    ratio = statistics.median(pair["ours"] / pair["bare"] for pair in pairs)
    print(f"fedh2l {ours:.2f} ms a round, bare loop {theirs:.2f} ms (medians of {len(pairs)} interleaved blocks)")
    print(f"ratio {ratio:.3f}, at most {LIMIT} wanted")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
