"""The commands, their common options and exit codes.

Exit codes: 0 success, 1 failure, 2 input error, 75 a bench at its time limit, 130 interrupted and saved.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from rich.logging import RichHandler
from typer.core import TyperGroup

from fedh2l import plugins
from fedh2l.cli.console import PlainLines, err, show_error
from fedh2l.errors import FedH2LError


class Command(NamedTuple):
    """A command: its module, its function or group there, and the first line of its help."""

    module: str
    name: str
    summary: str


COMMANDS = {
    "run": Command("run", "run", "Train models and print their accuracies. By default four LeNets on Rotated MNIST."),
    "bench": Command(
        "bench",
        "bench",
        "Compare methods over several seeds and print tables. Finished runs are not repeated.",
    ),
    "list": Command("listing", "list_known", "List methods, datasets and models, one line each."),
    "init": Command("commands", "init", "Write a configuration with every key explained."),
    "check": Command("commands", "check", "Check a configuration, its data and its models without training."),
    "evaluate": Command(
        "evaluate",
        "evaluate",
        "Evaluate the models of a run on its test data, or on all samples of other data.",
    ),
    "predict": Command("commands", "predict", "Classify new inputs with a trained model."),
    "cache": Command("cache", "app", "List or remove the decoded images on this machine."),
    "pki": Command("pki", "app", "Create an authority; request, sign, renew and revoke certificates."),
    "seedset": Command(
        "seedset", "app", "The seed set: prepare a part, merge all parts, verify the result, reveal a share."
    ),
    "roster": Command("roster", "app", "The roster: the members and the settings that they agree on."),
    "audit": Command(
        "audit",
        "audit",
        "Verify that an audit log is complete, and summarise it. Older files of the same log are included.",
    ),
    "peer": Command(
        "peer",
        "peer",
        "Run this organisation's peer until the last round.",
    ),
    "rehearse": Command(
        "peer",
        "rehearse",
        "Rehearse a deployment on this machine: one process, certificate and socket per node.",
    ),
    "status": Command(
        "status",
        "status",
        "Show a peer's round, accuracy and the state of its connections.",
    ),
}
"""In the order of the help. A command's module is imported when the command is called."""


class LazyCommands(TyperGroup):
    """Shows all commands with their summaries. Imports only the called command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the arguments of a call."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and command else None, rest


def load_command(name: str) -> Any:
    """Import a command and return it for click."""
    command = COMMANDS[name]
    found = getattr(import_module(f"fedh2l.cli.{command.module}"), command.name)
    group = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    return typer.main.get_group(group).commands[name]


app = typer.Typer(
    name="fedh2l",
    cls=LazyCommands,
    help="Federated learning by mutual distillation: nodes exchange class probabilities on public data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.summary)(lambda: None)  # `LazyCommands` calls the real one


def _version(wanted: bool) -> None:
    if wanted:
        from fedh2l.version import __version__

        typer.echo(f"fedh2l {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.with_resource(plugins.only())  # files may name code, which runs only if the user allows it
    handler = RichHandler(console=err, show_time=False, show_path=False)
    handler.setFormatter(PlainLines())
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        handlers=[handler],
    )
    for chatty in ("matplotlib", "PIL"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def main() -> None:
    """Run the command line. An error is one message, with a traceback only after --debug."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]  # --debug may be at any position
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(["--debug", *arguments] if debug else arguments)
    except FedH2LError as error:
        if debug:
            err.print_exception()
        show_error(*error.args)
        sys.exit(error.exit_code)
