"""Whom a peer waits for and believes; who would stop it, slow it down or lead it astray, does not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cryptography import x509

from fedh2l.cli.logs import LogFormat, _Lines
from fedh2l.data.seedset import SeedSet
from fedh2l.peer.monitoring import log_limit as quiet
from fedh2l.peer.peer import Peer
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.pki.certificates import NODE_CERTIFICATE
from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport import peer_table as neighbourhood
from fedh2l.peer.transport.peer_table import FORGIVEN, PeerTable
from fedh2l.peer.transport.sender import Contact
from fedh2l.runs.directory import RunDirectory
from town import NAMES, rehearsal


class Time:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Time:
    made = Time()
    monkeypatch.setattr(neighbourhood, "time", made)
    monkeypatch.setattr(quiet, "time", made)
    return made


@pytest.fixture
def peer(tmp_path):
    made = rehearsal(tmp_path / "there", "run.rounds=1000")
    peer = Peer(load_peer(made.folder / "M0" / PEER), RunDirectory.claim(tmp_path / "run", "x"))
    yield peer
    peer.audit.close()
    peer.local_nodes.close()


def there(peer: Peer, **rounds: int) -> None:
    peer.peers.senders.clear()
    for name, round in rounds.items():
        peer.peers.senders[name] = SimpleNamespace(contact=Contact(state="up", round=round))


def test_who_is_late_once_is_waited_for_as_soon_as_it_is_heard(clock):
    near = PeerTable(None, None, None, None)
    near.missed("M20", 2.0)
    assert near.late == {"M20"}
    assert near.heard("M20")
    assert not near.heard("M20")  # it was not late
    assert near.late == set()


def test_who_is_late_again_and_again_is_not_waited_for_ever_longer(clock):
    near = PeerTable(None, None, None, None)
    ignored = []
    for _ in range(9):
        near.missed("M20", 2.0)
        began = clock.now
        while not near.heard("M20"):
            clock.now += 1.0
        ignored.append(clock.now - began)
    assert ignored == [0, 2, 6, 14, 30, 62, 126, 126, 126]
    for _ in range(FORGIVEN):
        near.answered("M20")
    near.missed("M20", 2.0)
    assert near.heard("M20")


def test_done_is_believed_of_whom_this_peer_has_caught_up_with(peer):
    peer.servicer.left("M20", pb.Goodbye(round=0, finished=True))
    peer.round = 10
    assert not peer._barrier._is_done("M20")
    peer.round = 999
    assert peer._barrier._is_done("M20")
    assert not peer._barrier._is_done("M40")


def test_one_refusal_does_not_end_the_wait_for_others(peer):
    """M20 says that it is past each round. M40 has come one further, as it may while this peer waits for M60."""

    def said(**past: int) -> int | None:
        there(peer, M20=999, M40=12, M60=10)
        for name, round in past.items():
            courier = peer.peers.senders[name]
            courier.contact = replace(courier.contact, past=round)
        return peer.ahead()

    peer.round, peer._sent = 10, 11
    assert said(M20=11) is None
    assert said(M20=11, M60=10) is None
    assert said(M20=11, M40=11) == 12


def test_members_to_come_have_no_say_in_which_round_it_is(peer):
    """Two voices are enough, but only of those who are members now."""
    peer.round = peer._sent = 10
    there(peer, M20=900, M40=900, M60=11)
    assert peer.ahead() == 900
    there(peer, M20=11, M90=900, M95=900)
    assert peer.ahead() is None


def test_a_round_that_is_no_number_of_rounds(peer):
    there(peer, M20=2**40, M40=2**40, M60=1)
    assert peer.ahead() == 1000
    from fedh2l.peer.monitoring.status import state_of

    peer.peers.addresses = dict.fromkeys(NAMES[1:], "h:1")
    assert {other.round for other in state_of(peer).peers} == {2**32 - 1, 1}


def test_other_public_data_is_other_local_data(peer):
    (learner,) = peer.local_nodes.learners
    before = len(learner.pool("private+all-public"))
    learner.use(SeedSet({"M0": peer.roster_version.bundle.part("M0")}, 0))
    assert len(learner.pool("private+all-public")) < before


def test_lessons_are_not_kept_beyond_who_may_teach(tmp_path):
    """Of another term, of before rounds that were missed, and of whom the authority has shut out."""
    made = rehearsal(
        tmp_path / "there", "run.rounds=1000", "method.name=fedh2l-plus", "method.interval=3", "method.replay=2"
    )
    peer = Peer(load_peer(made.folder / "M0" / PEER), RunDirectory.claim(tmp_path / "run", "x"))
    (learner,) = peer.local_nodes.learners

    def still_there(of: Callable[[], None]) -> bool:
        learner.memory["lesson.0.inputs"] = torch.ones(1)
        of()
        return "lesson.0.inputs" in learner.memory

    def another_term() -> None:
        peer.roster_version = copy.copy(peer.roster_version)
        peer._enter(peer.present())

    try:
        assert peer.method.keeps
        assert still_there(lambda: peer._enter(1))
        assert not still_there(another_term)
        peer.round = 1
        assert still_there(another_term)  # as after a start anew
        shown = (made.folder / "M20" / "keys" / NODE_CERTIFICATE).read_bytes()
        peer.auth._met["M20"] = x509.load_pem_x509_certificate(shown)
        assert still_there(peer._shut_out)
        Authority(made.folder / "authority").revoke("M20")
        assert not still_there(peer._shut_out)
        assert still_there(peer._shut_out)  # what is heard from now on is of others
        there(peer, M20=900, M40=900, M60=900)
        assert not still_there(peer._catch_up)
    finally:
        peer.audit.close()
        peer.local_nodes.close()


def test_what_is_refused_is_counted(peer):
    for _ in range(3):
        peer.servicer.turned_away("M20", "malformed", "x" * 9999)
    peer.servicer.turned_away("", "not a member", "somebody")
    from fedh2l.peer.monitoring.status import state_of

    assert dict(state_of(peer).turned_away) == {"'M20': malformed": 3, "not a member": 1}


def test_the_same_again_and_again_does_not_fill_the_log(clock, caplog):
    log = logging.getLogger("fedh2l.test")
    log.addFilter(quiet.LogRateLimit())
    for _ in range(10):
        for number in range(100):
            log.warning("dropped a signal of '%s': %s", "M20", number, extra={"peer": "M20"})
        log.warning("dropped a signal of '%s': %s", "M40", 0, extra={"peer": "M40"})
        clock.now += 6.1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 20 + 10
    log.warning("dropped a signal of '%s': %s", "M20", 7, extra={"peer": "M20"})
    assert caplog.records[-1].getMessage() == "dropped a signal of 'M20': 7 (and 980 more like this in the last minute)"


@pytest.mark.parametrize("how", LogFormat)
def test_nobody_forges_a_line(how):
    record = logging.makeLogRecord({"msg": "turned away: %s", "args": ("x\n2026-01-01 info all is well\x1b[2J ü",)})
    text = _Lines(how, "M0").format(record)
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "ü" in text or "\\u00fc" in text
