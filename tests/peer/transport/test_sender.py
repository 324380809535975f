"""Signals on their way to a peer that is there, away, slow, or will not have them; over real TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc
import pytest
from test_server import LARGEST, Town

from fedh2l.peer.audit import AuditError, AuditLog, audit
from fedh2l.peer.refusals import Reason, Refused
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport import sender as couriers
from fedh2l.peer.transport.client import PeerClient
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.sender import QUEUE, Sender
from fedh2l.peer.transport.server import Listener
from members import CLASSES


def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(couriers, "LONGEST_PAUSE", 0.4)
    monkeypatch.setattr(couriers, "TIMEOUT", 3.0)


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path)
    made.courier, made.audit = hire(made)
    yield made
    made.courier.close(pb.Goodbye(), 0)
    made.listener.stop(0)


def hire(town, name="b", agreed=None) -> tuple[Sender, AuditLog]:
    log = AuditLog(town.folder / f"audit-{name}", name, "zoo", town.identity(name).signer)
    agreed = agreed or town.servicer.agreed
    made = Sender(PeerClient(town.auth(name), "a", town.address), agreed, log, lambda: agreed.hello(name, 3))
    made.start()
    return made, log


def reopen(town) -> None:
    town.listener = Listener(town.auth("a"), town.servicer, town.address, LARGEST, "abc")
    town.listener.start()


def test_signals_arrive_in_order_and_are_on_record(town):
    for round in range(1, 6):
        town.courier.send(round, bytes([round]))
    until(lambda: len(town.servicer.heard) == 5)
    assert town.servicer.heard == [("b", bytes([round])) for round in range(1, 6)]
    until(lambda: town.courier.contact.sent == 5)
    contact = town.courier.contact
    assert (contact.state, contact.round, contact.sent, contact.dropped) == ("up", 5, 5, 0)
    assert town.audit.sent == {"a": 5}
    town.courier.close(pb.Goodbye(round=5, finished=True), 5)
    assert town.servicer.heard[-1] == ("b", 5)
    report = audit(town.folder / "audit-b")
    assert report.problems == []
    assert report.messages == {"greeting": 1, "posteriors": 5, "head": 1, "goodbye": 1}


def test_sending_never_waits(town):
    town.listener.stop(0)
    began = time.monotonic()
    for round in range(1000):
        town.courier.send(round, b"x")
    assert time.monotonic() - began < 1


def test_a_peer_that_comes_back_gets_the_newest(town):
    until(lambda: town.courier.contact.state == "up")
    town.listener.stop(0)
    for round in range(1, 31):
        town.courier.send(round, bytes([round]))
    until(lambda: town.courier.contact.state == "down")
    assert town.courier.contact.reason
    reopen(town)
    until(lambda: len(town.servicer.heard) >= QUEUE)
    assert [payload[0] for _, payload in town.servicer.heard] == list(range(31 - QUEUE, 31))
    assert town.courier.contact.dropped == 30 - QUEUE
    assert town.courier.contact.state == "up"


def test_a_peer_that_was_never_there_yet(tmp_path):
    town = Town(tmp_path)
    town.listener.stop(0)
    courier, _ = hire(town)
    courier.send(1, b"x")
    until(lambda: courier.contact.state == "down" and courier.contact.reason != "")
    reopen(town)
    until(lambda: town.servicer.heard == [("b", b"x")])
    courier.close(pb.Goodbye(), 5)
    town.listener.stop(0)


def test_who_has_agreed_on_something_else_is_told_and_may_mend_it(town):
    other = RosterDigests.of([town.read(rounds=100, seed=9)], CLASSES)
    courier, _ = hire(town, "c", other)
    courier.send(1, b"x")
    until(lambda: courier.contact.state == "refused")
    assert "another roster, which differs in: seed" in courier.contact.reason
    assert town.servicer.heard == []
    town.servicer.agreed = other  # the founder mends it at the other end
    until(lambda: courier.contact.state == "up")
    until(lambda: town.servicer.heard == [("c", b"x")])
    courier.close(pb.Goodbye(), 5)


@pytest.mark.parametrize(("who", "left"), [("a", 1), ("b", 2)])
def test_with_whom_is_revoked_nobody_talks(town, who, left):
    """Also on a connection that was there before: nothing is sent to it, and nothing taken from it."""
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.sent == 1)
    town.founder.revoke(who)
    town.courier.send(2, b"y")
    until(lambda: town.courier.contact.state == "refused")
    assert "is revoked" in town.courier.contact.reason
    assert town.servicer.heard == [("b", b"x")]
    assert audit(town.folder / "audit-b").messages["posteriors"] == left


def test_what_fails_in_the_handshake_is_in_the_log_of_whoever_dials(tmp_path, town, caplog):
    stranger = Town(tmp_path / "elsewhere")
    try:
        log = AuditLog(tmp_path / "audit-x", "b", "zoo", stranger.identity("b").signer)
        agreed = town.servicer.agreed
        courier = Sender(PeerClient(stranger.auth("b"), "a", town.address), agreed, log, lambda: agreed.hello("b", 1))
        courier.start()
        until(lambda: courier.contact.state == "refused")
        assert "'a' cannot be reached" in caplog.text
        assert "does not show a certificate of this federation" in caplog.text
        courier.close(pb.Goodbye(), 0)
    finally:
        stranger.listener.stop(0)


def test_an_error_that_nobody_thought_of_does_not_end_a_courier(town, monkeypatch, caplog):
    until(lambda: town.courier.contact.state == "up")
    call, failed = PeerClient.call, []

    def failing(self, *arguments):
        if not failed:
            failed.append(True)
            raise UnicodeError("whatever")
        return call(self, *arguments)

    monkeypatch.setattr(PeerClient, "call", failing)
    town.courier.send(1, b"x")
    until(lambda: town.servicer.heard == [("b", b"x")])
    assert "UnicodeError: whatever" in caplog.text


def test_an_idle_courier_finds_out_that_the_other_is_gone(town, monkeypatch):
    until(lambda: town.courier.contact.state == "up")
    monkeypatch.setattr(couriers, "IDLE", 0.2)
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.sent == 1)
    town.listener.stop(0)
    until(lambda: town.courier.contact.state == "down")


def test_when_it_ends_a_signal_that_is_early_is_let_go(town, monkeypatch):
    def early(caller, posteriors):
        raise Refused(Reason.FUTURE, "it is of round 900")

    monkeypatch.setattr(town.servicer, "taught", early)
    town.courier.send(900, b"x")
    until(lambda: town.courier.contact.state == "up")
    town.courier.close(pb.Goodbye(round=3), 5)
    assert town.servicer.heard[-1] == ("b", 3)  # the goodbye


def test_a_signal_that_is_not_taken_is_not_sent_again(town, monkeypatch):
    def picky(caller, posteriors):
        if posteriors == b"bad":
            raise Refused(Reason.UNSOUND, "it holds negative values")
        town.servicer.heard.append((caller, posteriors))

    monkeypatch.setattr(town.servicer, "taught", picky)
    for payload in (b"good", b"bad", b"better"):
        town.courier.send(1, payload)
    until(lambda: len(town.servicer.heard) == 2)
    until(lambda: town.courier.contact.sent == 2)
    assert town.courier.contact.dropped == 1
    town.courier.close(pb.Goodbye(), 5)
    assert audit(town.folder / "audit-b").messages["posteriors"] == 3


def test_a_slow_peer_holds_up_nobody(town, monkeypatch):
    monkeypatch.setattr(couriers, "TIMEOUT", 0.5)
    let_go = threading.Event()

    def slow(caller, posteriors):
        let_go.wait(10)
        town.servicer.heard.append((caller, posteriors))

    monkeypatch.setattr(town.servicer, "taught", slow)
    until(lambda: town.courier.contact.state == "up")
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.state == "down")
    assert "DEADLINE_EXCEEDED" in town.courier.contact.reason
    let_go.set()
    until(lambda: town.courier.contact.sent == 1)  # it may get it twice: a mailbox takes it once


def test_ending_without_the_other(town):
    until(lambda: town.courier.contact.state == "up")
    town.listener.stop(0)
    town.courier.send(1, b"x")
    began = time.monotonic()
    town.courier.close(pb.Goodbye(round=1), 1.0)
    assert time.monotonic() - began < 2.5
    assert not town.courier._thread.is_alive()


def test_what_cannot_be_put_on_record_is_not_sent(town, monkeypatch):
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.sent == 1)

    def full(*_):
        raise AuditError("cannot write the audit log, so nothing is sent: No space left on device")

    monkeypatch.setattr(town.audit, "record", full)
    town.courier.send(2, b"y")
    until(lambda: "No space left" in town.courier.contact.reason)
    assert town.servicer.heard == [("b", b"x")]
    monkeypatch.undo()
    until(lambda: ("b", b"y") in town.servicer.heard)  # once there is room again


def test_a_refusal_says_in_which_round_the_other_is(town, monkeypatch):
    until(lambda: town.courier.contact.state == "up")

    def past(caller, posteriors):
        raise Refused(Reason.PAST, "it is of round 1")

    monkeypatch.setattr(town.servicer, "taught", past)
    monkeypatch.setattr(town.servicer, "present", lambda: 77)
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.round == 77)
    assert town.courier.contact.state == "up"


def test_little_is_told_of_what_another_says(town, monkeypatch, caplog):
    def fails(caller, posteriors):
        raise RuntimeError

    monkeypatch.setattr(town.listener, "_turn_away", lambda context, *_: context.abort(grpc.StatusCode.INTERNAL, text))
    monkeypatch.setattr(town.servicer, "taught", fails)
    text = "x" * 500  # within the limit of headers
    town.courier.send(1, b"x")
    until(lambda: town.courier.contact.reason == "INTERNAL")
    assert not any("xxx" in line for line in caplog.messages)
