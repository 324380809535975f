"""One peer of a real federation: trains its own node, and learns from whoever it hears in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from fedh2l.engines.residents import Residents
from fedh2l.learner import Learner
from fedh2l.messages import Posteriors, encode
from fedh2l.node import Node
from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.courier import Courier
from fedh2l.peer.keeper import Keeper
from fedh2l.peer.mailbox import Mailbox
from fedh2l.peer.settings import PeerConfig
from fedh2l.peer.transport import Agreed, Circle, Desk, Line, Listener, PeerRefusedError
from fedh2l.rundir import RunDirectory
from fedh2l.seedset import SeedSet
from fedh2l.settings import resolve_device
from fedh2l.trainer import torch_settings

log = logging.getLogger("fedh2l.peer")

AUDIT = "audit.jsonl"
FAREWELL = 5.0
"""Seconds in which what was sent last is delivered when a peer ends."""
GREETINGS = (10, 10.0)
"""How many greetings of one member are answered within how many seconds."""
MEET = 5.0
"""Seconds in which a peer that starts tries to meet the others, to learn which round they are in."""


class _Stopped(Exception):  # noqa: N818 - an outcome rather than an error
    """Asked to stop in the middle of a round."""


class Peer(Desk):
    """The node of one organisation, with its line to all others."""

    def __init__(self, config: PeerConfig, directory: RunDirectory) -> None:
        self.config, self._device = config, resolve_device(config.run.device)
        charter, run, name = config.charter, config.run, config.name
        self.name, self.rounds, self.timing = name, run.rounds, charter.timing
        self.roster = charter.roster(config.bundle.classes)
        self.agreed = Agreed.of(charter, config.bundle.classes)
        self.circle = Circle(config.identity, charter, config.revoked)
        self.node = Node(name, config.settings.model, config.domain, config.settings.model_args)
        self.residents = Residents([self._learner()], charter.method)
        self.method = charter.method
        self.keeper = Keeper(config, directory, self.node, self.residents)
        self.skipped = 0
        """Rounds in which this peer took no part."""
        self.round = 0
        """The last one that is done."""
        # Threads that answer others ask for labels of other rounds than the one in training: they have a set of theirs.
        self._labels = SeedSet({n: config.bundle.part(n) for n in charter.names}, run.seed)
        self.mailbox = Mailbox(
            name,
            self.roster,
            self._teachers,
            self._rows,
            len(config.bundle.classes),
            lambda sender, round: self._labels.batch(sender, round, self._asked_rows).labels,
            self.method.exchanges,
            self.timing.staleness if self.timing.mode == "asynchronous" else 0,
        )
        self.audit = AuditLog(directory.path / AUDIT, name, charter.agreement.federation, config.identity.signer)
        largest = max(*(self.mailbox.cap(other) for other in charter.names), len(self.agreed.canonical))
        self.listener = Listener(self.circle, self, config.settings.listen, largest)
        self.couriers = {
            other: Courier(Line(self.circle, other, charter.addresses[other]), self.agreed, self.audit, self.present)
            for other in self.roster.others(name)
        }
        self._sent = 0
        """The last round whose signal is on its way."""
        self._midway = False
        """Whether the local step of the next round is done already."""
        self._finished: set[str] = set()
        """Who has done its last round, and will not be heard again."""
        self._greetings: dict[str, list[float]] = {name: [] for name in self.couriers}
        self._absent: set[str] = set()
        """Who did not answer in time the last time; not waited for until heard from again."""

    def _learner(self) -> Learner:
        config, run = self.config, self.config.run
        device, dtype = self._device, run.torch_dtype
        parts = {other: config.bundle.part(other) for other in config.charter.names}
        seed_set = SeedSet(parts, run.seed).to(device, dtype)
        validation = config.domain.validation.to(device, dtype)
        return Learner(self.node, seed_set, config.secret, config.optimizer, run.batch_size, device, dtype, validation)

    @property
    def _asked_rows(self) -> int:
        return self.method.public_batch_rows(self.config.run.batch_size)

    def _rows(self, sender: str) -> int:
        start, end = self.config.bundle.ranges[sender]
        return min(self._asked_rows, end - start)

    def _teachers(self, round: int) -> Any:
        return self.method.teachers(self.roster, round)

    # What others ask

    def present(self) -> int:
        """The one after the last that is done."""
        return self.round + 1

    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """To whom has agreed on the same: the round that this peer is in."""
        self.agreed.check(caller, hello)
        many, within = GREETINGS
        present = time.monotonic()
        recent = [when for when in self._greetings[caller] if present - when < within]
        if len(recent) >= many:
            raise PeerRefusedError(f"'{caller}' greets more than {many} times in {within:g} s")
        self._greetings[caller] = [*recent, present]
        answer = self.agreed.hello(self.name, self.present())
        self.audit.record("greeting", caller, self.present(), answer.SerializeToString())
        return answer

    def taught(self, caller: str, posteriors: bytes) -> None:
        """Keeps a sound signal."""
        self.mailbox.accept(caller, posteriors)
        self._absent.discard(caller)

    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Whoever leaves is not waited for."""
        log.info("'%s' leaves after round %d%s", caller, goodbye.round, ", done" if goodbye.finished else "")
        self._absent.add(caller)
        if goodbye.finished:
            self._finished.add(caller)

    def turned_away(self, why: str) -> None:
        """Says so."""
        log.warning("turned away: %s", why)

    # The course of a training

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Trains to the last round, from the newest checkpoint if there is one; False if it was asked to stop."""
        with torch_settings(self.config.run):
            self._resume()
            self.keeper.clock.start()
            self.listener.start()
            for courier in self.couriers.values():
                courier.start()
            try:
                self._meet()
                try:
                    while self.round < self.rounds and not stop():
                        self._step(stop)
                except _Stopped:
                    log.info("stops in round %d", self.round + 1)
                self._checkpoint()
                finished = self.round >= self.rounds
                self._say_goodbye()
                if finished:
                    self._finish()
            finally:
                self._leave()
        return finished

    def _meet(self) -> None:
        """Gives all others a moment to be there, and goes on from where they are."""
        end = time.monotonic() + MEET
        while time.monotonic() < end and any(c.contact.state == "down" for c in self.couriers.values()):
            time.sleep(0.02)
        self._catch_up()

    def _theirs(self) -> dict[str, int]:
        """The rounds that others are in, as far as is known, and as far as two of them say so, where two are there."""
        rounds = {
            name: min(self.rounds, max(courier.contact.round, self.mailbox.furthest(name)))
            for name, courier in self.couriers.items()
        }
        known = sorted((round for round in rounds.values() if round), reverse=True)
        believed = known[min(1, len(known) - 1)] if known else 0  # one alone could send everybody anywhere
        return {name: min(round, believed) for name, round in rounds.items()}

    def _left_behind(self) -> bool:
        """Whether others have gone on without this peer."""
        return any(self._missed(name, round) for name, round in self._theirs().items())

    def _catch_up(self) -> None:
        """If others have gone on without this peer, goes on with the round that they are in."""
        if self._left_behind():
            theirs = max(self._theirs().values())
            log.warning("others are in round %d: goes on from there, after round %d", theirs, self.round)
            self.skipped += theirs - 1 - self.round
            self.round, self._midway = theirs - 1, False
            self.mailbox.enter(theirs)

    def _missed(self, name: str, theirs: int) -> bool:
        """Whether a peer that is in round `theirs` has done one without the signal of this peer that belongs to it."""
        if self.timing.mode == "asynchronous":
            return theirs > self.round + 1 + self.timing.staleness
        return any(
            self.method.exchanges(round) and self.name in self._teachers(round).get(name, ())
            for round in range(max(self.round, self._sent) + 1, theirs)
        )

    def _step(self, stop: Callable[[], bool]) -> None:
        round = self.round + 1
        self.mailbox.enter(round)
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
        payload = encode(message, self.roster)
        for student, teachers in self._teachers(round).items():
            if self.name in teachers:
                self.couriers[student].send(round, payload)
        self._sent = round
        inbox = [signal.to(self._device) for signal in self._hear(round, stop)]
        self.residents.receive({self.name: inbox}, round)

    def _hear(self, round: int, stop: Callable[[], bool]) -> Sequence[Posteriors]:
        """The signals of a round: of all that are expected, or of those that are there when it is time to go on."""
        if self.timing.mode == "asynchronous":
            return self.mailbox.newest(round)
        expected = self._teachers(round).get(self.name, ())
        deadline = time.monotonic() + self.timing.deadline
        while True:
            if stop():
                raise _Stopped
            waited = [name for name in expected if name not in self._absent]
            here = self.mailbox.collect(round, min(deadline, time.monotonic() + 0.5), set(waited).issubset)
            heard = {signal.sender for signal in here}
            if heard.issuperset(waited) or time.monotonic() >= deadline or self._left_behind():
                missing = [name for name in waited if name not in heard]
                for name in missing:
                    log.warning("'%s' did not answer in round %d; it is not waited for until heard from", name, round)
                self._absent.update(missing)
                break
        return self._quorate(round, here, expected, stop)

    def _quorate(
        self, round: int, here: Sequence[Posteriors], expected: Sequence[str], stop: Callable[[], bool]
    ) -> Sequence[Posteriors]:
        """Waits until enough are heard; others may be away for long, so what there is is saved meanwhile."""
        began, paused = time.monotonic(), False

        def enough(heard: set[str]) -> bool:
            return len(heard) >= min(self.timing.quorum, sum(name not in self._finished for name in expected))

        while not enough({signal.sender for signal in here}) and not self._left_behind():
            if stop():
                raise _Stopped
            patient = self.timing.below_quorum == "wait" and time.monotonic() - began < self.timing.patience
            if not paused and not patient:
                paused = True
                log.warning("paused in round %d: only %d peers are heard", round, len(here))
                self._checkpoint()
            here = self.mailbox.collect(round, time.monotonic() + 0.5, enough)
        if paused:
            log.info("goes on in round %d", round)
        return here

    # What is kept

    def _arrive(self) -> None:
        self.keeper.arrive(self.round, sum(courier.contact.bytes for courier in self.couriers.values()))
        if self.round < self.rounds and self.keeper.checkpoint_is_due(self.round):
            self._checkpoint()

    def _checkpoint(self) -> None:
        about = {"skipped": self.skipped, "midway": self._midway, "finished": sorted(self._finished)}
        self.keeper.save(self.round, {"agreed": self.agreed.digest.hex(), **about})

    def _resume(self) -> None:
        checkpoint = self.keeper.newest(self.agreed.digest.hex())
        if checkpoint is not None:
            self.round, self.skipped = checkpoint.round, checkpoint.plain["skipped"]
            self._midway, self._finished = checkpoint.plain["midway"], set(checkpoint.plain["finished"])
            self.mailbox.enter(self.round + 1)

    def _finish(self) -> None:
        sent = {name: courier.contact.bytes for name, courier in self.couriers.items()}
        refused = {f"{name}: {why}": count for (name, why), count in sorted(self.mailbox.refused.items())}
        self.keeper.finish(self.round, {"skipped": self.skipped, "bytes": sent, "refused": refused})

    def _say_goodbye(self) -> None:
        """What was sent last is delivered, as far as there is time; then nothing more is sent."""
        goodbye = pb.Goodbye(round=self.round, finished=self.round >= self.rounds)
        end = time.monotonic() + FAREWELL
        for courier in self.couriers.values():
            courier.close(goodbye, max(0.0, end - time.monotonic()))

    def _leave(self) -> None:
        self._say_goodbye()
        self.listener.stop()
        self.audit.close()
        self.residents.close()
