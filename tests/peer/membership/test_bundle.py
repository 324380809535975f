"""The seed set of a real federation: what is given is what everybody holds, and nobody can change it unseen."""

from __future__ import annotations

import csv
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedh2l.data.domain import Samples
from fedh2l.errors import ConfigError, DataError
from fedh2l.peer.membership.bundle import Bundle, Part, merge
from fedh2l.peer.membership.public_samples import from_folder, from_list, from_table, image_schema
from members import CLASSES, SCHEMA, part, unlabelled


@pytest.fixture
def bundle() -> Bundle:
    return merge("zoo", [part("b", 4, 1), part("a", 6, 2)])


def test_what_is_merged_is_what_everybody_reads(bundle, tmp_path):
    bundle.save(tmp_path / "seedset.safetensors")
    read = Bundle.load(tmp_path / "seedset.safetensors")
    assert read.digest == bundle.digest
    assert read.ranges == {"b": (0, 4), "a": (4, 10)}
    assert torch.equal(read.part("a").inputs, part("a", 6, 2).samples.inputs)
    assert read.counts() == {"b": [2, 2], "a": [3, 3]}
    assert json.loads(json.dumps(read.manifest())) == bundle.manifest()


def test_equal_bundles_are_equal_files(bundle, tmp_path):
    for name in ("one", "two"):
        merge("zoo", [part("b", 4, 1), part("a", 6, 2)]).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        lambda b: replace(b, federation="other"),
        lambda b: replace(b, classes=("dog", "cat")),
        lambda b: replace(b, schema=image_schema("RGB:4x6")),
        lambda b: replace(b, ranges={"b": (0, 5), "a": (5, 10)}),
        lambda b: replace(b, ranges={"c": (0, 4), "a": (4, 10)}),
        lambda b: replace(b, samples=Samples(b.samples.inputs + 1e-7, b.samples.labels)),
        lambda b: replace(b, samples=Samples(b.samples.inputs, b.samples.labels.flip(0))),
    ],
)
def test_any_difference_is_another_digest(bundle, changed):
    assert changed(bundle).digest != bundle.digest


def test_every_flipped_byte_is_seen(bundle, tmp_path):
    path = tmp_path / "seedset.safetensors"
    bundle.save(path)
    whole = path.read_bytes()
    (head,) = struct.unpack("<Q", whole[:8])
    for place in [*range(0, 8 + head, 7), *range(8 + head, len(whole), 11)]:
        broken = bytearray(whole)
        broken[place] ^= 0x01
        path.write_bytes(bytes(broken))
        try:
            read = Bundle.load(path)
        except DataError:
            continue
        assert read.digest != bundle.digest, place
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError):
        Bundle.load(path)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], "at least two members"),
        ([part("a")], "two parts of 'a'"),
        ([Part("b", ("dog", "cat"), SCHEMA, part("b").samples)], "differ in their classes"),
        ([Part("b", CLASSES, image_schema("L:6x4"), part("b").samples)], "differ in their schema"),
        ([Part("b", CLASSES, SCHEMA, Samples(torch.rand(2, 1, 4, 4), torch.arange(2)))], "differ in their shape"),
        ([Part("b", CLASSES, SCHEMA, Samples(torch.rand(2, 1, 6, 4).double(), torch.arange(2)))], "type of inputs"),
    ],
)
def test_parts_that_do_not_fit(others, why):
    with pytest.raises(DataError, match=why):
        merge("zoo", [part("a"), *others])


def test_a_class_that_nobody_gives():
    only_cats = [replace(part(n), samples=Samples(torch.rand(2, 1, 6, 4), torch.zeros(2).long())) for n in "ab"]
    with pytest.raises(DataError, match="class 'dog' is in no member's part"):
        merge("zoo", only_cats)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (Samples(torch.rand(2, 3), torch.tensor([0, 2])), "labels outside"),
        (Samples(torch.tensor([[float("nan")]]), torch.tensor([0])), "NaN or infinite"),
        (Samples(torch.rand(0, 3), torch.zeros(0).long()), "is empty"),
    ],
)
def test_parts_that_are_none(samples, why):
    with pytest.raises(DataError, match=why):
        Part("a", CLASSES, {}, samples)


@pytest.fixture
def zoo(tmp_path):
    """Real image files, in folders and in a list."""
    draw = np.random.default_rng(0)
    with (tmp_path / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "path", "remark"])
        for name in CLASSES:
            (tmp_path / "zoo" / name).mkdir(parents=True)
            for i in range(3):
                picture = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                picture.save(tmp_path / "zoo" / name / f"{i}.png")
                writer.writerow([name, f"zoo/{name}/{i}.png", "seen"])
    (tmp_path / "zoo" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def test_folders_and_lists_of_images(zoo):
    by_folder, by_list = (
        from_folder(zoo / "zoo", CLASSES, SCHEMA),
        from_list(zoo / "list.csv", CLASSES, SCHEMA),
    )
    assert by_folder.inputs.shape == (6, 1, 6, 4)
    assert torch.equal(by_folder.inputs, by_list.inputs)
    assert by_folder.labels.tolist() == by_list.labels.tolist() == [0, 0, 0, 1, 1, 1]
    with Image.open(zoo / "zoo" / "cat" / "0.png") as picture:
        pixels = np.asarray(picture.convert("L").resize((4, 6)))  # bytes, which are seen otherwise as others are
    assert np.array_equal(by_folder.inputs[0, 0].numpy(), pixels)
    with pytest.raises(DataError, match="is not named after a class; classes are cat, cow"):
        from_folder(zoo / "zoo", ("cat", "cow"), SCHEMA)
    (zoo / "zoo" / "cat" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match="cannot be read as an image"):
        from_list(zoo / "list.csv", CLASSES, SCHEMA)


TABLE = {"label": "kind", "classes": list(CLASSES), "numeric": ["x", "y"], "categorical": ["who"]}


def test_tables(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("y,x,kind,who\n1,2.5,dog,me\n-3,4e2,cat,?\n?,,dog,you\n")
    schema, samples = from_table(path, TABLE)
    assert schema == {
        "kind": "records", "numeric": ["x", "y"], "categorical": {"who": ["me", "you"]}, "indicators": False,
        "units": {},
    }  # fmt: skip
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert samples.inputs.tolist() == [[2.5, 1.0, 0.0], [400.0, -3.0, nan], [nan, nan, 1.0]]
    assert samples.labels.tolist() == [1, 0, 1]
    for text, why in (
        ("y,kind,who\n1,dog,me\n", "no column 'x'"),
        ("y,x,kind,who\n1,two,dog,me\n", "is not a number"),
        ("y,x,kind,who\n1,2,cow,me\n", "'cow' is not one of cat, dog"),
        ("y,x,kind,who\n1,2\n", "it has 2 cells, where there are 4 columns"),
        ("y,x,kind,who\n", "has no records"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=why):
            from_table(path, TABLE)


def tables(tmp_path, second: str = "x,y,kind,who\n5,1,cat,they\n7,?,dog,me\n", **units: str) -> list[Part]:
    texts = {"a": "x,y,kind,who\n1,1,dog,me\n3,2,cat,you\n", "b": second}
    parts = []
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
        schema, samples = from_table(tmp_path / f"{name}.csv", TABLE, units=units)
        parts.append(Part(name, CLASSES, schema, samples))
    return parts


def test_merged_tables_have_one_scale(tmp_path):
    bundle = merge("zoo", tables(tmp_path, x="kg"))
    assert bundle.schema["numeric"][0] == ["x", 4.0, pytest.approx(5**0.5)]
    assert bundle.schema["categorical"] == [["who", ["me", "they", "you"]]]
    assert bundle.schema["units"] == {"x": "kg"}
    assert bundle.samples.inputs[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert bundle.samples.inputs[3, 1] == 0  # what is missing is the public mean
    assert bundle.samples.inputs[:, 2:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    bundle.save(tmp_path / "seedset.safetensors")
    assert Bundle.load(tmp_path / "seedset.safetensors").digest == bundle.digest
    later = merge("zoo", tables(tmp_path, "x,y,kind,who\n50,1,cat,they\n70,3,dog,nobody\n", x="kg"), bundle.schema)
    assert later.schema == bundle.schema
    assert later.samples.inputs[3, 2:].tolist() == [0, 0, 0]  # a category that the first seed set does not know


def test_tables_with_other_columns_or_units(tmp_path):
    first, second = tables(tmp_path, x="kg")[0], tables(tmp_path, x="lb")[1]
    with pytest.raises(DataError, match=r"'a' and 'b' differ in their schema: .*kg.*lb"):
        merge("zoo", [first, second])
    with pytest.raises(ConfigError, match="--units: 'who' is not one of --columns"):
        tables(tmp_path, who="kg")


def test_without_labels(zoo):
    """Nobody knows what the samples are: no folders of classes, no column; all members alike."""
    known, path, flat = from_folder(zoo / "zoo", CLASSES, SCHEMA), zoo / "t.csv", zoo / "flat"
    path.write_text("path\n" + "".join(f"zoo/{name}/{i}.png\n" for name in CLASSES for i in range(3)))
    flat.mkdir()
    for name in CLASSES:
        for i in range(3):
            (flat / f"{name}{i}.png").write_bytes((zoo / "zoo" / name / f"{i}.png").read_bytes())
    (flat / ".hidden.png").write_bytes(b"not for others")
    found = [from_folder(flat, CLASSES, SCHEMA, False), from_list(path, CLASSES, SCHEMA, False)]
    assert torch.equal(found[0].inputs, found[1].inputs)  # in an order that does not tell the classes
    assert not torch.equal(found[0].inputs, known.inputs)
    assert sorted(row.tolist() for row in found[0].inputs) == sorted(row.tolist() for row in known.inputs)
    assert set(found[0].labels.tolist()) == {-1}
    with pytest.raises(DataError, match="has folders in it"):
        from_folder(zoo / "zoo", CLASSES, SCHEMA, False)
    path.write_text("y,x,who\n1,2.5,me\n")
    _, numbers = from_table(path, TABLE, labelled=False)
    assert numbers.inputs.tolist() == [[2.5, 1.0, 0.0]]
    assert numbers.labels.tolist() == [-1]
    whole = merge("zoo", [unlabelled("a"), unlabelled("b")])
    assert not whole.labelled
    assert whole.counts() == {"a": [4], "b": [4]}
    whole.save(zoo / "whole.safetensors")
    assert Bundle.load(zoo / "whole.safetensors").digest == whole.digest
    with pytest.raises(DataError, match="differ in their labels: all and none"):
        merge("zoo", [part("a"), unlabelled("b")])
    some = replace(part("a").samples, labels=torch.tensor([0, -1, 1, 0]))
    with pytest.raises(DataError, match="labels outside"):
        Part("a", CLASSES, SCHEMA, some)


def test_without_labels_from_the_command_line(cli, zoo):
    common = ("seedset", "part", "--classes", "cat,dog", "--image", "L:4x6", "--unlabelled", "--yes")
    common = (*common, "--folder", "zoo/cat")
    for name in ("a", "b"):
        given = cli(*common, "--name", name)
        assert given.returncode == 0, given.stderr
        assert "without labels" in given.stderr
    assert cli("seedset", "merge", "a.part.safetensors", "b.part.safetensors", "--federation", "zoo").returncode == 0
    assert not Bundle.load(zoo / "seedset.safetensors").labelled


@pytest.mark.parametrize("text", ["L", "L:28", "CMYK:2x2", "L:0x4", "RGB:99999x1"])
def test_schemas_that_are_none(text):
    with pytest.raises(ConfigError, match="MODE:WIDTHxHEIGHT"):
        image_schema(text)


def test_from_the_command_line(cli, zoo):
    common = ("seedset", "part", "--classes", "cat,dog", "--image", "L:4x6")
    refused = cli(*common, "--name", "a", "--folder", "zoo", input="n\n")
    assert refused.returncode == 2
    assert "Are they public?" in refused.stderr
    assert not list(zoo.glob("*.safetensors"))
    given = cli(*common, "--name", "a", "--folder", "zoo", input="y\n")
    assert given.returncode == 0, given.stderr
    assert cli(*common, "--name", "b", "--list", "list.csv", "--yes").returncode == 0
    merged = cli("seedset", "merge", "a.part.safetensors", "b.part.safetensors", "--federation", "zoo")
    assert merged.returncode == 0, merged.stderr
    verified = cli("seedset", "verify", "seedset.safetensors")
    assert verified.stdout == merged.stdout == f"sha256: {Bundle.load(zoo / 'seedset.safetensors').digest}\n"
    assert "name one source" in cli(*common, "--name", "a").stderr
