"""Which round the others are in, and whether they have gone on without this peer."""

from __future__ import annotations

from fedh2l.peer.mailbox import Mailbox
from fedh2l.peer.neighbours import Neighbours
from fedh2l.peer.terms import Terms


class Pace:
    """Compares how far this peer, `name`, has come with what is known of the others; it has `rounds` to do."""

    def __init__(self, name: str, rounds: int, terms: Terms, mailbox: Mailbox, neighbours: Neighbours) -> None:
        self._name, self._rounds, self._terms = name, rounds, terms
        self._mailbox, self._neighbours = mailbox, neighbours

    def _theirs(self) -> dict[str, int]:
        """The rounds that others are in, as far as is known, and as far as two of them say so, where two are there."""
        rounds = {
            name: min(self._rounds, max(self._neighbours.contact(name).round, self._mailbox.furthest(name)))
            for name in self._neighbours.addresses
        }
        known = sorted((round for round in rounds.values() if round), reverse=True)
        believed = known[min(1, len(known) - 1)] if known else 0  # one alone could send everybody anywhere
        return {name: min(round, believed) for name, round in rounds.items()}

    def ahead(self, done: int, sent: int) -> int | None:
        """The round that others are in, if they have gone on without this peer; None if it has kept up.

        `done` is the last round that this peer has done, `sent` the last whose signal is on its way.
        """
        theirs = self._theirs()
        missed = any(self._missed(name, round, done, sent) for name, round in theirs.items())
        return max(theirs.values()) if missed else None

    def _missed(self, name: str, theirs: int, done: int, sent: int) -> bool:
        """Whether a peer that is in round `theirs` has done one without the signal of this peer that belongs to it."""
        now = self._terms.at(done + 1) or self._terms.all[0]
        if now.charter.timing.mode == "asynchronous":
            return theirs > done + 1 + now.charter.timing.staleness
        return any(self._teaches(name, round) for round in range(max(done, sent) + 1, theirs))

    def _teaches(self, student: str, round: int) -> bool:
        term = self._terms.at(round)
        return term is not None and term.exchanges(round) and self._name in term.teachers(round).get(student, ())
