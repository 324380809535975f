"""`fedh2l roster`: the agreement of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice
from fedh2l.cli.extras import needs
from fedh2l.errors import ConfigError
from fedh2l.methods.registry import make_method
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.charter import Agreement, Charter, Member, Timing, differences

app = typer.Typer(no_args_is_help=True, help="The roster: who takes part, and what all have agreed on.")

SeedSet = Annotated[Path, typer.Option("--seedset", metavar="FILE", help="The federation's seed set.")]


@app.command()
def init(
    members: Annotated[list[str], typer.Argument(metavar="CERTIFICATE@HOST:PORT…", help="Each member, in order.")],
    rounds: Annotated[int, typer.Option(help="How many rounds.")],
    seedset: SeedSet = Path("seedset.safetensors"),
    method: Annotated[str, typer.Option(help="The method.")] = "fedh2l",
    seed: Annotated[int, typer.Option(help="What everything public that is random follows from.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("roster.toml"),
) -> None:
    """Write a roster from the members' certificates and the seed set; look it over, then give it to everybody."""
    needs("peer", "cryptography")
    from fedh2l.peer.certificates import About, read_certificate

    if out.exists():
        raise ConfigError(f"'{out}' exists already; name another file")
    bundle, found = Bundle.load(seedset), []
    for place, member in enumerate(members):
        path, _, address = member.rpartition("@")
        if not path:
            raise ConfigError(f"'{member}': a member is given as CERTIFICATE@HOST:PORT")
        about = About.of(read_certificate(Path(path)))
        found.append(Member.read({"name": about.name, "address": address, "pin": about.pin}, f"members.{place}"))
    agreement = Agreement(federation=bundle.federation, seed=seed, rounds=rounds, seedset=bundle.digest)
    charter = Charter(agreement, make_method({"name": method}), Timing(), tuple(found))
    charter.check_bundle(bundle)
    try:
        out.write_text(charter.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror}") from error
    err.print(f"Wrote {out}. Look it over, then give it to every member.", soft_wrap=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="ROSTER")] = Path("roster.toml"),
    seedset: SeedSet = Path("seedset.safetensors"),
    other: Annotated[
        Path | None, typer.Option("--with", metavar="ROSTER", help="Another one to compare it to.")
    ] = None,
) -> None:
    """Check a roster and its seed set; its digest must be the same everywhere."""
    charter, bundle = Charter.load(path), Bundle.load(seedset)
    charter.check_bundle(bundle)
    agreement = charter.agreement
    table = Table(title=f"'{agreement.federation}', version {agreement.version}: {charter.method.title}, "
                  f"{agreement.rounds:,} rounds")  # fmt: skip
    for column in ("member", "address", "key"):
        table.add_column(column, overflow="fold")
    for member in charter.members:
        table.add_row(member.name, member.address, member.pin)
    err.print(table)
    typer.echo(f"digest: {charter.roster(bundle.classes).digest.hex()}")
    if other is not None:
        found = differences(charter.canonical(bundle.classes), Charter.load(other).canonical(bundle.classes))
        for text in found:
            notice(text)
        if found:
            raise ConfigError(f"'{path}' and '{other}' differ, and peers that hold them refuse each other")
        err.print(f"'{other}' agrees.", soft_wrap=True)
