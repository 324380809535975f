"""`fedh2l init`, `check` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.api import load
from fedh2l.cli.console import err, notice, print_json, say
from fedh2l.cli.run import AllowOption, JsonOption, PresetOption, SetOption, announced
from fedh2l.data.domain import Domain
from fedh2l.errors import ConfigError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.presets import of_preset
from fedh2l.experiment.toml import to_toml
from fedh2l.protocol.messages import encoded_size
from fedh2l.report.samples import write_sheet
from fedh2l.report.tables import human_bytes, short


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("fedh2l.toml"),
    method: Annotated[str | None, typer.Option(help="Method whose keys are explained.")] = None,
    preset: PresetOption = None,
    changes: SetOption = None,
) -> None:
    """Write a configuration with every key explained."""
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
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file.")],
    changes: SetOption = None,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw public images with augmented versions beside them."),
    ] = None,
    allow: AllowOption = None,
) -> None:
    """Check a configuration, its data and its models without training."""
    settings = announced(load_config(config, changes or ()))
    experiment = settings.experiment()
    learners = experiment.learners()
    table = Table(title=f"{settings.method.name} on {settings.data_name}, {settings.run.rounds} rounds")
    for column in ("node", "model", "parameters", "private", "public", "val.", "test"):
        table.add_column(column, justify="left" if column in ("node", "model") else "right")
    for node, learner in zip(experiment.nodes, learners, strict=True):
        domain = node.domain
        sizes = [len(part) for part in (domain.private, domain.public, domain.validation, domain.test)]
        name = node.name if node.name == domain.name else f"{node.name} ({domain.name})"
        table.add_row(name, short(node.model_name), f"{learner.parameters.numel():,}", *(f"{n:,}" for n in sizes))
    err.print(table)
    if "posteriors" in settings.method.sends:
        rows = settings.method.public_batch_rows(settings.run.batch_size)
        rows = min(rows, max(len(node.domain.public) for node in experiment.nodes))
        classes = len(experiment.nodes[0].domain.classes)
        size = human_bytes(encoded_size("posteriors", str(settings.method.written), (rows, classes)))
        err.print(f"A teaching signal is at most {size}: {classes} posteriors each of {rows} public samples.")
    if samples is not None:
        _draw_samples([node.domain for node in experiment.nodes], settings.run.seed, samples)
    err.print(f"{config} is fine. Run it:  fedh2l run {config}", soft_wrap=True)


def _draw_samples(domains: Sequence[Domain], seed: int, path: Path) -> None:
    write_sheet(domains, seed, path)
    if all(domain.augmentation is None for domain in domains):
        notice(f"{path} shows the original images; data.augment = 'all' adds augmented versions.")
    else:
        err.print(f"{path} shows public images, with augmented versions beside them.", soft_wrap=True)


def predict(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Image files or .npy arrays.")],
    node: Annotated[str, typer.Option(help="Node whose model is used.")],
    which: Annotated[
        str, typer.Option(metavar="best|last", help="Best model on validation data, or the last.")
    ] = "best",
    allow: AllowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify new inputs with a trained model."""
    predictions = load(directory, node, which).predict(list(inputs))
    for source, prediction in zip(inputs, predictions, strict=True):
        if not as_json:
            say(f"{source}: {prediction.label} ({100 * prediction.probability:.1f} %)")
    if as_json:
        print_json([{"input": s, **p._asdict()} for s, p in zip(inputs, predictions, strict=True)])
