"""Posteriors in fewer bits: what is read is a distribution, the same everywhere, and as long as it was said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedh2l.errors import ConfigError, MessageError
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.protocol.messages import Encoding, Posteriors, decode, encode, encoded_size
from fedh2l.protocol.messages.base import HEADER
from fedh2l.protocol.roster import Roster
from fedh2l.runs.trainer import Trainer

NAMES = ("float32", "float16", "int8", "int4", "topk-1", "topk-3", "topk-99")
ROSTER = Roster(("a", "b", "c"), seed=1)


def posteriors(rows: int = 6, classes: int = 10, sharp: float = 3.0) -> torch.Tensor:
    return torch.softmax(sharp * torch.randn(rows, classes, generator=torch.Generator().manual_seed(rows)), -1)


@pytest.mark.parametrize("classes", [2, 9, 10, 300])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_the_sender_thinks_it_sent(name, classes):
    labels = torch.arange(6) % classes
    message = Posteriors.of("b", 3, posteriors(classes=classes), labels, Encoding.of(name))
    data = encode(message, ROSTER)
    assert len(data) == message.encoded_size == encoded_size("posteriors", name, (6, classes))
    back = decode(data, ROSTER)
    assert torch.equal(back.values, message.values)
    assert str(back.encoding) == name
    assert int(back.correct) == int(message.correct)
    assert not back.faults(labels).any()
    assert back.values.dtype == torch.float32
    torch.testing.assert_close(back.values.sum(-1), torch.ones(6))


@pytest.mark.parametrize(
    ("name", "row"),
    [("float32", 40), ("float16", 20), ("int8", 10), ("int4", 5), ("topk-1", 3), ("topk-3", 9), ("topk-99", 30)],
)
def test_the_documented_sizes(name, row):
    assert encoded_size("posteriors", name, (32, 10)) == HEADER.size + 4 + 32 * row
    assert encoded_size("posteriors", name, (32, 10), flagged=False) == HEADER.size + 32 * row
    assert encoded_size("posteriors", "topk-2", (4, 300)) == HEADER.size + 4 + 4 * 2 * 4


@pytest.mark.parametrize(("name", "far"), [("float16", 1e-3), ("int8", 0.02), ("int4", 0.15), ("topk-10", 1e-3)])
def test_little_is_lost(name, far):
    p = posteriors(200, 10, 1.0)
    message = Posteriors.of("a", 1, p, None, Encoding.of(name))
    assert (message.values - p).abs().max() < far


def test_logarithms_are_rounded_to_the_nearest_step():
    p = posteriors(50, 10, 2.0)
    read = Posteriors.of("a", 1, p, None, Encoding.of("int8")).values
    below = (p.log().amax(-1, keepdim=True) - p.log()).clamp(max=255 / 16)
    assert ((read.log().amax(-1, keepdim=True) - read.log()) - below).abs().max() <= 1 / 32 + 1e-4


def test_the_likeliest_classes_stay_and_others_share_the_rest():
    p = torch.tensor([[0.5, 0.05, 0.25, 0.15, 0.05]])
    read = Posteriors.of("a", 1, p, None, Encoding.of("topk-2")).values
    torch.testing.assert_close(read, torch.tensor([[0.5, 0.25 / 3, 0.25, 0.25 / 3, 0.25 / 3]]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_certain_and_undecided_rows(name):
    p = torch.cat([torch.eye(4), torch.full((1, 4), 0.25), torch.tensor([[1 - 3e-30, 1e-30, 1e-30, 1e-30]])])
    message = Posteriors.of("a", 1, p, torch.arange(6) % 4, Encoding.of(name))
    assert not message.faults(torch.arange(6) % 4).any()
    assert message.values.argmax(-1).tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_many_nodes_are_written_as_each_of_them(name):
    p = torch.stack([posteriors(5, 7, sharp) for sharp in (0.5, 2.0, 6.0)])
    labels = torch.arange(5).expand(3, 5)
    stacked = Posteriors.of("", 1, p, labels, Encoding.of(name))
    for place in range(3):
        alone = Posteriors.of("", 1, p[place], labels[place], Encoding.of(name))
        assert torch.equal(stacked.values[place], alone.values)
    assert stacked.encoded_size == alone.encoded_size


@pytest.mark.parametrize("name", NAMES)
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8), cut=st.integers(0, 40))
@settings(max_examples=150)
def test_mutated_messages_are_refused_or_distributions(name, edits, cut):
    labels = torch.arange(6)
    data = bytearray(encode(Posteriors.of("b", 3, posteriors(), labels, Encoding.of(name)), ROSTER))
    for position, value in edits:
        data[position % len(data)] = value
    data = data[: len(data) - cut] if cut < 5 else data
    try:
        message = decode(bytes(data), ROSTER)
    except MessageError:
        return
    if isinstance(message, Posteriors) and message.shape == (6, 10) and not message.faults(labels).any():
        assert torch.isfinite(message.values).all()
        assert (message.values >= 0).all()
        assert ((message.values.sum(-1) - 1).abs() <= 1e-4).all()


def test_other_kinds_have_one_encoding():
    with pytest.raises(MessageError, match="there is no message 'parameters' in encoding 'int8'"):
        encoded_size("parameters", "int8", (10,))
    with pytest.raises(MessageError, match="there is no encoding 'int2'"):
        encoded_size("posteriors", "int2", (10, 3))


def test_an_encoding_that_there_is_not_is_refused(federation):
    with pytest.raises(ConfigError, match=r"method\.encoding"):
        federation("method.encoding=topk-0")


def test_bytes_are_counted_as_they_are_sent(federation):
    results = {name: Trainer(federation(f"method.encoding={name}")).run() for name in ("float32", "int8", "topk-1")}
    rows = 8
    for name, row in (("float32", 40), ("int8", 10), ("topk-1", 3)):
        assert results[name].bytes["total"] == 20 * 12 * (HEADER.size + 4 + rows * row)
        assert results[name].bytes["payload"] == 20 * 12 * (4 + rows * row)
    assert results["int8"].matrix != results["float32"].matrix


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_distribution_is_refused_by_its_receivers(name):
    p = posteriors()
    p[2, 3] = float("nan")
    message = Posteriors.of("b", 3, p, None, Encoding.of(name))
    assert message.faults()[0]
    assert decode(encode(message, ROSTER), ROSTER).faults()[0]


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("float16", [torch.tensor([[-0.5, -0.25, -0.25]])]),
        ("float16", [torch.zeros(1, 3)]),
        ("int8", [torch.tensor([[1, 2, 3]])]),
        ("int4", [torch.tensor([[0x11, 0x01]])]),
        ("topk-2", [torch.tensor([[0, 0]]), torch.tensor([[0.5, 0.25]])]),
        ("topk-2", [torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.25]])]),
        ("topk-2", [torch.tensor([[0, 1]]), torch.tensor([[0.75, -0.25]])]),
        ("topk-3", [torch.tensor([[0, 1, 2]]), torch.tensor([[-0.5, -0.25, -0.25]])]),
    ],
)
def test_what_nobody_would_have_written_is_no_number(name, arrays):
    assert Encoding.of(name).read(arrays, 3).isnan().all()


def test_a_few_bytes_are_not_unfolded_to_many_numbers():
    p = torch.full((200, 300), 1 / 300)
    data = bytearray(encode(Posteriors.of("b", 3, p, None, Encoding.of("topk-1")), ROSTER))
    data[36:38] = b"\xff\xff"
    assert decode(bytes(data), ROSTER).shape == (200, 65535)
    with pytest.raises(MessageError, match="200 rows of 65535 columns, where there are at most 320 numbers"):
        decode(bytes(data), ROSTER, most=320)


def test_a_method_that_writes_otherwise_than_it_says_is_stopped(federation):
    class Careless(FedH2L):
        name = "careless"

        def emit(self, node, round):
            message = super().emit(node, round)
            return Posteriors.of(message.sender, round, message.values, None)

    careless = replace(federation(), method=Careless(encoding="int8"))
    with pytest.raises(MessageError, match="sends posteriors in float32, and int8 in `written`"):
        Trainer(careless).run()
