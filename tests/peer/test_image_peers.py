"""Peers with images: folders of their own, seed sets of bytes or of numbers, and views that the roster agrees on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedh2l.data.datasets.image_folder import IMAGENET, ImageFolder
from fedh2l.data.image_cache import CACHE
from fedh2l.data.pixels import Pixels
from fedh2l.errors import ConfigError
from fedh2l.peer.membership.augmentation import AS_THEY_ARE, SharedViews
from fedh2l.peer.membership.bundle import Part, merge
from fedh2l.peer.membership.public_samples import from_folder, image_schema
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.own_data import domain_of
from fedh2l.peer.pki.authority import Authority
from members import join
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
        "nodes.day.model=byte_images:net", "nodes.night.model=byte_images:net",
    ]  # fmt: skip
    options = [*(part for change in changes for part in ("--set", change)), "--rounds", 6, "--json"]
    here, there = (cli(command, *options, "--out", command) for command in ("run", "rehearse"))
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
            domain_of(own, "day", 0, bundle)
        return
    domain = domain_of(own, "day", 0, bundle)
    public = bundle.part("day").inputs
    assert domain.private.inputs.dtype == public.dtype == torch.uint8
    rows = {row.numpy().tobytes() for row in public}
    assert all(row.numpy().tobytes() in rows for row in domain.private.inputs)  # the same files, made the same way
    numbers = replace(bundle, samples=as_numbers(bundle))
    assert domain_of(own, "day", 0, numbers).private.inputs.is_floating_point()
    with pytest.raises(ConfigError, match="holds images as numbers, which are not augmented"):
        domain_of(ImageFolder(root=str(root), size=16, augment="local"), "day", 0, numbers)


def made(tmp_path):
    """A folder, and the seed set that `fedh2l seedset part` would make of it."""
    root = folders(tmp_path / "images", ("day", "night"), CLASSES, each=10)
    about = image_schema("RGB:16x16:imagenet")
    parts = [Part(name, CLASSES, about, from_folder(root / name, CLASSES, about)) for name in ("day", "night")]
    return root, merge("shapes", parts)


def test_a_peer_needs_validation_data_of_its_own(tmp_path):
    """In a run, that of another node would be enough."""
    _, bundle = made(tmp_path)
    few = folders(tmp_path / "few", ("day", "night"), CLASSES, each=4)
    with pytest.raises(ConfigError, match=r"no validation data, .*raise data\.validation"):
        domain_of(ImageFolder(root=str(few), size=16), "day", 0, bundle)
    assert domain_of(ImageFolder(root=str(few), size=16, validation=0.2), "day", 0, bundle).validation.labels.numel()


def as_numbers(bundle):
    return bundle.samples.as_numbers(Pixels.of(bundle.schema))


@pytest.mark.parametrize(("augment", "crop"), [("all", 0.8), ("public", 1)])
def test_views_of_the_roster_are_those_of_the_data(tmp_path, augment, crop):
    root, bundle = made(tmp_path)
    views = SharedViews(crop=0.8, flip=0.5, jitter=0.4)
    assert views.of(bundle).crop == 0.8
    seeing = ImageFolder(root=str(root), size=16, augment=augment, kind="photographs")
    with pytest.raises(ConfigError, match=r"in another way than the \[views\] of the roster"):
        domain_of(seeing, "day", 0, bundle)
    for agreed in (views, views.model_copy(update={"local": True})):
        own = domain_of(seeing, "day", 0, bundle, agreed).augmentation
        assert (own.crop, own.public) == (crop, None)


def test_a_roster_for_images_has_safe_views_of_all_data(invoke, tmp_path, monkeypatch):
    """FedH2L+ needs them from every member, so the roster says so, and a member's file need not."""
    root, bundle = made(tmp_path)
    monkeypatch.chdir(tmp_path)
    founder, members = Authority.found(tmp_path / "authority", "shapes"), []
    for place, name in enumerate(("day", "night")):
        join(founder, tmp_path / name, name, 365, ["127.0.0.1"])
        members.append(f"{name}/node.pem@127.0.0.1:{7001 + place}")
    bundle.save(tmp_path / "seedset.safetensors")

    def init(*options):
        (tmp_path / "roster.toml").unlink(missing_ok=True)
        code, _, said = invoke("roster", "init", *members, "--rounds", 50, "--seed", 3, *options)
        assert code == 0, said
        return RosterFile.load(tmp_path / "roster.toml").views

    safe = init("--method", "fedh2l-plus")
    assert safe == SharedViews(shift=0.1, zoom=0.15, erase=0.3, local=True)
    assert "[views]\nshift = 0.1\nzoom = 0.15\nerase = 0.3\nlocal = true\n" in (tmp_path / "roster.toml").read_text()
    own = domain_of(ImageFolder(root=str(root), size=16), "day", 0, bundle, safe).augmentation
    assert (own.shift, own.zoom, own.erase, own.flip, own.jitter) == (0.1, 0.15, 0.3, 0.0, 0.0)
    simulated = ImageFolder(root=str(root), size=16, augment="all")
    assert domain_of(simulated, "day", 0, bundle, safe).augmentation == own
    assert init("--method", "fedh2l") == AS_THEY_ARE
    for method in ("fedh2l", "fedh2l-plus"):
        photographs = SharedViews(crop=0.8, flip=0.5, jitter=0.4, local=True)
        assert init("--method", method, "--kind", "photographs") == photographs
    (tmp_path / "roster.toml").unlink()
    code, _, said = invoke("roster", "init", *members, "--rounds", 50, "--kind", "photos")
    assert code == 2
    assert "Did you mean 'photographs'" in said


@pytest.mark.parametrize("views", [{}, {"flip": 0.5}])
def test_a_node_of_numbers_with_a_seed_set_of_bytes(tmp_path, views):
    _, bundle = made(tmp_path)
    members = [{"name": name, "address": f"{name}.example:7443"} for name in ("day", "night")]
    raw = {"federation": "shapes", "rounds": 5, "seedset": bundle.digest, "members": members, "views": views}
    terms = RosterHistory((RosterVersion(RosterFile.read(raw), bundle),))
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
