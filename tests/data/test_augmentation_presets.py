"""Augmentation of image folders: safe unless the user says what the images show, and visible on a sheet."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import ROOT, TINY
from fedh2l.data.augmentation import Augmentation
from fedh2l.data.datasets.image_folder import IMAGENET, ImageFolder, OfficeCaltech10, OfficeHome
from fedh2l.data.datasets.pacs import PACS
from fedh2l.data.datasets.rotated_mnist import RotatedMNIST
from fedh2l.data.image_cache import CACHE
from fedh2l.data.pixels import Pixels
from fedh2l.errors import ConfigError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.toml import to_toml
from pictures import folders

NUMBERS = ("crop", "flip", "jitter", "shift", "zoom", "erase", "bend", "mix")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path) -> Path:
    return folders(tmp_path / "images", ("day", "night"), ("circle", "line"))


def views(dataset: ImageFolder) -> Augmentation:
    found = dataset._views(Pixels.of(IMAGENET))
    assert found is not None
    return found


def letter() -> torch.Tensor:
    """A red L on white, 32 × 32."""
    image = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    image[1:, 6:26, 10:14] = 0
    image[1:, 22:26, 10:24] = 0
    return image


def test_by_default_a_letter_stays_a_letter():
    """It is moved, resized and partly erased, but not mirrored, turned or recoloured."""
    plain = Pixels()
    safe = ImageFolder(root="x", augment="all", erase=0.0)._views(plain)
    assert safe is not None
    seen = safe.views(letter().expand(200, 3, 32, 32), torch.float32, "local-views", "s", "a", 1)
    shown = 1 - seen[:, 1]  # how red it is
    torch.testing.assert_close(seen[:, 0], torch.ones_like(seen[:, 0]))  # red and white both have all red
    torch.testing.assert_close(seen[:, 1], seen[:, 2])
    assert shown.amax((1, 2)).min() > 0.9
    for picture in shown:
        columns, rows = picture.sum(0), picture.sum(1)
        assert columns.argmax() < (columns * torch.arange(32)).sum() / columns.sum()  # the stem is on the left
        assert rows.argmax() > (rows * torch.arange(32)).sum() / rows.sum()  # the foot is below
    erased = ImageFolder(root="x", augment="all")._views(plain)
    assert erased is not None
    black = erased.views(letter().expand(200, 3, 32, 32), torch.float32, "local-views", "s", "a", 1).sum(1) == 0
    assert 0.5 < black.flatten(1).any(1).double().mean() <= 1


def test_public_and_local_images_are_augmented_alike():
    both = views(ImageFolder(root="x", augment="all"))
    assert both.public is not None
    assert all(getattr(both, key) == getattr(both.public, key) for key in NUMBERS[:-1])
    bent = views(ImageFolder(root="x", augment="all", bend=0.1, mix=0.5))
    assert (bent.bend, bent.public.bend, bent.public.mix) == (0.0, 0.1, 0.5)


@pytest.mark.parametrize("dataset", [PACS, OfficeHome, OfficeCaltech10])
def test_augmentation_of_the_benchmarks_is_as_it_was(dataset):
    pixels = Pixels.of(IMAGENET)
    assert repr(views(dataset(root="x", augment="all"))) == repr(Augmentation(pixels, 0.8, 0.5, 0.4).of("all", mix=0.0))
    photographs = ImageFolder(root="x", augment="all", kind="photographs")
    assert views(photographs) == views(dataset(root="x", augment="all"))


def test_colours_of_drawings_stay():
    drawings = views(ImageFolder(root="x", augment="all", kind="drawings"))
    assert (drawings.crop, drawings.flip, drawings.jitter) == (0.8, 0.5, 0.0)


def test_given_keys_win():
    given = views(ImageFolder(root="x", augment="all", kind="photographs", flip=0.0, shift=0.2))
    assert (given.crop, given.flip, given.jitter, given.shift) == (0.8, 0.0, 0.4, 0.2)


def test_digits_have_the_same_values_without_saying_so():
    digits, folder = RotatedMNIST(), ImageFolder(root="x").resolved()
    assert [(getattr(digits, key), getattr(folder, key)) for key in ("shift", "zoom", "erase")] == [
        (0.1, 0.1), (0.15, 0.15), (0.3, 0.3),
    ]  # fmt: skip


def test_a_run_keeps_the_values_and_a_starter_config_leaves_them_to_the_kind(root, tmp_path):
    changes = ["data.name=image-folder", f"data.root={root}", "run.device=cpu"]
    config, _ = load_config(None, changes, "fedh2l-plus")
    kept = tomllib.loads(to_toml(config))["data"]
    assert {key: kept[key] for key in NUMBERS} == {
        "crop": 1.0, "flip": 0.0, "jitter": 0.0, "shift": 0.1, "zoom": 0.15, "erase": 0.3, "bend": 0.0, "mix": 0.0,
    }  # fmt: skip
    started = tmp_path / "starter.toml"
    started.write_text(to_toml(config, comments=True))
    assert not set(NUMBERS) & set(tomllib.loads(started.read_text())["data"])
    other, _ = load_config(started, ["data.kind=photographs"])
    assert tomllib.loads(to_toml(other))["data"]["flip"] == 0.5
    with pytest.raises(ConfigError, match=r"data\.kind = 'photos'"):
        load_config(started, ["data.kind=photos"])


def test_all_views_of_digits_work_on_folders(root, invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["data.name=image-folder", f"data.root={root}", "data.size=16", "run.batch_size=4", "run.device=cpu",
              "nodes.day.model=cnn", "nodes.night.model=cnn", "run.ema_decay=0.5"]  # fmt: skip
    results = []
    for number, change in enumerate(("shift=0.2", "zoom=0.3", "erase=0.5", "bend=0.2", "mix=0.4", "kind=drawings")):
        options = [part for each in (*common, f"data.{change}") for part in ("--set", each)]
        run = ("run", "--method", "fedh2l-plus", "--rounds", 4, "--out", f"run{number}", *options)
        code, _, said = invoke(*run)
        assert code == 0, said
        lines = (tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines()
        results.append(json.dumps(json.loads(lines[-1])["nodes"]))
    assert len(set(results)) == len(results)


def check(invoke, config: Path, sheet: Path, *changes: str, allow: str = "none") -> tuple[int, str]:
    options = [part for change in changes for part in ("--set", change)]
    code, _, said = invoke("check", config, "--samples", sheet, "--allow", allow, *options)
    return code, said


@pytest.mark.parametrize("normalise", ["imagenet", "none"])
def test_a_sheet_of_samples(root, tmp_path, invoke, normalise):
    config, sheet = tmp_path / "own.toml", tmp_path / "sheet.png"
    nodes = "".join(f'[[nodes]]\nname = "{name}"\nmodel = "cnn"\n' for name in ("day", "night"))
    config.write_text(
        f'[data]\nname = "image-folder"\nroot = "{root}"\nsize = 96\nnormalise = "{normalise}"\naugment = "all"\n'
        + nodes
    )
    code, said = check(invoke, config, sheet)
    assert code == 0, said
    assert "with augmented versions" in said
    picture = np.asarray(Image.open(sheet).convert("RGB")).astype(int)
    day, night = ImageFolder(root=str(root), size=96).domains(0)
    for domain, top in ((day, 24), (night, 152)):
        original = domain.public.inputs[0].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(picture[top : top + 96, 8:104] - original).max() <= 1
        versions = [picture[top : top + 96, 8 + 96 * place : 104 + 96 * place] for place in (1, 2, 3)]
        assert all(np.abs(version - original).max() > 50 for version in versions)
    code, said = check(invoke, config, sheet, "data.augment=none")
    assert code == 0
    assert "shows the original images" in said
    assert Image.open(sheet).width < picture.shape[1]
    code, said = check(invoke, config, tmp_path / "no" / "sheet.png")
    assert code == 2
    assert "cannot be written" in said


def test_a_sheet_of_digits_and_none_of_records(tmp_path, invoke):
    config, sheet = tmp_path / "own.toml", tmp_path / "sheet.png"
    config.write_text("")
    code, said = check(invoke, config, sheet, *TINY, "data.augment=all")
    assert code == 0, said
    assert Image.open(sheet).height == 4 * (16 + 96 + 16) + 8
    example = ROOT / "examples" / "own" / "federation.toml"
    code, said = check(invoke, example, sheet, allow="sites")
    assert code == 2
    assert "are not grey or colour images" in said
