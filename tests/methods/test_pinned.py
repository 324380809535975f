"""Pinned losses of the first rounds for every option of the method: a silent change of the maths fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedh2l.runs.trainer import Trainer

OPTIONS = {
    "default": [],
    "own-public": ["method.local_data=private+own-public"],
    "interval-sum": ["method.interval=3"],
    "interval-difference": ["method.interval=3", "method.local_gradient=difference"],
    "no-kl": ["method.kl_weight=0.0"],
    "no-project": ["method.project=none"],
    "pcgrad": ["method.project=pcgrad"],
    "public-batch": ["method.public_batch_size=5"],
    "ring": ["method.topology=ring"],
    "line": ["method.topology=line"],
    "edges": ['method.topology=[["M0","M20"],["M40","M60"]]'],
    "regular": ["method.topology=regular-2"],
    "peers": ["method.peers_per_round=1"],
    "pairs": ["method.pairing=pairs"],
    "sgd": ["optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9"],
    "adam": ["optimizer.name=adam"],
    "mutual-rate": ["optimizer.mutual_lr_scale=10.0"],
    "aligned": ["data.splits=aligned"],
    "alpha": ["data.alpha=0.3"],
    "independent": ["method.name=independent"],
    "aggregation": ["method.name=aggregation", "run.batch_size=9"],
    "fedmd": ["method.name=fedmd", "method.public_epochs=1", "method.private_epochs=1", "method.revisit_epochs=1"],
    "fedmd-subset": [
        "method.name=fedmd",
        "method.public_epochs=0",
        "method.private_epochs=0",
        "method.subset=20",
        "method.digest_batch_size=8",
        "run.rounds=6",
    ],
    "fedavg": ["method.name=fedavg"],
    "fedavg-3": ["method.name=fedavg", "method.interval=3"],
    "fedavg-reset": ["method.name=fedavg", "method.interval=3", "method.optimizer_state=reset"],
    "fedprox": ["method.name=fedprox", "method.interval=3", "method.mu=0.5"],
    "agnostic": ["method.name=agnostic", "method.lambda_lr=0.5"],
    "agnostic-2": ["method.name=agnostic", "method.interval=2", "method.lambda_lr=0.5"],
    "fml": ["method.name=fml", "method.interval=3"],
    "fml-meme": [
        "method.name=fml",
        "method.interval=2",
        "method.meme=cnn",
        "method.meme_state=reset",
        "method.alpha=0.3",
        "method.beta=0.8",
    ],
    "fedgkt": [
        "method.name=fedgkt",
        "method.interval=3",
        "method.server_epochs=2",
        *(f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)),
    ],
    "fedgkt-plain": [
        "method.name=fedgkt",
        "method.interval=3",
        "method.server_distillation=false",
        *(f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)),
    ],
    "lenet": [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")],
}
PINNED = Path(__file__).with_name("pinned.json")


def first_losses(federation, changes: list[str]) -> dict[str, list[float]]:
    """For each node, the mean of what it recorded in the first six rounds, in float64."""
    trainer = Trainer(federation("run.dtype=float64", *changes))
    trainer.engine.advance(1, 6, lambda _: True)
    series = trainer.engine.series().values()
    names = sorted({name for node in series for name in node})
    return {name: [sum(node[name]) / len(node[name]) for node in series if node.get(name)] for name in names}


@pytest.mark.parametrize("option", OPTIONS)
def test_first_losses(federation, option):
    got = first_losses(federation, OPTIONS[option])
    want = json.loads(PINNED.read_text())[option]
    assert got.keys() == want.keys()
    for name, values in want.items():
        torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(values), rtol=1e-6, atol=1e-9, msg=name)


def test_every_option_makes_a_difference():
    pinned = json.loads(PINNED.read_text())
    assert pinned.keys() == OPTIONS.keys()
    assert len({json.dumps(losses, sort_keys=True) for losses in pinned.values()}) == len(OPTIONS)


if __name__ == "__main__":  # after a deliberate change of the maths; CONTRIBUTING.md has the command
    from conftest import MLPS, TINY
    from fedh2l.experiment.config import load_config

    def make(*changes: str):
        return load_config(None, [*TINY, *MLPS, "run.rounds=20", *changes])[0].experiment()

    torch.set_num_threads(1)
    PINNED.write_text(json.dumps({name: first_losses(make, o) for name, o in OPTIONS.items()}, indent=1) + "\n")
