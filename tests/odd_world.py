"""A sound file of each format that fedh2l reads."""

from __future__ import annotations

import csv
import gzip
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

import fedh2l
from fedh2l.bench.cells import Cell
from fedh2l.data.datasets.image_folder import ImageFolder
from fedh2l.data.datasets.pacs import PACS
from fedh2l.experiment.config import load_config
from fedh2l.models.small import mlp
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.membership.bundle import Bundle, Part, merge
from fedh2l.peer.membership.public_samples import from_folder, image_schema
from fedh2l.peer.membership.reveals import reveal
from fedh2l.peer.membership.shares import commitment_to, draw_share, seed_of
from fedh2l.peer.pki.certificates import read_key
from fedh2l.peer.rehearsal import Rehearsal
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer
from pictures import folders

NAMES = ("north", "south")
CONFIG = """
[run]
rounds = 4
eval_every = 2
checkpoint_every = 2
batch_size = 8
device = "cpu"
[data]
name = "table"
root = "ROOT"
files = {north = "north.csv", south = "south.csv"}
label = "ill"
classes = ["no", "yes"]
numeric = ["age"]
categorical = ["ward"]
alpha = 0.2
[method]
name = "fedh2l"
topology = [["north", "south"]]
[optimizer]
lr = 0.01
[ray]
num_cpus = 1.0
[[nodes]]
name = "north"
model = "mlp"
model_args = {hidden = [4]}
[[nodes]]
name = "south"
model = "mlp"
model_args = {hidden = [4]}
"""


def make(world: Path) -> Path:
    """All files, in a folder."""
    for name in NAMES:
        dice = random.Random(name)
        with (world / f"{name}.csv").open("w", newline="") as file:
            rows = [[f"{row % 2 + dice.random():.3f}", dice.choice("AB"), ("no", "yes")[row % 2]] for row in range(60)]
            csv.writer(file).writerows([["age", "ward", "ill"], *rows])
    (world / "config.toml").write_text(CONFIG.replace("ROOT", str(world)))
    _runs(world)
    _federation(world)
    _images(world)
    _bench(world)
    table = pa.table({"age": [row / 7 for row in range(60)], "ill": ["no", "yes"] * 30})
    parquet.write_table(table, world / "west.parquet")
    weights = mlp(4, (3,)).state_dict()
    save_file(weights, world / "weights.safetensors")
    torch.save(weights, world / "weights.pth")
    np.save(world / "x.npy", np.zeros(3, np.float32))
    (world / "mnist").mkdir()
    digits = struct.pack(">BBBBIII", 0, 0, 8, 3, 5, 28, 28) + bytes(5 * 28 * 28)
    (world / "mnist" / "train-images-idx3-ubyte").write_bytes(digits)
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 5) + bytes(5)
    (world / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return world


def _runs(world: Path) -> None:
    """A run that has ended, and one that was stopped."""
    config = load_config(world / "config.toml")[0]
    text = (world / "config.toml").read_text()
    Trainer(config.experiment(), RunDirectory.claim(world / "run", text)).run()
    resume_in_python(world)
    stopped: list[bool] = []
    trainer = Trainer(config.experiment(), RunDirectory.claim(world / "half", text), stop=lambda: bool(stopped))
    trainer.callbacks = [Stop(stopped)]
    with pytest.raises(Interrupted):
        trainer.run()


SCHEMA = image_schema("RGB:8x8:imagenet")
IMAGES = """
[run]
rounds = 2
device = "cpu"
batch_size = 4
[data]
name = "image-folder"
root = "ROOT"
size = 8
alpha = 0.3
validation = 0.2
test = 0.2
[method]
name = "independent"
"""


class Stop(Callback):
    """Stops a run after its second round."""

    def __init__(self, stopped: list[bool]) -> None:
        self.stopped = stopped

    def on_round(self, round: int) -> None:
        self.stopped += [True] * (round == 2)


def _federation(world: Path) -> None:
    """Certificates, roster, seed set, peers, parts and audit logs."""
    config = load_config(world / "config.toml", run={"device": "cpu", "engine": "local"})[0]
    (world / "town").mkdir()
    made = Rehearsal(config, config.experiment(), world / "town")
    for name in NAMES:
        share = commitment_to(draw_share(world / f"{name}.share"))
        Part(name, ("no", "yes"), made.bundle.schema, made.bundle.part(name), share).save(world / f"{name}.part")
    merge("rehearsal", [Part.load(world / f"{name}.part") for name in NAMES]).save(world / "public.safetensors")
    bundle, shares = Bundle.load(world / "public.safetensors"), {}
    for name in NAMES:
        shares[name] = reveal(world / f"{name}.share", bundle, read_key(world / f"town/{name}/keys/node.key"))
        shares[name].save(world / f"{name}.reveal")
    seed = seed_of({name: each.share for name, each in shares.items()})
    agreement = made.roster_file.agreement.model_copy(update={"seed": seed, "seedset": bundle.digest})
    (world / "shared.toml").write_text(replace(made.roster_file, agreement=agreement, shares=shares).to_toml())
    log = AuditLog(world / "audit.jsonl", "north", "rehearsal", read_key(world / "town/north/keys/node.key"))
    for round in range(1, 4):
        log.record("posteriors", "south", round, bytes(100))
    (world / "witness.jsonl").write_text("".join(log.head().to_json() + "\n" for _ in range(2)))
    log.close()


def _images(world: Path) -> None:
    folders(world / "images", ("day", "night"), ("circle", "line"), 4)
    folders(world / "pacs", PACS.DOMAINS, PACS.CLASSES, 2)
    (world / "list.csv").write_text(
        "path,label\nimages/day/circle/pic_000.png,circle\nimages/day/line/pic_000.png,line\n"
    )
    image_folder(world)
    entry = next((world / "cache").glob("*.npy"))
    (world / "key").write_text(entry.stem)
    for suffix in (".npy", ".json"):
        shutil.copy(entry.with_suffix(suffix), world / f"entry{suffix}")
    for name, domain in zip(NAMES, ("day", "night"), strict=True):
        samples = from_folder(world / "images" / domain, ("circle", "line"), SCHEMA)
        Part(name, ("circle", "line"), SCHEMA, samples).save(world / f"{name}.images.part")
    merge("rehearsal", [Part.load(world / f"{name}.images.part") for name in NAMES]).save(world / "images.safetensors")
    nodes = [f"[[nodes]]\nname = '{name}'\nmodel = 'mlp'\nmodel_args = {{hidden = [4]}}\n" for name in ("day", "night")]
    text = IMAGES.replace("ROOT", str(world / "images")) + "".join(nodes)
    (world / "images.toml").write_text(text)
    config = load_config(world / "images.toml")[0]
    Trainer(config.experiment(), RunDirectory.claim(world / "imagerun", text)).run()
    splits = world / "splits"
    splits.mkdir()
    for domain in PACS.DOMAINS:
        lines = [f"{domain}/{name}/pic_00{i}.png {label}" for label, name in enumerate(PACS.CLASSES, 1) for i in (0, 1)]
        for part in ("train", "crossval", "test"):
            (splits / f"{domain}_{part}_kfold.txt").write_text("\n".join(lines) + "\n")


def image_folder(world: Path) -> None:
    ImageFolder(root=str(world / "images"), size=8, alpha=0.2, validation=0.2, test=0.2).domains(0)


COMMON = ("run.rounds=4",)


def _bench(world: Path) -> None:
    folder = Cell("fedh2l", COMMON, 0).path(world / "bench")
    folder.mkdir(parents=True)
    shutil.copy(world / "run" / "result.json", folder)
    folder.rename(world / "cell")
    folder.symlink_to(world / "cell")
    nodes = [f'[[nodes]]\nname = "{name}"\nmodel = "mlp"\n' for name in ("amazon", "caltech10", "dslr", "webcam")]
    (world / "nodes.toml").write_text("".join(nodes))


def resume_in_python(world: Path) -> None:
    config = load_config(world / "config.toml")[0]
    fedh2l.train(config.experiment().nodes, rounds=4, out=world / "own", resume=True)
