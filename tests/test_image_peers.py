"""Peers with images: folders of their own, seed sets of bytes or of numbers, and views that the roster agrees on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedh2l.data.image_cache import CACHE
from fedh2l.data.image_folder import IMAGENET, ImageFolder
from fedh2l.errors import ConfigError
from fedh2l.peer.bundle import Part, merge
from fedh2l.peer.charter import Charter
from fedh2l.peer.public import from_folder, image_schema
from fedh2l.peer.settings import _own_domain
from fedh2l.peer.terms import Term, Terms
from fedh2l.peer.views import SharedViews
from fedh2l.pixels import Pixels
from pictures import folders

CLASSES = ("circle", "line")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.mark.parametrize("augment", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_peers_with_images(cli, tmp_path, augment):
    """Each peer reads its folder, the seed set holds bytes, and the end is that of one process."""
    root = folders(tmp_path / "images", ("day", "night"), ("circle", "line"), each=20)
    changes = [
        "data.name=image-folder", f"data.root={root}", "data.size=16", f"data.augment={augment}", "run.batch_size=4",
        "nodes.day.model=test_passes:net", "nodes.night.model=test_passes:net",
    ]  # fmt: skip
    options = [*(part for change in changes for part in ("--set", change)), "--rounds", 6, "--json"]
    here, there = (cli(command, *options, "--out", command, timeout=180) for command in ("run", "rehearse"))
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    results = [json.loads(each.stdout) | {"seconds": 0} for each in (here, there)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ("RGB:16x16:imagenet", None),
        ("RGB:16x16", "fit: crop here, None there; mean: .* here, None there"),
        ("RGB:24x24:imagenet", r"size: \[16, 16\] here, \[24, 24\] there"),
    ],
)
def test_a_seed_set_of_images_made_elsewhere(tmp_path, schema, refused):
    """A peer's own images must be made as the public ones are, whether these are numbers or bytes."""
    root = folders(tmp_path / "images", ("day", "night"), CLASSES, each=10)
    about = image_schema(schema)
    parts = [Part(name, CLASSES, about, from_folder(root / name, CLASSES, about)) for name in ("day", "night")]
    bundle, own = merge("shapes", parts), ImageFolder(root=str(root), size=16)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            _own_domain(own, "day", 0, bundle)
        return
    domain = _own_domain(own, "day", 0, bundle)
    public = bundle.part("day").inputs
    assert domain.private.inputs.dtype == public.dtype == torch.uint8
    rows = {row.numpy().tobytes() for row in public}
    assert all(row.numpy().tobytes() in rows for row in domain.private.inputs)  # the same files, made the same way
    numbers = replace(bundle, samples=as_numbers(bundle))
    assert _own_domain(own, "day", 0, numbers).private.inputs.is_floating_point()
    with pytest.raises(ConfigError, match="holds images as numbers, which are not augmented"):
        _own_domain(ImageFolder(root=str(root), size=16, augment="local"), "day", 0, numbers)


def made(tmp_path):
    """A folder, and the seed set that `fedh2l seedset part` would make of it."""
    root = folders(tmp_path / "images", ("day", "night"), CLASSES, each=10)
    about = image_schema("RGB:16x16:imagenet")
    parts = [Part(name, CLASSES, about, from_folder(root / name, CLASSES, about)) for name in ("day", "night")]
    return root, merge("shapes", parts)


def as_numbers(bundle):
    return bundle.samples.as_numbers(Pixels.of(bundle.schema))


@pytest.mark.parametrize(("augment", "crop"), [("all", 0.8), ("public", 1)])
def test_views_of_the_roster_are_those_of_the_data(tmp_path, augment, crop):
    root, bundle = made(tmp_path)
    views = SharedViews(crop=0.8, flip=0.5, jitter=0.4)
    assert views.of(bundle).crop == 0.8
    seeing = ImageFolder(root=str(root), size=16, augment=augment)
    with pytest.raises(ConfigError, match=r"the roster agrees on other views of public images \(\[views\]\)"):
        _own_domain(seeing, "day", 0, bundle)
    own = _own_domain(seeing, "day", 0, bundle, views).augmentation
    assert (own.crop, own.public) == (crop, None)


@pytest.mark.parametrize("views", [{}, {"flip": 0.5}])
def test_a_node_of_numbers_with_a_seed_set_of_bytes(tmp_path, views):
    _, bundle = made(tmp_path)
    members = [{"name": name, "address": f"{name}.example:7443"} for name in ("day", "night")]
    raw = {"federation": "shapes", "rounds": 5, "seedset": bundle.digest, "members": members, "views": views}
    terms = Terms((Term(Charter.read(raw), bundle),))
    if views:
        with pytest.raises(ConfigError, match="normalised numbers, not as bytes"):
            terms.as_numbers()
        return
    (term,) = terms.as_numbers().all
    start, end = bundle.ranges["day"]
    mean, deviation = (torch.tensor(IMAGENET[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = (bundle.samples.inputs[start:end] / 255 - mean) / deviation
    torch.testing.assert_close(term.part("day").inputs, expected, rtol=0, atol=1e-5)
    assert term.seed_set.batch("day", 1, 4).inputs.is_floating_point()
