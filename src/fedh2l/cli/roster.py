"""`fedh2l roster`: the agreement of a federation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice
from fedh2l.cli.extras import needs
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.methods.registry import find_method, make_method
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.charter import Agreement, Charter, Member, Timing, check_versions, differences

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
    bundle = Bundle.load(seedset)
    agreement = Agreement(federation=bundle.federation, seed=seed, rounds=rounds, seedset=bundle.digest)
    advice = find_method(method).advice("method", bundle.labelled)
    charter = Charter(agreement, make_method({"name": method, **advice}), Timing(), _members(members))
    charter.check_bundle(bundle)
    _write(charter, out)
    err.print(f"Wrote {out}. Look it over, then give it to every member.", soft_wrap=True)


@app.command()
def amend(
    from_round: Annotated[int, typer.Option(help="The first round in which the new version holds.")],
    path: Annotated[Path, typer.Argument(metavar="ROSTER", help="The version that holds now.")] = Path("roster.toml"),
    add: Annotated[
        list[str] | None, typer.Option(metavar="CERTIFICATE@HOST:PORT", help="Who joins; may be repeated.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Who leaves; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds, if not as many as before.")] = None,
    seedset: SeedSet = Path("seedset.safetensors"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it; roster-2.toml, …")] = None,
) -> None:
    """Write the next version of a roster: who joins, who leaves, and from which round on."""
    needs("peer", "cryptography")
    before, bundle = Charter.load(path), Bundle.load(seedset)
    version = before.agreement.version + 1
    out = out or path.with_name(f"roster-{version}.toml")
    strangers = sorted(set(remove or ()) - set(before.names))
    if strangers:
        raise ConfigError(
            f"--remove {strangers[0]}: there is no such member.{did_you_mean(strangers[0], before.names)}"
        )
    stay = [member for member in before.members if member.name not in (remove or ())]
    new = {"version": version, "from_round": from_round, "rounds": rounds or before.agreement.rounds}
    agreement = Agreement.read({**before.agreement.model_dump(), **new, "seedset": bundle.digest}, "roster")
    after = Charter(agreement, before.method, before.timing, (*stay, *_members(add or ())), before.views)
    after.check_bundle(bundle)
    check_versions([before, after])
    _write(after, out)
    err.print(
        f"Wrote {out}. Give it to every member before round {from_round:,}; each names both in its peer.toml:",
        f'    roster = ["{path.name}", "{out.name}"]',
        sep="\n",
        soft_wrap=True,
    )


def _members(given: Sequence[str]) -> tuple[Member, ...]:
    from fedh2l.peer.certificates import About, read_certificate

    found = []
    for place, member in enumerate(given):
        path, _, address = member.rpartition("@")
        if not path:
            raise ConfigError(f"'{member}': a member is given as CERTIFICATE@HOST:PORT")
        about = About.of(read_certificate(Path(path)))
        found.append(Member.read({"name": about.name, "address": address, "pin": about.pin}, f"members.{place}"))
    return tuple(found)


def _write(charter: Charter, out: Path) -> None:
    if out.exists():
        raise ConfigError(f"'{out}' exists already; name another file")
    try:
        out.write_text(charter.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror}") from error


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
