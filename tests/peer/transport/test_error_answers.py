"""Error answers of another member's server are held to the rules of answers."""

from __future__ import annotations

import grpc
import pytest
from test_server import Town

from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.client import ROUND


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path)
    yield made
    made.listener.stop(0)


def teach(town: Town) -> None:
    town.line("b").call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5)


def dishonest(town: Town, monkeypatch, initial=(), trailing=(), size=300) -> None:
    def answered(caller, requests, context, kind, answer):
        if initial:
            context.send_initial_metadata(initial)
        context.set_trailing_metadata(trailing)
        context.abort(grpc.StatusCode.UNAVAILABLE, "private record 4711" + "C" * size)

    monkeypatch.setattr(town.listener, "_answered", answered)


@pytest.mark.parametrize(
    ("initial", "trailing"),
    [
        ((("x-secret", "A"),), ()),
        ((), (("x-secret", "A"),)),
        ((), (("x-data-bin", b"\0\x1b"),)),
        ((), ((ROUND, "data"),)),
        ((), ((ROUND, "1" * 50),)),
        ((), ((ROUND, "1"), (ROUND, "2"))),
    ],
)
def test_metadata_of_an_error(town, monkeypatch, initial, trailing):
    dishonest(town, monkeypatch, initial, trailing)
    with pytest.raises(PeerRefusedError, match="unexpected metadata"):
        teach(town)


@pytest.mark.parametrize("trailing", [(), ((ROUND, "17"),)])
def test_an_error_without_more(town, monkeypatch, trailing):
    dishonest(town, monkeypatch, trailing=trailing)
    with pytest.raises(grpc.RpcError):
        teach(town)


def test_large_headers_of_an_answer_are_not_read(town, monkeypatch):
    dishonest(town, monkeypatch, size=5000)
    with pytest.raises(grpc.RpcError) as error:
        teach(town)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "CCC" not in error.value.details()
