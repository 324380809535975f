"""`fedh2l peer` and `fedh2l rehearse`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from fedh2l.cli.logs import LogFormat, use_format
from fedh2l.cli.run import AllowOption, ConfigArgument, JsonOption, OutOption, SetOption, announced, show
from fedh2l.experiment.config import load_config
from fedh2l.extras import PEER, needs
from fedh2l.runs.directory import CONFIG, RunDirectory
from fedh2l.runs.interrupts import on_interrupt

log = logging.getLogger("fedh2l.peer")


def peer(
    path: Annotated[Path, typer.Argument(metavar="PEER.toml", help="Configuration of the peer.")] = Path("peer.toml"),
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log.")] = LogFormat.TEXT,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Run without certificates, with peers on this machine only.")
    ] = False,
    allow: AllowOption = None,
) -> None:
    """Run this organisation's peer until the last round."""
    needs("peer", *PEER)
    from fedh2l.peer.monitoring.log_limit import LogRateLimit
    from fedh2l.peer.peer import Peer
    from fedh2l.peer.settings import load_peer

    config = load_peer(path, insecure)
    use_format(log_format, config.name)
    log.addFilter(LogRateLimit())
    if insecure:
        log.warning("running without certificates: any process on this machine can take part under any name")
    elif config.identity is not None and config.identity.ends_soon:
        log.warning("the certificate ends on %s: renew it", f"{config.identity.about.until:%Y-%m-%d}")
    out = config.path(config.settings.out)
    directory = RunDirectory.open(out) if (out / CONFIG).exists() else RunDirectory.claim(out, config.text)
    asked: list[bool] = []
    with directory.locked(), on_interrupt(lambda: asked.append(True)):
        finished = Peer(config, directory).run(lambda: bool(asked))
    if finished:
        log.info("'%s' is done; its models are in %s", config.name, out)
    else:
        log.warning("'%s' has stopped and is saved. Start it again to go on.", config.name)


def rehearse(
    config: ConfigArgument = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    changes: SetOption = None,
    allow: AllowOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rehearse a deployment on this machine: one process, certificate and socket per node."""
    needs("peer", *PEER)
    from fedh2l.experiment.toml import to_toml
    from fedh2l.peer.rehearsal import Rehearsal

    options = {"rounds": rounds, "seed": seed, "device": "cpu", "engine": "local"}
    settings = announced(load_config(config, changes or (), None, options))
    federation = settings.experiment()
    default = RunDirectory.default_path(f"{settings.data_name}-rehearsal", settings.method.title, settings.run.seed)
    directory = RunDirectory.claim(out or default, to_toml(settings))
    asked: list[bool] = []
    with on_interrupt(lambda: asked.append(True)):
        result = Rehearsal(settings, federation, directory.path).run(lambda: bool(asked))
    directory.write_result(result.to_dict())
    show(result, settings, f"Everything that the peers had and left is in {directory.path}", as_json)
