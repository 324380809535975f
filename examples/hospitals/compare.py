"""Training together against training alone, over many splits of the patients.

    python examples/hospitals/compare.py [--root heart-disease] [--splits 20]

For every split both methods start from the same weights and see the same batches. Accuracy and the area under the ROC
curve (AUC) are on the pooled test patients of the other hospitals, and on a hospital's own; means over hospitals, then
over splits, with 95 % intervals of the paired difference.
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
from fedh2l.config import load_config
from fedh2l.settings import CORES, available_cores

HERE = Path(__file__).parent
MEASURES = ("own patients, accuracy", "others' patients, accuracy", "others' patients, AUC")


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """How often somebody ill gets a higher score than somebody healthy; a tie counts half."""
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
    parser.add_argument("--root", default="heart-disease", help="the folder with the four files")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    cores, methods = available_cores(), ("independent", "fedh2l")
    os.environ[CORES] = "1"  # as many trainings side by side as there are cores, each on one
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        runs = {m: [pool.submit(train, m, s, given.root, given.rounds) for s in range(given.splits)] for m in methods}
        found = {method: [run.result() for run in each] for method, each in runs.items()}
    print(f"{given.splits} splits; mean over hospitals and splits, in %")
    print(f"{'':28}{'alone':>8}{'together':>10}{'difference':>22}")
    for place, measure in enumerate(MEASURES):
        alone, together = ([run[place] for run in found[method]] for method in methods)
        paired = Difference.of(together, alone)
        low, high = paired.mean - (paired.half_width or 0), paired.mean + (paired.half_width or 0)
        means = f"{statistics.fmean(alone):8.1f}{statistics.fmean(together):10.1f}{paired.mean:+10.1f}"
        print(f"{measure:28}{means} [{low:+.1f}, {high:+.1f}]")


if __name__ == "__main__":
    main()
