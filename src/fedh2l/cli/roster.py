"""`fedh2l roster`: members and agreed settings of a federation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice, say
from fedh2l.cli.run import AllowOption
from fedh2l.data.augmentation_keys import SETS, Kind
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.extras import needs
from fedh2l.files import write_exclusively
from fedh2l.methods.registry import find_method, make_method
from fedh2l.peer.membership.augmentation import AS_THEY_ARE, SharedViews
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.peer.membership.roster_comparison import check_start, check_versions, differences, grouped, pin_digest
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_sections import Agreement, Member, Timing
from fedh2l.peer.membership.shares import Reveal, seed_of
from fedh2l.plugins import allow_named

app = typer.Typer(no_args_is_help=True, help="The roster: the members and the settings that they agree on.")

SeedSet = Annotated[Path, typer.Option("--seedset", metavar="FILE", help="Seed set of the federation.")]


@app.command()
def init(
    members: Annotated[list[str], typer.Argument(metavar="CERTIFICATE@HOST:PORT…", help="Members, in order.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds.")],
    seedset: SeedSet = Path("seedset.safetensors"),
    method: Annotated[str, typer.Option(help="Method.")] = "fedh2l",
    share: Annotated[
        list[Path] | None,
        typer.Option(metavar="NAME.reveal", help="Revealed share of one member. Repeatable, one per member."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed. Only if the members committed to no shares.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(SETS),
            help="Kind of images, which sets [views]. By default any, if the method augments images.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("roster.toml"),
) -> None:
    """Write a roster from the certificates of all members and the seed set."""
    needs("peer", "cryptography")
    allow_named([method])
    bundle = Bundle.load(seedset)
    shares = _shares(share or (), bundle, seed)
    chosen = find_method(method)
    agreement = Agreement(
        federation=bundle.federation,
        seed=seed_of({name: each.share for name, each in shares.items()}) if shares else seed or 0,
        rounds=rounds,
        seedset=bundle.digest,
        ema_decay=chosen.advice("run", bundle.labelled).get("ema_decay", 0.0),
    )
    made = make_method({"name": method, **chosen.advice("method", bundle.labelled)})
    views = _views(bundle, kind, chosen.advice("data", bundle.labelled).get("augment", "none") == "all")
    roster_file = RosterFile(agreement, made, Timing(), _members(members), views, shares)
    roster_file.check_bundle(bundle)
    _write(roster_file, out)
    err.print(f"Wrote {out}. Look it over, then give it to every member.", soft_wrap=True)


@app.command()
def amend(
    from_round: Annotated[int, typer.Option(help="First round of the new version.")],
    path: Annotated[Path, typer.Argument(metavar="ROSTER", help="Current version.")] = Path("roster.toml"),
    add: Annotated[
        list[str] | None, typer.Option(metavar="CERTIFICATE@HOST:PORT", help="Member that joins. Repeatable.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Member that leaves. Repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds. By default as before.")] = None,
    seedset: SeedSet = Path("seedset.safetensors"),
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. By default roster-2.toml and so on.")
    ] = None,
    allow: AllowOption = None,
) -> None:
    """Write the next version of a roster, with members that join or leave from a given round on."""
    needs("peer", "cryptography")
    before, bundle = RosterFile.load(path), Bundle.load(seedset)
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
    members = (*stay, *_members(add or ()))
    after = RosterFile(agreement, before.method, before.timing, members, before.views, before.shares)
    after.check_bundle(bundle)
    check_versions([before, after])
    _write(after, out)
    err.print(
        f"Wrote {out}. Give it to every member before round {from_round:,}. "
        "Each adds it to all earlier versions in its peer.toml:",
        f'    roster = ["{path.name}", "{out.name}"]',
        sep="\n",
        soft_wrap=True,
    )


def _views(bundle: Bundle, kind: str | None, wanted: bool) -> SharedViews:
    """Return the augmentation for all members: the given kind, or `any` if the method augments images."""
    chosen: Kind | None = next((known for known in SETS if known == kind), None)
    if kind is not None and chosen is None:
        raise ConfigError(f"--kind {kind}: it is {', '.join(SETS)}.{did_you_mean(kind, SETS)}")
    views = SharedViews.suited_to(bundle, chosen or "any")
    if chosen and views == AS_THEY_ARE:
        raise ConfigError(f"--kind {kind}: the seed set holds no images that can be augmented")
    return views if chosen or wanted else AS_THEY_ARE


def _shares(files: Sequence[Path], bundle: Bundle, seed: int | None) -> dict[str, Reveal]:
    """Return the revealed share of each member that committed to one in the seed set."""
    owners = bundle.commitments
    if not owners and files:
        raise ConfigError("the seed set has no commitments to shares of the seed; leave out --share, or make it anew")
    if owners and seed is not None:
        raise ConfigError("--seed: the members committed to shares of the seed; give them with --share")
    found = {each.name: each for each in map(Reveal.load, files)}
    missing = sorted(set(owners) - set(found))
    if missing:
        raise ConfigError(f"--share: the shares of {', '.join(missing)} are missing")
    if not owners:
        notice("The members committed to no shares of the seed, so you choose it. They should know that.")
    return found


def _members(given: Sequence[str]) -> tuple[Member, ...]:
    from fedh2l.peer.pki.certificates import About, read_certificate

    found = []
    for place, member in enumerate(given):
        path, _, address = member.rpartition("@")
        if not path:
            raise ConfigError(f"'{member}': write a member as CERTIFICATE@HOST:PORT")
        about = About.of(read_certificate(Path(path)))
        found.append(Member.read({"name": about.name, "address": address, "pin": about.pin}, f"members.{place}"))
    return tuple(found)


def _write(roster_file: RosterFile, out: Path) -> None:
    try:
        write_exclusively(out, roster_file.to_toml().encode())
    except FileExistsError:
        raise ConfigError(f"'{out}' exists already; name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror}") from error


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="ROSTER", help="Roster to check.")] = Path("roster.toml"),
    seedset: SeedSet = Path("seedset.safetensors"),
    other: Annotated[Path | None, typer.Option("--with", metavar="ROSTER", help="Roster to compare with.")] = None,
    after: Annotated[
        list[Path] | None,
        typer.Option(metavar="ROSTER", help="Earlier version of a later roster. Repeatable, from the first one on."),
    ] = None,
    joined: Annotated[bool, typer.Option("--joined", help="You join with this version, or joined later.")] = False,
    allow: AllowOption = None,
) -> None:
    """Check a roster and its seed set, and print the digest. All members must have the same digest."""
    roster_file, bundle = RosterFile.load(path), Bundle.load(seedset)
    versions = [*map(RosterFile.load, after or ()), roster_file]
    check_versions(versions)
    check_start(versions[0], joined, "Name the earlier versions with --after. If you really join later, use --joined")
    roster_file.check_bundle(bundle)
    _show_members(roster_file)
    if not roster_file.shares:
        notice("The author of this roster chose the seed. It does not come from shares of all members.")
    elif joined and roster_file.without_share:
        notice(
            f"The seed does not come from shares of {', '.join(roster_file.without_share)}. If they were members in "
            "round 1, the founder chose the seed. Refuse this roster then."
        )
    digest = roster_file.roster(bundle.classes).digest.hex()
    say(f"digest: {digest}")
    err.print(f"To compare it by telephone: {grouped(digest)}. All members should read the same.", soft_wrap=True)
    if other is not None:
        found = differences(roster_file.canonical(bundle.classes), RosterFile.load(other).canonical(bundle.classes))
        for text in found:
            notice(text)
        if found:
            raise ConfigError(f"'{path}' and '{other}' differ, and peers that hold them refuse each other")
        err.print(f"'{other}' agrees.", soft_wrap=True)


def _show_members(roster_file: RosterFile) -> None:
    agreement = roster_file.agreement
    table = Table(title=f"'{agreement.federation}', version {agreement.version}: {roster_file.method.title}, "
                  f"{agreement.rounds:,} rounds")  # fmt: skip
    for column in ("member", "address", "key", "fingerprint of the key"):
        table.add_column(column, overflow="fold")
    for member in roster_file.members:
        table.add_row(member.name, member.address, member.pin, grouped(pin_digest(member.pin)))
    err.print(table)
