"""Measure how often a mutual step opposes the local gradient, although the teaching gradient was projected.

    python benchmarks/step_direction.py [--seed 1] [--splits aligned]

AMSGrad rescales each coordinate of the projected gradient, so ⟨g̃, g_loc⟩ ≥ 0 does not determine the direction of the
step. The script trains the default experiment for 300 rounds and examines rounds 51 to 300 of every member.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import fedh2l
from fedh2l.experiment.config import load_config
from fedh2l.methods.lesson import Lesson
from fedh2l.training.learner import Learner

FIRST, LAST = 51, 300


class Watched(fedh2l.FedH2L):
    """FedH2L that records, for every mutual step, whether it raises the local loss to first order."""

    def learn(self, node: Learner, lesson: Lesson, g_loc: Tensor, round: int) -> None:
        before = node.parameters.detach().clone()
        super().learn(node, lesson, g_loc, round)
        step = (node.parameters.detach() - before).double()
        if FIRST <= round <= LAST:
            conflict = bool(node.records["conflict_rate"][-1][1] > 0)
            STEPS.append((conflict, bool(torch.dot(step, g_loc.double()) > 0)))


STEPS: list[tuple[bool, bool]] = []
"""For each step: whether the gradients were in conflict, and whether the step opposes the local gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--splits", choices=("independent", "aligned"), default="independent")
    options = parser.parse_args()
    config, _ = load_config(None, [f"data.splits={options.splits}"], "fedh2l", {"seed": options.seed, "device": "cpu"})
    nodes = config.experiment().nodes
    method = Watched(**config.method.model_dump())
    fedh2l.train(nodes, method, LAST, options.seed, optimizer=config.optimizer, device="cpu", engine="local")
    for name, conflict in (("rounds with a conflict", True), ("other rounds", False)):
        opposed = [against for found, against in STEPS if found == conflict]
        print(f"{name}: {100 * sum(opposed) / len(opposed):.0f} % of {len(opposed)} steps oppose the local gradient")


if __name__ == "__main__":
    main()
