"""Benchmarks on images: the paper's tables and FedH2L+, with models to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedh2l.bench.plus_suites import FAIR, PLUS
from fedh2l.bench.suite import Row, Scores, Suite, TableSpec, scores
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.experiment.config import NodeSettings
from fedh2l.experiment.presets import ARCHITECTURES, KINDS, TRAINING, Changes, Models, models_of
from fedh2l.experiment.toml import toml_value
from fedh2l.experiment.values import parse_value, read_toml
from fedh2l.plugins import check_allowed, is_path, search

IMAGE_SUITES = {f"{prefix}{dataset}": dataset for prefix in ("", "plus-") for dataset in ARCHITECTURES}
"""The dataset of each suite."""

PAPER: Mapping[str, Mapping[str, Scores]] = {
    "pacs": {
        "FedH2L": scores(77.33, 94.94, 70.66),
        "AGG": scores(77.00, 94.20, 70.14),
        "FedMD": scores(74.11, 92.55, 67.08),
        "IND": scores(60.53, 94.25, 48.83),
    },
    "office-home": {
        "FedH2L": scores(64.92, 71.58, 61.85),
        "AGG": scores(59.24, 68.08, 55.39),
        "FedMD": scores(56.97, 67.03, 52.95),
        "IND": scores(47.59, 69.59, 39.73),
    },
}
"""Scores in the paper with a different model on each node. For PACS, they use the paper's protocol."""


def image_suite(name: str, models: str | None = None, changes: Sequence[str] = ()) -> Suite:
    """Return a benchmark on images. `models` is a keyword or a TOML file with [[nodes]].

    `changes` are the user's settings. On PACS, the paper's scores are shown only with the paper's protocol.
    """
    dataset = IMAGE_SUITES[name]
    models = models or "heterogeneous"
    if models in KINDS:
        kind: Models = "heterogeneous" if models == "heterogeneous" else "homogeneous"
        own, called = models_of(dataset, kind), f"{kind} models"
    else:
        own, called = _models_in(Path(models), dataset), f"models of {Path(models).name}"
    protocol = [parse_value(change.partition("=")[2]) for change in changes if change.startswith("data.protocol=")]
    comparable = models == "heterogeneous" and (dataset != "pacs" or protocol[-1:] == ["paper"])
    if name.startswith("plus-"):
        rows, summary = _plus(), "FedH2L+ against FedH2L, and against what trains on the same views"
    else:
        rows, summary = _methods(PAPER.get(dataset, {}) if comparable else {}), "the paper's table"
    table = TableSpec(f"{dataset}, {called}", rows, (f"data.name={dataset}", *own), TRAINING)
    return Suite(name, f"{summary}, on images of {dataset}; data.root says where they are", [table], images=dataset)


def _methods(paper: Mapping[str, Scores]) -> list[Row]:
    methods = {
        "FedH2L": "fedh2l",
        "AGG": "aggregation",
        "FedMD": "fedmd",
        "IND": "independent",
        "FedAvg": "fedavg",
        "FedProx": "fedprox",
    }
    return [Row.of(label, method, paper=paper.get(label)) for label, method in methods.items()]


def _plus() -> list[Row]:
    rivals = {"FedH2L, local views": "fedh2l", "AGG": "aggregation", "FedMD": "fedmd", "IND": "independent"}
    fair = [Row.of(label, method, *FAIR) for label, method in rivals.items()]
    return [Row.of("FedH2L+", PLUS), Row.of("FedH2L", "fedh2l"), *fair]


def _models_in(path: Path, dataset: str) -> Changes:
    """Read the models of a file. They may be functions in a module in the same folder."""
    if not path.suffix:
        known = " or ".join(KINDS)
        raise ConfigError(f"--models {path}: it is {known}, or a TOML file.{did_you_mean(str(path), KINDS)}")
    raw = read_toml(path)
    search(str(path.absolute().parent))
    other = [section for section in raw if section != "nodes"]
    if other:
        raise ConfigError(f"--models {path}: it has [{other[0]}], and only [[nodes]] count here; use --set")
    nodes = [NodeSettings.read(node, f"{path}, nodes.{place}") for place, node in enumerate(raw.get("nodes", []))]
    for place, node in enumerate(nodes):
        if is_path(node.model):
            check_allowed(node.model, f"{path}: nodes.{place}.model")
    names, known_nodes = [node.name for node in nodes], list(ARCHITECTURES[dataset])
    if sorted(names) != sorted(known_nodes):
        wanted = ", ".join(known_nodes)
        raise ConfigError(f"--models {path}: it should have a model for each of {wanted}, under [[nodes]]")
    return tuple(
        f"nodes.{node.name}.{key}={toml_value(value)}"
        for node in nodes
        for key, value in node.model_dump(exclude={"name"}, exclude_none=True).items()
    )
