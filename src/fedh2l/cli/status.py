"""`fedh2l status`: state of a peer on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from fedh2l.cli.console import err, notice, print_json
from fedh2l.extras import PEER, needs
from fedh2l.report.tables import human_bytes


def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Status address of the peer, for example 127.0.0.1:7444.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON on standard output.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Show a peer's round, accuracy and the state of its connections."""
    needs("peer", *PEER)
    from google.protobuf.json_format import MessageToDict

    from fedh2l.peer.monitoring.status import ask

    state = ask(address, timeout)
    if as_json:
        print_json(MessageToDict(state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    accuracy = f"{state.accuracy:.1f} %" if state.accuracy >= 0 else "not known yet"
    conflicts = f"{100 * state.conflict_rate:.1f} %" if state.conflict_rate >= 0 else "not known yet"
    err.print(
        f"'{state.node}' in '{state.federation}', version {state.version}: {state.phase}, "
        f"round {state.round:,} of {state.rounds:,}, {state.skipped:,} skipped",
        f"own validation data {accuracy}, conflicts {conflicts}, {human_bytes(state.bytes)} sent, "
        f"{state.seconds:.0f} s of training",
        sep="\n",
        soft_wrap=True,
    )
    table = Table()
    for column in ("peer", "state", "round", "taken", "lost", "heard", "refused here", "sent", "why"):
        table.add_column(column, justify="left" if column in ("peer", "state", "why") else "right", overflow="fold")
    for peer in state.peers:
        why = [peer.reason] if peer.reason else []
        why += [f"{count} × {reason}" for reason, count in sorted(peer.refused.items())]
        counts = (peer.round, peer.sent, peer.dropped, peer.heard, sum(peer.refused.values()))
        cells = [peer.name, peer.state, *(f"{count:,}" for count in counts), human_bytes(peer.bytes), "; ".join(why)]
        table.add_row(*cells)
    err.print(table)
    for who, count in sorted(state.turned_away.items()):
        notice(f"{count:,} calls turned away: {who}")
