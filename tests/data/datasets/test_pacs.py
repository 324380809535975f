"""PACS: its two protocols, on lists drawn here and on the official ones, and what is said of bad lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedh2l.data import image_cache
from fedh2l.data.datasets.pacs import PACS
from fedh2l.data.domain import SPLITS
from fedh2l.errors import DataError
from pictures import folders


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(image_cache.CACHE, str(tmp_path / "cache"))


@pytest.fixture
def pacs(tmp_path) -> Path:
    """In the layout of the original, with lists as the official ones are: the test list is the whole domain."""
    root = folders(tmp_path / "pacs" / "images", PACS.DOMAINS, PACS.CLASSES, each=20, suffix=".jpg")
    lists = root.parent / "splits"
    lists.mkdir()
    for domain in PACS.DOMAINS:
        lines = [
            f"{path.relative_to(root).as_posix()} {label}"
            for label, name in enumerate(PACS.CLASSES, 1)
            for path in sorted((root / domain / name).iterdir())
        ]
        (lists / f"{domain}_test_kfold.txt").write_text("\n".join(lines) + "\n")
        (lists / f"{domain}_crossval_kfold.txt").write_text("\n".join(lines[::10]) + "\n")
        train = [line for place, line in enumerate(lines) if place % 10]
        (lists / f"{domain}_train_kfold.txt").write_text("\n".join(train) + "\n")
    return root


def test_pacs_says_which_protocol_it_is(pacs):
    dataset = PACS(root=str(pacs), size=32, protocol="paper")
    assert dataset.note == "pacs, 32 × 32 pixels, protocol 'paper'"
    sizes = [[len(getattr(domain, split)) for split in SPLITS] for domain in dataset.domains(0)]
    assert sizes == [[126, 14, 14, 126]] * 4
    sizes = [[len(getattr(domain, split)) for split in SPLITS] for domain in PACS(root=str(pacs), size=32).domains(0)]
    assert sizes == [[91, 14, 14, 21]] * 4


def splits_of(dataset: PACS) -> dict[str, dict[str, set[str]]]:
    """The file names of every split of every domain."""
    found = {}
    for folder in dataset.DOMAINS:
        domain = dataset._list(folder, dataset.CLASSES)
        split = dataset._split(domain, 0)
        assert all(len(set(places)) == len(places) for places in split.values())
        found[folder] = {part: {domain.files[place] for place in places} for part, places in split.items()}
    return found


@pytest.fixture(params=["drawn", "real"])
def any_pacs(request) -> Path:
    """Lists that are drawn here, and the official ones where a user has them."""
    if request.param == "drawn":
        return request.getfixturevalue("pacs")
    if "FEDH2L_PACS" not in os.environ:
        pytest.skip("name the folder of PACS's images in FEDH2L_PACS to check the official lists")
    return Path(os.environ["FEDH2L_PACS"])


@pytest.mark.parametrize("protocol", ["clean", "paper"])
def test_which_splits_are_disjoint(any_pacs, protocol):
    for folder, parts in splits_of(PACS(root=str(any_pacs), protocol=protocol)).items():
        everything = {path.relative_to(any_pacs).as_posix() for path in (any_pacs / folder).glob("*/*")}
        private, public, validation, test = (parts[split] for split in SPLITS)
        assert public.isdisjoint(test)
        assert private.isdisjoint(validation)
        if protocol == "clean":
            assert private.isdisjoint(public | test)
            assert validation.isdisjoint(public | test)
            assert private | public | validation | test == everything
        else:
            assert public | test == everything == private | validation


def change_line(root: Path, line: int, text: str) -> None:
    path = root.parent / "splits" / "cartoon_train_kfold.txt"
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda root: change_line(root, 2, "cartoon/dog/pic_003.jpg 8"),
            r"line 3: '8' is not a label; they are 1 to 7",
        ),
        (lambda root: change_line(root, 2, "cartoon/dog/pic_003.jpg"), r"line 3: '' is not a label"),
        (lambda root: change_line(root, 2, "cartoon/dog/pic_003.jpg 2"), r"has the label elephant, .* folder of dog"),
        (
            lambda root: [(root / "cartoon" / "dog" / f"pic_00{n}.jpg").unlink() for n in range(1, 6)],
            r"cartoon_train_kfold.txt' names 5 files that are not in .*pic_001\.jpg, .*pic_002\.jpg, .*pic_003\.jpg, …",
        ),
        (
            lambda root: (root.parent / "splits" / "photo_crossval_kfold.txt").unlink(),
            r"needs '.*photo_crossval_kfold.txt', which cannot be read",
        ),
    ],
)
def test_bad_lists(pacs, wrong, message):
    wrong(pacs)
    with pytest.raises(DataError, match=message):
        PACS(root=str(pacs), size=16, protocol="paper").domains(0)
