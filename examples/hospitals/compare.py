"""Compare FedH2L with training alone, with and without all public records, over many splits of the patients.

    python examples/hospitals/compare.py [--root heart-disease] [--splits 20]

All methods start from the same weights. Accuracy is measured on a hospital's own test patients, and on those of the
other hospitals. AUC, the area under the ROC curve, is measured on the latter. The table has means over hospitals and
splits, and 95 % intervals of the paired differences.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import fedh2l
from fedh2l.bench.statistics import Difference
from fedh2l.experiment.config import load_config
from fedh2l.hardware import CORES, available_cores

HERE = Path(__file__).parent
MEASURES = ("own patients, accuracy", "others' patients, accuracy", "others' patients, AUC")
METHODS = {"independent": "alone", "aggregation": "public data", "fedh2l": "FedH2L"}


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of pairs where the ill patient has the higher score. A tie counts half."""
    ill, healthy = scores[labels == 1], scores[labels == 0]
    above = (ill[:, None] > healthy).double() + 0.5 * (ill[:, None] == healthy).double()
    return 100 * float(above.mean())


def train(method: str, seed: int, root: str, rounds: int | None) -> list[float]:
    changes = [f"data.root={root}", *([f"run.rounds={rounds}"] if rounds else [])]
    config, _ = load_config(HERE / "hospitals.toml", changes, method, {"seed": seed, "device": "cpu"})
    domains = {domain.name: domain for domain in config.data.domains(seed)}
    nodes = [fedh2l.Node(n.name, n.model, domains[n.name], n.model_args) for n in config.nodes]
    with tempfile.TemporaryDirectory() as folder:
        run = {"batch_size": config.run.batch_size, "eval_every": config.run.eval_every, "device": "cpu"}
        result = fedh2l.train(
            nodes, config.method, config.run.rounds, seed, optimizer=config.optimizer, out=f"{folder}/run", **run
        )
        areas = []
        for node in nodes:
            others = [domains[name].test for name in domains if name != node.name]
            inputs = torch.cat([test.inputs for test in others])
            labels = torch.cat([test.labels for test in others])
            with torch.no_grad():
                logits = fedh2l.load(f"{folder}/run", node.name)(inputs)
            areas.append(auc(logits[:, 1] - logits[:, 0], labels))
    return [result.average["WDP"], result.average["CDP"], statistics.fmean(areas)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="heart-disease", help="Folder with the four files.")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    cores = available_cores()
    os.environ[CORES] = "1"  # one core per run, as many runs as cores
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        runs = {m: [pool.submit(train, m, s, given.root, given.rounds) for s in range(given.splits)] for m in METHODS}
        found = {method: [run.result() for run in each] for method, each in runs.items()}
    print(f"{given.splits} splits; mean over hospitals and splits, in %")
    print(f"{'':28}" + "".join(f"{title:>13}" for title in METHODS.values()))
    for place, measure in enumerate(MEASURES):
        values = {method: [run[place] for run in each] for method, each in found.items()}
        print(f"{measure:28}" + "".join(f"{statistics.fmean(each):13.1f}" for each in values.values()))
        for other in ("independent", "aggregation"):
            paired = Difference.of(values["fedh2l"], values[other])
            low, high = paired.mean - (paired.half_width or 0), paired.mean + (paired.half_width or 0)
            print(f"    FedH2L − {METHODS[other]}: {paired.mean:+.1f} [{low:+.1f}, {high:+.1f}]")


if __name__ == "__main__":
    main()
