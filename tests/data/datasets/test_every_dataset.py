"""For every built-in dataset: a starter config that runs, and tests of a run's models on other data."""

from __future__ import annotations

import csv
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fedh2l
from conftest import blobs
from fedh2l.data.datasets.image_folder import OfficeCaltech10, OfficeHome
from fedh2l.data.datasets.pacs import PACS
from fedh2l.data.image_cache import CACHE
from fedh2l.data.registry import DATASETS
from pictures import folders

SHAPES = ("circle", "line")
IMAGES = {
    "pacs": (PACS.DOMAINS, PACS.CLASSES),
    "office-home": (OfficeHome.DOMAINS, SHAPES),
    "office-caltech10": (OfficeCaltech10.DOMAINS, SHAPES),
    "image-folder": (("day", "night"), SHAPES),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write_table(path: Path, count: int, shift: float = 0.0) -> None:
    dice = random.Random(path.name)
    rows = [[shift + row % 2 + dice.random(), dice.choice("AB"), "yes" if row % 2 else "no"] for row in range(count)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "ward", "ill"], *rows])


def settings(name: str, folder: Path) -> list[str]:
    """What a user must say of a dataset, with a little data in a folder."""
    if name == "rotated-mnist":
        return ["data.per_class=20"]
    if name == "table":
        for file in ("north.csv", "south.csv"):
            write_table(folder / file, 60)
        files = '{north = "north.csv", south = "south.csv"}'
        columns = ['data.numeric=["age"]', 'data.categorical=["ward"]']
        return [f"data.files={files}", f"data.root={folder}", "data.label=ill", 'data.classes=["no", "yes"]', *columns]
    folders(folder / "images", *IMAGES[name], each=10)
    return [f"data.root={folder / 'images'}"]


def options(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def done(invoke, *arguments) -> str:
    """Output of a command that must succeed."""
    code, out, said = invoke(*arguments)
    assert code == 0, said
    return out + said


@pytest.mark.parametrize("name", DATASETS)
def test_a_starter_config_runs(name, invoke, tmp_path):
    done(invoke, "init", "own.toml", *options(f"data.name={name}", *settings(name, tmp_path)))
    done(invoke, "check", "own.toml")
    done(invoke, "run", "own.toml", "--rounds", 2, "--out", "run", "--device", "cpu")
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("changes", "model"),
    [(["data.size=28", "data.colour=false"], "lenet"), (["data.size=28"], "cnn"), (["data.size=33"], "cnn")],
)
def test_the_model_fits_the_images(changes, model, invoke, tmp_path):
    done(invoke, "init", "own.toml", *options("data.name=image-folder", *settings("image-folder", tmp_path), *changes))
    assert (tmp_path / "own.toml").read_text().count(f'model = "{model}"') == 2
    done(invoke, "check", "own.toml")


def test_a_missing_folder_is_asked_for(invoke):
    code, _, said = invoke("init", "own.toml", *options("data.name=image-folder"))
    assert code == 2
    assert "data.root: this key is required" in said


@pytest.mark.parametrize(("shape", "model"), [((1, 28, 28), "lenet"), ((3, 12, 12), "cnn"), ((5,), "mlp")])
def test_the_model_fits_data_of_the_users_own(shape, model, invoke, tmp_path):
    (tmp_path / "ours.py").write_text(
        "import torch, fedh2l\n"
        "def two():\n"
        f"    return [fedh2l.Domain.split((torch.rand(60, *{shape}), torch.arange(60) % 3), n, 3) for n in 'ab']\n"
    )
    made = invoke_own(invoke, "init", "own.toml", *options("data.name=ours:two"))
    assert made == 0
    assert (tmp_path / "own.toml").read_text().count(f'model = "{model}"') == 2
    assert invoke_own(invoke, "check", "own.toml", "--allow", "ours") == 0


def invoke_own(invoke, *arguments) -> int:
    """As in a process of its own: a module of the user's is imported anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path.cwd()))
        patch.delitem(sys.modules, "ours", raising=False)
        return invoke(*arguments)[0]


def trained(name: str, invoke, tmp_path: Path, *changes: str) -> None:
    made = options(f"data.name={name}", *settings(name, tmp_path), "run.eval_every=10", *changes)
    done(invoke, "run", "--rounds", 20, "--out", "run", "--device", "cpu", *made)


def report(invoke, *data: str) -> tuple[dict, str]:
    """What `fedh2l evaluate` reports, as JSON and in words."""
    wanted = [part for change in data for part in ("--data", change)]
    code, out, said = invoke("evaluate", "run", "--json", *wanted)
    assert code == 0, said
    return json.loads(out), said


def refused(invoke, *data: str) -> str:
    wanted = [part for change in data for part in ("--data", change)]
    code, _, said = invoke("evaluate", "run", *wanted)
    assert code == 2
    return said


def test_all_images_of_another_folder_are_tested(invoke, tmp_path):
    trained("image-folder", invoke, tmp_path, "data.size=16")
    own, said = report(invoke)
    assert own["tested"] == {name: {"samples": 4, "all": False} for name in ("day", "night")}
    assert "Tested: the test split of day (4), night (4)." in said
    shutil.move(tmp_path / "images", tmp_path / "other")  # also if the run's own data is gone
    for path in (tmp_path / "other").glob("*/*/pic_00[3-9].png"):
        path.unlink()  # too few to be split
    other, said = report(invoke, f"root={tmp_path / 'other'}")
    assert other["tested"] == {name: {"samples": 6, "all": True} for name in ("day", "night")}
    assert "Tested: all samples of day (6), night (6)." in said
    assert "trained on" not in said


def test_all_images_are_what_the_model_sees(invoke, tmp_path):
    """The accuracy is that of the model on each file."""
    trained("image-folder", invoke, tmp_path, "data.size=16")
    shutil.copytree(tmp_path / "images", tmp_path / "copy")
    other, _ = report(invoke, f"root={tmp_path / 'copy'}")
    model = fedh2l.load("run", "day")
    for domain in ("day", "night"):
        files = sorted((tmp_path / "copy" / domain).rglob("*.png"))
        right = sum(found.label == file.parent.name for found, file in zip(model.predict(files), files, strict=True))
        assert other["accuracy"]["day"][domain] == pytest.approx(100 * right / len(files))


def test_a_domain_that_is_new_in_the_same_folder(invoke, tmp_path):
    trained("image-folder", invoke, tmp_path, "data.size=16")
    shutil.copytree(tmp_path / "images" / "day", tmp_path / "images" / "dusk")
    found, said = report(invoke, 'folders=["day", "dusk"]')
    assert found["tested"] == {"day": {"samples": 4, "all": False}, "dusk": {"samples": 20, "all": True}}
    assert "Tested: all samples of dusk (20)." in said


def test_digits_at_other_angles_are_the_digits_of_the_run(invoke, tmp_path):
    """Most were trained on at another angle, so their test split is tested."""
    trained("rotated-mnist", invoke, tmp_path)
    found, said = report(invoke, "angles=[10,80]")
    assert found["tested"] == {name: {"samples": 30, "all": False} for name in ("M10", "M80")}
    assert "Tested: the test split of M10 (30), M80 (30)." in said
    assert "may have been trained on" in said


def test_all_records_of_another_file_are_tested_on_the_scale_of_the_model(invoke, tmp_path):
    trained("table", invoke, tmp_path)
    write_table(tmp_path / "far.csv", 30, shift=100.0)
    found, _ = report(invoke, 'files={far = "far.csv"}')
    assert found["tested"] == {"far": {"samples": 30, "all": True}}
    model = fedh2l.load("run", "north")
    _, mean, deviation = model.preprocessing["numeric"][0]
    with (tmp_path / "far.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    inputs = [
        [(float(line["age"]) - mean) / deviation, float(line["ward"] == "A"), float(line["ward"] == "B")]
        for line in lines
    ]
    answers = model(torch.tensor(inputs)).argmax(1).tolist()
    right = sum(model.classes[answer] == line["ill"] for answer, line in zip(answers, lines, strict=True))
    assert found["accuracy"]["north"]["far"] == pytest.approx(100 * right / 30)
    both = refused(invoke, 'files={north = "north.csv", far = "far.csv"}')  # together they have another scale
    assert "domain 'north' is not prepared as the model's training data (numeric: " in both
    assert "test the new files without the run's own" in both
    assert "trained on other columns: age, ward" in refused(invoke, 'files={far = "far.csv"}', "numeric=[]")


def test_images_made_in_another_way_are_refused(invoke, tmp_path):
    trained("image-folder", invoke, tmp_path, "data.size=16")
    said = refused(invoke, "normalise=none")
    assert "domain 'day' is not prepared as the model's training data (mean: [0.0] here, [0.485" in said


def test_a_run_from_python_is_tested_on_other_data(invoke, tmp_path):
    nodes = [fedh2l.Node(name, "mlp", blobs(name)) for name in ("x", "y")]
    fedh2l.train(nodes, rounds=2, out=tmp_path / "run")
    found, _ = report(invoke, "conftest:two_domains")
    assert found["tested"] == {name: {"samples": 120, "all": True} for name in ("x", "y")}
