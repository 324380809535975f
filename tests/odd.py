"""Odd files: the ways in which a file can be wrong, for `test_odd_files.py`."""

from __future__ import annotations

import base64
import copy
import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

EVIL = "\x1b]0;owned\x07\x1b[31m[red]x[/red]\r\nFORGED\u2028\u202e\x9b1mü\x7f"
"""Moves the cursor, sets a title and colours, is markup for rich, and begins a line of its own."""
NESTED = ["@300@", "@900@", "@20000@"]
"""Stand for as many lists in each other, which the usual writers cannot write."""


def deepened(text: str) -> str:
    """A text with lists in the places that stand for them."""
    return re.sub('"@([0-9]+)@"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


ODD_VALUES = [
    None, True, 0, -1, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"), float("inf"), -1e308, "", "x", "\x00", EVIL,
    "9" * 5000, "x" * 3000, [], {}, [[]], [None], [EVIL], {EVIL: EVIL}, *NESTED, {"x": NESTED[0]}, [0, 1], ["a", "a"],
    [["a", "b"]], [1e999] * 3,
]  # fmt: skip
ODD_BYTES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\x1b[2J",
    b"\n",
    b"9" * 30,
    b"-1",
    b"{",
    b"]",
    b'"',
    EVIL.encode(),
    b"\x80" * 9,
]


@st.composite
def damaged(draw: Callable[..., Any], data: bytes) -> bytes:
    """Flipped, cut, removed, repeated and inserted bytes."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(changed)))
        kind = draw(st.sampled_from(["flip", "cut", "remove", "repeat", "insert"]))
        span = draw(st.integers(1, 40))
        if kind == "flip" and start < len(changed):
            changed[start] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[start:]
        elif kind == "remove":
            del changed[start : start + span]
        elif kind == "repeat":
            changed[start:start] = changed[start : start + span]
        else:
            changed[start:start] = draw(st.sampled_from(ODD_BYTES))
    return bytes(changed)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a tree."""
    yield here
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*here, key))


@st.composite
def changed(draw: Callable[..., Any], tree: Any) -> Any:
    """Values of another type or size, keys that are missing, and keys that nobody knows."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        if not tree:
            break
        *path, last = draw(st.sampled_from([place for place in places(tree) if place]))
        holder = tree
        for key in path:
            holder = holder[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        value = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
        if kind == "replace":
            holder[last] = value
        elif kind == "remove":
            del holder[last]
        elif isinstance(holder, dict):
            holder[EVIL] = value
        else:
            holder.append(value)
    return tree


def toml(tree: dict[str, Any]) -> str:
    """As TOML, tables inline. A usual writer would refuse some of these values."""
    lines = (f"{json.dumps(key)} = {_written(value)}\n" for key, value in tree.items())
    return deepened("".join(lines)).replace("\x7f", "\\u007f")


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # nan and inf are TOML, too
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file, its metadata as trees."""
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    about = head.get("__metadata__", {})
    return head | {"__metadata__": {key: json.loads(text) for key, text in about.items()}}, data[8 + size :]


def closed(head: Any, body: bytes) -> bytes:
    """A safetensors file of these."""
    head = copy.copy(head)
    about = head.get("__metadata__") if isinstance(head, dict) else None
    if isinstance(about, dict):
        head["__metadata__"] = {key: deepened(json.dumps(value)) for key, value in about.items()}
    text = deepened(json.dumps(head)).encode()
    return struct.pack("<Q", len(text)) + text + body


def der_of(pem: bytes) -> bytes:
    """What a PEM file encodes."""
    return base64.b64decode(b"".join(pem.splitlines()[1:-1]))


def as_pem(der: bytes, like: bytes) -> bytes:
    """A PEM file of the same kind."""
    first, *_, last = like.splitlines()
    return b"\n".join([first, base64.encodebytes(der).strip(), last, b""])
