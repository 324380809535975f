"""A complete federation on one machine, with real processes, certificates and sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedh2l.data.domain import Samples
from fedh2l.engines.ledger import Ledger
from fedh2l.errors import RunError
from fedh2l.experiment.config import Config
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.toml import toml_text
from fedh2l.files import private_opener
from fedh2l.hardware import resolve_device
from fedh2l.models.saved import load_model
from fedh2l.peer.membership.augmentation import SharedViews
from fedh2l.peer.membership.bundle import Part, merge
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_sections import Agreement, Member, Timing
from fedh2l.peer.pki import certificates
from fedh2l.peer.pki.authority import CA_CERTIFICATE, REVOKED, Authority
from fedh2l.peer.settings import LOCAL
from fedh2l.plugins import is_path, trust
from fedh2l.protocol.messages import Posteriors, encoded_size
from fedh2l.protocol.sampling import node_secret
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.loop import torch_settings
from fedh2l.runs.result import Result
from fedh2l.runs.selection import ModelSelection
from fedh2l.training.metrics import count_correct

FEDERATION, HOST = "rehearsal", "127.0.0.1"
PEER, LOG = "peer.toml", "peer.log"
POLL = 0.05


class Rehearsal:
    """The peers of a configuration, each with a folder inside `folder`."""

    def __init__(
        self,
        config: Config,
        federation: Experiment,
        folder: Path,
        timing: Timing | None = None,
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        """Write all files of the peers. They run on this machine, or on the addresses in `hosts`."""
        self.config, self.federation, self.folder = config, federation, folder
        self.names = federation.roster.names
        self.hosts = {name: (hosts or {}).get(name, HOST) for name in self.names}
        ports = free_ports(2 * len(self.names))
        self.addresses = {name: f"{self.hosts[name]}:{port}" for name, port in zip(self.names, ports, strict=False)}
        others = ports[len(self.names) :]
        self.status = {name: f"{HOST}:{port}" for name, port in zip(self.names, others, strict=True)}
        """Status address of each peer."""
        founder = Authority.found(folder / "authority", FEDERATION)
        parts = []
        for node in federation.nodes:
            request, _ = certificates.request(folder / node.name / "keys", node.name, [self.hosts[node.name]])
            signed = founder.sign(certificates.read_request(request))
            certificates.write(folder / node.name / "keys" / certificates.NODE_CERTIFICATE, certificates.pem(signed))
            domain = node.domain
            parts.append(Part(node.name, domain.classes, domain.preprocessing, domain.public))
        self.bundle = merge(FEDERATION, parts)
        self.bundle.save(folder / "seedset.safetensors")
        run = config.run
        agreement = Agreement(
            federation=FEDERATION, seed=run.seed, rounds=run.rounds, batch_size=run.batch_size,
            ema_decay=run.ema_decay, seedset=self.bundle.digest,
        )  # fmt: skip
        pins = {entry["name"]: entry["pin"] for entry in founder.issued()}
        members = tuple(Member(name=n, address=self.addresses[n], pin=pins[n]) for n in self.names)
        seen = federation.nodes[0].domain.augmentation
        views = SharedViews.like(seen.public if seen else None)
        self.roster_file = RosterFile(agreement, config.method, timing or Timing(), members, views)
        (folder / "roster.toml").write_text(self.roster_file.to_toml(), encoding="utf-8")
        for name in self.names:
            self._write_peer(name)

    def _write_peer(self, name: str) -> None:
        own, config = self.folder / name, self.config
        certificates.write_private(own / "keys" / "secret", node_secret(config.run.seed, name).encode())
        node = next(settings for settings in config.nodes if settings.name == name)
        sections = config.sections()
        text = {
            "peer": {
                "listen": self.addresses[name], "status": self.status[name], "roster": "../roster.toml",
                "seedset": "../seedset.safetensors",
                "authority": f"../authority/{CA_CERTIFICATE}", "revoked": f"../authority/{REVOKED}",
                "out": "run", "model": node.model, "model_args": node.model_args, "weights": node.weights,
                "domain": node.domain or name, "snapshots": True,
            },
            "run": {key: value for key, value in sections["run"].items() if key in LOCAL},
            "data": sections["data"],
            "optimizer": sections["optimizer"],
        }  # fmt: skip
        (own / PEER).write_text(toml_text(text), encoding="utf-8")

    def start(self, name: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a peer as a process that appends its output to a log file. `before` precedes the command."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        allowed = [f"--allow={package}" for package in self.packages]
        with open(self.folder / name / LOG, "ab", opener=private_opener) as file:
            return subprocess.Popen(  # noqa: S603 - this program; `before` comes from the caller's code
                [*before, sys.executable, "-m", "fedh2l", "peer", str(self.folder / name / PEER), *allowed],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
            )  # fmt: skip

    @property
    def packages(self) -> list[str]:
        """Packages that the peers may import: those allowed here, and that of the method."""
        own = self.config.method.title
        return [*trust().packages, *([own.partition(":")[0]] if is_path(own) else [])]

    def run(self, stop: Callable[[], bool] = lambda: False) -> Result:
        """Run all peers to the end. Return the same result as `fedh2l run`."""
        began = time.monotonic()
        with ExitStack() as stack:
            processes = {name: self.start(name) for name in self.names}
            stack.callback(_end, list(processes.values()))
            running = True
            while running:
                ended = {name: process.poll() for name, process in processes.items()}
                failed = [name for name, code in ended.items() if code not in (None, 0)]
                if failed:
                    output = (self.folder / failed[0] / LOG).read_text(errors="replace").strip()
                    raise RunError(f"peer '{failed[0]}' failed:", *output[-2000:].splitlines())
                running = None in ended.values()
                if running and stop():
                    raise RunError("the rehearsal was stopped")
                time.sleep(POLL if running else 0)
        return self.result(time.monotonic() - began)

    def result(self, seconds: float) -> Result:
        """Return the result of the saved models.

        Models are selected on the validation data of all nodes, and tested on the test data of each node.
        """
        config, nodes = self.config, self.federation.nodes
        device, dtype = resolve_device(config.run.device), config.run.torch_dtype
        validation = Samples.concatenate([node.domain.validation for node in nodes]).to(device, dtype)
        tests = [node.domain.test.to(device, dtype) for node in nodes]
        selection = ModelSelection(self.names)
        results = {name: self._directory(name).result() or {} for name in self.names}
        rounds = [
            r for r in range(1, config.run.rounds + 1) if r % config.run.eval_every == 0 or r == config.run.rounds
        ]
        with torch_settings(config.run):
            for taken in rounds:
                counts = {n: self._right(n, f"round-{taken}", [validation])[0] for n in self.names}
                selection.take(counts, taken)
            best = dict(zip(self.names, selection.best_rounds(), strict=True))
            last = [self._right(n, "last", tests) for n in self.names]
            chosen = (
                [self._right(n, f"round-{best[n]}", tests) for n in self.names]
                if config.run.selection == "best"
                else last
            )
        conflicts = [entry["peer"]["conflicts"] for entry in results.values()]
        return Result.from_counts(
            config.method.title,
            config.run,
            {node.name: node.model_name for node in nodes},
            chosen,
            last,
            [len(test) for test in tests],
            list(best.values()) if config.run.selection == "best" else [config.run.rounds] * len(self.names),
            [100 * right / len(validation) for right in selection.validated(config.run.selection)],
            bytes=self._ledger(results).summary(config.run.rounds),
            conflict_rate=sum(c for c, _ in conflicts) / max(sum(n for _, n in conflicts), 1),
            seconds=round(seconds, 3),
        )

    def _directory(self, name: str) -> RunDirectory:
        return RunDirectory.open(self.folder / name / "run")

    def _right(self, name: str, which: str, sets: Sequence[Samples]) -> list[int]:
        """Return how many samples of each set a peer's model classifies correctly."""
        path = self._directory(name).model_path(name, which)
        if not path.exists():
            raise RunError(f"peer '{name}' left no model of {which}; it skipped that round")
        own = [node.model.partition(":")[0] for node in self.config.nodes if is_path(node.model)]
        model = load_model(path, allow=own).to(sets[0].inputs.device)
        return [count_correct(model, samples) for samples in sets]

    def _ledger(self, results: Mapping[str, Mapping[str, Any]]) -> Ledger:
        """Reconstruct the ledger from the bytes that the peers report."""
        ledger, method = Ledger(), self.config.method
        roster, classes = self.roster_file.roster(self.bundle.classes), len(self.bundle.classes)
        for name in self.names:
            start, end = self.bundle.ranges[name]
            rows = min(method.public_batch_rows(self.config.run.batch_size), end - start)
            payload = Posteriors.payload_size_of((rows, classes), self.bundle.labelled, method.written)
            size = encoded_size("posteriors", str(method.written), (rows, classes), self.bundle.labelled)
            for edge, sent in results[name]["bytes"]["edges"].items():
                if sent:
                    ledger.edges[edge] += sent
                    ledger.payload += sent // size * payload
            sends = [r for r in range(1, self.config.run.rounds + 1) if method.exchanges(r)]
            heard = [r for r in sends if any(name in t for t in method.teachers(roster, r).values())]
            ledger.multicast += size * len(heard)
        return ledger


def free_ports(count: int) -> list[int]:
    """Return ports that are currently free."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
