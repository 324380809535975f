"""`fedh2l run`: train a federation."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from fedh2l.cli.console import err, notice, print_json
from fedh2l.config import Config, load_config
from fedh2l.errors import ConfigError, RunError
from fedh2l.presets import of_preset
from fedh2l.reporting.progress import LiveProgress
from fedh2l.reporting.tables import result_table, traffic
from fedh2l.result import Result
from fedh2l.rundir import RunDirectory
from fedh2l.signals import on_interrupt
from fedh2l.toml import to_toml
from fedh2l.trainer import Interrupted, Trainer

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be repeated.")
]


def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Without one: the default.")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A federation of the paper; `fedh2l list` shows them.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="A method; `fedh2l list` shows them.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="What everything random follows from.")] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda|auto", help="Where to compute.")] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="local|batched|ray|auto", help="What runs the nodes; ray: on a cluster.")
    ] = None,
    changes: SetOption = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; a new folder in runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with an interrupted run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
) -> None:
    """Train a federation: with no argument, four LeNets on Rotated MNIST."""
    if resume is not None:
        if any(option is not None for option in (config, preset, method, rounds, seed, device, engine, changes, out)):
            raise ConfigError(
                "--resume goes on with a run exactly as it was configured; give no other settings with it"
            )
        settings, result, directory = _resume(resume)
    else:
        options = {
            "rounds": rounds, "seed": seed, "device": device, "engine": engine, "out": str(out) if out else None,
        }  # fmt: skip
        if config and preset:
            raise ConfigError(f"--preset {preset} is instead of a config file; give one of them")
        settings, notices = load_config(config, (*of_preset(preset), *(changes or ())), method, options)
        for text in notices:
            notice(text)
        result, directory = _start(settings)
    err.print()
    err.print(result_table(result, settings.run.selection_rule, settings.data.note))
    err.print(traffic(result, settings.method), soft_wrap=True)
    err.print(f"Results, metrics and models are in {directory.path}", soft_wrap=True)
    if as_json:
        print_json(result.to_dict())


def _start(config: Config) -> tuple[Result, RunDirectory]:
    trainer = Trainer(config.federation())  # everything that can be wrong is found before anything is written
    default = RunDirectory.default_path(config.data_name, config.method.title, config.run.seed)
    trainer.directory = RunDirectory.claim(config.run.out or default, to_toml(config))
    return _train(trainer), trainer.directory


def _resume(path: Path) -> tuple[Config, Result, RunDirectory]:
    if not path.is_dir():
        raise RunError(f"--resume {path}: there is no such run")
    directory = RunDirectory.open(path)
    config, _ = load_config(directory.config_path)
    finished = directory.result()
    if finished is not None:
        notice(f"{path} has already ended; nothing was left to do")
        return config, Result.from_dict(finished), directory
    trainer = Trainer(config.federation(), directory)
    if trainer.resume():
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
        with on_interrupt(lambda: asked.append(True)), redirect_stdout(sys.stderr):  # Ray prints what it has to say
            return trainer.run()
    except Interrupted as stopped:
        progress.close()
        program = "fedh2l" if shutil.which("fedh2l") else f"{shlex.quote(sys.executable)} -m fedh2l"
        command = f"{program} run --resume {shlex.quote(str(trainer.directory.path))}"
        notice(f"Stopped after round {stopped.round}, which is saved. Go on with:  {command}")
        raise typer.Exit(130) from None
    finally:
        progress.close()
