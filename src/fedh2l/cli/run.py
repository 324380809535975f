"""`fedh2l run`: train models."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fedh2l import plugins
from fedh2l.cli.console import err, notice, print_json
from fedh2l.errors import ConfigError, RunError
from fedh2l.experiment.config import Config, load_config
from fedh2l.experiment.presets import of_preset
from fedh2l.experiment.toml import to_toml
from fedh2l.report.progress import LiveProgress
from fedh2l.report.tables import result_table, traffic
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.interrupts import on_interrupt
from fedh2l.runs.result import Result
from fedh2l.runs.resuming import go_on, saved_result
from fedh2l.runs.trainer import Interrupted, Trainer

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting. Repeatable.")
]

AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="PACKAGE",
        help="Allow files to import models, methods and data from this package, which runs its code. Repeatable.",
        callback=lambda packages: plugins.allow(packages or ()),
    ),
]


PresetOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Image experiment of the paper. `fedh2l list` shows all.")
]
DeviceOption = Annotated[str | None, typer.Option(metavar="cpu|cuda|auto", help="Device for training.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
ConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.toml]", help="Configuration file. By default four LeNets on Rotated MNIST."),
]
MethodOption = Annotated[str | None, typer.Option(help="Method. `fedh2l list` shows all.")]
RoundsOption = Annotated[int | None, typer.Option(help="Number of rounds.")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed.")]
EngineOption = Annotated[
    str | None,
    typer.Option(metavar="auto|local|processes|batched|ray", help="Where nodes run. ray uses a cluster."),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the run. By default a new one in runs/.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Remove the run that is in --out first.")]
ResumeOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Continue a run. With --rounds, extend it.")]


def run(
    config: ConfigArgument = None,
    preset: PresetOption = None,
    method: MethodOption = None,
    rounds: RoundsOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    engine: EngineOption = None,
    changes: SetOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    resume: ResumeOption = None,
    allow: AllowOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train models and print their accuracies. By default four LeNets on Rotated MNIST."""
    if resume is not None:
        if any(option is not None for option in (config, preset, method, seed, device, engine, changes, out)):
            raise ConfigError("--resume continues a run with its own settings; only --rounds can be given with it")
        if overwrite:
            raise ConfigError("--resume continues a run, and --overwrite removes it; give one of them")
        settings, result, directory = _resume(resume, rounds)
    else:
        options = {
            "rounds": rounds, "seed": seed, "device": device, "engine": engine, "out": str(out) if out else None,
        }  # fmt: skip
        if config and preset:
            raise ConfigError(f"--preset {preset} is instead of a config file; give one of them")
        overrides = (*of_preset(preset), *(changes or ()))
        settings = announced(load_config(config, overrides, method, options, trusted=True))
        result, directory = _start(settings, overwrite)
    err.print()
    show(result, settings, f"Results, metrics and models are in {directory.path}", as_json)


def announced(loaded: tuple[Config, list[str]]) -> Config:
    """Print the notices of a loaded configuration, and return it."""
    config, notices = loaded
    for text in notices:
        notice(text)
    return config


def show(result: Result, config: Config, where: str, as_json: bool) -> None:
    """Print a result, and where the files of the run are."""
    err.print(result_table(result, config.run.selection_rule, config.data.note))
    err.print(traffic(result, config.method), soft_wrap=True)
    err.print(where, soft_wrap=True)
    if as_json:
        print_json(result.to_dict())


def _start(config: Config, overwrite: bool) -> tuple[Result, RunDirectory]:
    trainer = Trainer(config.experiment())  # everything that can be wrong is found before anything is written
    default = RunDirectory.default_path(config.data_name, config.method.title, config.run.seed)
    with trainer.preparing():
        trainer.directory = RunDirectory.claim(config.run.out or default, to_toml(config), overwrite)
    with trainer.directory.says_what_is_left():
        return _train(trainer), trainer.directory


def _resume(path: Path, rounds: int | None) -> tuple[Config, Result, RunDirectory]:
    if not path.is_dir():
        raise RunError(f"--resume {path}: there is no such run")
    directory = RunDirectory.open(path)
    config, _ = load_config(directory.config_path, run={"rounds": rounds})
    experiment = config.experiment()
    if ended := saved_result(directory, experiment):
        return config, ended, directory
    trainer = Trainer(experiment, directory)
    with trainer.preparing():
        found = go_on(trainer, to_toml(config))
    if found:
        notice(f"{path}: going on after round {trainer.round}")
    else:
        notice(f"{path} has no checkpoint: starting from round 0")
    return config, _train(trainer), directory


def _train(trainer: Trainer) -> Result:
    assert trainer.directory is not None
    progress = LiveProgress(err)
    trainer.callbacks = [progress]
    asked: list[bool] = []
    trainer.stop = lambda: bool(asked)  # at the next whole round
    try:
        with on_interrupt(lambda: asked.append(True)), redirect_stdout(sys.stderr):  # show Ray's own messages
            return trainer.run()
    except Interrupted as stopped:
        progress.close()
        program = "fedh2l" if shutil.which("fedh2l") else f"{shlex.quote(sys.executable)} -m fedh2l"
        allowed = "".join(f" --allow {shlex.quote(package)}" for package in plugins.trust().packages)
        command = f"{program} run --resume {shlex.quote(str(trainer.directory.path))}{allowed}"
        notice(f"Stopped after round {stopped.round}, which is saved. Go on with:  {command}")
        raise typer.Exit(130) from None
    finally:
        progress.close()
