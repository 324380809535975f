"""Peers that are killed and started again, as processes: the others go on, and nobody can send them away."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import MutualTLS
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.server import Listener, Servicer
from town import NAMES, Town

STILL = 2.0
"""Seconds that no other peer may stand still."""


class Watch:
    """Notes when each peer has trained five more rounds."""

    def __init__(self, town: Town) -> None:
        self._town, self._stop = town, threading.Event()
        self.seen: dict[str, list[tuple[float, int]]] = {name: [] for name in NAMES}
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            for name, seen in self.seen.items():
                round = self._town.round(name)
                if not seen or round != seen[-1][1]:
                    seen.append((time.monotonic(), round))

    def longest(self, name: str, start: float, end: float) -> float:
        """The longest time in which a peer did not go on."""
        times = [start, *(when for when, _ in self.seen[name] if start < when < end), end]
        return max(after - before for before, after in pairwise(times))

    def rate(self, name: str, start: float, end: float) -> float:
        """Rounds per second."""
        rounds = [round for when, round in self.seen[name] if start <= when <= end]
        return (max(rounds) - rounds[0]) / (end - start)


@pytest.mark.slow
def test_a_rolling_restart_holds_up_nobody(town):
    made = town("run.rounds=1000000", "run.eval_every=5", "run.checkpoint_every=50")
    made.start(*NAMES)
    made.until(lambda: all(made.round(name) >= 100 for name in NAMES))
    with Watch(made) as watch:
        spans = []
        for name, how in zip(NAMES, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL), strict=True):
            began = time.monotonic()
            made.kill(name, how)
            made.start(name)
            made.until(lambda name=name: "goes on after round" in made.log(name), 60)
            back = made.round(name)
            made.until(lambda name=name, back=back: made.round(name) > back + 50, 60)
            spans.append((name, began, time.monotonic()))
        control = time.monotonic()
        for _, began, end in spans:
            unrelated = subprocess.Popen([sys.executable, "-c", "import torch"])
            time.sleep(end - began)
            assert unrelated.wait() == 0
        done = time.monotonic()
    for name, began, end in spans:
        for other in set(NAMES) - {name}:
            assert watch.longest(other, began, end) <= STILL, (other, made.log(other)[-2000:])
    first, last = spans[0][1], spans[-1][2]
    rates = {name: (watch.rate(name, first, last), watch.rate(name, control, done)) for name in NAMES}
    assert all(restarting > undisturbed / 2 for restarting, undisturbed in rates.values()), rates
    assert {name: made.kill(name, signal.SIGTERM) for name in NAMES} == dict.fromkeys(NAMES, 0)


class Liar(Servicer):
    """Claims to be in a round that nobody has reached."""

    def __init__(self, agreed: RosterDigests) -> None:
        self.agreed, self.heard = agreed, 0

    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        return self.agreed.hello("M20", 99_999)

    def taught(self, caller: str, posteriors: bytes) -> None:
        self.heard += 1

    def present(self) -> int:
        return 99_999

    def told(self, caller: str, head: pb.Head) -> None: ...
    def left(self, caller: str, goodbye: pb.Goodbye) -> None: ...
    def turned_away(self, caller: str, reason: str, why: str) -> None: ...


@pytest.mark.slow
def test_one_member_alone_cannot_end_the_training_of_another(town):
    """With two members there is no second opinion. A claim moves a peer by the time that it has lost, and no more."""
    made = town("data.angles=[0, 20]", "run.rounds=100000", "run.eval_every=50", nodes=2, quorum=0, deadline=2.0)
    config = load_peer(made.folder / "M20" / PEER)
    circle = config.auth()
    assert isinstance(circle, MutualTLS)
    desk = Liar(RosterDigests.of([config.history.newest.roster_file], config.history.newest.bundle.classes))
    listener = Listener(circle, desk, config.settings.listen, 4096, ("M0", "M20"))
    listener.start()
    try:
        made.start("M0")
        made.until(lambda: desk.heard > 50)
        early = made.state("M0")
        made.until(lambda: desk.heard > 400)
        state = made.state("M0")
    finally:
        listener.stop(0)
    assert state.round < 50_000
    assert early.skipped < 5_000  # it waited for a deadline, and could have trained as many rounds meanwhile
    assert state.skipped - early.skipped <= 0.1 * (state.round - early.round)
    assert made.kill("M0", signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_one_of_two_members_is_restarted(town, how):
    """The other waits for it, since it has nobody else. Both go on as soon as it is back."""
    made = town("data.angles=[0, 20]", "run.rounds=100000", "run.eval_every=5", nodes=2, deadline=5.0)
    for name in ("M0", "M20"):
        made.start(name)
    for _ in range(3):
        made.until(lambda: made.round("M20") > 20 and made.round("M0") > 20)
        made.kill("M20", how)
        reached = made.round("M0")
        made.start("M20")
        made.until(lambda reached=reached: min(map(made.round, ("M0", "M20"))) > reached + 30, 60)
    assert {name: made.kill(name, signal.SIGTERM) for name in ("M0", "M20")} == {"M0": 0, "M20": 0}
