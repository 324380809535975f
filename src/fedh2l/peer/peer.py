"""One peer of a real federation: trains its own node, and learns from whoever it hears in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fedh2l.engines.residents import Residents
from fedh2l.learner import Learner
from fedh2l.messages import Posteriors, encode
from fedh2l.node import Node
from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.charter import Timing
from fedh2l.peer.desk import FrontDesk
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.keeper import Keeper
from fedh2l.peer.mailbox import Mailbox
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
"""Seconds in which what was sent last is delivered when a peer ends."""
MEET = 5.0
"""Seconds in which a peer that starts tries to meet the others, to learn which round they are in."""
HEADS = 300.0
"""Seconds between two times that others are told how long this peer's audit log is."""


class _Stopped(Exception):  # noqa: N818 - an outcome rather than an error
    """Asked to stop in the middle of a round."""


class Peer:
    """The node of one organisation, with its line to all others."""

    def __init__(self, config: PeerConfig, directory: RunDirectory) -> None:
        self.config, self._device = config, resolve_device(config.run.device)
        self.name, self.rounds, self.terms = config.name, config.run.rounds, config.terms
        self.term = self.terms.all[0]
        """What holds in the round that this peer is in."""
        self.phase: Phase = "meeting"
        self.circle = config.circle()
        self.agreed = Agreed.of([term.charter for term in self.terms.all], self.term.bundle.classes)
        self.node = Node(self.name, config.settings.model, config.domain, config.settings.model_args)
        self.residents = Residents([self._learner()], self.term.method)
        self.method = self.term.method
        self.keeper = Keeper(config, directory, self.node, self.residents)
        self.skipped = 0
        """Rounds in which this peer took no part."""
        self.round = self.term.first - 1
        """The last one that is done."""
        stale = self.timing.staleness if self.timing.mode == "asynchronous" else 0
        self.mailbox = Mailbox(self.name, self.terms, stale)
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
        self._pace = Pace(self.name, self.rounds, self.terms, self.mailbox, self.neighbours)
        self._sent = 0
        """The last round whose signal is on its way."""
        self._midway = False
        """Whether the local step of the next round is done already."""
        self._told = time.monotonic()
        self._entered: Term | None = None
        """The term whose members this peer speaks to."""

    def _learner(self) -> Learner:
        config, run = self.config, self.config.run
        device, dtype = self._device, run.torch_dtype
        validation = config.domain.validation.to(device, dtype)
        seed_set = self._public(self.term)
        return Learner(self.node, seed_set, config.secret, config.optimizer, run.batch_size, device, dtype, validation)

    def _public(self, term: Term) -> SeedSet:
        return term.seed_set.to(self._device, self.config.run.torch_dtype)

    @property
    def timing(self) -> Timing:
        """How long this peer waits for others now."""
        return self.term.charter.timing

    @property
    def federation(self) -> str:
        """Its name."""
        return self.term.charter.agreement.federation

    @property
    def finished(self) -> bool:
        """Whether the last round is done."""
        return self.round >= self.rounds

    def _teachers(self, round: int) -> Graph:
        return (self.terms.at(round) or self.term).teachers(round)

    def _hello(self) -> pb.Hello:
        return self.agreed.hello(self.name, self.present(), self.finished)

    def present(self) -> int:
        """The round that this peer is in: the one after the last that is done."""
        return self.round + 1

    # The course of a training

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Trains to the last round, from the newest checkpoint if there is one; False if it was asked to stop."""
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
                self._meet(stop)
                while not self.finished and not stop():
                    self._step(stop)
            except _Stopped:
                log.info("stops in round %d", self.present(), extra={"round": self.present()})
            self._checkpoint()
            if self.finished:
                self._finish()
                self._say_goodbye()
                self._linger(stop)
        return self.finished

    def _enter(self, round: int) -> None:
        """Begins a round, and a term if it is the first of one."""
        term = self.terms.at(round) or self.terms.all[0]
        if term is not self.term:
            version = term.charter.agreement.version
            log.info("from round %d version %d of the roster holds", round, version, extra={"round": round})
            self.term = term
            for learner in self.residents.learners:
                learner.seed_set = self._public(term)
        if term is not self._entered:
            self._entered = term
            self._surround(self.terms.from_round(round))
        self.mailbox.enter(round)

    def _surround(self, terms: Sequence[Term]) -> None:
        """Speaks to those who are members now or will be, and to nobody else."""
        members = {m.name: m for term in reversed(terms) for m in term.charter.members}  # as it is now goes first
        self.circle.admit({name: member.pin or "" for name, member in members.items()})
        addresses = {name: member.address for name, member in members.items() if name != self.name}
        self.neighbours.keep(addresses, self._goodbye(), FAREWELL)

    def _meet(self, stop: Callable[[], bool]) -> None:
        """Gives all others a moment to be there, and goes on from where they are.

        Who never waits for anybody later waits here, for as many as the roster wants to be heard.
        """
        others = self.term.roster.others(self.name)
        end, said = time.monotonic() + MEET, False
        while not stop():
            missing = sum(not self.neighbours.is_there(name) for name in others)
            wanted = min(self.timing.quorum, sum(not self.neighbours.is_done(name) for name in others))
            alone = self.timing.mode == "asynchronous" and len(others) - missing < wanted
            if missing == 0 or (time.monotonic() >= end and not alone):
                break
            if time.monotonic() >= end and not said:
                said, self.phase = True, "waiting"
                log.warning("waits for %d others to begin: %d are there", wanted, len(others) - missing)
            time.sleep(0.02)
        self.phase = "training"
        self._catch_up()

    def _ahead(self) -> int | None:
        return self._pace.ahead(self.round, self._sent)

    def _catch_up(self) -> None:
        """If others have gone on without this peer, goes on with the round that they are in."""
        theirs = self._ahead()
        if theirs is not None:
            about = {"round": theirs}
            log.warning("others are in round %d: goes on from there, after round %d", theirs, self.round, extra=about)
            self.skipped += theirs - 1 - self.round
            self.round, self._midway = theirs - 1, False
            self._enter(theirs)

    def _step(self, stop: Callable[[], bool]) -> None:
        round = self.present()
        self._enter(round)
        if not self._midway:
            self.residents.local_steps(round)
        if self.method.exchanges(round):
            self._midway = True
            self._exchange(round, stop)
        self.round, self._midway = round, False
        self._arrive()
        self._catch_up()

    def _exchange(self, round: int, stop: Callable[[], bool]) -> None:
        message = self.residents.emit(round)[self.name]
        students = [student for student, teachers in self._teachers(round).items() if self.name in teachers]
        self.neighbours.send(students, round, encode(message, self.term.roster))
        self._sent = round
        inbox = [signal.to(self._device) for signal in self._hear(round, stop)]
        self.residents.receive({self.name: inbox}, round)

    def _hear(self, round: int, stop: Callable[[], bool]) -> Sequence[Posteriors]:
        """The signals of a round: of all that are expected, or of those that are there when it is time to go on."""
        if self.timing.mode == "asynchronous":
            return self.mailbox.newest(round)
        expected = self._teachers(round).get(self.name, ())
        late = self.neighbours.late
        deadline = time.monotonic() + self.timing.deadline
        while True:
            if stop():
                raise _Stopped
            waited = [name for name in expected if name not in late and not self.neighbours.is_done(name)]
            here = self.mailbox.collect(round, min(deadline, time.monotonic() + 0.5), set(waited).issubset)
            heard = {signal.sender for signal in here}
            if heard.issuperset(waited) or time.monotonic() >= deadline or self._ahead() is not None:
                missing = [name for name in waited if name not in heard]
                for name in missing:
                    about = {"peer": name, "round": round}
                    log.warning("'%s' did not answer in round %d; late until it is heard", name, round, extra=about)
                late.update(missing)
                break
        return self._quorate(round, here, expected, stop)

    def _quorate(
        self, round: int, here: Sequence[Posteriors], expected: Sequence[str], stop: Callable[[], bool]
    ) -> Sequence[Posteriors]:
        """Waits until enough are heard; others may be away for long, so what there is is saved meanwhile."""
        began, paused = time.monotonic(), False

        def enough(heard: set[str]) -> bool:
            return len(heard) >= min(self.timing.quorum, sum(not self.neighbours.is_done(n) for n in expected))

        while not enough({signal.sender for signal in here}) and self._ahead() is None:
            if stop():
                raise _Stopped
            patient = self.timing.below_quorum == "wait" and time.monotonic() - began < self.timing.patience
            self.phase = self.phase if paused else "waiting"
            if not paused and not patient:
                paused, self.phase = True, "paused"
                log.warning("paused in round %d: only %d peers are heard", round, len(here), extra={"round": round})
                self._checkpoint()
            here = self.mailbox.collect(round, time.monotonic() + 0.5, enough)
        self.phase = "training"
        if paused:
            log.info("goes on in round %d", round, extra={"round": round})
        return here

    # What is kept

    def _arrive(self) -> None:
        self.keeper.arrive(self.round, self.audit.sent.total())
        if time.monotonic() - self._told > HEADS:
            self._told = time.monotonic()
            for courier in self.neighbours.couriers.values():
                courier.tell_head()
        if not self.finished and self.keeper.checkpoint_is_due(self.round):
            self._checkpoint()

    def _checkpoint(self) -> None:
        done = sorted(name for name in self.neighbours.addresses if self.neighbours.is_done(name))
        about = {"skipped": self.skipped, "midway": self._midway, "finished": done}
        self.keeper.save(self.round, self.term.charter.agreement, {"agreed": self.term.roster.digest.hex(), **about})

    def _resume(self) -> None:
        checkpoint = self.keeper.newest(self.terms)
        if checkpoint is not None:
            self.round, self.skipped = checkpoint.round, checkpoint.plain["skipped"]
            self._midway, self.neighbours.finished = checkpoint.plain["midway"], set(checkpoint.plain["finished"])

    def _finish(self) -> None:
        refused = {f"{name}: {why}": count for (name, why), count in sorted(self.mailbox.refused.items())}
        others = [name for name in self.terms.names if name != self.name]
        sent = {name: self.audit.sent[name] for name in others}
        self.keeper.finish(self.round, {"skipped": self.skipped, "bytes": sent, "refused": refused})

    def _goodbye(self) -> pb.Goodbye:
        return pb.Goodbye(round=self.round, finished=self.finished)

    def _say_goodbye(self) -> None:
        self.neighbours.close(self._goodbye(), FAREWELL)

    def _linger(self, stop: Callable[[], bool]) -> None:
        """Stays for a while for those who are not done: whoever comes back learns here that the others are.

        Whoever is no longer a member has nothing to tell them.
        """
        self.phase, end = "done", time.monotonic() + self.timing.linger
        near = self.neighbours
        others = [name for name in self.term.roster.others(self.name) if near.contact(name).state != "refused"]
        waited = False
        while self.name in self.terms.newest.roster.names and time.monotonic() < end and not stop():
            behind = [name for name in others if not near.is_done(name)]
            if not behind:
                break
            if not waited:
                log.info("done; stays up to %g s for %s", self.timing.linger, ", ".join(behind))
            waited = True
            time.sleep(0.05)
