"""The accuracy that one lying member of four costs the other three.

    python benchmarks/liars.py [--seeds 3] [--rounds 300]

Four LeNets train on Rotated MNIST with aligned splits. The first member replaces the posteriors that it sends. The
false ones give probability 1 to one class per sample. Its messages stay valid: the receivers count the correct answers
of the false posteriors and get the number in the message. It sends one of:

- certain: the class that its model predicts, so only the probability is a lie;
- everything: the class after the predicted one;
- noise: a random class;
- pair: the predicted class, but 4 in place of 9 and 9 in place of 4.

Prints a Markdown table. ACC is the mean over the three honest members' models, on all four domains and on digits that
no member has. Numbers in brackets are differences to the same method with an honest first member, paired by seed, with
95 % intervals. The last two columns are the accuracy on the digits 4 and 9 alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedh2l.bench.statistics import Difference, Summary
from fedh2l.data.domain import Samples
from fedh2l.experiment.config import load_config
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.fedh2l_plus import FedH2LPlus
from fedh2l.protocol.messages import Posteriors
from fedh2l.runs.trainer import Trainer

Lie = Literal["nothing", "certain", "everything", "noise", "pair"]
LIES: tuple[Lie, ...] = get_args(Lie)
LIAR, PAIR = "M0", (4, 9)
SETTINGS = ["run.device=cpu", "run.engine=local", "run.threads=1", "run.eval_every=50"]
DATA = ["data.splits=aligned", "data.tests=rest"]
METHODS = {
    "`fedh2l`": ("liars:LyingFedH2L", []),
    "`fedh2l`, `project = none`": ("liars:LyingFedH2L", ["method.project=none"]),
    "`fedh2l-plus`": ("liars:LyingFedH2LPlus", []),
    "`aggregation`": ("aggregation", []),
}


def falsified(method: LyingFedH2L | LyingFedH2LPlus, node, honest: Posteriors) -> Posteriors:
    """Return a false message if the node lies, else the honest one."""
    if node.name != LIAR or method.lie == "nothing":
        return honest
    classes = honest.values.shape[-1]
    said = false_classes(method.lie, honest.values.argmax(-1), classes, honest.round)
    batch = node.public_batch(node.name, honest.round, method.public_batch_rows(node.batch_size))
    certain = F.one_hot(said, classes).to(honest.values.dtype)
    return Posteriors.of(node.name, honest.round, certain, batch.labels, method.written)


def false_classes(lie: Lie, predicted: Tensor, classes: int, round: int) -> Tensor:
    """Return the liar's class of each sample, `(rows,)`."""
    if lie == "everything":
        return (predicted + 1) % classes
    if lie == "noise":
        return torch.randint(classes, predicted.shape, generator=torch.Generator().manual_seed(round))
    if lie == "pair":
        one, other = PAIR
        return torch.where(predicted == one, other, torch.where(predicted == other, one, predicted))
    return predicted


class LyingFedH2L(FedH2L):
    """FedH2L with a member that may lie."""

    lie: Lie = Field("nothing", description="what the first member lies about")

    def emit(self, node, round):
        return falsified(self, node, super().emit(node, round))


class LyingFedH2LPlus(FedH2LPlus):
    """FedH2L+ with a member that may lie."""

    lie: Lie = Field("nothing", description="what the first member lies about")

    def emit(self, node, round):
        return falsified(self, node, super().emit(node, round))


def trained(method: str, changes: list[str]) -> tuple[float, float]:
    """Return ACC of the honest members' models in percent, on all classes and on the pair."""
    trainer = Trainer(load_config(None, [*SETTINGS, *DATA, *changes], method)[0].experiment())
    result = trainer.run()
    tests = Samples.concatenate([node.domain.test for node in trainer.experiment.nodes])
    of_pair = tests.take(torch.isin(tests.labels, torch.tensor(PAIR)).nonzero().squeeze(-1))
    honest = [node.ACC for node in result.nodes if node.name != LIAR]
    on_pair = [right(learner.module, of_pair) for learner in trainer.engine.learners if learner.name != LIAR]
    return Summary(tuple(honest)).mean, Summary(tuple(on_pair)).mean


@torch.no_grad()
def right(module: torch.nn.Module, samples: Samples) -> float:
    answers = torch.cat([module(inputs).argmax(-1) for inputs in samples.inputs.split(512)])
    return 100 * float((answers == samples.labels).double().mean())


def cell(values: list[float], reference: list[float] | None = None) -> str:
    mean = f"{Summary(tuple(values)).mean:.1f}"
    if reference is None:
        return mean
    difference = Difference.of(values, reference)
    width = "" if difference.half_width is None else f" ± {difference.half_width:.1f}"
    return f"{mean} ({difference.mean:+.1f}{width})".replace("-", "−")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, …")
    parser.add_argument("--rounds", type=int, default=300)
    given = parser.parse_args()
    all_classes, pair = defaultdict(list), defaultdict(list)
    for seed in range(given.seeds):
        for row, (method, changes) in METHODS.items():
            sends = method != "aggregation"
            for lie in LIES if sends else LIES[:1]:
                changed = [*changes, f"run.seed={seed}", f"run.rounds={given.rounds}"]
                acc, on_pair = trained(method, [*changed, f"method.lie={lie}"] if sends else changed)
                all_classes[row, lie].append(acc)
                pair[row, lie].append(on_pair)
                print(f"seed {seed}, {row}, lie {lie}: {acc:.2f}, pair {on_pair:.2f}", file=sys.stderr, flush=True)
    print("| method | honest |", " | ".join(LIES[1:]), "| 4 and 9: honest | 4 and 9: pair |")
    print("| --- " * (len(LIES) + 3) + "|")
    for row, (method, _) in METHODS.items():
        honest, on_pair = all_classes[row, "nothing"], pair[row, "nothing"]
        if method == "aggregation":
            lies, lied = ["sends nothing"] * len(LIES[1:]), "sends nothing"
        else:
            lies = [cell(all_classes[row, lie], honest) for lie in LIES[1:]]
            lied = cell(pair[row, "pair"], on_pair)
        print("|", " | ".join([row, cell(honest), *lies, cell(on_pair), lied]), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
