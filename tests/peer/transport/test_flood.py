"""A member that calls as fast as it can slows nobody, and neither does one whose certificate is revoked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from test_server import Town as Listening

from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.transport import budget
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.budget import CallBudgets
from http2 import ACK, END_STREAM, HEADERS, PING, SETTINGS, call, connect, frame, tls

CALLS = {
    "malformed": ("/fedh2l.v1.Peer/Teach", pb.Signal(posteriors=b"x" * 1000).SerializeToString()),
    "valid": ("/fedh2l.v1.Peer/Leave", pb.Goodbye(round=1).SerializeToString()),
}
CONNECTIONS, AT_ONCE = 1, 2


def flood(folder: Path, address: str, path: str, message: bytes, end: float) -> int:
    """Call until `end`, again and again over new connections; returns how many calls were answered."""
    context, answered = tls(folder / "M40" / "keys", folder / "authority" / "ca.pem"), 0
    while time.time() < end:
        with contextlib.suppress(OSError), connect(address, context) as made:
            made.settimeout(5)
            stream, out, data = 1, 0, b""
            while time.time() < end:
                while out < AT_ONCE:
                    made.sendall(call(stream, path, message))
                    stream, out = stream + 2, out + 1
                got = made.recv(65536)
                if not got:
                    break
                data += got
                while len(data) >= 9 and len(data) >= (size := 9 + int.from_bytes(data[:3], "big")):
                    kind, flags, payload, data = data[3], data[4], data[9:size], data[size:]
                    if kind in (SETTINGS, PING) and not flags & ACK:
                        made.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                    if kind == HEADERS and flags & END_STREAM:
                        answered, out = answered + 1, out - 1
    return answered


def test_a_budget_of_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])
    budgets = CallBudgets()
    for _ in range(int(60 * budget.RATE / 10)):  # a minute of the most that is allowed
        now[0] += 10 / budget.RATE
        assert not budgets.spend(b"honest", 10.0)
    assert not any(budgets.spend(b"flood", 1.0) for _ in range(int(budget.BURST)))
    assert budgets.spend(b"flood", 1.0)
    assert not budgets.spend(b"honest", 1.0)
    now[0] += budget.BANNED - 1
    assert budgets.spend(b"flood", 1.0)
    now[0] += 2
    assert not budgets.spend(b"flood", 1.0)
    assert sum(not budgets.spend(b"refused", budget.REFUSED_CALL) for _ in range(1000)) <= 250


@pytest.mark.parametrize("which", ["valid", "malformed", "not a member"])
def test_who_calls_too_often_is_not_answered_for_a_while(tmp_path, monkeypatch, which):
    monkeypatch.setattr(budget, "RATE", 10.0)
    monkeypatch.setattr(budget, "BURST", 400.0)
    monkeypatch.setattr(budget, "BANNED", 2.0)
    made = Listening(tmp_path)
    if which == "not a member":
        made.founder.revoke("b")
    message = b"\x7a\x01x" if which == "malformed" else pb.Signal(posteriors=b"xyz").SerializeToString()

    def outcome() -> str:
        try:
            made.call("b", "Teach", message)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    try:
        usual = {"valid": "OK", "malformed": "INVALID_ARGUMENT", "not a member": "PERMISSION_DENIED"}[which]
        found = [outcome() for _ in range(500)]
        assert found[0] == usual
        assert found[-1] == "UNAVAILABLE"  # and each call is a new connection
        assert found.count(usual) <= {"valid": 450, "malformed": 25, "not a member": 4}[which]
        assert made.line("c").call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
        if which != "not a member":  # its next call would be answered after 20 more seconds at this rate
            time.sleep(4.5)
            assert outcome() == usual
    finally:
        made.listener.stop(0)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["malformed", "valid", "revoked"])
def test_a_member_that_floods_slows_nobody(town, which):
    made = town("run.rounds=1000000", "run.eval_every=1000", "run.checkpoint_every=0", nodes=3, deadline=1.0)
    made.start("M0", "M20")
    made.until(lambda: "is there" in made.log("M0"))
    made.until(lambda: made.state("M0").round > 50)
    if which == "revoked":
        Authority(made.folder / "authority").revoke("M40")

    def rate(seconds: float = 8.0) -> float:
        before, began = made.state("M0").round, time.monotonic()
        time.sleep(seconds)
        return (made.state("M0").round - before) / (time.monotonic() - began)

    def start(arguments: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)

    # another process that is as busy as the flood, which takes part of the processor, too
    busy = start(["-c", "import time; end = time.time() + 10\nwhile time.time() < end: pass"])
    time.sleep(1)
    control = rate()
    busy.wait()
    path, message = CALLS["malformed" if which == "revoked" else which]
    flooding = start([__file__, str(made.folder), made.rehearsed.addresses["M0"], path, message.hex()])
    time.sleep(6)  # its first calls are answered
    flooded = rate()
    answered = flooding.communicate()[0]
    assert flooding.returncode == 0
    assert flooded > control / 2, f"{flooded} and {control} rounds per second, {answered} answers"


if __name__ == "__main__":
    folder, address, path, message = sys.argv[1:]
    given = Path(folder), address, path, bytes.fromhex(message), time.time() + 16
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        print(sum(pool.map(lambda _: flood(*given), range(CONNECTIONS))))
