"""Benchmarks beyond the paper: `fedh2l-plus`, its additions one by one, and accuracy against bytes."""

from __future__ import annotations

from fedh2l.bench.suite import FOUR_MODELS, Row, Suite, by_splits
from fedh2l.experiment.presets import Changes

PLUS = "fedh2l-plus"
EMA = "run.ema_decay=0.998"
FAIR: Changes = ("data.augment=local", EMA)
"""Settings for fair baselines: augmented local data and averaged weights."""


def plus() -> Suite:
    """Compare FedH2L+ to FedAvg, with and without augmentation of local data."""
    rows = [
        Row.of("FedH2L+", PLUS),
        _fedavg(*FAIR),
        Row.of("FedAvg, K = 1", "fedavg", *FAIR, "method.interval=1"),
        Row.of("FedH2L+, no public labels", PLUS, "data.public_labels=false"),
    ]
    plain = [Row.of("FedH2L+", PLUS, "data.augment=public"), _fedavg("data.augment=none", EMA)]
    tables = [*by_splits(rows), *by_splits(plain, title="α = 10 %, local data not augmented")]
    return Suite("plus", "FedH2L+ against FedAvg", tables)


def plus_rest() -> Suite:
    """Test runs of `plus` on digits that no node has at any angle. FedAvg has K = 1, its best choice in `plus`."""
    rows = [
        Row.of("FedH2L+", PLUS),
        Row.of("FedAvg, K = 1", "fedavg", *FAIR, "method.interval=1"),
    ]
    return Suite(
        "plus-rest", "FedH2L+ against FedAvg, 4,000 test digits per domain", by_splits(rows, "data.tests=rest")
    )


def _fedavg(*changes: str) -> Row:
    """Return FedAvg with the interval that is best on validation data."""
    return Row("FedAvg, best", "fedavg", {f"K = {k}": (*changes, f"method.interval={k}") for k in (1, 5, 10, 50, 100)})


def gain() -> Suite:
    """Compare FedH2L+ to FedH2L with at most the same bytes, for several α and with four different models."""
    rows = [Row.of("FedH2L+", PLUS), Row.of("FedH2L", "fedh2l")]
    tables = []
    for alpha, share in (("5 %", "0.05"), ("10 %", "0.10"), ("15 %", "0.15")):
        tables += by_splits(rows, f"data.alpha={share}", title=f"α = {alpha}")
    rivals = [Row.of(label, name, *FAIR) for label, name in (("AGG", "aggregation"), ("FedMD", "fedmd"))]
    return Suite(
        "gain", "FedH2L+ against FedH2L", tables + by_splits([*rows, *rivals], *FOUR_MODELS, title="four models")
    )


def levers() -> Suite:
    """Test each addition alone, and all additions except one."""
    rows = [
        Row.of("FedH2L+", PLUS),
        Row.of("public digits are not bent", PLUS, "data.bend=0.0"),
        Row.of("nor mixed", PLUS, "data.bend=0.0", "data.mix=0.0"),
        Row.of("views of local data alone", PLUS, "data.augment=local"),
        Row.of("views of public data alone", PLUS, "data.augment=public"),
        Row.of("no views", PLUS, "data.augment=none"),
        Row.of("no average", PLUS, "run.ema_decay=0.0"),
        Row.of("mutual learning rate × 1", PLUS, "optimizer.mutual_lr_scale=1.0"),
        Row.of("32 public samples", PLUS, "method.public_batch_size=32"),
        Row.of("all public data is local too", PLUS, "method.local_data=private+all-public"),
        Row.of("temperature 1, weight 1", PLUS, "method.temperature=1.0", "method.kl_weight=1.0"),
        Row.of("float32", PLUS, "method.encoding=float32"),
        Row.of("no projection", PLUS, "method.project=none"),
        *(Row.of(f"E = {e}", PLUS, f"method.interval={e}") for e in RARE),
        *(Row.of(f"E = {e}, no replay", PLUS, f"method.interval={e}", "method.replay=0") for e in RARE),
        Row.of("no public labels", PLUS, "data.public_labels=false"),
        Row.of("FedH2L", "fedh2l"),
        Row.of("FedH2L, views", "fedh2l", "data.augment=all"),
        Row.of("FedH2L, EMA", "fedh2l", EMA),
        Row.of("FedH2L, mutual learning rate × 3", "fedh2l", "optimizer.mutual_lr_scale=3.0"),
        Row.of("FedH2L, temperature 3, weight 3", "fedh2l", "method.temperature=3.0", "method.kl_weight=3.0"),
        Row.of("FedH2L, E = 10", "fedh2l", "method.interval=10"),
        Row.of("FedH2L, no public labels", "fedh2l", *UNLABELLED),
    ]
    return Suite("levers", "what each part of FedH2L+ is worth, and public data without labels", by_splits(rows))


RARE = (5, 20)
UNLABELLED: Changes = ("data.public_labels=false", "method.ce_weight=0.0", "method.local_data=private")


EXCHANGES = (1, 2, 5, 10, 20, 50, 100)


def frontier() -> Suite:
    """Compare accuracy against bytes."""
    small = ("method.encoding=int4", "method.public_batch_size=32")
    one = (*small, "method.peers_per_round=1")
    rows = [
        Row.of("FedH2L+", PLUS),
        *(Row.of(f"FedH2L+, {name}", PLUS, f"method.encoding={name}") for name in ("float32", "int4", "topk-3")),
        Row.of("FedH2L+, 32 samples", PLUS, "method.public_batch_size=32"),
        *(Row.of(f"FedH2L+, E = {e}", PLUS, f"method.interval={e}") for e in (2, 5)),
        *(Row.of(f"FedH2L+, int4, 32, E = {e}", PLUS, *small, f"method.interval={e}") for e in EXCHANGES),
        Row.of("FedH2L+, one teacher", PLUS, "method.peers_per_round=1"),
        *(Row.of(f"FedH2L+, int4, 32, one, E = {e}", PLUS, *one, f"method.interval={e}") for e in (1, 2, 10)),
        Row.of("FedH2L", "fedh2l"),
        *(Row.of(f"FedH2L, E = {e}", "fedh2l", f"method.interval={e}") for e in (5, 10)),
        Row.of("FedH2L, int8", "fedh2l", "method.encoding=int8"),
        *(Row.of(f"FedAvg, K = {k}", "fedavg", *FAIR, f"method.interval={k}") for k in (1, 5, 10, 50, 100, 500)),
        Row.of("FedProx, K = 10", "fedprox", *FAIR, "method.interval=10", "method.mu=0.001"),
        Row.of("FedAgnostic", "agnostic", *FAIR),
        Row.of("FedMD", "fedmd", *FAIR, "method.revisit_epochs=1", "method.digest_epochs=5"),
        Row.of("FML", "fml", *FAIR),
        Row.of("AGG", "aggregation", *FAIR),
        Row.of("IND", "independent", *FAIR),
    ]
    return Suite("frontier", "accuracy against bytes, as a table and a plot", by_splits(rows), frontier=True)
