"""What a peer takes from others: sound signals, each once, and nothing else."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedh2l.methods.fedh2l import FedH2L
from fedh2l.peer.refusals import Reason, Refused
from fedh2l.peer.transport.inbox import AHEAD, Inbox, LatestInbox
from fedh2l.protocol.messages import Encoding, Logits, Parameters, Posteriors, decode, encode
from fedh2l.protocol.roster import Roster

ROSTER = Roster(("a", "b", "c", "d"), 7)
ROWS, CLASSES = 5, 3
ALL = {"b", "c", "d"}.issubset


def labels(sender: str, round: int) -> torch.Tensor:
    return torch.tensor([(ord(sender) + round + i) % CLASSES for i in range(ROWS)])


class Always:
    """Terms that never change, with labels that tests can work out."""

    first, rounds, roster, names = 1, 10_000, ROSTER, ROSTER.names

    def __init__(self, method: FedH2L, labelled: bool = True) -> None:
        self.method, self.labelled = method, labelled
        self.labels = labels if labelled else lambda sender, round: None
        self.teachers, self.exchanges, self.all = lambda round: method.teachers(ROSTER, round), method.exchanges, [self]

    def at(self, round: int) -> Always:
        return self

    def shape(self, sender: str) -> tuple[int, int]:
        return ROWS, CLASSES

    def largest(self, sender: str) -> int:
        return len(data(signal(sender)))


def mailbox(name: str = "a", **method) -> Inbox:
    return Inbox(name, Always(FedH2L(**method)))


def signal(sender: str = "b", round: int = 1, seed: int = 0) -> Posteriors:
    logits = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(seed))
    return Posteriors.of(sender, round, torch.softmax(logits, -1), labels(sender, round))


def data(message=None, roster: Roster = ROSTER) -> bytes:
    return encode(message or signal(), roster)


def reason(box: Inbox, payload: bytes, sender: str = "b") -> Reason:
    with pytest.raises(Refused) as refused:
        box.accept(sender, payload)
    assert box.refused[sender, refused.value.reason] >= 1
    return refused.value.reason


def test_a_sound_signal_is_kept_as_it_was_sent():
    box = mailbox()
    box.accept("b", data())
    (kept,) = box.collect(1, time.monotonic(), ALL)
    assert torch.equal(kept.values, signal().values)
    assert kept.accuracy == signal().accuracy


def test_without_labels_nobody_says_how_many_were_right():
    box = Inbox("a", Always(FedH2L(), labelled=False))
    assert reason(box, data()) is Reason.WRONG_SHAPE
    box.accept("b", data(replace(signal(), correct=None)))
    (kept,) = box.collect(1, time.monotonic(), ALL)
    assert kept.correct is None


def changed(**changes) -> bytes:
    return data(replace(signal(), **changes))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", Reason.MALFORMED),
        (b"\x00" * 60, Reason.MALFORMED),
        (data()[:-1], Reason.MALFORMED),
        (data() + b"\x00", Reason.TOO_LARGE),
        (data(roster=Roster(ROSTER.names, 8)), Reason.MALFORMED),
        (data(signal("c")), Reason.WRONG_NAME),
        (data(Logits.of("b", 1, torch.zeros(ROWS, CLASSES))), Reason.NOT_POSTERIORS),
        (data(Parameters("b", 1, torch.zeros(4))), Reason.NOT_POSTERIORS),
        (data(signal(round=AHEAD + 2)), Reason.FUTURE),
        (data(signal(round=0)), Reason.PAST),
        (changed(values=torch.full((ROWS - 1, CLASSES), 1 / CLASSES)), Reason.WRONG_SHAPE),
        (changed(values=torch.full((ROWS, CLASSES - 1), 1 / 2)), Reason.WRONG_SHAPE),
        (changed(correct=None), Reason.WRONG_SHAPE),
        (changed(encoding=Encoding.of("int8")), Reason.WRONG_SHAPE),
        (changed(values=torch.full((ROWS, CLASSES), float("nan"))), Reason.UNSOUND),
        (changed(values=torch.tensor([[2.0, -1.0, 0.0]] * ROWS)), Reason.UNSOUND),
        (changed(values=torch.full((ROWS, CLASSES), 0.5)), Reason.UNSOUND),
        (changed(correct=signal().correct + 1), Reason.UNSOUND),
    ],
)
def test_what_is_refused(payload, why):
    box = mailbox()
    assert reason(box, payload) is why
    assert box.collect(1, time.monotonic(), ALL) == []


def test_each_signal_counts_once():
    box = mailbox()
    box.accept("b", data())
    assert reason(box, data()) is Reason.REPLAYED
    assert reason(box, data(signal(seed=1))) is Reason.REPLAYED  # another one of that round
    box.enter(2)
    assert reason(box, data()) is Reason.PAST


def test_who_is_not_heard_is_not_expected():
    assert reason(mailbox("a", topology="line"), data(signal("c")), "c") is Reason.NOT_EXPECTED
    box = mailbox(interval=2)
    assert reason(box, data()) is Reason.NOT_EXPECTED
    box.accept("b", data(signal(round=2)))
    assert reason(mailbox("b"), data()) is Reason.NOT_EXPECTED  # oneself


def latest(staleness: int, **method) -> LatestInbox:
    return LatestInbox("a", Always(FedH2L(**method)), staleness)


def test_without_waiting_those_are_heard_whose_turn_it_is():
    box = latest(5, peers_per_round=1)
    for round in range(1, 7):
        box.enter(round)
        taught = FedH2L(peers_per_round=1).teachers(ROSTER, round)["a"]
        for name in "bcd":
            if name in taught:
                box.accept(name, data(signal(name, round)))
            else:
                assert reason(box, data(signal(name, round)), name) is Reason.NOT_EXPECTED
        assert {s.sender for s in box.newest(round)} == set(taught)


def test_staleness_counts_exchanges_here():
    box = latest(1, interval=10)
    box.enter(10)
    box.accept("b", data(signal("b", 500)))  # its own pace
    assert [s.round for s in box.newest(10)] == [500]
    assert [s.round for s in box.newest(20)] == [500]
    assert box.newest(30) == []
    box.enter(30)
    box.accept("b", data(signal("b", 510)))
    assert [s.round for s in box.newest(30)] == [510]
    assert reason(box, data(signal("b", 510))) is Reason.REPLAYED
    assert reason(box, data(signal("b", 500))) is Reason.PAST
    assert reason(box, data(signal("c", Always.rounds + 10)), "c") is Reason.FUTURE
    assert [s.sender for s in box.newest(30)] == ["b"]
    assert box.furthest("b") == 510


def test_waiting_ends_when_all_are_there_or_at_the_deadline():
    box = mailbox()
    sender = threading.Timer(0.1, lambda: [box.accept(n, data(signal(n))) for n in ("d", "b", "c")])
    sender.start()
    began = time.monotonic()
    heard = box.collect(1, began + 30, ALL)
    assert [s.sender for s in heard] == ["b", "c", "d"]  # in roster order, whatever order they came in
    assert time.monotonic() - began < 10
    box.enter(2)
    box.accept("c", data(signal("c", 2)))
    began = time.monotonic()
    assert [s.sender for s in box.collect(2, began + 0.2, ALL)] == ["c"]
    assert time.monotonic() - began >= 0.2
    assert [s.sender for s in box.collect(2, began + 30, lambda heard: len(heard) >= 1)] == ["c"]


def test_signals_of_peers_that_are_ahead_are_kept_for_their_round():
    box = mailbox()
    box.accept("b", data(signal(round=3)))
    assert box.furthest("b") == 3
    assert box.collect(1, time.monotonic(), ALL) == []
    box.enter(3)
    assert len(box.collect(3, time.monotonic(), ALL)) == 1
    box.enter(4)
    assert box.furthest("b") == 0


def test_what_is_kept_is_bounded():
    box = mailbox()
    for round in range(1, AHEAD + 20):
        for sender in "bcd":
            if round <= 1 + AHEAD:
                box.accept(sender, data(signal(sender, round)))
            else:
                assert reason(box, data(signal(sender, round)), sender) is Reason.FUTURE
    assert len(box._kept) == 3 * (AHEAD + 1)
    box.enter(500)
    assert not box._kept
    assert not box._seen


def rightly_accepted(payload: bytes) -> bool:
    """The rules once more, written from the protocol's text, on bytes."""
    if len(payload) != 40 + 4 + 4 * ROWS * CLASSES:
        return False
    magic, schema, kind, encoding, digest, place, round, rows, columns, flags = struct.unpack_from(
        "<4sHBB16sIIIHH", payload
    )
    right = (b"FH2L", 1, 1, 1, ROSTER.digest, 1, ROWS, CLASSES, 1)
    if (magic, schema, kind, encoding, digest, place, rows, columns, flags) != right or not 1 <= round <= 1 + AHEAD:
        return False
    (correct,) = struct.unpack_from("<I", payload, 40)
    values = np.frombuffer(payload, "<f4", offset=44).reshape(ROWS, CLASSES)
    if not np.isfinite(values).all() or (values < 0).any():
        return False
    with np.errstate(over="ignore"):
        close = np.abs(values.astype(np.float64).sum(1) - 1) <= 1.01e-4  # sums differ in the last bit
    return bool(close.all()) and int((values.argmax(1) == labels("b", round).numpy()).sum()) == correct


@st.composite
def mutations(draw) -> bytes:
    payload = bytearray(data(signal(seed=draw(st.integers(0, 3)))))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "set", "cut", "grow", "swap"]))
        place = draw(st.integers(0, max(len(payload) - 1, 0)))
        if kind == "flip" and payload:
            payload[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and payload:
            payload[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del payload[place:]
        elif kind == "grow":
            payload += draw(st.binary(max_size=20))
        elif kind == "swap" and len(payload) > 8:
            other = draw(st.integers(0, len(payload) - 4))
            place = min(place, len(payload) - 4)
            payload[place : place + 4], payload[other : other + 4] = (
                payload[other : other + 4],
                payload[place : place + 4],
            )
    return bytes(payload)


@given(mutations() | st.binary(max_size=200))
def test_whatever_comes_nothing_breaks_and_nothing_gets_through_wrongly(payload):
    judge(payload)


def judge(payload: bytes) -> bool:
    box = mailbox()
    try:
        box.accept("b", payload)
    except Refused:
        assert not rightly_accepted(payload)
        return False
    assert rightly_accepted(payload)
    assert decode(payload, ROSTER).sender == "b"
    return True


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_mutated_messages(count):
    random = np.random.default_rng(count)
    whole, accepted = data(), 0
    for _ in range(count):
        payload = bytearray(whole)
        for place in random.integers(0, len(payload), random.integers(1, 4)):
            payload[place] = (
                payload[place] ^ (1 << random.integers(8)) if random.random() < 0.7 else random.integers(256)
            )
        if random.random() < 0.1:
            payload = payload[: random.integers(len(payload) + 1)]
        accepted += judge(bytes(payload))
    assert 0 < accepted < count / 2  # a last bit of a value may differ; most changes may not


def test_a_signal_in_fewer_bits_is_read_as_its_sender_read_it():
    box = mailbox(encoding="int4")
    short = Posteriors.of("b", 1, signal().values, labels("b", 1), Encoding.of("int4"))
    box.accept("b", data(short))
    (kept,) = box.collect(1, time.monotonic(), ALL)
    assert torch.equal(kept.values, short.values)
    assert reason(box, data(signal(round=2))) is Reason.WRONG_SHAPE  # float32 was not agreed


def test_a_signal_that_would_unfold_to_more_than_is_agreed_is_not_read():
    box = mailbox(encoding="topk-1")
    payload = bytearray(data(Posteriors.of("b", 1, torch.full((4, 300), 1 / 300), None, Encoding.of("topk-1"))))
    payload[36:38] = b"\xff\xff"
    assert reason(box, bytes(payload)) is Reason.MALFORMED
