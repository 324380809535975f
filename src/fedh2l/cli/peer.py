"""`fedh2l peer` and `fedh2l rehearse`: real federations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from fedh2l.cli.console import err, notice, print_json
from fedh2l.cli.extras import needs
from fedh2l.cli.run import SetOption
from fedh2l.config import load_config
from fedh2l.reporting.tables import result_table, traffic
from fedh2l.rundir import CONFIG, RunDirectory
from fedh2l.signals import on_interrupt

MODULES = ("cryptography", "grpc", "google.protobuf")


def peer(path: Annotated[Path, typer.Argument(metavar="PEER.toml")] = Path("peer.toml")) -> None:
    """Run this organisation's peer: train its node, exchange posteriors with the others, until the last round."""
    needs("peer", *MODULES)
    from fedh2l.peer.peer import Peer
    from fedh2l.peer.settings import load_peer

    config = load_peer(path)
    if config.identity.ends_soon:
        notice(f"The certificate ends on {config.identity.about.until:%Y-%m-%d}: renew it.")
    out = config.path(config.settings.out)
    directory = RunDirectory.open(out) if (out / CONFIG).exists() else RunDirectory.claim(out, config.text)
    if directory.result() is not None:
        notice(f"'{config.name}' has already done its last round; its models are in {out}")
        return
    logging.getLogger("fedh2l.peer").setLevel(logging.INFO)
    asked: list[bool] = []
    with directory.locked(), on_interrupt(lambda: asked.append(True)):
        finished = Peer(config, directory).run(lambda: bool(asked))
    if finished:
        err.print(f"'{config.name}' is done; its models are in {out}", soft_wrap=True)
    else:
        notice(f"'{config.name}' has stopped and is saved. Start it again to go on.")


def rehearse(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Without one: the default.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="What everything random follows from.")] = None,
    changes: SetOption = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; a new folder in runs/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
) -> None:
    """Try a real federation on this machine: a process, a certificate and a socket for every node."""
    needs("peer", *MODULES)
    from fedh2l.peer.rehearsal import Rehearsal
    from fedh2l.toml import to_toml

    options = {"rounds": rounds, "seed": seed, "device": "cpu", "engine": "local"}
    settings, notices = load_config(config, changes or (), None, options)
    for text in notices:
        notice(text)
    federation = settings.federation()
    default = RunDirectory.default_path(f"{settings.data_name}-rehearsal", settings.method.title, settings.run.seed)
    directory = RunDirectory.claim(out or default, to_toml(settings))
    asked: list[bool] = []
    with on_interrupt(lambda: asked.append(True)):
        result = Rehearsal(settings, federation, directory.path).run(lambda: bool(asked))
    directory.write_result(result.to_dict())
    err.print(result_table(result, settings.run.selection_rule))
    err.print(traffic(result, settings.method), soft_wrap=True)
    err.print(f"Everything that the peers had and left is in {directory.path}", soft_wrap=True)
    if as_json:
        print_json(result.to_dict())
