"""Compare the time of a FedAvg round to Flower: LeNet-5, four clients, one step on a batch of 32 per round.

    python benchmarks/flower.py [--rounds 100] [--environment .flower]

The first run installs Flower in its own virtual environment. Flower is timed with one CPU per client and with half a
CPU, and the faster one is used. Both sides take turns and do not evaluate. Only the time between two rounds is
measured, so starting Ray and processes does not count. Exits with 1 if this project is not at least 8 times as fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import torch

from fedh2l.experiment.config import load_config
from fedh2l.hardware import available_cores
from fedh2l.runs.trainer import Trainer

WANTED = 8.0
JOB = Path(__file__).with_name("flower_job.py")


def environment(folder: Path) -> Path:
    """Return the interpreter of Flower's environment. Install it if needed."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing Flower into {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True)
        version = torch.__version__.partition("+")[0]
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={version}", "flwr[simulation]"], check=True)
    return python


def theirs(python: Path, rounds: int, cpus: float) -> float:
    settings = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([python, JOB, str(rounds), str(cpus)], env=settings, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"Flower failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1]) * 1e3


def ours(trainer: Trainer, rounds: int) -> float:
    began = time.perf_counter()
    reached = trainer.engine.advance(trainer.round + 1, trainer.round + rounds, lambda _: True)
    seconds = time.perf_counter() - began
    trainer.engine.verify()
    trainer.engine.series()
    trainer.round = reached
    return seconds / rounds * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of Flower a run; of ours, ten times as many")
    parser.add_argument("--environment", type=Path, default=Path(__file__).parent / ".flower")
    options = parser.parse_args()
    python = environment(options.environment.absolute())
    torch.set_num_threads(1)
    changes = ["run.device=cpu", "run.engine=local", "run.rounds=1000000", "optimizer.name=sgd", "method.interval=1"]
    trainer = Trainer(load_config(None, changes, "fedavg")[0].experiment())
    ours(trainer, 20)
    here, there = [], []
    for cpus in (1.0, 0.5, 1.0):
        here.append(ours(trainer, 10 * options.rounds))
        there.append(theirs(python, options.rounds, cpus))
    mine, flower = statistics.median(here), min(there)
    print(f"{available_cores()} cores, torch {torch.__version__}")
    print(
        f"ours {mine:.1f} ms a round, Flower {flower:.1f} ms: {flower / mine:.1f} times; at least {WANTED:.0f} wanted"
    )
    return int(flower / mine < WANTED)


if __name__ == "__main__":
    sys.exit(main())
