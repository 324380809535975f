"""`fedh2l pki`: the certificates of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice
from fedh2l.cli.extras import needs
from fedh2l.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Certificates: found a federation, request, sign, renew, revoke.")

Folder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The authority's folder.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.callback()
def _needs() -> None:
    needs("peer", "cryptography")


@app.command()
def init(
    federation: Annotated[str, typer.Option(help="The name of the federation.")],
    folder: Folder = Path("authority"),
    days: Annotated[int, typer.Option(help="How long the authority lasts.")] = 3650,
) -> None:
    """Found a federation: make its certificate authority."""
    from fedh2l.peer import authority

    made = authority.Authority.found(folder, federation, days)
    err.print(f"The authority of '{made.federation}' is in {folder}.", soft_wrap=True)
    err.print(f"Keep {folder / authority.CA_KEY} to yourself: who has it can make members.", soft_wrap=True)
    given = f"{folder / authority.CA_CERTIFICATE} and {folder / authority.REVOKED}"
    err.print(f"Every member gets {given}.", soft_wrap=True)
    err.print(f"Sign their requests with:  fedh2l pki sign --dir {folder} NODE.csr", soft_wrap=True)


@app.command()
def request(
    name: Annotated[str, typer.Option(help="The node's name in the federation.")],
    host: Annotated[list[str], typer.Option(help="A host name or address of this peer; may be repeated.")],
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where key and request go.")] = Path("keys"),
) -> None:
    """Make this node's key, which stays here, and a request for a certificate. With a key already there: renew."""
    from fedh2l.peer import certificates

    path, new = certificates.request(folder, name, host)
    pin = certificates.About.of(certificates.read_request(path)).pin
    key = folder / certificates.NODE_KEY
    err.print(f"{'Made' if new else 'Used'} the key {key}; it stays here.", soft_wrap=True)
    err.print(f"Send {path} to the founder, and tell them by another way: {pin}", soft_wrap=True)


@app.command()
def sign(
    requests: Annotated[list[Path], typer.Argument(metavar="NODE.csr…")],
    folder: Folder = Path("authority"),
    days: Annotated[int, typer.Option(help="How long certificates last.")] = 365,
    yes: Yes = False,
) -> None:
    """Sign requests, after looking at whose they are; certificates are written beside them."""
    from fedh2l.peer import authority, certificates

    made = authority.Authority(folder)
    read = [(path, certificates.read_request(path)) for path in requests]
    for path, asked in read:
        about = certificates.About.of(asked)
        err.print(f"{path}: node '{about.name}' at {', '.join(about.hosts)}, key {about.pin}", soft_wrap=True)
        _confirm(f"Is this the key that '{about.name}' told you?", yes)
        target = path.with_suffix(".pem")
        certificates.write(target, certificates.pem(made.sign(asked, days)))
        err.print(f"Wrote {target}; send it back to '{about.name}'.", soft_wrap=True)


@app.command()
def revoke(
    who: Annotated[str, typer.Argument(metavar="NAME|SERIAL")],
    folder: Folder = Path("authority"),
    yes: Yes = False,
) -> None:
    """Take back certificates of a node; every peer that has the new list refuses them from then on."""
    from fedh2l.peer import authority

    made = authority.Authority(folder)
    _confirm(f"Take back the certificates of '{who}'?", yes)
    for entry in made.revoke(who):
        err.print(f"Revoked {entry['serial']} of '{entry['name']}'.")
    notice(f"Give every member the new {folder / authority.REVOKED}: until a peer has it, it goes on trusting.")


@app.command("list")
def list_issued(folder: Folder = Path("authority")) -> None:
    """What the authority has signed."""
    from fedh2l.peer import authority, certificates

    made = authority.Authority(folder)
    table = Table(title=f"certificates of '{made.federation}'")
    for column in ("node", "hosts", "key", "serial", "until", ""):
        table.add_column(column, overflow="fold")
    for entry in made.issued():
        ended = entry["until"] < certificates.now().isoformat()
        state = f"revoked {entry['revoked'][:10]}" if entry["revoked"] else "ended" if ended else ""
        hosts = ", ".join(entry["hosts"])
        table.add_row(entry["name"], hosts, entry["pin"], entry["serial"], entry["until"][:10], state)
    err.print(table)


@app.command()
def show(path: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """What a certificate or request says; the key line is what a roster pins."""
    from fedh2l.peer import certificates

    subject: Any
    try:
        subject = certificates.read_certificate(path)
    except certificates.PKIError:
        subject = certificates.read_request(path)
    about = certificates.About.of(subject)
    typer.echo(f"name: {about.name}\nhosts: {', '.join(about.hosts) or '-'}\nkey: {about.pin}")
    if about.until is not None:
        typer.echo(f"serial: {about.serial:x}\nuntil: {about.until:%Y-%m-%d %H:%M} UTC")


def _confirm(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        raise ConfigError("nothing was done")
