"""Image datasets: layout, splits, odd files, the cache, and what is said of bad data."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedh2l.data import image_cache
from fedh2l.data.datasets.image_folder import ImageFolder, OfficeCaltech10, OfficeHome
from fedh2l.data.domain import SPLITS, Domain
from fedh2l.data.images import decode, read_image
from fedh2l.errors import DataError
from pictures import draw, folders

SHAPES = ("circle", "line", "triangle")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(image_cache.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path) -> Path:
    return folders(tmp_path / "images", ("day", "night"), SHAPES)


def rows(domain: Domain) -> list[bytes]:
    """Every image of a domain, split after split."""
    return [image.numpy().tobytes() for split in SPLITS for image in getattr(domain, split).inputs]


def test_what_is_in_the_folders(root):
    day, night = ImageFolder(root=str(root), size=24).domains(0)
    assert (day.name, night.name) == ("day", "night")
    assert day.classes == SHAPES
    assert [len(getattr(day, split)) for split in SPLITS] == [39, 6, 6, 9]
    assert day.private.inputs.dtype == torch.uint8
    assert day.private.inputs.shape[1:] == (3, 24, 24)
    assert sorted(day.test.labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    everything = sorted(
        decode(path, path.read_bytes(), "RGB", (24, 24), "crop").tobytes() for path in root.glob("day/*/*.png")
    )
    assert sorted(rows(day)) == everything


def test_labels_are_those_of_the_folders(root):
    for domain in ImageFolder(root=str(root), size=24, folders=["night", "day"]).domains(3):
        for split in SPLITS:
            samples = getattr(domain, split)
            for pixels, label in zip(samples.inputs, samples.labels.tolist(), strict=True):
                found = [
                    path.parent.name
                    for path in root.glob(f"{domain.name}/*/*.png")
                    if torch.equal(torch.from_numpy(decode(path, path.read_bytes(), "RGB", (24, 24), "crop")), pixels)
                ]
                assert found == [SHAPES[label]]


def test_other_seeds_are_other_splits(root):
    first, again, other = (ImageFolder(root=str(root), size=8).domains(seed)[0] for seed in (0, 0, 1))
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert sorted(rows(first)) == sorted(rows(other))


def test_the_same_pixels_as_a_file_that_is_predicted(root):
    """A model in use is fed what it was trained on."""
    domain = ImageFolder(root=str(root), size=16).domains(0)[0]
    path = root / "day" / "circle" / "pic_000.png"
    alone = read_image(path, domain.preprocessing)
    pixels = decode(path, path.read_bytes(), "RGB", (16, 16), "crop").astype(np.float64) / 255
    mean, std = (np.array(domain.preprocessing[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    np.testing.assert_allclose(alone.numpy(), (pixels - mean) / std, atol=1e-5)
    assert domain.as_numbers().private.inputs.dtype == torch.float32


@pytest.mark.parametrize("kind", ["palette", "palette, transparent", "grey", "grey, 16 bits", "cmyk", "rgba", "turned"])
def test_odd_files(tmp_path, kind):
    plain = Image.new("RGB", (40, 40), "white")
    plain.paste((200, 30, 60), (0, 0, 20, 40))
    path = tmp_path / ("odd.jpg" if kind in ("cmyk", "turned") else "odd.png")
    expected = plain
    if kind == "palette":
        plain.convert("P", palette=Image.Palette.ADAPTIVE).save(path)
    elif kind == "palette, transparent":
        paletted = plain.convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
        paletted.save(path, transparency=paletted.getpixel((0, 0)))
        expected = Image.new("RGB", (40, 40), "white")
    elif kind == "grey":
        plain.convert("L").save(path)
        expected = plain.convert("L").convert("RGB")
    elif kind == "grey, 16 bits":
        Image.fromarray(np.asarray(plain.convert("L")).astype(np.uint16) * 257).save(path)
        expected = plain.convert("L").convert("RGB")
    elif kind == "cmyk":
        plain.convert("CMYK").save(path, quality=100)
    elif kind == "rgba":
        see_through = plain.convert("RGBA")
        see_through.putalpha(0)
        see_through.save(path)
        expected = Image.new("RGB", (40, 40), "white")
    else:
        turned = Image.Exif()
        turned[0x0112] = 3  # upside down
        plain.save(path, exif=turned, quality=100)
        expected = plain.rotate(180)
    found = decode(path, path.read_bytes(), "RGB", (40, 40), "crop").astype(int)
    away = np.abs(found - np.asarray(expected).transpose(2, 0, 1).astype(int))[:, :, [5, 35]]
    assert away.max() <= 6  # not beside the edge, where JPEG is not exact


def test_crop_and_stretch(tmp_path):
    wide = Image.new("RGB", (60, 20), "white")
    wide.paste("black", (20, 0, 40, 20))
    path = tmp_path / "wide.png"
    wide.save(path)
    assert decode(path, path.read_bytes(), "RGB", (20, 20), "crop").max() == 0
    assert decode(path, path.read_bytes(), "L", (20, 20), "stretch").shape == (1, 20, 20)
    assert decode(path, path.read_bytes(), "L", (20, 20), "stretch").max() == 255


def test_images_are_decoded_once(root, cache, monkeypatch):
    first = ImageFolder(root=str(root), size=16).domains(0)
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    assert len(kept) == 2

    def never(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(image_cache, "decode", never)
    again = ImageFolder(root=str(root), size=16, alpha=0.2).domains(1)
    assert sorted(rows(first[0])) == sorted(rows(again[0]))
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")} == kept
    moved = root.rename(root.parent / "elsewhere")
    ImageFolder(root=str(moved), size=16).domains(0)
    with pytest.raises(AssertionError, match="decoded again"):
        ImageFolder(root=str(moved), size=24).domains(0)


def test_another_picture_in_the_same_file(root):
    before = ImageFolder(root=str(root), size=16).domains(0)[0]
    path = root / "day" / "line" / "pic_003.png"
    draw(2, 3, random.Random(7)).save(path)
    after = ImageFolder(root=str(root), size=16).domains(0)[0]
    assert len(set(rows(before)) - set(rows(after))) == 1


def test_a_damaged_cache_is_made_again(root, cache, caplog):
    before = ImageFolder(root=str(root), size=16).domains(0)[0]
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    after = ImageFolder(root=str(root), size=16).domains(0)[0]
    assert rows(before) == rows(after)
    assert "decoded again" in caplog.text
    assert not list(cache.glob("*.part"))


def test_no_place_for_the_cache(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(image_cache.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=f"cannot be kept in .*{image_cache.CACHE}"):
        ImageFolder(root=str(root), size=16).domains(0)


def test_a_full_disk(root, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DataError, match=f"cannot be written to .*No space left.*{image_cache.CACHE}"):
        ImageFolder(root=str(root), size=16).domains(0)
    assert not list(cache.iterdir())


def test_unfinished_files_of_killed_processes_are_removed(root, cache):
    cache.mkdir()
    name = "0123456789abcdef"
    for end, age in (("old_1.part", 2 * image_cache.DAY), ("new_1.part", 60)):
        (cache / f"{name}{end}").write_text("")
        os.utime(cache / f"{name}{end}", (time.time() - age,) * 2)
    (cache / "film.part").write_text("")
    os.utime(cache / "film.part", (0, 0))
    ImageFolder(root=str(root), size=16).domains(0)
    assert {path.name for path in cache.glob("*.part")} == {f"{name}new_1.part", "film.part"}


def test_what_is_hidden_or_no_image_is_left_out(root, caplog):
    caplog.set_level("INFO", "fedh2l")
    before = ImageFolder(root=str(root), size=16).domains(0)[0].digest
    hidden = root / "day" / "line" / ".thumbs"
    hidden.mkdir()
    draw(1, 0, random.Random(1)).save(hidden / "pic_000.png")
    (root / "day" / "line" / ".pic.png").write_text("")
    (root / "day" / "line" / "folder.png").mkdir()
    (root / "day" / "line" / "notes.txt").write_text("")
    assert ImageFolder(root=str(root), size=16).domains(0)[0].digest == before
    assert "day/line': ignored 1 files whose names" in caplog.text


def test_names_of_folders_become_names_of_nodes(root):
    (root / "day").rename(root / "Hospital A (2020)")
    (root / "night").rename(root / "b c")
    assert ImageFolder(root=str(root)).domain_names(0) == ["Hospital_A_2020", "b_c"]
    (root / "Hospital A (2020)").rename(root / "b_c")
    with pytest.raises(DataError, match="gives no name for a node that others do not have; rename it"):
        ImageFolder(root=str(root)).domain_names(0)


@pytest.mark.parametrize(("mode", "value"), [("F", 0.5), ("I", 70000)])
def test_numbers_of_which_nothing_says_what_is_white(tmp_path, mode, value):
    path = tmp_path / "odd.tiff"
    Image.new(mode, (8, 8), value).save(path)
    with pytest.raises(DataError, match=r"odd\.tiff' cannot be read as an image: its values are"):
        decode(path, path.read_bytes(), "RGB", (8, 8), "crop")


def no_root(root: Path) -> None:
    root.rename(root.parent / "gone")


def no_domain(root: Path) -> None:
    for name in ("day", "night"):
        (root / name).rename(root.parent / name)


def no_class(root: Path) -> None:
    (root / "night" / "line").rename(root.parent / "line")


def another_class(root: Path) -> None:
    (root / "night" / "star").mkdir()


def empty_class(root: Path) -> None:
    for path in (root / "night" / "line").iterdir():
        path.unlink()


def no_image(root: Path) -> None:
    (root / "night" / "line" / "pic_004.png").write_text("not an image")


def truncated(root: Path) -> None:
    path = root / "night" / "line" / "pic_004.png"
    path.write_bytes(path.read_bytes()[:-40])


def too_few(root: Path) -> None:
    for name in SHAPES:
        for path in sorted((root / "night" / name).iterdir())[2:]:
            path.unlink()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (no_root, r"data\.root: there is no folder '.*images'"),
        (no_domain, r"images' has no folders of domains"),
        (no_class, r"night' has no folder for the class 'line', which '.*day' has"),
        (another_class, r"night' has a class 'star', which '.*day' has not; .*data\.classes"),
        (empty_class, r"night/line' has no images"),
        (no_image, r"night/line/pic_004\.png' cannot be read as an image"),
        (truncated, r"night/line/pic_004\.png' cannot be read as an image"),
        (too_few, r"night' has too few images \(6\) for test data, .* raise the share of test data \(data\.test"),
    ],
)
def test_bad_folders(root, wrong, message):
    wrong(root)
    with pytest.raises(DataError, match=message):
        ImageFolder(root=str(root), size=16).domains(0)


def test_bad_names(root):
    with pytest.raises(DataError, match=r"has no folder 'nigth'\. Did you mean 'night'"):
        ImageFolder(root=str(root), folders=["day", "nigth"]).domains(0)
    with pytest.raises(DataError, match="day' has no folder for the class 'square'"):
        ImageFolder(root=str(root), classes=["circle", "square"]).domains(0)
    two = ImageFolder(root=str(root), classes=["line", "circle"], size=8).domains(0)
    assert two[0].classes == ("line", "circle")


def test_office_home_has_a_space_in_a_name(tmp_path):
    root = folders(tmp_path / "office", OfficeHome.DOMAINS, ("bed", "bike"), each=10)
    domains = OfficeHome(root=str(root), size=8).domains(0)
    assert [domain.name for domain in domains] == ["Art", "Clipart", "Product", "Real_World"]


def test_office_caltech_has_classes_of_eight(tmp_path):
    root = folders(tmp_path / "office", OfficeCaltech10.DOMAINS, ("bike", "mug"), each=8)
    for domain in OfficeCaltech10(root=str(root), size=8).domains(0):
        assert [len(getattr(domain, split)) for split in SPLITS] == [10, 2, 2, 2]


def test_only_images_of_known_formats_are_opened(tmp_path, monkeypatch):
    """Pillow hands EPS to Ghostscript, whatever the file is called."""
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    gs.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 28 28\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match="none of the known formats"):
        decode(Path("a.png"), eps, "L", (28, 28), "stretch")
    assert not (tmp_path / "ran").exists()
