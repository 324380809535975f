"""Other users of the machine cannot stop a training through the monitoring ports, and a full disk does not end it."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request

import pytest

from fedh2l.peer.monitoring import status
from fedh2l.peer.rehearsal import free_ports
from town import Town, rehearsal

FILES = 256
"""Open files that the peers in these tests may have."""


@pytest.fixture
def pair(tmp_path):
    changes = ("run.rounds=1000000", "run.checkpoint_every=20", "data.angles=[0.0,20.0]")
    made = Town(rehearsal(tmp_path / "town", *changes, nodes=2), lambda _: ["prlimit", f"--nofile={FILES}:{FILES}"])
    yield made
    made.close()


def newest(pair: Town) -> int:
    paths = pair.directory("M0").checkpoints.paths()
    return int(paths[-1].stem.removeprefix("round-")) if paths else 0


def connected(address: str, count: int) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    made = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            made.append(socket.create_connection((host, int(port)), 1))
    return made


def is_closed(made: socket.socket) -> bool:
    made.setblocking(False)
    try:
        while made.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["status", "metrics"])
def test_idle_connections_use_up_no_files(pair, kind):
    exposed = f"127.0.0.1:{free_ports(1)[0]}"
    pair.edit("M0", ("[peer]", f'[peer]\nmetrics = "{exposed}"'))
    pair.start("M0", "M20")
    pair.until(lambda: newest(pair) >= 40)
    held = connected(pair.rehearsed.status["M0"] if kind == "status" else exposed, 2 * FILES)
    before = newest(pair)
    pair.until(lambda: pair.dead("M0") or newest(pair) >= before + 100)
    assert not pair.dead("M0"), pair.log("M0")
    assert "open files" not in pair.log("M0")
    pair.until(lambda: all(map(is_closed, held)), status.IDLE + 10)
    if kind == "status":
        assert pair.state("M0").round > before
    else:
        assert b"fedh2l_round" in urllib.request.urlopen(f"http://{exposed}/metrics", timeout=5).read()
    for each in held:
        each.close()


@pytest.mark.slow
def test_a_request_gets_through_many_idle_connections(pair):
    exposed = f"127.0.0.1:{free_ports(1)[0]}"
    pair.edit("M0", ("[peer]", f'[peer]\nmetrics = "{exposed}"'))
    pair.start("M0", "M20")
    pair.until(lambda: newest(pair) >= 20)
    held = connected(exposed, status.CONNECTIONS)
    assert b"fedh2l_round" in urllib.request.urlopen(f"http://{exposed}/metrics", timeout=5).read()
    for each in held:
        each.close()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_tried_again(pair):
    pair.start("M0", "M20")
    pair.until(lambda: newest(pair) >= 40)
    folder = pair.directory("M0").checkpoints.folder
    folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")
    pair.until(lambda: "cannot write a checkpoint" in pair.log("M0"))
    time.sleep(0.5)
    assert not pair.dead("M0"), pair.log("M0")
    folder.unlink()
    pair.until(lambda: newest(pair) > 40)
    folder.rename(folder.with_name("aside2"))
    folder.write_text("no folder")
    pair.processes["M0"].terminate()
    assert pair.processes["M0"].wait(60) == 1  # the last one: a service manager may start it again
    assert "Traceback" not in pair.log("M0")
