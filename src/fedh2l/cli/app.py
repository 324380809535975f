"""The commands, and what all of them share: where output goes, and how errors end.

Exit codes: 0 done, 1 the training failed, 2 the input was wrong, 130 interrupted (and saved),
75 a bench stopped at its time limit.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.logging import RichHandler

from fedh2l.cli import audit, bench, commands, peer, pki, roster, run, seedset, status
from fedh2l.cli.console import err, show_error
from fedh2l.errors import FedH2LError
from fedh2l.version import __version__

app = typer.Typer(
    name="fedh2l",
    help="Federated learning between nodes that share neither data nor models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(bench.bench)
app.command("list")(commands.list_known)
app.command()(commands.init)
app.command()(commands.check)
app.command()(commands.evaluate)
app.command()(commands.predict)
app.add_typer(pki.app, name="pki")
app.add_typer(seedset.app, name="seedset")
app.add_typer(roster.app, name="roster")
app.command()(audit.audit)
app.command()(peer.peer)
app.command()(peer.rehearse)
app.command()(status.status)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedh2l {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format="%(message)s", handlers=[handler])
    for chatty in ("matplotlib", "PIL"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def main() -> None:
    """Runs the command line; an error that a user can mend is one message, with no traceback unless asked for."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]  # wherever it stands
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(["--debug", *arguments] if debug else arguments)
    except FedH2LError as error:
        if debug:
            err.print_exception()
        show_error(str(error))
        sys.exit(error.exit_code)
