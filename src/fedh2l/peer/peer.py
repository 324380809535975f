"""A peer of a federation: it trains one node, and learns from the messages that arrive in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from fedh2l.checkpoints import restoring
from fedh2l.engines.residents import Residents
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.messages import Message, encode
from fedh2l.node import Node
from fedh2l.node_learner import NodeLearner
from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.charter import Timing
from fedh2l.peer.company import Company, StoppedError
from fedh2l.peer.desk import FrontDesk
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.keeper import Keeper
from fedh2l.peer.mailbox import LatestMailbox, Mailbox
from fedh2l.peer.neighbours import Neighbours
from fedh2l.peer.pace import Pace
from fedh2l.peer.settings import PeerConfig
from fedh2l.peer.status import Phase, Windows
from fedh2l.peer.terms import Term
from fedh2l.peer.transport import Listener
from fedh2l.peer.witness import Witnesses
from fedh2l.rundir import RunDirectory
from fedh2l.seedset import SeedSet
from fedh2l.settings import resolve_device
from fedh2l.topology import Graph
from fedh2l.trainer import torch_settings

log = logging.getLogger("fedh2l.peer")

AUDIT, WITNESS = "audit.jsonl", "witness"
FAREWELL = 5.0
"""Seconds for delivering the last messages when a peer ends."""
GRACE = 64
"""Number of rounds that former members may still call after a change of members, to say goodbye."""
HEADS = 300.0
"""Seconds between two messages with the head of the audit log."""


class Peer:
    """The node of one organisation, connected to the other members."""

    def __init__(self, config: PeerConfig, directory: RunDirectory) -> None:
        self.config, self._device = config, resolve_device(config.run.device)
        self.name, self.rounds, self.terms = config.name, config.run.rounds, config.terms
        self.term = self.terms.all[0]
        """Roster version of the current round."""
        self.phase: Phase = "meeting"
        self.circle = config.circle()
        self.agreed = Agreed.of([term.charter for term in self.terms.all], self.term.bundle.classes)
        own = config.settings
        self.node = Node(self.name, own.model or "", config.domain, own.model_args, weights=own.weights)
        self.residents = Residents([self._learner()], self.term.method)
        self.method = self.term.method
        self.keeper = Keeper(config, directory, self.node, self.residents)
        self.skipped = 0
        """Number of rounds that this peer has skipped."""
        self.round = self.term.first - 1
        """Last completed round."""
        self.mailbox = self._mailbox()
        self.audit = AuditLog(directory.path / AUDIT, self.name, self.federation, config.signer)
        self.witnesses = Witnesses(directory.path / WITNESS)
        members = self.terms.names
        largest = max(*(self.terms.largest(other) for other in members), self.agreed.size)
        self.neighbours = Neighbours(self.circle, self.agreed, self.audit, self._hello)
        self.desk = FrontDesk(
            self.circle,
            self.agreed,
            self.mailbox,
            self.neighbours,
            self.audit,
            self.witnesses,
            self._hello,
            self.present,
        )
        self.listener = Listener(self.circle, self.desk, config.settings.listen, largest, members)
        self.pace = Pace(self.name, self.rounds, self.terms, self.mailbox, self.neighbours)
        self._company = Company(self)
        self._result: dict[str, Any] | None = None
        self._sent = 0
        """Last round whose message was sent."""
        self._midway = False
        """Whether the local step of the next round is already done."""
        self._barred: frozenset[str] = frozenset()
        """Members that are known as revoked or removed."""
        self._told = time.monotonic()
        self._around: tuple[tuple[Term, ...], ...] = ()
        """Roster versions with the members that this peer calls, and those with the members that may call it."""

    def _learner(self) -> NodeLearner:
        config, run = self.config, self.config.run
        device, dtype = self._device, run.torch_dtype
        validation = config.domain.validation.to(device, dtype)
        seed_set = self._public(self.term)
        rest = (run.batch_size, device, dtype, validation, run.compute, run.ema_decay)
        learner = NodeLearner(self.node, seed_set, config.secret, config.optimizer, *rest)
        return learner

    def _mailbox(self) -> Mailbox:
        if self.timing.mode == "asynchronous":
            return LatestMailbox(self.name, self.terms, self.timing.staleness)
        return Mailbox(self.name, self.terms)

    def _public(self, term: Term) -> SeedSet:
        return term.seed_set.to(self._device, self.config.run.torch_dtype)

    @property
    def timing(self) -> Timing:
        return self.term.charter.timing

    @property
    def federation(self) -> str:
        return self.term.charter.agreement.federation

    @property
    def finished(self) -> bool:
        """Whether the last round is done."""
        return self.round >= self.rounds

    @property
    def begins(self) -> bool:
        """Whether this is the first round of the training, or of this peer's membership."""
        return self.present() <= self.terms.all[0].first

    def _teachers(self, round: int) -> Graph:
        return self.terms.at(round).teachers(round)

    def _hello(self) -> pb.Hello:
        return self.agreed.hello(self.name, self.present(), self.finished)

    def present(self) -> int:
        """Return the current round: the one after the last completed round."""
        return self.round + 1

    # Training

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last round, from the newest checkpoint if there is one. Return False if stopped earlier."""
        with ExitStack() as stack:
            stack.callback(self.residents.close)
            stack.callback(self.audit.close)
            stack.enter_context(torch_settings(self.config.run))
            self._resume()
            self.keeper.clock.start()
            stack.enter_context(Windows(self, self.config.settings))
            stack.callback(self.listener.stop)
            self.listener.start()
            stack.callback(self._say_goodbye)
            self._enter(self.present())
            try:
                self._company.meet(stop)
                self.phase = "training"
                self._catch_up()
                stepped = self.present() if self._midway else None
                for event in rounds(self.residents, self.method, self._schedule(stop), stepped):
                    if isinstance(event, Exchange):
                        self._midway = True
                        event.inboxes = {self.name: self._exchange(event.sent[self.name], event.round, stop)}
                    else:
                        self._round_done(event.round)
            except StoppedError:
                log.info("stops in round %d", self.present(), extra={"round": self.present()})
            if self._result is None:
                self.checkpoint()
            if self.finished:
                self._finish()
                self._say_goodbye()
                self._linger(stop)
                self._finish()
        return self.finished

    def _enter(self, round: int) -> None:
        """Start a round, and switch to its roster version if that is a new one."""
        term = self.terms.at(round)
        if term is not self.term:
            version = term.charter.agreement.version
            log.info("from round %d version %d of the roster holds", round, version, extra={"round": round})
            self.term = term
            for learner in self.residents.learners:
                learner.use(self._public(term))
            if self.round < term.first:
                self.residents.forget()
        around = tuple(
            tuple(term for term in self.terms.from_round(since) if self.name in term.roster.names)
            for since in (round, round - GRACE)
        )
        if around != self._around:
            self._around = around
            self._surround(*around)
        self.mailbox.enter(round)

    def _surround(self, terms: Sequence[Term], heard: Sequence[Term]) -> None:
        """Call the members of `terms`, and accept calls from the members of `heard` too. Drop all others."""
        heard_members, members = (
            {m.name: m for term in reversed(which) for m in term.charter.members} for which in (heard, terms)
        )  # the current version takes precedence
        self.circle.admit({name: m.pin or "" for name, m in (heard_members | members).items()})
        addresses = {name: member.address for name, member in members.items() if name != self.name}
        self.neighbours.keep(addresses, self._goodbye(), FAREWELL)

    def ahead(self) -> int | None:
        """Return the round of the others if they have continued without this peer, else None."""
        return self.pace.ahead(self.round, self._sent)

    def _catch_up(self) -> None:
        """Skip the rounds that the others have done without this peer."""
        theirs = self.ahead()
        if theirs is not None:
            about = {"round": theirs}
            log.warning("others are in round %d: goes on from there, after round %d", theirs, self.round, extra=about)
            self.skipped += theirs - 1 - self.round
            self.round, self._midway = theirs - 1, False
            self.residents.forget()  # drop old lessons
            self._enter(theirs)

    def _schedule(self, stop: Callable[[], bool]) -> Iterator[int]:
        """Yield the rounds to do, without skipped rounds."""
        while not self.finished and not stop():
            self._enter(self.present())
            if self.method.keeps:
                self._shut_out()
            self.pace.tempo.begins()
            yield self.present()

    def _round_done(self, round: int) -> None:
        self.round, self._midway = round, False
        self.pace.tempo.trained()
        self._arrive()
        self.pace.tempo.waits()
        self._catch_up()

    def _shut_out(self) -> None:
        """Drop all cached lessons if a member was revoked or removed, since they may come from it."""
        barred = self._company.barred()
        if not barred <= self._barred:
            self.residents.forget()
        self._barred = barred

    def _exchange(self, message: Message, round: int, stop: Callable[[], bool]) -> list[Message]:
        """Send a message to all students, and return the messages of the teachers."""
        students = [student for student, teachers in self._teachers(round).items() if self.name in teachers]
        self.neighbours.send(students, round, encode(message, self.term.roster))
        self._sent = round
        self.pace.tempo.waits()
        inbox = self._company.hear(round, stop)
        self.pace.tempo.goes_on()
        return [signal.to(self._device) for signal in inbox]

    # Checkpoints and result

    def _arrive(self) -> None:
        due = not self.finished and self.keeper.checkpoint_is_due(self.round)
        self.keeper.arrive(self.round, self.audit.sent.total(), look=due)
        if time.monotonic() - self._told > HEADS:
            self._told = time.monotonic()
            for courier in self.neighbours.couriers.values():
                courier.tell_head()
        if due:
            self.checkpoint()

    def checkpoint(self) -> None:
        done = sorted(name for name in self.neighbours.addresses if self.neighbours.says_done(name))
        about = {
            "skipped": self.skipped, "midway": self._midway, "finished": done, "tempo": self.pace.tempo.state(),
        }  # fmt: skip
        self.keeper.save(self.round, {**self.keeper.made_by(self.term), **about})

    def _resume(self) -> None:
        self._result = self.keeper.result(self.rounds, self.terms)
        if self._result is not None:
            self.round, self.neighbours.finished = self.rounds, set(self._result["done"])
            log.warning("'%s' has already done its last round", self.name)
            return
        checkpoint = self.keeper.newest(self.terms)
        if checkpoint is not None:
            with restoring(self.keeper.directory.path):
                self.round, self.skipped = checkpoint.round, int(checkpoint.plain["skipped"])
                self._midway = bool(checkpoint.plain["midway"])
                self.neighbours.finished = set(map(str, checkpoint.plain["finished"]))
                self.pace.tempo.restore(checkpoint.plain["tempo"])
        self.keeper.directory.sign(self.keeper.inputs)

    def _finish(self) -> None:
        """Write the result once. Later calls only update the list of members that are done."""
        done = sorted(name for name in self.terms.names if self.neighbours.says_done(name))
        if self._result is not None:
            self._result |= {"done": done}
            self.keeper.directory.write_result(self._result)
            return
        refused = {f"{name}: {why}": count for (name, why), count in sorted(self.mailbox.refused.items())}
        others = [name for name in self.terms.names if name != self.name]
        sent = {name: self.audit.sent[name] for name in others}
        about = {"skipped": self.skipped, "bytes": sent, "refused": refused, "done": done}
        about |= self.keeper.made_by(self.term)
        self._result = self.keeper.finish(self.round, about)

    def _goodbye(self) -> pb.Goodbye:
        return pb.Goodbye(round=self.round, finished=self.finished)

    def _say_goodbye(self) -> None:
        self.neighbours.close(self._goodbye(), FAREWELL)

    def _linger(self, stop: Callable[[], bool]) -> None:
        """Wait up to `timing.linger` seconds for the others, so that a returning member learns that they are done.

        A former member does not wait.
        """
        self.phase, end = "done", time.monotonic() + self.timing.linger
        near = self.neighbours
        others = [name for name in self.term.roster.others(self.name) if near.contact(name).state != "refused"]
        waited = False
        while self.name in self.terms.newest.roster.names and time.monotonic() < end and not stop():
            behind = [name for name in others if not near.says_done(name)]
            if not behind:
                break
            if not waited:
                log.info("done; stays up to %g s for %s", self.timing.linger, ", ".join(behind))
            waited = True
            time.sleep(0.05)
