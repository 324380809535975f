from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedh2l.errors import MessageError
from fedh2l.protocol.messages import Posteriors, decode, encode, encoded_size
from fedh2l.protocol.roster import Roster

ROSTER = Roster(("a", "b", "c"), seed=1)
LABELS = torch.tensor([0, 1, 2, 3, 0])


def signal(rows: int = 5, classes: int = 4, sender: str = "b", labels: torch.Tensor | None = LABELS) -> Posteriors:
    logits = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
    return Posteriors.of(sender, 7, torch.softmax(logits, -1), labels)


@pytest.mark.parametrize("labels", [LABELS, None])
def test_the_byte_form_gives_back_the_tensor_form(labels):
    message = signal(labels=labels)
    data = encode(message, ROSTER)
    assert len(data) == encoded_size("posteriors", "float32", (5, 4), flagged=labels is not None)
    assert len(data) == message.encoded_size
    back = decode(data, ROSTER)
    assert (back.sender, back.round) == ("b", 7)
    assert torch.equal(back.values, message.values)
    assert (back.correct is None) == (labels is None)
    if labels is not None:
        assert int(back.correct) == int(message.correct)
        assert not back.faults(labels).any()


def test_the_documented_size():
    assert encoded_size("posteriors", "float32", (32, 10)) == 1324


def test_a_float64_run_sends_what_its_receivers_decode():
    p = torch.softmax(torch.randn(5, 4, dtype=torch.float64), -1)
    message = Posteriors.of("a", 1, p, LABELS)
    assert torch.equal(decode(encode(message, ROSTER), ROSTER).values, message.values)


def change(data: bytes, position: int, new: bytes) -> bytes:
    return data[:position] + new + data[position + len(new) :]


@pytest.mark.parametrize(
    ("position", "new", "reason"),
    [
        (0, b"XXXX", "not a fedh2l message"),
        (4, b"\x02\x00", "schema"),
        (6, b"\x09", "kind"),
        (7, b"\x09", "encoding"),
        (8, b"\xff" * 16, "another federation"),
        (24, b"\x03\x00\x00\x00", "roster"),
        (32, b"\x06\x00\x00\x00", "rows"),
        (36, b"\x05\x00", "columns"),
        (38, b"\x02\x00", "flags"),
    ],
)
def test_a_malformed_message_is_refused(position, new, reason):
    with pytest.raises(MessageError, match=reason):
        decode(change(encode(signal(), ROSTER), position, new), ROSTER)


def test_another_roster_is_another_federation():
    for other in (Roster(("a", "b", "d"), 1), Roster(("a", "b", "c"), 2), Roster.agree(("a", "b", "c"), 1, {"x": 1})):
        with pytest.raises(MessageError, match="another federation"):
            decode(encode(signal(), ROSTER), other)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(MessageError):
        decode(data, ROSTER)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), st.integers(0, 200))
@settings(max_examples=500)
def test_mutated_messages_are_refused_or_sound(edits, length):
    data = bytearray(encode(signal(), ROSTER))
    for position, value in edits:
        data[position % len(data)] = value
    data = data[: max(0, len(data) - length)] if length < 20 else data
    try:
        message = decode(bytes(data), ROSTER)
    except MessageError:
        return
    if not message.faults(LABELS).any():
        assert torch.isfinite(message.values).all()
        assert (message.values >= 0).all()
        assert ((message.values.sum(-1) - 1).abs() <= 1e-4).all()


@pytest.mark.parametrize(
    ("value", "fault"),
    [(float("nan"), 0), (float("inf"), 0), (-0.1, 1), (0.9, 2)],
)
def test_unsound_values_are_flagged(value, fault):
    message = signal()
    message.values[1, 2] = value
    assert message.faults(LABELS)[fault], message.FAULTS[fault]


def test_a_forged_accuracy_is_flagged():
    honest = signal()
    forged = Posteriors(honest.sender, honest.round, honest.values, honest.correct + 1)
    assert honest.faults(LABELS).tolist() == [False] * 4
    assert forged.faults(LABELS).tolist() == [False, False, False, True]


def test_a_signal_of_another_shape_is_refused():
    with pytest.raises(MessageError, match="agreed"):
        signal().check_shape(5, 3)
