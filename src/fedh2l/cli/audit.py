"""`fedh2l audit`: verify the log of sent messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedh2l.cli.console import err, notice, say, show_error
from fedh2l.extras import needs
from fedh2l.report.tables import human_bytes


def audit(
    path: Annotated[Path, typer.Argument(metavar="AUDIT.jsonl", help="Audit log of a peer.")],
    witness: Annotated[
        list[Path] | None, typer.Option(help="Signed heads of this log from another peer. Repeatable.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate of the node, to verify the heads.")] = None,
) -> None:
    """Verify that an audit log is complete, and summarise it. Older files of the same log are included."""
    needs("peer", "cryptography")
    from fedh2l.peer import audit as audits
    from fedh2l.peer.pki.certificates import About, read_certificate

    heads = [head for file in witness or () for head in audits.read_heads(file)]
    shown_by = read_certificate(certificate) if certificate else None
    key = shown_by.public_key() if shown_by else None
    if heads and key is None:
        notice("Without --certificate, the signatures of the witnesses' heads are not verified.")
    report = audits.audit(path, heads, key)
    owner = About.of(shown_by).name if shown_by else report.node
    if owner != report.node:
        report.problems.append(f"the certificate is that of '{owner}', the log that of '{report.node}'")
    for kind, size in sorted(report.sent.items()):
        who = f"to {len(report.receivers)} peers" if len(report.receivers) != 1 else "to one peer"
        say(f"{human_bytes(size)} of {WORDS.get(kind, kind)} in {report.messages[kind]:,} messages {who}")
    files = f" in {report.files} files" if report.files > 1 else ""
    strange = sorted(set(report.sent) - set(WORDS))
    say(
        f"'{report.node}' in '{report.federation}': {report.lines:,} lines{files} up to round {report.last_round:,}, "
        + ("nothing else" if not strange else f"and these kinds, unknown to this version: {', '.join(strange)}")
    )
    for number in report.torn:
        notice(f"The line before line {number} is incomplete: the peer was killed while it wrote it.")
    if heads:
        err.print(f"Witnesses vouch for the first {report.witnessed:,} lines.")
    for problem in report.problems[:MOST]:
        show_error(problem)
    if len(report.problems) > MOST:
        show_error(f"and {len(report.problems) - MOST:,} more problems")
    if report.problems:
        raise typer.Exit(1)


MOST = 20
"""Largest number of problems to print."""


WORDS = {
    "posteriors": "posteriors on public data",
    "greeting": "greetings",
    "refusal": "refusals that name what differs",
    "head": "signed heads of this record",
    "goodbye": "goodbyes",
}
