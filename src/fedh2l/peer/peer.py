"""A peer of a federation: it trains one node, and learns from the messages that arrive in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from fedh2l.data.seedset import SeedSet
from fedh2l.engines.local_nodes import LocalNodes
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.errors import WriteError
from fedh2l.hardware import resolve_device
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.audit.witness import Witnesses
from fedh2l.peer.barrier import RoundBarrier, StoppedError
from fedh2l.peer.membership.roster_history import RosterVersion
from fedh2l.peer.membership.roster_sections import Timing
from fedh2l.peer.monitoring.status import MonitoringPorts, Phase
from fedh2l.peer.progress import PeerProgress
from fedh2l.peer.recorder import PeerRecorder
from fedh2l.peer.settings import PeerConfig
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.inbox import Inbox, LatestInbox
from fedh2l.peer.transport.peer_table import PeerTable
from fedh2l.peer.transport.server import Listener
from fedh2l.peer.transport.servicer import PeerServicer
from fedh2l.protocol.messages import Message, encode
from fedh2l.runs.checkpoints import restoring
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.loop import torch_settings
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner

log = logging.getLogger("fedh2l.peer")

AUDIT, WITNESS = "audit.jsonl", "witness"
FAREWELL = 5.0
"""Seconds for delivering the last messages when a peer ends."""
GRACE = 64
"""Number of rounds that former members may still call after a change of members, to say goodbye."""


class Peer:
    """The node of one organisation, connected to the other members."""

    def __init__(self, config: PeerConfig, directory: RunDirectory) -> None:
        self.config, self._device = config, resolve_device(config.run.device)
        self.name, self.rounds, self.history = config.name, config.run.rounds, config.history
        self.roster_version = self.history.all[0]
        """Roster version of the current round."""
        self.phase: Phase = "meeting"
        self.auth = config.auth()
        roster_files = [version.roster_file for version in self.history.all]
        self.agreed = RosterDigests.of(roster_files, self.roster_version.bundle.classes)
        own = config.settings
        self.node = Node(self.name, own.model or "", config.domain, own.model_args, weights=own.weights)
        learner = NodeLearner(self.node, config.training().to(self._device), config.secret)
        self.local_nodes = LocalNodes([learner], self.roster_version.method)
        self.method = self.roster_version.method
        self.recorder = PeerRecorder(config, directory, self.node, self.local_nodes, lambda: self.audit.sent.total())
        self.skipped = 0
        """Number of rounds that this peer has skipped."""
        self.round = self.roster_version.first - 1
        """Last completed round."""
        self.inbox = self._inbox()
        self.audit = AuditLog(directory.path / AUDIT, self.name, self.federation, config.signer)
        self.witnesses = Witnesses(directory.path / WITNESS)
        members = self.history.names
        largest = max(*(self.history.largest(other) for other in members), self.agreed.size)
        self.peers = PeerTable(self.auth, self.agreed, self.audit, self._hello)
        logs = (self.audit, self.witnesses)
        self.servicer = PeerServicer(self.auth, self.agreed, self.inbox, self.peers, *logs, self._hello, self.present)
        self.listener = Listener(self.auth, self.servicer, config.settings.listen, largest, members)
        self.progress = PeerProgress(self.name, self.rounds, self.history, self.inbox, self.peers)
        self._barrier = RoundBarrier(self)
        self._result: dict[str, Any] | None = None
        self._sent = 0
        """Last round whose message was sent."""
        self._midway = False
        """Whether the local step of the next round is already done."""
        self._barred: frozenset[str] = frozenset()
        """Members that are known as revoked or removed."""
        self._around: tuple[tuple[RosterVersion, ...], ...] = ()
        """Roster versions with the members that this peer calls, and those with the members that may call it."""

    def _inbox(self) -> Inbox:
        if self.timing.mode == "asynchronous":
            return LatestInbox(self.name, self.history, self.timing.staleness)
        return Inbox(self.name, self.history)

    def _public(self, roster_version: RosterVersion) -> SeedSet:
        return roster_version.seed_set.to(self._device, self.config.run.torch_dtype)

    @property
    def timing(self) -> Timing:
        return self.roster_version.roster_file.timing

    @property
    def federation(self) -> str:
        return self.roster_version.roster_file.agreement.federation

    @property
    def finished(self) -> bool:
        """Whether the last round is done."""
        return self.round >= self.rounds

    @property
    def begins(self) -> bool:
        """Whether this is the first round of the training, or of this peer's membership."""
        return self.present() <= self.history.all[0].first

    def _hello(self) -> pb.Hello:
        return self.agreed.hello(self.name, self.present(), self.finished)

    def present(self) -> int:
        """Return the current round: the one after the last completed round."""
        return self.round + 1

    # Training

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last round, from the newest checkpoint if there is one. Return False if stopped earlier."""
        with ExitStack() as stack:
            stack.callback(self.local_nodes.close)
            stack.callback(self.audit.close)
            stack.enter_context(torch_settings(self.config.run))
            self._resume()
            self.recorder.clock.start()
            stack.enter_context(MonitoringPorts(self, self.config.settings))
            stack.callback(self.listener.stop)
            self.listener.start()
            stack.callback(self._say_goodbye)
            self._enter(self.present())
            try:
                self._barrier.meet(stop)
                self.phase = "training"
                self._catch_up()
                stepped = self.present() if self._midway else None
                for event in rounds(self.local_nodes, self.method, self._schedule(stop), stepped):
                    if isinstance(event, Exchange):
                        self._midway = True
                        event.inboxes = {self.name: self._exchange(event.sent[self.name], event.round, stop)}
                    else:
                        self._round_done(event.round)
            except StoppedError:
                log.info("stops in round %d", self.present(), extra={"round": self.present()})
            if self._result is None:
                self._save()
            if self.finished:
                self._finish()
                self._say_goodbye()
                self.phase = "done"
                self._barrier.linger(stop)
                self._finish()
        return self.finished

    def _enter(self, round: int) -> None:
        """Start a round, and switch to its roster version if that is a new one."""
        version = self.history.at(round)
        if version is not self.roster_version:
            number = version.roster_file.agreement.version
            log.info("from round %d version %d of the roster holds", round, number, extra={"round": round})
            self.roster_version = version
            for learner in self.local_nodes.learners:
                learner.use(self._public(version))
            if self.round < version.first:
                self.local_nodes.forget()
        around = tuple(
            tuple(version for version in self.history.from_round(since) if self.name in version.roster.names)
            for since in (round, round - GRACE)
        )
        if around != self._around:
            self._around = around
            self._surround(*around)
        self.inbox.enter(round)

    def _surround(self, versions: Sequence[RosterVersion], heard: Sequence[RosterVersion]) -> None:
        """Call the members of `versions`, and accept calls from the members of `heard` too. Drop all others."""
        heard_members, members = (
            {m.name: m for version in reversed(which) for m in version.roster_file.members}
            for which in (heard, versions)
        )  # the current version takes precedence
        self.auth.admit({name: m.pin or "" for name, m in (heard_members | members).items()})
        addresses = {name: member.address for name, member in members.items() if name != self.name}
        self.peers.keep(addresses, self._goodbye(), FAREWELL)

    def ahead(self) -> int | None:
        """Return the round of the others if they have continued without this peer, else None."""
        return self.progress.ahead(self.round, self._sent)

    def _catch_up(self) -> None:
        """Skip the rounds that the others have done without this peer."""
        theirs = self.ahead()
        if theirs is not None:
            about = {"round": theirs}
            log.warning("others are in round %d: goes on from there, after round %d", theirs, self.round, extra=about)
            self.skipped += theirs - 1 - self.round
            self.round, self._midway = theirs - 1, False
            self.local_nodes.forget()  # drop old lessons
            self._enter(theirs)

    def _schedule(self, stop: Callable[[], bool]) -> Iterator[int]:
        """Yield the rounds to do, without skipped rounds."""
        while not self.finished and not stop():
            self._enter(self.present())
            if self.method.keeps:
                self._shut_out()
            self.progress.timer.begins()
            yield self.present()

    def _round_done(self, round: int) -> None:
        self.round, self._midway = round, False
        self.progress.timer.trained()
        self._arrive()
        self.progress.timer.waits()
        self._catch_up()

    def _shut_out(self) -> None:
        """Drop all cached lessons if a member was revoked or removed, since they may come from it."""
        barred = self._barrier.barred()
        if not barred <= self._barred:
            self.local_nodes.forget()
        self._barred = barred

    def _exchange(self, message: Message, round: int, stop: Callable[[], bool]) -> list[Message]:
        """Send a message to all students, and return the messages of the teachers."""
        students = [
            student for student, teachers in self.history.at(round).teachers(round).items() if self.name in teachers
        ]
        self.peers.send(students, round, encode(message, self.roster_version.roster))
        self._sent = round
        self.progress.timer.waits()
        inbox = self._barrier.hear(round, stop)
        self.progress.timer.goes_on()
        return [signal.to(self._device) for signal in inbox]

    # Checkpoints and result

    def _arrive(self) -> None:
        due = not self.finished and self.recorder.checkpoint_is_due(self.round)
        self.recorder.arrive(self.round, look=due)
        self.peers.tell_heads()
        if due:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save a checkpoint. If that fails, the one before stays valid, and the next due one is another attempt."""
        try:
            self._save()
        except WriteError as error:
            log.error("%s; the training goes on, and tries it again", error, extra={"round": self.round})

    def _save(self) -> None:
        done = sorted(name for name in self.peers.addresses if self.peers.says_done(name))
        about = {
            "skipped": self.skipped, "midway": self._midway, "finished": done, "tempo": self.progress.timer.state(),
        }  # fmt: skip
        self.recorder.save(self.round, {**self.recorder.made_by(self.roster_version), **about})

    def _resume(self) -> None:
        self._result = self.recorder.result(self.rounds, self.history)
        if self._result is not None:
            self.round, self.peers.finished = self.rounds, set(self._result["peer"]["done"])
            log.warning("'%s' has already done its last round", self.name)
            return
        checkpoint = self.recorder.newest(self.history)
        if checkpoint is not None:
            with restoring(self.recorder.directory.path):
                self.round, self.skipped = checkpoint.round, int(checkpoint.plain["skipped"])
                self._midway = bool(checkpoint.plain["midway"])
                self.peers.finished = set(map(str, checkpoint.plain["finished"]))
                self.progress.timer.restore(checkpoint.plain["tempo"])
        self.recorder.directory.sign(self.recorder.inputs)

    def _finish(self) -> None:
        """Write the result once. Later calls only update the list of members that are done."""
        done = sorted(name for name in self.history.names if self.peers.says_done(name))
        if self._result is not None:
            self._result["peer"]["done"] = done
            self.recorder.directory.write_result(self._result)
            return
        refused = {f"{name}: {why}": count for (name, why), count in sorted(self.inbox.refused.items())}
        others = [name for name in self.history.names if name != self.name]
        sent = {name: self.audit.sent[name] for name in others}
        about = {"skipped": self.skipped, "refused": refused, "done": done}
        about |= self.recorder.made_by(self.roster_version)
        self._result = self.recorder.finish(self.round, self.method.title, sent, about)

    def _goodbye(self) -> pb.Goodbye:
        return pb.Goodbye(round=self.round, finished=self.finished)

    def _say_goodbye(self) -> None:
        self.peers.close(self._goodbye(), FAREWELL)
