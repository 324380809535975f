"""What reads the files of `odd_world.py`: command lines and functions."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509

from fedh2l.bench.image_suites import image_suite
from fedh2l.bench.output import Report
from fedh2l.bench.suite import Row, Suite, TableSpec
from fedh2l.bench.tables import tables_of
from fedh2l.cli import main
from fedh2l.cli.console import err
from fedh2l.data.datasets.mnist import idx_digits
from fedh2l.data.datasets.pacs import PACS
from fedh2l.data.datasets.table import Table
from fedh2l.models.pretrained import start_from
from fedh2l.models.small import mlp
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.pki.certificates import About, read_certificate, read_key
from fedh2l.peer.pki.checks import Revocations
from fedh2l.peer.settings import load_peer
from odd_world import COMMON, NAMES, image_folder, resume_in_python


class Format(NamedTuple):
    """A file of the world, how it is written, and what reads it: a command line, or a function of the world."""

    file: str
    kind: str
    read: str | Callable[[Path], Any]


def run(line: str, world: Path) -> None:
    """Run the command line in this process; an error of the project ends it with code 1 or 2, any other is raised."""
    for written in ("r1", "r2"):  # rosters are not overwritten
        (world / written).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(err, "_width", 400)  # no text is split over lines
        patch.setattr(sys, "argv", ["fedh2l", *(word.replace("WORLD", str(world)) for word in line.split())])
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code in (None, 0, 1, 2)


def pacs(world: Path) -> None:
    PACS(root=str(world / "pacs"), protocol="paper", lists=str(world / "splits"), size=8).domains(0)


def cached(world: Path) -> None:
    """A dataset finds decoded images by the key of their content, and `cache list` shows them."""
    key = (world / "key").read_text()
    for suffix in (".npy", ".json"):
        shutil.copy(world / f"entry{suffix}", world / "cache" / f"{key}{suffix}")
    image_folder(world)
    shutil.copy(world / "entry.json", world / "cache" / f"{key}.json")
    run("cache list", world)


ROW = Row.of("FedH2L", "fedh2l")
SUITE = Suite("own", "", [TableSpec("own", [ROW])], capabilities=True, frontier=True)


def tables(world: Path) -> None:
    found = tables_of(SUITE, world / "bench", 1, COMMON, None)
    report = Report.of(SUITE, found, "")
    report.write(world)


def models(world: Path) -> None:
    image_suite("office-caltech10", str(world / "nodes.toml"))


def peer(world: Path) -> None:
    load_peer(world / "town" / "north" / "peer.toml")


def weights(name: str) -> Callable[[Path], Any]:
    return lambda world: start_from(mlp(4, (3,)), str(world / name), "", "node 'a'")


def digits(world: Path) -> None:
    idx_digits(str(world / "mnist"))


def parquet_table(world: Path) -> None:
    Table(files={"west": "west.parquet"}, root=str(world), label="ill", classes=["no", "yes"], numeric=["age"]).domains(
        0
    )


def fields(world: Path) -> None:
    """A request may have odd fields, and be signed all the same."""
    with contextlib.suppress(ValueError):
        request = x509.load_pem_x509_csr((world / "town/north/keys/node.csr").read_bytes())
        About.of(request)


def revocations(world: Path) -> None:
    found = Revocations(read_certificate(world / "town/authority/ca.pem"), world / "town/authority/revoked.pem")
    assert len({read_certificate(world / f"town/{name}/keys/node.pem") in found for name in NAMES})


def restart(world: Path) -> None:
    """A peer takes up its audit log."""
    copy = shutil.copy(world / "audit.jsonl", world / "copy.jsonl")
    AuditLog(Path(copy), "north", "rehearsal", read_key(world / "town/north/keys/node.key")).close()


def resume(world: Path) -> None:
    shutil.rmtree(world / "again", ignore_errors=True)
    shutil.copytree(world / "half", world / "again")
    run("run --resume WORLD/again", world)


SEEDSET, AUTHORITY, KEYS = (
    "--seedset WORLD/town/seedset.safetensors",
    "--dir WORLD/town/authority",
    "WORLD/town/north/keys",
)
SHARED = "roster init --rounds 3 --seedset WORLD/public.safetensors --out WORLD/r1" + "".join(
    f" WORLD/town/{name}/keys/node.pem@127.0.0.1:{port} --share WORLD/{name}.reveal"
    for port, name in enumerate(NAMES, 1)
)
PREDICT = "predict WORLD/imagerun WORLD/images/day/circle/pic_000.png --node day"
VIEWED = (
    "roster init --rounds 3 --seed 1 --kind photographs --seedset WORLD/images.safetensors --out WORLD/r1"
    + "".join(f" WORLD/town/{name}/keys/node.pem@127.0.0.1:{port}" for port, name in enumerate(NAMES, 1))
)
PUBLIC = "WORLD/public.safetensors"
KEY = "--key WORLD/town/north/keys/node.key --out WORLD/r2"
GIVE = "seedset part --name north --yes --out WORLD/p"
AGE, SHAPES = "--columns age --label ill", "--classes circle,line --image L:8x8"
AMEND = f"roster amend --from-round 2 WORLD/town/roster.toml --out WORLD/r2 {SEEDSET}"
AUDIT = "audit WORLD/audit.jsonl --witness WORLD/witness.jsonl"
FORMATS = {
    "seed set": Format("town/seedset.safetensors", "tensors", "seedset verify WORLD/town/seedset.safetensors"),
    "agreed seed set": Format("town/seedset.safetensors", "tensors", f"roster check WORLD/town/roster.toml {SEEDSET}"),
    "part": Format("north.part", "tensors", "seedset merge WORLD/north.part WORLD/south.part --federation x"),
    "seed set of images": Format("images.safetensors", "tensors", VIEWED),
    "share": Format("north.share", "bytes", f"seedset reveal {PUBLIC} --share WORLD/north.share {KEY}"),
    "revealed share": Format("north.reveal", "toml", SHARED),
    "roster with shares": Format("shared.toml", "toml", f"roster check WORLD/shared.toml --seedset {PUBLIC}"),
    "roster": Format("town/roster.toml", "toml", f"roster check WORLD/town/roster.toml {SEEDSET}"),
    "roster, amended": Format("town/roster.toml", "toml", AMEND),
    "peer config": Format("town/north/peer.toml", "toml", peer),
    "run config": Format("config.toml", "toml", "check WORLD/config.toml"),
    "config of a run": Format("run/config.toml", "toml", "evaluate WORLD/run"),
    "config, resumed in Python": Format("own/config.toml", "bytes", resume_in_python),
    "model": Format("run/models/north-best.safetensors", "tensors", "predict WORLD/run WORLD/x.npy --node north"),
    "model of images": Format("imagerun/models/day-best.safetensors", "tensors", PREDICT),
    "evaluated model of images": Format("imagerun/models/day-best.safetensors", "tensors", "evaluate WORLD/imagerun"),
    "image to predict": Format("images/day/circle/pic_000.png", "bytes", PREDICT),
    "evaluated model": Format("run/models/north-best.safetensors", "tensors", "evaluate WORLD/run --node north"),
    "input": Format("x.npy", "bytes", "predict WORLD/run WORLD/x.npy --node north"),
    "weights": Format("weights.safetensors", "tensors", weights("weights.safetensors")),
    "pickled weights": Format("weights.pth", "bytes", weights("weights.pth")),
    "checkpoint": Format("half/checkpoints/round-000000002.ckpt", "checkpoint", resume),
    "metrics": Format("half/metrics.jsonl", "jsonl", resume),
    "result": Format("run/result.json", "json", "run --resume WORLD/run"),
    "result of a bench": Format("cell/result.json", "json", tables),
    "models of a bench": Format("nodes.toml", "toml", models),
    "certificate": Format("town/north/keys/node.pem", "bytes", f"pki show {KEYS}/node.pem"),
    "certificate, its fields": Format("town/north/keys/node.pem", "pem", f"pki show {KEYS}/node.pem"),
    "certificate of a peer": Format("town/north/keys/node.pem", "pem", peer),
    "request, its fields": Format("town/north/keys/node.csr", "pem", fields),
    "request": Format("town/north/keys/node.csr", "bytes", f"pki sign {KEYS}/node.csr --yes {AUTHORITY}"),
    "key": Format("town/north/keys/node.key", "pem", peer),
    "secret": Format("town/north/keys/secret", "bytes", peer),
    "revocations": Format("town/authority/revoked.pem", "pem", revocations),
    "ledger": Format("town/authority/issued.json", "json", f"pki list {AUTHORITY}"),
    "ledger, signed": Format("town/authority/issued.json", "json", f"pki sign {KEYS}/node.csr --yes {AUTHORITY}"),
    "ledger, revoked": Format("town/authority/issued.json", "json", f"pki revoke north --yes {AUTHORITY}"),
    "audit log": Format("audit.jsonl", "jsonl", AUDIT),
    "audit log, taken up": Format("audit.jsonl", "jsonl", restart),
    "witness": Format("witness.jsonl", "jsonl", f"{AUDIT} --certificate {KEYS}/node.pem"),
    "digits": Format("mnist/train-images-idx3-ubyte", "bytes", digits),
    "labels of digits": Format("mnist/train-labels-idx1-ubyte.gz", "bytes", digits),
    "table": Format("north.csv", "csv", "check WORLD/config.toml"),
    "Parquet table": Format("west.parquet", "bytes", parquet_table),
    "public table": Format("north.csv", "csv", f"{GIVE} --table WORLD/north.csv --classes no,yes {AGE}"),
    "list of images": Format("list.csv", "csv", f"{GIVE} --list WORLD/list.csv {SHAPES}"),
    "image": Format("images/day/circle/pic_000.png", "bytes", image_folder),
    "public image": Format("images/day/circle/pic_000.png", "bytes", f"{GIVE} --folder WORLD/images/day {SHAPES}"),
    "official list": Format("splits/photo_test_kfold.txt", "bytes", pacs),
    "decoded images": Format("entry.npy", "bytes", cached),
    "note on decoded images": Format("entry.json", "json", cached),
}  # fmt: skip
"""By what they are called. A command that gives a part of a seed set reads or writes a share beside it."""
