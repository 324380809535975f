"""Which round the others are in, and whether they have gone on without this peer."""

from __future__ import annotations

import time

from fedh2l.peer.mailbox import Mailbox
from fedh2l.peer.neighbours import Neighbours
from fedh2l.peer.terms import Term, Terms


class Pace:
    """Compares how far this peer, `name`, has come with what is known of the others; it has `rounds` to do.

    What one other says alone is believed only if there is no other, or if nobody else could be reached for as long as
    the roster's patience lasts: somebody who lies could otherwise send a peer anywhere.
    """

    def __init__(self, name: str, rounds: int, terms: Terms, mailbox: Mailbox, neighbours: Neighbours) -> None:
        self._name, self._rounds, self._terms = name, rounds, terms
        self._mailbox, self._neighbours = mailbox, neighbours
        self._with_others = time.monotonic()
        """When two others were there the last time."""

    def _theirs(self, term: Term) -> dict[str, int]:
        """The rounds that the others of a term are in, as far as they are believed."""
        others = term.roster.others(self._name)
        rounds = {
            name: min(self._rounds, max(self._neighbours.contact(name).round, self._mailbox.furthest(name)))
            for name in others
        }
        known = sorted(rounds.values(), reverse=True)
        if sum(self._neighbours.is_there(name) for name in others) >= 2:
            self._with_others = time.monotonic()
        alone = len(others) < 2 or time.monotonic() - self._with_others > term.charter.timing.patience
        believed = known[0] if alone else known[1]
        return {name: min(round, believed) for name, round in rounds.items()}

    def ahead(self, done: int, sent: int) -> int | None:
        """The round that others are in, if they have gone on without this peer; None if it has kept up.

        `done` is the last round that this peer has done, `sent` the last whose signal is on its way.
        """
        term = self._terms.at(done + 1)
        if term.charter.timing.mode == "asynchronous":  # everybody goes at its own pace
            return None
        theirs = self._theirs(term)
        missed = any(self._missed(name, round, done, sent) for name, round in theirs.items())
        return max(theirs.values()) if missed else None

    def _missed(self, name: str, theirs: int, done: int, sent: int) -> bool:
        """Whether a peer that is in round `theirs` has done one without the signal of this peer that belongs to it."""
        return any(self._teaches(name, round) for round in range(max(done, sent) + 1, theirs))

    def _teaches(self, student: str, round: int) -> bool:
        term = self._terms.at(round)
        return round >= term.first and term.exchanges(round) and self._name in term.teachers(round).get(student, ())

    def at_least(self, round: int, term: Term) -> int:
        """How many others of a term say that they are in a round, or further."""
        others = term.roster.others(self._name)
        return sum(max(self._neighbours.contact(n).round, self._mailbox.furthest(n)) >= round for n in others)
