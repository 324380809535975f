"""`fedh2l evaluate`: test the models of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedh2l.api import load
from fedh2l.cli.console import err, notice, print_json
from fedh2l.cli.run import AllowOption
from fedh2l.data.base import WholeDomain
from fedh2l.data.domain import Samples
from fedh2l.data.images import UNSAID
from fedh2l.errors import DataError
from fedh2l.experiment.config import FROM_PYTHON, Config, load_config
from fedh2l.experiment.values import read_toml
from fedh2l.models.saved import Classifier
from fedh2l.report.tables import matrix_table
from fedh2l.runs.directory import RunDirectory
from fedh2l.training.metrics import count_correct


@dataclass(frozen=True)
class Tested:
    """Samples of a domain to test on."""

    name: str
    classes: tuple[str, ...]
    samples: Samples
    preprocessing: Mapping[str, Any]
    whole: bool
    """All samples of the domain, or only its test split."""


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    node: Annotated[str | None, typer.Option(help="Evaluate only this node.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Other data: a key of [data] to change, for example root=FOLDER, or the name of a dataset. "
            "Repeatable. All samples of other folders and files are used.",
        ),
    ] = None,
    which: Annotated[
        str, typer.Option(metavar="best|last", help="Best models on validation data, or the last.")
    ] = "best",
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the accuracies as JSON on standard output.")] = False,
) -> None:
    """Evaluate the models of a run on its test data, or on all samples of other data."""
    opened = RunDirectory.open(directory)
    changes = [f"data.{change if '=' in change else 'name=' + change}" for change in data or ()]
    config, _ = load_config(opened.config_path, changes, run={"device": "auto"})
    names = [node] if node else [entry.name for entry in config.nodes]
    models = {name: load(directory, name, which) for name in names}
    origins = _origins(opened.config_path) if changes else None
    tested = _tested(config, origins, models[names[0]].preprocessing)
    matrix = {name: _accuracies(model, tested) for name, model in models.items()}
    columns = [domain.name for domain in tested]
    rows = [[matrix[name][column] for column in columns] for name in names]
    rule = config.run.model_copy(update={"selection": which}).selection_rule
    about = f"; {config.data.note}" if config.data.note else ""
    err.print(matrix_table(names, rows, columns, f"{directory}: test accuracy in % ({rule}{about})"))
    _say_what_was_tested(tested, bool(changes))
    if as_json:
        sizes = {domain.name: {"samples": len(domain.samples), "all": domain.whole} for domain in tested}
        print_json({"which": which, "accuracy": matrix, "tested": sizes})


def _origins(path: Path) -> set[str]:
    """Return the origins of the run's samples. They are unknown for data from Python."""
    if read_toml(path).get("data", {}).get("name") == FROM_PYTHON:
        return set()
    run, _ = load_config(path)
    return {run.data.origin(node.domain or node.name) for node in run.nodes}


def _tested(config: Config, origins: set[str] | None, preprocessing: Mapping[str, Any]) -> list[Tested]:
    """Return the test splits of domains with these origins (None: any), and all samples of other domains."""
    seed, data = config.run.seed, config.data
    names = data.domain_names(seed)
    own = {name for name in names if origins is None or data.origin(name) in origins}
    found: dict[str, Tested] = {}
    if own:
        for domain in data.domains(seed):
            found[domain.name] = Tested(domain.name, domain.classes, domain.test, domain.preprocessing, False)
    if len(own) < len(names):
        whole: Sequence[WholeDomain] = data.whole(seed, preprocessing)
        found |= {each.name: Tested(*each, whole=True) for each in whole if each.name not in own}
    return [found[name] for name in names]


def _accuracies(classifier: Classifier, tested: Sequence[Tested]) -> dict[str, float]:
    """Return the accuracy per domain in percent."""
    parameter = next(classifier.parameters())
    accuracies = {}
    for domain in tested:
        if domain.classes != classifier.classes:
            raise DataError(f"domain '{domain.name}' has classes {domain.classes}, the model {classifier.classes}")
        samples = domain.samples.to(parameter.device, parameter.dtype)
        if tuple(samples.inputs.shape[1:]) != classifier.input_shape:
            raise DataError(
                f"domain '{domain.name}' has inputs of shape {tuple(samples.inputs.shape[1:])}, "
                f"the model takes {classifier.input_shape}"
            )
        _check_preprocessing(domain, classifier)
        accuracies[domain.name] = 100 * count_correct(classifier, samples) / len(samples)
    return accuracies


def _check_preprocessing(domain: Tested, classifier: Classifier) -> None:
    """Refuse inputs that are not prepared like the training data, such as columns on another scale."""
    here = {**UNSAID, **json.loads(json.dumps(dict(domain.preprocessing)))}
    there = {**UNSAID, **classifier.preprocessing}
    different = sorted(key for key in {*here, *there} if here.get(key) != there.get(key))
    if different:
        listed = "; ".join(f"{key}: {here.get(key)} here, {there.get(key)} there" for key in different)
        hint = "" if domain.whole or here.get("kind") != "table" else "; test the new files without the run's own"
        raise DataError(f"domain '{domain.name}' is not prepared as the model's training data ({listed}){hint}")


def _say_what_was_tested(tested: Sequence[Tested], changed: bool) -> None:
    for whole, text in ((False, "the test split of"), (True, "all samples of")):
        parts = [f"{domain.name} ({len(domain.samples):,})" for domain in tested if domain.whole is whole]
        if parts:
            err.print(f"Tested: {text} {', '.join(parts)}.", soft_wrap=True)
    if changed and not all(domain.whole for domain in tested):
        notice(
            "Other settings draw other splits: the run may have been trained on some of these samples, or on others "
            "made of them."
        )
