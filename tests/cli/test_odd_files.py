"""Files from outside: whatever is in them, a command ends with a result or a line that says what is wrong."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import resource
import struct
import tomllib
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from fedh2l.errors import FedH2LError
from odd import EVIL, as_pem, changed, closed, damaged, deepened, der_of, opened, toml
from odd_formats import FORMATS, Format, run
from odd_world import make

FEW, MANY = 5, 100


def examples(count: int) -> hypothesis.settings:
    """The same examples in every run."""
    phases = [hypothesis.Phase.generate]
    return hypothesis.settings(
        max_examples=count, derandomize=True, database=None, phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("world")
        patch.setenv("FEDH2L_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "400")
        patch.chdir(folder)
        yield make(folder)


def outcome(world: Path, read: Any) -> tuple[str, str]:
    """What is printed, and the refusal. Anything but an error of the project fails the test."""
    printed, refusal = io.StringIO(), ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            run(read, world) if isinstance(read, str) else read(world)
        except FedH2LError as error:
            refusal = str(error)
    for line in f"{printed.getvalue()}\n{refusal}".split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("FORGED"), line
    return printed.getvalue(), refusal


def with_content(world: Path, found: Format, content: bytes) -> tuple[str, str]:
    """The outcome for other content; the file is put back."""
    path = world / found.file
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        return outcome(world, found.read)
    finally:
        path.write_bytes(before)


def read_tree(kind: str, data: bytes) -> Any:
    if kind == "toml":
        return tomllib.loads(data.decode())
    if kind == "json":
        return json.loads(data)
    if kind == "jsonl":
        return [json.loads(line) for line in data.splitlines()]
    if kind == "csv":
        return list(csv.reader(data.decode().splitlines()))
    return opened(data if kind == "tensors" else data.partition(b"\n")[2])[0]


def written(kind: str, tree: Any, data: bytes) -> bytes:
    if kind == "toml":
        return toml(tree).encode("utf-8", "surrogatepass")
    if kind == "json":
        return deepened(json.dumps(tree)).encode()
    if kind == "jsonl":
        return "".join(deepened(json.dumps(line)) + "\n" for line in tree).encode()
    if kind == "csv":
        text = io.StringIO()
        csv.writer(text).writerows([row if isinstance(row, list) else [row] for row in tree])
        return text.getvalue().encode()
    if kind == "tensors":
        return closed(tree, opened(data)[1])
    return as_checkpoint(closed(tree, opened(data.partition(b"\n")[2])[1]))


def as_checkpoint(body: bytes) -> bytes:
    """With the checksum that belongs to it."""
    return b"fedh2l-checkpoint-1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize("name", FORMATS)
def test_a_sound_file_is_read(world, name):
    found = FORMATS[name]
    data = (world / found.file).read_bytes()
    if found.kind not in ("bytes", "pem"):
        data = written(found.kind, read_tree(found.kind, data), data)
    printed, refusal = with_content(world, found, data)
    assert (printed.count("error"), refusal) == (0, ""), printed


COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


@COUNTS
@pytest.mark.parametrize("name", FORMATS)
def test_changed_bytes(world, name, count):
    found = FORMATS[name]
    data = (world / found.file).read_bytes()

    @examples(count)
    @hypothesis.given(damaged(der_of(data) if found.kind == "pem" else data))
    def check(content: bytes) -> None:
        with_content(world, found, as_pem(content, data) if found.kind == "pem" else content)

    check()


@COUNTS
@pytest.mark.parametrize("name", [name for name, found in FORMATS.items() if found.kind not in ("bytes", "pem")])
def test_changed_values(world, name, count):
    found = FORMATS[name]
    data = (world / found.file).read_bytes()

    @examples(count)
    @hypothesis.given(changed(read_tree(found.kind, data)))
    def check(tree: Any) -> None:
        with_content(world, found, written(found.kind, tree, data))

    check()


NOTHING = {
    "empty": b"",
    "lists": b"[" * 100_000,
    "TOML lists": b"x=" + b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "no text": b"\xff" * 100_000,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
def test_no_content(world, name, content):
    with_content(world, FORMATS[name], content)


def placed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    *before, last = path
    holder = tree
    for key in before:
        holder = holder[key]
    holder[last] = value
    return tree


ABOUT = ("__metadata__", "fedh2l")
ESCAPED = "\\x1b]0;owned\\x07\\x1b[31m[red]x[/red]\\r\\nFORGED"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("seed set", (*ABOUT, "format"), EVIL),
        ("part", (*ABOUT, "node"), "[red]x[/red]"),
        ("roster", ("federation",), EVIL),
        ("roster", ("members", 0, "name"), EVIL),
        ("roster", (EVIL,), 1),
        ("peer config", ("peer", "domain"), EVIL),
        ("run config", ("nodes", 0, "name"), EVIL),
        ("config of a run", ("data", "files"), {EVIL: "north.csv"}),
        ("model", (*ABOUT, "classes"), [EVIL, f"b{EVIL}"]),
        ("model", (*ABOUT, "factory"), EVIL),
        ("evaluated model", (*ABOUT, "classes"), [EVIL, "yes"]),
        ("evaluated model", (*ABOUT, "preprocessing", "kind"), EVIL),
        ("result", ("nodes", 0, "name"), EVIL),
        ("result", ("method",), EVIL),
        ("result of a bench", ("nodes", 0, "name"), EVIL),
        ("ledger", (0, "name"), EVIL),
        ("ledger", (0, "hosts"), [EVIL]),
        ("ledger, revoked", (0, "pin"), EVIL),
        ("audit log", (0, "node"), EVIL),
        ("audit log", (1, "kind"), EVIL),
        ("witness", (0, "hash"), EVIL),
        ("table", (3, 2), EVIL),
        ("list of images", (1, 0), EVIL),
        ("note on decoded images", ("folder",), EVIL),
    ],
)
def test_text_is_escaped(world, name, path, value):
    found = FORMATS[name]
    data = (world / found.file).read_bytes()
    tree = placed(read_tree(found.kind, data), path, value)
    printed, refusal = with_content(world, found, written(found.kind, tree, data))
    text = "".join((printed + refusal).split("\n"))
    quiet = name in ("ledger, revoked", "result of a bench", "witness") or path[-1] in ("format", "pin")
    assert quiet or ESCAPED in text or "[red]x[/red]" in text, printed + refusal


NPY = b"\x93NUMPY\x01\x00\x76\x00{'descr': '%s', 'fortran_order': False, 'shape': (4398046511104,), }"
GIANT = 2**42


def png(width: int, height: int) -> bytes:
    """An image that says how large it is, and holds little more."""
    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", about), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


SIZES = {
    "seed set": closed({"inputs": {"dtype": "U8", "shape": [GIANT, 1], "data_offsets": [0, GIANT]}}, b""),
    "model": struct.pack("<Q", GIANT) + b"{}",
    "weights": closed({"w": {"dtype": "F32", "shape": [2**21, 2**21], "data_offsets": [0, 16]}}, bytes(16)),
    "checkpoint": as_checkpoint(closed({"w": {"dtype": "U8", "shape": [GIANT], "data_offsets": [0, GIANT]}}, b"")),
    "input": (NPY % b"<f4").ljust(127) + b"\n",
    "decoded images": (NPY % b"|u1").ljust(127) + b"\n",
    "digits": b"\x00\x00\x08\x04" + b"\x00\x01\x00\x00" * 4,
    "labels of digits": gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05", 1) + 64 * gzip.compress(bytes(2**25), 1),
    "image": png(60_000, 60_000),
    "public image": png(60_000, 60_000),
}
"""Files that say that they are larger than any memory, or are so when they are unpacked."""


@pytest.mark.parametrize("name", SIZES)
def test_a_declared_size_takes_no_memory(world, name):
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, most))
    try:
        printed, refusal = with_content(world, FORMATS[name], SIZES[name])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
    fallback = name in ("decoded images", "checkpoint")  # images are decoded again, and a run starts again
    assert fallback or "error: " in printed or refusal
