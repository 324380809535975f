"""The package follows the paper's algorithm: its parameters are those of a plain transcription."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import reference
from fedh2l.protocol.sampling import node_secret
from fedh2l.runs.trainer import Trainer

REPLAYING = [
    "method.name=fedh2l-plus", "method.local_data=private+all-public", "method.kl_weight=1", "method.temperature=1",
    "method.encoding=float32", "method.public_batch_size=8", "run.ema_decay=0", "data.augment=none",
    "optimizer.mutual_lr_scale=1",
]  # fmt: skip
"""FedH2L+ with the settings of the paper, so that replay is all that is new."""
VARIANTS = {
    "default": ([], {}),
    "own-public": (["method.local_data=private+own-public"], {}),
    "no-kl": (["method.kl_weight=0"], {"use_kl": False}),
    "no-project": (["method.project=none"], {"project": "none"}),
    "pcgrad": (["method.project=pcgrad"], {"project": "pcgrad"}),
    "sum": (["method.interval=4"], {"interval": 4}),
    "difference": (
        ["method.interval=4", "method.local_gradient=difference"],
        {"interval": 4, "local_gradient": "difference"},
    ),
    "difference-1": (["method.local_gradient=difference"], {"local_gradient": "difference"}),
    "ring": (["method.topology=ring"], {"heard": lambda i, r: sorted([(i - 1) % 4, (i + 1) % 4])}),
    "pairs": (["method.pairing=pairs", "data.angles=[0,20,40,60,80]"], {"heard": "method"}),
    "peers": (["method.peers_per_round=2", "method.interval=2"], {"heard": "method", "interval": 2}),
    "lenet": ([f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")], {}),
    "alone": (["method.interval=0"], {"interval": 0}),
    "soft": (["method.temperature=3", "method.kl_weight=0.5"], {"temperature": 3.0, "kl_weight": 0.5}),
    "small-public": (["run.batch_size=32"], {}),
    "replay": ([*REPLAYING, "method.interval=4", "method.replay=3"], {"interval": 4, "replay": 3}),
    "replay-pairs": (
        [*REPLAYING, "method.interval=3", "method.replay=2", "method.pairing=pairs", "data.angles=[0,20,40,60,80]"],
        {"interval": 3, "replay": 2, "heard": "method"},
    ),
}


def draws(population, size, purpose, seed, node, round):
    """The documented construction of a batch, written out once more."""
    import hashlib

    if size >= population:
        return list(range(population))
    h = hashlib.sha256()
    for field in ("fedh2l-1", purpose, str(seed), node, str(round)):
        h.update(len(field.encode()).to_bytes(4, "big") + field.encode())
    words = np.random.Philox(key=int.from_bytes(h.digest()[:16], "little")).random_raw(size)
    cards = list(range(population))
    for i in range(size):
        j = i + int(words[i]) * (population - i) // 2**64
        cards[i], cards[j] = cards[j], cards[i]
    return cards[:size]


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_equal_the_reference(federation, variant):
    changes, options = VARIANTS[variant]
    fed = federation("run.dtype=float64", "run.eval_every=1000", "run.seed=3", *changes)
    trainer = Trainer(fed)
    models = [copy.deepcopy(learner.module) for learner in trainer.engine.learners]
    domains = [node.domain for node in fed.nodes]
    publics = [(d.public.inputs.double(), d.public.labels) for d in domains]
    own_only = "own-public" in variant
    pools = []
    for i, d in enumerate(domains):
        shared = [publics[i]] if own_only else publics
        pools.append(
            (
                torch.cat([d.private.inputs.double(), *(x for x, _ in shared)]),
                torch.cat([d.private.labels, *(y for _, y in shared)]),
            )
        )
    names, size = [n.name for n in fed.nodes], fed.settings.batch_size
    if options.get("heard") == "method":
        options = {
            **options,
            "heard": lambda i, r: [names.index(t) for t in fed.method.teachers(fed.roster, r)[names[i]]],
        }
    reference.train(
        models,
        pools,
        publics,
        lambda i, r: draws(len(pools[i][1]), size, "local-batch", node_secret(3, names[i]), names[i], r),
        lambda i, r: draws(len(publics[i][1]), size, "public-batch", 3, names[i], r),
        rounds=20,
        **options,
    )
    moved = [learner.parameters.clone() for learner in trainer.engine.learners]
    assert trainer.engine.advance(1, 20, lambda _: True) == 20
    for learner, model, before in zip(trainer.engine.learners, models, moved, strict=True):
        expected = reference.flatten(model.parameters()).detach()
        assert (learner.parameters - before).abs().max() > 1e-2  # it did train
        torch.testing.assert_close(learner.parameters, expected, rtol=0, atol=1e-5)
