"""Real peers as processes, which tests start, stop, kill and cut off from each other."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from relay import Link, Relay, reroute

from conftest import MLPS, TINY
from fedh2l.experiment.config import load_config
from fedh2l.models.saved import load_model
from fedh2l.peer.audit import audit, read_heads
from fedh2l.peer.membership.roster_sections import Timing
from fedh2l.peer.monitoring.status import ask
from fedh2l.peer.pki.certificates import read_certificate
from fedh2l.peer.rehearsal import PEER, Rehearsal
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.runs.checkpoints import unpack
from fedh2l.runs.directory import RunDirectory
from fedh2l.training.metrics import count_correct

NAMES = ("M0", "M20", "M40", "M60")
KINDS = {"posteriors", "greeting", "head", "goodbye"}


def rehearsal(folder: Path, *changes: str, timing: Timing | None = None, hosts=None, nodes: int = 4) -> Rehearsal:
    models = [change for change in MLPS if int(change.split(".")[1]) < nodes]
    config, _ = load_config(None, [*TINY, *models, *changes], None, {"device": "cpu", "engine": "local"})
    folder.mkdir()
    return Rehearsal(config, config.experiment(), folder, timing, hosts)


class Town:
    """A rehearsal whose peers are started and stopped one by one."""

    def __init__(self, rehearsed: Rehearsal, within: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        self._within = within
        self.rehearsed, self.folder = rehearsed, rehearsed.folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.relay: Relay | None = None

    def start(self, *names: str, **environment: str) -> None:
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            for name in names:
                self.processes[name] = self.rehearsed.start(name, self._within(name))
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        self.processes[name].send_signal(number)
        return self.processes[name].wait(60)

    def dead(self, name: str) -> bool:
        return self.processes[name].poll() is not None

    def directory(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / name / "run")

    def log(self, name: str) -> str:
        return (self.folder / name / "peer.log").read_text()

    def state(self, name: str) -> pb.State:
        return ask(self.rehearsed.status[name], 10)

    def round(self, name: str) -> int:
        file = self.directory(name).path / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["round"] if lines else 0

    def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, {name: self.log(name)[-1500:] for name in self.processes}
            time.sleep(0.05)

    def edit(self, name: str, *changes: tuple[str, str]) -> None:
        """Changes a peer's own settings."""
        path = self.folder / name / PEER
        text = path.read_text()
        for old, new in changes:
            assert old in text, f"{old!r} is not in {text}"
            text = text.replace(old, new)
        path.write_text(text)

    def link(self) -> dict[tuple[str, str], Link]:
        """From now on every peer reaches every other through a link of its own; by who dials and who is dialled."""
        self.relay = Relay()
        return reroute(self.rehearsed, self.relay)

    def finish(self, seconds: float = 120) -> dict[str, dict]:
        """All peers to their end, with nothing broken on the way."""
        self.until(lambda: all(map(self.dead, self.processes)), seconds)
        for name, process in self.processes.items():
            assert process.returncode == 0, self.log(name)
            assert "Traceback" not in self.log(name), self.log(name)
            self.check_record(name)
            for path in self.directory(name).checkpoints.paths():
                unpack(path.read_bytes())  # raises if it is damaged
        return {name: self.directory(name).result() for name in self.processes}

    def check_record(self, name: str) -> None:
        """What a peer sent is on record, whole, as the others can witness."""
        key = read_certificate(self.folder / name / "keys" / "node.pem").public_key()
        kept = [self.directory(other).path / "witness" / f"{name}.jsonl" for other in self.processes if other != name]
        heads = [head for path in kept if path.exists() for head in read_heads(path)]
        report = audit(self.directory(name).path / "audit.jsonl", heads, key)
        assert report.problems == []
        assert heads, f"nobody was told of the record of '{name}'"
        assert report.witnessed > 0
        assert set(report.messages) <= KINDS

    def accuracy(self, names: Iterable[str] = NAMES, which: str = "last") -> float:
        """Of the models that these peers end with, on everybody's test data."""
        nodes = {node.name: node for node in self.rehearsed.federation.nodes}
        shares = []
        with torch.no_grad():
            for name in names:
                model = load_model(self.directory(name).model_path(name, which), allow=["faulty"])
                for node in nodes.values():
                    test = node.domain.test.to(torch.device("cpu"), torch.float32)
                    shares.append(100 * count_correct(model, test) / len(test))
        return statistics.fmean(shares)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        if self.relay is not None:
            self.relay.close()
