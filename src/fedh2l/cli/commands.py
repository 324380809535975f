"""The commands around a training: what there is, is this right, how good is it, what does it say."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.api import load
from fedh2l.cli.console import err, notice, print_json
from fedh2l.cli.run import SetOption
from fedh2l.config import load_config
from fedh2l.data.registry import DATASETS
from fedh2l.domain import Domain
from fedh2l.errors import ConfigError, DataError
from fedh2l.messages import encoded_size
from fedh2l.methods.registry import METHODS, installed_methods
from fedh2l.metrics import count_correct
from fedh2l.models.factory import MODELS
from fedh2l.models.saved import Classifier
from fedh2l.presets import PRESETS, of_preset
from fedh2l.reporting.tables import human_bytes, matrix_table, short
from fedh2l.rundir import RunDirectory
from fedh2l.toml import to_toml


def list_known() -> None:
    """Methods, datasets and models, one line each."""
    for title, known in (("methods", METHODS), ("datasets", DATASETS), ("models", MODELS)):
        typer.echo(f"{title}:")
        for name, thing in known.items():
            summary = (inspect.getdoc(thing) or "").splitlines()[0]
            typer.echo(f"  {name:<16} {summary}")
    typer.echo("presets:")
    for name, settings in PRESETS.items():
        own = dict.fromkeys(change.rpartition(":")[2] for change in settings if change.startswith("nodes."))
        typer.echo(f"  {name:<30} {', '.join(own)}")
    for name, path in installed_methods().items():
        typer.echo(f"method of another package: {name} ({path})")
    typer.echo(
        "Your own: data.name = 'package.module:function', nodes.N.model = 'package.module:factory', "
        "method.name = 'package.module:Class'."
    )


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("fedh2l.toml"),
    method: Annotated[str | None, typer.Option(help="The method whose keys to explain.")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A federation of the paper; `fedh2l list` shows them.")
    ] = None,
    changes: SetOption = None,
) -> None:
    """Write a commented starter config."""
    if path.exists():
        raise ConfigError(f"'{path}' exists already; name another file")
    config, _ = load_config(None, (*of_preset(preset), *(changes or ())), method)
    portable = replace(config, run=config.run.model_copy(update={"device": "auto", "engine": "auto"}))
    head = f"# The defaults of fedh2l, every key explained. Run it:  fedh2l run {path}\n\n"
    try:
        path.write_text(head + to_toml(portable, comments=True), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror}") from error
    err.print(f"Wrote {path}. Change what you like, then:  fedh2l run {path}", soft_wrap=True)


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    changes: SetOption = None,
) -> None:
    """Check a config, its data and its models: everything but training."""
    settings, notices = load_config(config, changes or ())
    for text in notices:
        notice(text)
    federation = settings.federation()
    learners = federation.learners()
    table = Table(title=f"{settings.method.name} on {settings.data_name}, {settings.run.rounds} rounds")
    for column in ("node", "model", "parameters", "private", "public", "val.", "test"):
        table.add_column(column, justify="left" if column in ("node", "model") else "right")
    for node, learner in zip(federation.nodes, learners, strict=True):
        domain = node.domain
        sizes = [len(part) for part in (domain.private, domain.public, domain.validation, domain.test)]
        name = node.name if node.name == domain.name else f"{node.name} ({domain.name})"
        table.add_row(name, short(node.model_name), f"{learner.parameters.numel():,}", *(f"{n:,}" for n in sizes))
    err.print(table)
    if "posteriors" in settings.method.sends:
        rows = settings.method.public_batch_rows(settings.run.batch_size)
        rows = min(rows, max(len(node.domain.public) for node in federation.nodes))
        classes = len(federation.nodes[0].domain.classes)
        size = human_bytes(encoded_size("posteriors", str(settings.method.written), (rows, classes)))
        err.print(f"A teaching signal is at most {size}: {classes} posteriors each of {rows} public samples.")
    err.print(f"{config} is fine. Run it:  fedh2l run {config}", soft_wrap=True)


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    node: Annotated[str | None, typer.Option(help="One node only.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Other data: a key of the data section to change, as angles=\\[10,80], or a dataset; repeatable.",
        ),
    ] = None,
    which: Annotated[str, typer.Option(metavar="best|last", help="Which models.")] = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print the accuracies as JSON.")] = False,
) -> None:
    """Test the models of a run, on its own test data or on other data."""
    opened = RunDirectory.open(directory)
    changes = [f"data.{change if '=' in change else 'name=' + change}" for change in data or ()]
    config, _ = load_config(opened.config_path, changes, run={"device": "auto"})
    if changes:
        notice(
            "Other settings draw other splits: some of these samples, or others made of them, may have been trained on."
        )
    domains = config.data.domains(config.run.seed)
    names = [node] if node else [entry.name for entry in config.nodes]
    matrix = {name: _accuracies(load(directory, name, which), domains) for name in names}
    columns = [domain.name for domain in domains]
    rows = [[matrix[name][column] for column in columns] for name in names]
    rule = config.run.model_copy(update={"selection": which}).selection_rule
    about = f"; {config.data.note}" if config.data.note else ""
    err.print(matrix_table(names, rows, columns, f"{directory}: test accuracy in % ({rule}{about})"))
    if as_json:
        print_json({"which": which, "accuracy": matrix})


def predict(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Image files, or .npy arrays.")],
    node: Annotated[str, typer.Option(help="Whose model.")],
    which: Annotated[str, typer.Option(metavar="best|last", help="Which model.")] = "best",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a trained model what it sees."""
    predictions = load(directory, node, which).predict(list(inputs))
    for source, prediction in zip(inputs, predictions, strict=True):
        if not as_json:
            typer.echo(f"{source}: {prediction.label} ({100 * prediction.probability:.1f} %)")
    if as_json:
        print_json([{"input": s, **p._asdict()} for s, p in zip(inputs, predictions, strict=True)])


def _accuracies(classifier: Classifier, domains: list[Domain]) -> dict[str, float]:
    """In percent, on the test data of each domain."""
    parameter = next(classifier.parameters())
    accuracies = {}
    for domain in domains:
        if domain.classes != classifier.classes:
            raise DataError(f"domain '{domain.name}' has classes {domain.classes}, the model {classifier.classes}")
        test = domain.test.to(parameter.device, parameter.dtype)
        if tuple(test.inputs.shape[1:]) != classifier.input_shape:
            raise DataError(
                f"domain '{domain.name}' has inputs of shape {tuple(test.inputs.shape[1:])}, "
                f"the model takes {classifier.input_shape}"
            )
        accuracies[domain.name] = 100 * count_correct(classifier, test) / len(test)
    return accuracies
