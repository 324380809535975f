"""`fedh2l bench`: compare methods over several seeds."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedh2l import plugins
from fedh2l.bench.cells import Cell, all_cells, units
from fedh2l.bench.image_suites import image_suite
from fedh2l.bench.output import Report
from fedh2l.bench.runner import Outcome, Processes, Runner, Workers
from fedh2l.bench.suite import Suite
from fedh2l.bench.suites import SUITES
from fedh2l.bench.tables import tables_of
from fedh2l.cli.console import err, notice
from fedh2l.cli.run import AllowOption, SetOption
from fedh2l.engines.choice import ray_module
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.experiment.settings import RaySettings
from fedh2l.extras import needs
from fedh2l.hardware import available_cores, resolve_device
from fedh2l.methods.registry import find_method
from fedh2l.runs.directory import RunDirectory

OUT_OF_TIME = 75
"""Exit code of a bench that reached its time limit."""


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=f"One of: {', '.join(SUITES)}.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each setting: 0, 1, …")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds per run.")] = 10_000,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these methods. Own methods as package.module:Class.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Parallel runs. By default one per core, and one for images or on a GPU.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for runs and tables.")] = Path("bench"),
    device: Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Device for training.")] = "auto",
    engine: Annotated[
        str, typer.Option(metavar="auto|ray", help="With ray, the runs are spread over a Ray cluster.")
    ] = "auto",
    models: Annotated[
        str | None,
        typer.Option(
            metavar="heterogeneous|homogeneous|FILE",
            help="Models of image suites: the paper's, ResNet18 on all nodes, or the nodes of a TOML file.",
        ),
    ] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the models of each run.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Stop after this time. The same command continues.")
    ] = None,
    changes: SetOption = None,
    allow: AllowOption = None,
) -> None:
    """Compare methods over several seeds and print tables. Finished runs are not repeated."""
    wanted = _suite(suite, models, changes or ())
    needs("bench", "scipy", *(["matplotlib"] if wanted.frontier else []))  # now, not after hours of training
    named = [name.strip() for name in methods.split(",")] if methods else None
    plugins.allow_named(named or ())
    for name in named or ():
        find_method(name)
    common = (f"run.rounds={rounds}", *(changes or ()))
    cells = all_cells(wanted, seeds, common, named)
    if engine not in ("auto", "ray"):
        raise ConfigError(f"--engine {engine}: use auto for this machine, or ray for a Ray cluster. To set the "
                          f"engine of each run, use --set run.engine={engine}")  # fmt: skip
    place = str(resolve_device(device)) if engine == "auto" else device
    configs = [cell.config("cpu") for cell in cells]  # errors are raised before anything runs
    rules = {config.run.selection_rule for config in configs}
    data = {config.data.note for config in configs} - {""}
    todo = [cell for cell in cells if cell.result(out) is None]
    for cell in [cell for cell in cells if cell not in todo][:1]:  # the others have the same data and models
        RunDirectory(cell.path(out)).check(cell.config("cpu").experiment().fingerprint)
    if todo:
        todo[0].config("cpu").experiment()  # reads images once for all runs
    err.print(f"{len(cells)} runs of {rounds} rounds, {len(cells) - len(todo)} of them done already.")
    if todo:
        workers = (
            _on_ray(out, place, jobs, todo[0].config("cpu").ray, keep_models)
            if engine == "ray"
            else _here(out, place, jobs or (1 if wanted.images else None), keep_models)  # large models, one at a time
        )
        outcome = _run(todo, rounds, workers, time_limit)
    else:
        outcome = Outcome()
    about = "".join(f"Data: {note}. " for note in sorted(data))
    caption = (
        f"Test accuracy in %, mean ± standard deviation over {seeds} seeds; differences are paired by seed, with "
        f"95 % intervals. Selected: {' or '.join(sorted(rules))}. {about}Made by `fedh2l {shlex.join(sys.argv[1:])}`."
    )
    mark = " ◆: nothing that sends no more is better." if wanted.frontier else ""
    report = Report.of(wanted, tables_of(wanted, out, seeds, common, named), caption + mark)
    out.mkdir(parents=True, exist_ok=True)
    written = report.write(out)
    for table in report.rich(err.width):
        err.print(table)
    err.print(f"Wrote {', '.join(str(path) for path in written)}", soft_wrap=True)
    _end(outcome, sum(cell.result(out) is None for cell in cells))


class Pool(NamedTuple):
    """Workers of a bench, with their device and number."""

    workers: Workers
    device: str
    jobs: int


def _suite(name: str, models: str | None, changes: Sequence[str]) -> Suite:
    if name not in SUITES:
        raise ConfigError(f"unknown suite '{name}'.{did_you_mean(name, SUITES)} There are: {', '.join(SUITES)}")
    if SUITES[name].images:
        return image_suite(name, models, changes)
    if models is not None:
        raise ConfigError(f"--models {models}: the models of '{name}' are fixed; this is for benchmarks on images")
    return SUITES[name]


def _here(out: Path, device: str, jobs: int | None, keep_models: bool) -> Pool:
    count = jobs or (1 if device.startswith("cuda") else available_cores())
    return Pool(Processes(out, device, count, keep_models), device, count)


def _on_ray(out: Path, device: str, jobs: int | None, settings: RaySettings, keep_models: bool) -> Pool:
    cluster = ray_module("fedh2l.bench.cluster", "--engine")
    workers = cluster.OnRay(out, device, settings, keep_models)
    return Pool(workers, workers.device, jobs or workers.places)


def _run(todo: Sequence[Cell], rounds: int, pool: Pool, seconds: float | None) -> Outcome:
    progress = Progress(
        TextColumn("{task.fields[cells]} of {task.fields[all]} runs"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left", style="dim"),
        console=err,
    )
    task = progress.add_task("", total=rounds * len(todo), cells=0, all=len(todo))

    class Bar:
        def update(self, rounds: int, cells: int) -> None:
            progress.update(task, completed=rounds, cells=cells)

    with progress:
        return Runner(pool.workers, pool.jobs, seconds, Bar()).run(units(todo, pool.device))


def _end(outcome: Outcome, left: int) -> None:
    for cell, problem in outcome.failed.items():
        first, *rest = problem.splitlines() or [""]
        notice(f"{cell.method}, seed {cell.seed}, {' '.join(cell.changes)}: {first}", *(f"  {line}" for line in rest))
    if outcome.stopped:
        why = "Stopped" if outcome.interrupted else "Out of time"
        notice(f"{why}; {left} runs remain and running ones are saved. The same command continues them.")
        raise typer.Exit(130 if outcome.interrupted else OUT_OF_TIME)
    if outcome.failed:
        raise typer.Exit(1)
