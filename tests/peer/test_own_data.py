"""A member's own data is like the seed set: on one scale, of one size, without a line of Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedh2l
from fedh2l.errors import ConfigError, DataError
from fedh2l.models.saved import load_model
from fedh2l.peer.membership.bundle import Bundle, Part, merge
from fedh2l.peer.membership.public_samples import from_table
from fedh2l.peer.own_data import own_domain
from fedh2l.peer.rehearsal import free_ports
from fedh2l.runs.directory import RunDirectory
from records import records, write

HOSPITALS = {"north": 0.0, "south": 20.0}
"""By how much older the patients are."""
COLUMNS = {"label": "ill", "classes": ["no", "yes"], "numeric": ["age", "dose"], "categorical": ["ward"]}
OWN = {"name": "table", "label": "ill"}


@pytest.fixture
def bundle(tmp_path) -> Bundle:
    parts = []
    for seed, (name, shift) in enumerate(HOSPITALS.items()):
        write(tmp_path / f"{name}.csv", records(120, shift, seed))
        write(tmp_path / f"{name}-public.csv", records(30, shift, 10 + seed))
        schema, samples = from_table(tmp_path / f"{name}-public.csv", COLUMNS, units={"age": "years"})
        parts.append(Part(name, ("no", "yes"), schema, samples))
    return merge("health", parts)


def test_records_are_on_the_scale_of_the_seed_set(bundle, tmp_path, caplog):
    domain = own_domain({**OWN, "file": str(tmp_path / "north.csv")}, "north", None, 0, bundle)
    assert domain.preprocessing == bundle.schema
    assert domain.private.inputs.shape[1:] == bundle.samples.inputs.shape[1:]
    assert [len(each) for each in (domain.private, domain.validation, domain.test)] == [90, 12, 18]
    means = [float(samples.inputs[:, 0].mean()) for samples in (domain.private, bundle.part("north"))]
    assert means[0] == pytest.approx(means[1], abs=0.3)
    assert "on the same scale" not in caplog.text


def function(scaled: bool) -> Callable[..., list]:
    """Data of the member's own, as numbers of its own."""

    def data(schema: dict, file: str) -> list[fedh2l.Domain]:
        ages = torch.tensor([float(line.split(",")[0]) for line in Path(file).read_text().splitlines()[1:]])
        if scaled:
            _, mean, deviation = schema["numeric"][0]
            ages = (ages - mean) / deviation
        rest = torch.zeros(len(ages), 4)
        return [
            fedh2l.Domain.split(
                (torch.cat([ages[:, None], rest], 1), torch.arange(len(ages)) % 2), "north", ["no", "yes"]
            )
        ]

    return data


RAW, SCALED = function(False), function(True)


def test_raw_numbers_are_refused(bundle, tmp_path):
    own = {"name": "test_own_data:RAW", "file": str(tmp_path / "north.csv")}
    with pytest.raises(
        ConfigError, match=r"input 0 has mean 4\d.* private data, but .* in the seed set\. Scale private"
    ):
        own_domain(own, "north", None, 0, bundle)
    assert own_domain({**own, "name": "test_own_data:SCALED"}, "north", None, 0, bundle)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"units": {"age": "months"}}, "data.units: 'age' is in months here, and the seed set has it in years"),
        ({"units": {"dose": "mg"}}, "'dose' is in mg here, and the seed set has it with no unit"),
        ({"label": "well"}, "has no column 'well'"),
        ({"values": {"ill": ["1"]}}, "'ill' is not one of data.classes"),
        ({"file": "nowhere.csv"}, "cannot read 'nowhere.csv'"),
        ({"fil": "x"}, "data.fil: unknown key. Did you mean 'file'"),
    ],
)
def test_what_does_not_fit_is_named(bundle, tmp_path, changes, why):
    with pytest.raises((ConfigError, DataError), match=why):
        own_domain({**OWN, "file": str(tmp_path / "north.csv"), **changes}, "north", None, 0, bundle)


def test_a_table_on_a_scale_of_its_own(bundle, tmp_path):
    """The dataset for simulations scales by its own public records."""
    simulated = {"name": "table", "files": {"north": "north.csv"}, "root": str(tmp_path), **COLUMNS}
    with pytest.raises(ConfigError, match=r"numeric: .* here, .* there.*takes the scale of the seed set if data.file"):
        own_domain(simulated, "north", None, 0, bundle)


def test_columns_and_categories_that_are_not_there(bundle, tmp_path, caplog):
    rows = [[age, "Z", ill] for age, _, _, ill in records(60, 0, 3)]
    write(tmp_path / "few.csv", rows, ["age", "ward", "ill"])
    domain = own_domain({**OWN, "file": str(tmp_path / "few.csv")}, "north", None, 0, bundle)
    assert (domain.private.inputs[:, 1:] == 0).all()
    assert "has no column 'dose'; its values count as missing" in caplog.text
    assert "no public record has ward = Z" in caplog.text


def pictures(folder: Path, side: int, shade: int) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for place in range(20):
            pixels = np.full((side, side, 3), shade + 60 * label + place, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")


@pytest.fixture
def command(cli) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A command that does what it should."""

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        done = cli(*words)
        assert done.returncode == 0, done.stderr
        return done

    return call


def found(command, names: tuple[str, ...], method: str) -> None:
    """Certificates and a roster, as people make them."""
    command("pki", "init", "--federation", "f")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    for name in names:
        command("pki", "request", "--name", name, "--host", "127.0.0.1", "--dir", f"{name}/keys")
        command("pki", "sign", f"{name}/keys/node.csr", "--yes")
    parts = [f"{name}.part.safetensors" for name in names]
    command("seedset", "merge", *parts, "--federation", "f")
    for name in names:
        command("seedset", "reveal", "--share", f"{name}.share", "--key", f"{name}/keys/node.key")
    shares = [word for name in names for word in ("--share", f"{name}.reveal")]
    members = [f"{name}/keys/node.pem@127.0.0.1:{port}" for name, port in ports.items()]
    command("roster", "init", *members, "--rounds", 40, "--method", method, *shares)
    command("roster", "check")


def train(folder: Path, data: dict[str, str]) -> None:
    """Real peers, from files alone."""
    roster = (folder / "roster.toml").read_text()
    running = {}
    for name, section in data.items():
        address = next(line for line in roster.split(f'name = "{name}"')[1].splitlines() if "address" in line)
        about = f'[peer]\nlisten = {address.partition("=")[2]}\nroster = "../roster.toml"\nout = "run"\n'
        about += 'seedset = "../seedset.safetensors"\nauthority = "../authority/ca.pem"\n'
        (folder / name / "peer.toml").write_text(f"{about}[run]\neval_every = 20\n[data]\n{section}")
        call = [sys.executable, "-m", "fedh2l", "peer", f"{name}/peer.toml"]
        running[name] = subprocess.Popen(call, cwd=folder, stderr=subprocess.PIPE, text=True)
    said = {name: process.communicate(timeout=200)[1] for name, process in running.items()}
    assert [process.returncode for process in running.values()] == [0] * len(data), said
    for name in data:
        assert (RunDirectory(folder / name / "run").result() or {})["peer"]["skipped"] == 0


def test_hospitals_train_without_python(command, tmp_path):
    for seed, (name, shift) in enumerate(HOSPITALS.items()):
        write(tmp_path / f"{name}.csv", records(120, shift, seed))
        write(tmp_path / f"{name}-public.csv", records(30, shift, 10 + seed))
        words = ("--classes", "no,yes", "--columns", "age,dose", "--categories", "ward", "--label", "ill", "--yes")
        command("seedset", "part", "--name", name, "--table", f"{name}-public.csv", *words, "--units", "age=years")
    found(command, tuple(HOSPITALS), "fedh2l")
    shown = command("seedset", "verify", "seedset.safetensors").stderr
    assert "age in years (mean " in shown
    train(tmp_path, {name: f'name = "table"\nfile = "{tmp_path}/{name}.csv"\nlabel = "ill"\n' for name in HOSPITALS})
    saved = load_model(tmp_path / "north" / "run" / "models" / "north-best.safetensors")
    assert saved.preprocessing == Bundle.load(tmp_path / "seedset.safetensors").schema


def test_images_train_without_python(command, tmp_path):
    names = ("zoo", "farm")
    for place, name in enumerate(names):
        pictures(tmp_path / f"{name}-images", 40, 40 * place)
        pictures(tmp_path / f"{name}-public", 30, 40 * place)
        words = ("--classes", "cat,dog", "--folder", f"{name}-public", "--image", "RGB:16x16", "--yes")
        command("seedset", "part", "--name", name, *words)
    found(command, names, "fedh2l-plus")
    roster = (tmp_path / "roster.toml").read_text()
    assert "ema_decay = 0.998" in roster
    assert "local = true" in roster
    train(tmp_path, {name: f'name = "image-folder"\nfolder = "{tmp_path}/{name}-images"\n' for name in names})
