"""`fedh2l bench`: compare methods over several seeds."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

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
from fedh2l.experiment.config import Config
from fedh2l.extras import needs
from fedh2l.hardware import available_cores, resolve_device
from fedh2l.methods.registry import find_method
from fedh2l.runs.directory import RunDirectory

OUT_OF_TIME = 75
"""Exit code of a bench that reached its time limit."""


SuiteArgument = Annotated[str, typer.Argument(metavar="SUITE", help=f"One of: {', '.join(SUITES)}.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="Number of seeds for each setting: 0, 1, …")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Number of rounds per run.")]
MethodsOption = Annotated[
    str | None, typer.Option(metavar="A,B", help="Only these methods. Own methods as package.module:Class.")
]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Parallel runs. By default one per core, and one for images or on a GPU.")
]
OutOption = Annotated[Path, typer.Option(metavar="DIR", help="Directory for runs and tables.")]
DeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda|auto", help="Device for training.")]
EngineOption = Annotated[
    str, typer.Option(metavar="auto|ray", help="With ray, the runs are spread over a Ray cluster.")
]
ModelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="heterogeneous|homogeneous|FILE",
        help="Models of image suites: the paper's, ResNet18 on all nodes, or the nodes of a TOML file.",
    ),
]
KeepModelsOption = Annotated[bool, typer.Option("--keep-models", help="Keep the models of each run.")]
TimeLimitOption = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="Stop after this time. The same command continues.")
]


def bench(
    suite: SuiteArgument,
    seeds: SeedsOption = 5,
    rounds: RoundsOption = 10_000,
    methods: MethodsOption = None,
    jobs: JobsOption = None,
    out: OutOption = Path("bench"),
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    models: ModelsOption = None,
    keep_models: KeepModelsOption = False,
    time_limit: TimeLimitOption = None,
    changes: SetOption = None,
    allow: AllowOption = None,
) -> None:
    """Compare methods over several seeds and print tables. Finished runs are not repeated."""
    wanted = _suite(suite, models, changes or ())
    named = _methods(methods)
    common = (f"run.rounds={rounds}", *(changes or ()))
    cells = all_cells(wanted, seeds, common, named)
    if engine not in ("auto", "ray"):
        raise ConfigError(f"--engine {engine}: use auto for this machine, or ray for a Ray cluster. To set the "
                          f"engine of each run, use --set run.engine={engine}")  # fmt: skip
    place = str(resolve_device(device)) if engine == "auto" else device
    caption = _caption(wanted, seeds, [cell.config("cpu") for cell in cells])  # checks all before anything runs
    todo, outcome = _unfinished(cells, out), Outcome()
    err.print(f"{len(cells)} runs of {rounds} rounds, {len(cells) - len(todo)} of them done already.")
    if todo and engine == "ray":
        cluster = ray_module("fedh2l.bench.cluster", "--engine")
        workers = cluster.OnRay(out, place, todo[0].config("cpu").ray, jobs, keep_models)
        outcome = _run(todo, rounds, workers, time_limit)
    elif todo:
        one = wanted.images or place.startswith("cuda")  # large models, one at a time
        count = jobs or (1 if one else available_cores())
        outcome = _run(todo, rounds, Processes(out, place, count, keep_models), time_limit)
    _write(Report.of(wanted, tables_of(wanted, out, seeds, common, named), caption), out)
    _end(outcome, sum(cell.result(out) is None for cell in cells))


def _suite(name: str, models: str | None, changes: Sequence[str]) -> Suite:
    if name not in SUITES:
        raise ConfigError(f"unknown suite '{name}'.{did_you_mean(name, SUITES)} There are: {', '.join(SUITES)}")
    needs("bench", "scipy", *(["matplotlib"] if SUITES[name].frontier else []))  # now, not after hours of training
    if SUITES[name].images:
        return image_suite(name, models, changes)
    if models is not None:
        raise ConfigError(f"--models {models}: the models of '{name}' are fixed; this is for benchmarks on images")
    return SUITES[name]


def _methods(names: str | None) -> list[str] | None:
    """Return the named methods. All of them must be known."""
    if names is None:
        return None
    named = [name.strip() for name in names.split(",")]
    plugins.allow_named(named)
    for name in named:
        find_method(name)
    return named


def _unfinished(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Return the cells without a result, after checks of the data and the models."""
    todo = [cell for cell in cells if cell.result(out) is None]
    for cell in [cell for cell in cells if cell not in todo][:1]:  # the others have the same data and models
        RunDirectory(cell.path(out)).check(cell.config("cpu").experiment().fingerprint)
    if todo:
        todo[0].config("cpu").experiment()  # reads images once for all runs
    return todo


def _caption(suite: Suite, seeds: int, configs: Sequence[Config]) -> str:
    rules = " or ".join(sorted({config.run.selection_rule for config in configs}))
    notes = sorted({config.data.note for config in configs} - {""})
    about = "".join(f"Data: {note}. " for note in notes)
    mark = " ◆: nothing that sends no more is better." if suite.frontier else ""
    return (
        f"Test accuracy in %, mean ± standard deviation over {seeds} seeds; differences are paired by seed, with "
        f"95 % intervals. Selected: {rules}. {about}Made by `fedh2l {shlex.join(sys.argv[1:])}`.{mark}"
    )


def _write(report: Report, out: Path) -> None:
    """Write and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    written = report.write(out)
    for table in report.rich(err.width):
        err.print(table)
    err.print(f"Wrote {', '.join(str(path) for path in written)}", soft_wrap=True)


def _run(todo: Sequence[Cell], rounds: int, workers: Workers, seconds: float | None) -> Outcome:
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
        return Runner(workers, seconds, Bar()).run(units(todo, workers.device))


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
