"""The benchmarks: every table of the paper, with the paper's scores."""

from __future__ import annotations

from fedh2l.bench.image_suites import IMAGE_SUITES, image_suite
from fedh2l.bench.plus_suites import frontier, gain, levers, plus, plus_rest
from fedh2l.bench.suite import FOUR_MODELS, SPLITS, Row, Scores, Suite, TableSpec, by_splits, scores

ALPHAS = {
    "5 %": ("data.alpha=0.05", scores(86.79, 92.83, 85.11), scores(85.13, 92.33, 82.73), scores(85.09, 89.11, 82.95)),
    "10 %": ("data.alpha=0.1", scores(89.13, 93.33, 87.72), scores(85.25, 92.00, 83.00), scores(85.09, 91.17, 83.06)),
    "15 %": ("data.alpha=0.15", scores(89.63, 92.67, 88.61), scores(87.83, 92.47, 86.22), scores(86.75, 91.33, 85.22)),
}
"""For each α: the setting, and the paper's scores of FedH2L, AGG and FedMD."""

FEDH2L = scores(89.13, 93.33, 87.72)
IND = scores(68.45, 92.56, 60.47)
FEDAVG = scores(86.50, 86.50, 86.50)
FEDPROX = scores(86.67, 86.67, 86.67)
FEDMD = {
    f"revisit {r}, digest {d}": (f"method.revisit_epochs={r}", f"method.digest_epochs={d}")
    for r, d in ((1, 1), (1, 5), (1, 20))
}
"""Additional settings of FedMD. Validation data selects one."""


def _rotated_mnist() -> Suite:
    tables = []
    for splits in SPLITS:
        for alpha, (setting, fedh2l, agg, fedmd) in ALPHAS.items():
            rows = [
                Row.of("FedH2L", "fedh2l", paper=fedh2l),
                Row.of("AGG", "aggregation", paper=agg),
                Row.of("FedMD", "fedmd", paper=fedmd),
            ]
            if alpha == "10 %":
                rows += [Row("FedMD, tuned", "fedmd", FEDMD)]
                rows += _whatever_alpha()
            tables.append(TableSpec(f"α = {alpha}, {splits} splits", rows, (setting, f"data.splits={splits}")))
    return Suite("rotated-mnist", "the paper's main table: four LeNets on digits at four angles", tables)


def _whatever_alpha() -> list[Row]:
    """Return the rows that are run at one α only: variants, and methods that do not depend on α."""
    return [
        Row.of("FedH2L, asynchronous", "fedh2l", "method.pairing=pairs", paper=scores(88.21, 92.17, 86.89)),
        Row.of("IND", "independent", paper=IND),
        Row.of("FedAvg, K = 1", "fedavg", "method.interval=1"),
        Row("FedAvg, best", "fedavg", {f"K = {k}": (f"method.interval={k}",) for k in (2, 5, 10, 20, 50)}),
        Row.of("FedAvg, matched bytes", "fedavg", "method.interval=matched", paper=FEDAVG),
        _fedprox("FedProx, K = 10", "10", None),
        _fedprox("FedProx, matched bytes", "matched", FEDPROX),
    ]


def _fedprox(label: str, interval: str, paper: Scores | None) -> Row:
    """Return FedProx with a choice of μ. The values are those of its authors."""
    choices = {f"μ = {mu}": (f"method.interval={interval}", f"method.mu={mu}") for mu in (0.001, 0.01, 0.1, 1.0)}
    return Row(label, "fedprox", choices, paper)


def _ablation() -> Suite:
    rows = [
        Row.of("FedH2L", "fedh2l", paper=FEDH2L),
        Row.of("no KL", "fedh2l", "method.kl_weight=0.0", paper=scores(86.79, 91.67, 84.50)),
        Row.of("no projection", "fedh2l", "method.project=none", paper=scores(88.46, 92.67, 87.45)),
        Row.of("PCGrad", "fedh2l", "method.project=pcgrad", paper=scores(88.34, 92.67, 86.89)),
        Row.of("local data: private + own public", "fedh2l", "method.local_data=private+own-public"),
        Row.of("lenet-wide", "fedh2l", *(f"nodes.{i}.model=lenet-wide" for i in range(4))),
    ]
    return Suite("ablation", "FedH2L without one of its parts, or read otherwise", by_splits(rows))


def _interval() -> Suite:
    paper = {1: FEDH2L, 5: scores(88.04, 92.17, 86.67), 10: scores(87.25, 93.17, 85.28)}
    rows = [Row.of("E = 1", "fedh2l", paper=paper[1])]
    for e in (5, 10, 20, 50):
        for reading in ("sum", "difference"):
            changes = (f"method.interval={e}", f"method.local_gradient={reading}")
            rows.append(Row.of(f"E = {e}, {reading}", "fedh2l", *changes, paper=paper.get(e)))
    return Suite("interval", "a mutual step every E rounds, with both readings of the local gradient", by_splits(rows))


def _heterogeneous() -> Suite:
    rows = [
        Row.of("FedH2L", "fedh2l"),
        Row.of("AGG", "aggregation"),
        Row.of("FedMD", "fedmd"),
        Row.of("IND", "independent"),
        Row.of("FML", "fml"),
        Row.of("FedGKT", "fedgkt"),
        Row.of("FedAvg", "fedavg"),
        Row.of("FedProx", "fedprox"),
        Row.of("FedAgnostic", "agnostic"),
    ]
    tables = [TableSpec(f"{splits} splits", rows, (*FOUR_MODELS, f"data.splits={splits}")) for splits in SPLITS]
    return Suite("heterogeneous-mnist", "a different model on each node: LeNet-5, wide LeNet, MLP, CNN", tables)


def _comparison() -> Suite:
    rows = [
        Row.of("FedH2L", "fedh2l", paper=FEDH2L),
        Row.of("FedMD", "fedmd", paper=ALPHAS["10 %"][3]),
        Row.of("FedAvg", "fedavg"),
        Row.of("FedProx", "fedprox"),
        Row.of("FedAgnostic", "agnostic"),
        Row.of("FML", "fml"),
        Row.of("FedGKT", "fedgkt"),
        Row.of("AGG", "aggregation", paper=ALPHAS["10 %"][2]),
        Row.of("IND", "independent", paper=IND),
    ]
    return Suite("comparison", "all methods: accuracy, requirements and bytes", by_splits(rows), capabilities=True)


SUITES = {
    suite.name: suite
    for suite in (
        *(_rotated_mnist(), _ablation(), _interval(), _heterogeneous(), _comparison()),
        *(plus(), plus_rest(), gain(), levers(), frontier()),
        *(image_suite(name) for name in IMAGE_SUITES),
    )
}
