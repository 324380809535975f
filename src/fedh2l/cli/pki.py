"""`fedh2l pki`: certificates of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice, say
from fedh2l.errors import ConfigError
from fedh2l.extras import needs
from fedh2l.peer.membership.roster_comparison import grouped, pin_digest
from fedh2l.protocol.roster import check_name

app = typer.Typer(no_args_is_help=True, help="Create an authority; request, sign, renew and revoke certificates.")

Folder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@app.callback()
def _needs() -> None:
    needs("peer", "cryptography")


@app.command()
def init(
    federation: Annotated[str, typer.Option(help="Name of the federation.")],
    folder: Folder = Path("authority"),
    days: Annotated[int, typer.Option(help="Days until the authority expires.")] = 3650,
) -> None:
    """Create the certificate authority of a federation."""
    from fedh2l.peer.pki import authority

    made = authority.Authority.found(folder, federation, days)
    err.print(f"The authority of '{made.federation}' is in {folder}.", soft_wrap=True)
    err.print(f"Keep {folder / authority.CA_KEY} to yourself: who has it can make members.", soft_wrap=True)
    given = f"{folder / authority.CA_CERTIFICATE} and {folder / authority.REVOKED}"
    err.print(f"Every member gets {given}.", soft_wrap=True)
    err.print(f"Sign their requests with:  fedh2l pki sign --dir {folder} NODE.csr", soft_wrap=True)


@app.command()
def request(
    name: Annotated[str, typer.Option(help="Name of the node.")],
    host: Annotated[list[str], typer.Option(help="Host name or address of this peer. Repeatable.")],
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder for the key and the request.")] = Path(
        "keys"
    ),
) -> None:
    """Create a key and a certificate request. An existing key is used again, to renew its certificate."""
    from fedh2l.peer.pki import certificates

    path, new = certificates.request(folder, name, host)
    pin = certificates.About.of(certificates.read_request(path)).pin
    key = folder / certificates.NODE_KEY
    err.print(f"{'Made' if new else 'Used'} the key {key}; it stays here.", soft_wrap=True)
    spoken = grouped(pin_digest(pin))
    err.print(f"Send {path} to the founder, and read them this fingerprint by telephone: {spoken}", soft_wrap=True)


@app.command()
def sign(
    requests: Annotated[list[Path], typer.Argument(metavar="NODE.csr…", help="Certificate requests.")],
    folder: Folder = Path("authority"),
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
    yes: Yes = False,
) -> None:
    """Sign requests after you confirm each fingerprint. Certificates are written beside the requests."""
    from fedh2l.peer.pki import authority, certificates

    made = authority.Authority(folder)
    read = [(path, certificates.read_request(path)) for path in requests]
    for path, asked in read:
        about = certificates.About.of(asked)
        check_name(about.name)
        spoken = grouped(pin_digest(about.pin))
        err.print(f"{path}: node '{about.name}' at {', '.join(about.hosts)}, key {about.pin}", soft_wrap=True)
        _confirm(f"The fingerprint of the key is {spoken}. Is this what '{about.name}' read to you?", yes)
        target = path.with_suffix(".pem")
        _check_target(target, about.name)
        certificates.write(target, certificates.pem(made.sign(asked, days)))
        err.print(f"Wrote {target}; send it back to '{about.name}'.", soft_wrap=True)


def _check_target(target: Path, name: str) -> None:
    """Refuse to replace anything but an earlier certificate of the same node: others choose how requests are called."""
    from fedh2l.peer.pki import certificates

    try:
        known = certificates.read_certificate(target) if target.exists() else None
        same = known is None or (certificates.About.of(known).name == name and known.subject != known.issuer)
    except certificates.PKIError:
        same = False
    if not same:
        raise ConfigError(f"'{target}' is there and is no certificate of '{name}'; rename the request first")


@app.command()
def revoke(
    who: Annotated[
        str, typer.Argument(metavar="NAME|SERIAL", help="Name of a node, or serial number of a certificate.")
    ],
    folder: Folder = Path("authority"),
    yes: Yes = False,
) -> None:
    """Revoke the certificates of a node. Peers with the new list refuse them."""
    from fedh2l.peer.pki import authority

    made = authority.Authority(folder)
    _confirm(f"Take back the certificates of '{who}'?", yes)
    for entry in made.revoke(who):
        err.print(f"Revoked {entry['serial']} of '{entry['name']}'.")
    notice(f"Give every member the new {folder / authority.REVOKED}: until a peer has it, it goes on trusting.")


@app.command("list")
def list_issued(folder: Folder = Path("authority")) -> None:
    """List the certificates that the authority has signed."""
    from fedh2l.peer.pki import authority, certificates

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
def show(path: Annotated[Path, typer.Argument(metavar="FILE", help="Certificate or request.")]) -> None:
    """Show a certificate or request. The key line is the pin for a roster."""
    from fedh2l.peer.pki import certificates

    subject: Any
    try:
        subject = certificates.read_certificate(path)
    except certificates.PKIError:
        subject = certificates.read_request(path)
    about = certificates.About.of(subject)
    say(f"name: {about.name}", f"hosts: {', '.join(about.hosts) or '-'}", f"key: {about.pin}")
    say(f"fingerprint: {grouped(pin_digest(about.pin))}")
    if about.until is not None:
        say(f"serial: {about.serial:x}", f"until: {about.until:%Y-%m-%d %H:%M} UTC")


def _confirm(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        raise ConfigError("nothing was done")
