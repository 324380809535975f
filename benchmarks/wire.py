"""Measure network costs: bytes per message on the socket, with TLS, and the time that peers add to a round.

    python benchmarks/wire.py [--blocks 7] [--rounds 400]

Four peers on loopback, each a process with its own certificate, train logistic regression. Its computation is short, so
the network dominates. Blocks of them are interleaved with the same training in one process. The time of a round is the
median over the intervals between two evaluations, without the first. Bytes are counted in other blocks, on established
connections, by relays in both directions. Exits with 1 above either limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from relay import Relay, reroute

from fedh2l.experiment.config import load_config
from fedh2l.experiment.toml import to_toml
from fedh2l.peer.rehearsal import Rehearsal
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Trainer

EVERY = 50
MILLISECONDS = 15.0
FACTOR, MORE = 1.3, 200


def settings(rounds: int):
    linear = [f"nodes.{place}.{change}" for place in range(4) for change in ("model=mlp", "model_args={hidden=[]}")]
    fixed = [f"run.rounds={rounds}", f"run.eval_every={EVERY}", "run.threads=1", "run.device=cpu", "run.engine=local"]
    return load_config(None, [*linear, *fixed, "run.checkpoint_every=0"])[0]


def stretches(lines: list[dict]) -> list[float]:
    """Return the milliseconds per round between evaluations, without the first interval."""
    return [
        1e3 * (after["seconds"] - before["seconds"]) / (after["round"] - before["round"])
        for before, after in pairwise(lines)
    ]


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def together(config, folder: Path) -> float:
    """Train in one process. Return the milliseconds per round."""
    directory = RunDirectory.claim(folder / "run", to_toml(config))
    Trainer(config.experiment(), directory).run()
    return statistics.median(stretches(metrics(directory.path)))


def apart(config, folder: Path) -> float:
    """Train with one process per node. Return the milliseconds per round."""
    made = Rehearsal(config, config.experiment(), folder)
    made.run()
    return statistics.median(t for name in made.names for t in stretches(metrics(folder / name / "run")))


def counted(config, folder: Path) -> tuple[float, int]:
    """Return the bytes on the socket per message, and the payload of one message."""
    made, relay = Rehearsal(config, config.experiment(), folder), Relay()
    links = list(reroute(made, relay).values())
    processes = [made.start(name) for name in made.names]

    def reached(round: int) -> int:
        """Return the bytes once all peers have done this round."""
        while any(_round(folder / name / "run") < round for name in made.names):
            if any(process.poll() not in (None, 0) for process in processes):
                raise RuntimeError("a peer failed")
            time.sleep(0.002)
        return sum(link.bytes for link in links)

    first, last = EVERY, config.run.rounds - EVERY
    try:
        passed = -reached(first) + reached(last)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        relay.close()
    rows = min(config.run.batch_size, *(end - start for start, end in made.bundle.ranges.values()))
    return passed / (len(links) * (last - first)), 4 * rows * len(made.bundle.classes) + 4


def _round(path: Path) -> int:
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["round"] if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    config = settings(given.rounds)
    times: dict[str, list[float]] = {"together": [], "apart": []}
    for block in range(given.blocks):
        order = [together, apart] if block % 2 else [apart, together]
        for side in order:
            with tempfile.TemporaryDirectory() as folder:
                times[side.__name__].append(side(config, Path(folder)))
    one, many = (statistics.median(times[side]) for side in ("together", "apart"))
    added = statistics.median(b - a for a, b in zip(times["together"], times["apart"], strict=True))
    print(f"one process {one:.2f} ms a round, four peers {many:.2f} ms; {added:.2f} ms more (medians of "
          f"{given.blocks} interleaved blocks), at most {MILLISECONDS:g} wanted")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        passed, payload = counted(config, Path(folder))
    most = FACTOR * payload + MORE
    print(f"{passed:.0f} bytes on the socket for a payload of {payload}, at most {most:.0f} wanted")
    return int(added > MILLISECONDS or passed > most)


if __name__ == "__main__":
    sys.exit(main())
