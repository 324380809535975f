"""`fedh2l audit`: what left this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedh2l.cli.console import err, notice, show_error
from fedh2l.cli.extras import needs
from fedh2l.reporting.tables import human_bytes


def audit(
    path: Annotated[Path, typer.Argument(metavar="AUDIT.jsonl", help="A peer's record of what it sent.")],
    witness: Annotated[
        list[Path] | None, typer.Option(help="What another peer was told of this record; may be repeated.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Of the node, to verify what witnesses say.")] = None,
) -> None:
    """Verify that the record of what a peer sent is whole, and sum it up."""
    needs("peer", "cryptography")
    from fedh2l.peer import audit as audits
    from fedh2l.peer.certificates import read_certificate

    heads = [head for file in witness or () for head in audits.read_heads(file)]
    key = read_certificate(certificate).public_key() if certificate else None
    if heads and key is None:
        notice("Without --certificate, what witnesses say is not known to be this node's word.")
    report = audits.audit(path, heads, key)
    for kind, size in sorted(report.sent.items()):
        who = f"to {len(report.receivers)} peers" if len(report.receivers) != 1 else "to one peer"
        typer.echo(f"{human_bytes(size)} of {WORDS.get(kind, kind)} in {report.messages[kind]:,} messages {who}")
    strange = sorted(set(report.sent) - set(WORDS))
    typer.echo(
        f"'{report.node}' in '{report.federation}': {report.lines:,} lines up to round {report.last_round:,}, "
        + ("nothing else" if not strange else f"and what this version does not know: {', '.join(strange)}")
    )
    for number in report.torn:
        notice(f"Before line {number} a line was not written to its end: the peer was killed just then.")
    if heads:
        err.print(f"Witnesses vouch for the first {report.witnessed:,} lines.")
    for problem in report.problems:
        show_error(problem)
    if report.problems:
        raise typer.Exit(1)


WORDS = {
    "posteriors": "posteriors on public data",
    "greeting": "greetings",
    "refusal": "refusals that name what differs",
    "head": "signed heads of this record",
    "goodbye": "goodbyes",
}
