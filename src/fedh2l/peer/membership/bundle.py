"""The public seed set of a federation, and the parts that it is merged from.

Each member contributes a part: samples that it declares public. The founder merges the parts into one file, the bundle.
All members agree on its digest before the first round, so posteriors of all members refer to the same samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from fedh2l.data.domain import UNKNOWN, Samples
from fedh2l.data.pixels import Pixels
from fedh2l.errors import DataError, shown
from fedh2l.files import METADATA, UnreadableError, read_tensors, write_atomically
from fedh2l.peer.membership import records
from fedh2l.peer.membership.shares import is_hash
from fedh2l.protocol.roster import check_name

MOST_MEMBERS, MOST_CLASSES = 1000, 1000
"""Largest numbers of members and of classes. A peer compares each member with each other one."""
PART, BUNDLE = "fedh2l-seedset-part-1", "fedh2l-seedset-1"


@dataclass(frozen=True)
class Part:
    """Public samples of one member. Either all of them have labels or none."""

    node: str
    classes: tuple[str, ...]
    schema: Mapping[str, Any]
    """Preprocessing of the inputs. It is the same for all members."""
    samples: Samples
    commitment: str = ""
    """Commitment to this member's share of the seed (`shares.py`). Empty in a rehearsal, which has no shares."""

    def __post_init__(self) -> None:
        check_name(self.node)
        raw = self.schema.get("kind") == records.KIND
        _check(self.samples, self.classes, f"the part of '{self.node}'", finite=not raw)
        if raw:
            records.check_raw(self.samples, self.schema)

    def save(self, path: Path) -> None:
        """Write the part to a safetensors file."""
        about = {
            "node": self.node, "classes": self.classes, "schema": dict(self.schema), "commitment": self.commitment,
        }  # fmt: skip
        _save(path, PART, about, self.samples)

    @staticmethod
    def load(path: Path) -> Part:
        """Read a part from a safetensors file."""
        about, samples = _load(path, PART, "the part of a seed set")
        try:
            node, commitment = _text(about["node"]), about["commitment"]
            if commitment != "" and not is_hash(commitment):
                raise ValueError("its commitment is no hash")
            return Part(node, _classes(about), dict(about["schema"]), samples, commitment)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"'{path}': its metadata is damaged ({shown(error, 80)})") from error


@dataclass(frozen=True)
class Bundle:
    """Public samples of all members, with one range of samples per member."""

    federation: str
    classes: tuple[str, ...]
    schema: Mapping[str, Any]
    ranges: Mapping[str, tuple[int, int]]
    samples: Samples
    commitments: Mapping[str, str] = field(default_factory=dict)
    """Commitment of each member to its share of the seed."""

    @cached_property
    def content(self) -> str:
        """SHA-256 of all inputs and labels, in hexadecimal."""
        sha = hashlib.sha256()
        for tensor in (self.samples.inputs, self.samples.labels):
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().numpy().tobytes())
        return sha.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """Return everything in the bundle except the samples, which are represented by their hash."""
        return {
            "federation": self.federation,
            "classes": list(self.classes),
            "schema": dict(self.schema),
            "ranges": {name: list(span) for name, span in self.ranges.items()},
            "commitments": dict(self.commitments),
            "sha256": self.content,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest, which covers the samples too. Members compare this value."""
        text = json.dumps(self.manifest(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def part(self, node: str) -> Samples:
        """Return the public samples of a member."""
        start, end = self.ranges[node]
        return Samples(self.samples.inputs[start:end], self.samples.labels[start:end])

    @cached_property
    def labelled(self) -> bool:
        """Whether the samples have labels."""
        return _labelled(self.samples)

    def counts(self) -> dict[str, list[int]]:
        """Return the number of samples per class for each member, or their total number without labels."""
        size = len(self.classes)
        if not self.labelled:
            return {name: [end - start] for name, (start, end) in self.ranges.items()}
        return {name: torch.bincount(self.part(name).labels, minlength=size).tolist() for name in self.ranges}

    def save(self, path: Path) -> None:
        """Write the bundle to a safetensors file."""
        _save(path, BUNDLE, self.manifest(), self.samples)

    @staticmethod
    def load(path: Path) -> Bundle:
        """Read a bundle from a safetensors file. Raise `DataError` if it was changed."""
        about, samples = _load(path, BUNDLE, "a seed set")
        try:
            spans = sorted(about["ranges"].items(), key=lambda item: list(map(int, item[1])))
            ranges = {_text(name): (int(start), int(end)) for name, (start, end) in spans}
            commitments = dict(about["commitments"])
            if not all(map(is_hash, commitments.values())):
                raise ValueError("a commitment is no hash")
            bundle = Bundle(
                _text(about["federation"]), _classes(about), dict(about["schema"]), ranges, samples, commitments
            )
            content = about["sha256"]
            records.in_words(bundle.schema)  # raises if the schema cannot be described later
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"'{path}': its manifest is damaged ({shown(error, 80)})") from error
        if bundle.content != content:
            raise DataError(f"'{path}' was changed after it was merged: its samples are not those of its manifest")
        _check(samples, bundle.classes, f"'{path}'")
        ends = [0, *(end for _, end in ranges.values())]
        if [start for start, _ in ranges.values()] != ends[:-1] or ends[-1] != len(samples):
            raise DataError(f"'{path}': the ranges of its members do not cover its samples one after the other")
        return bundle


def merge(federation: str, parts: Sequence[Part], like: Mapping[str, Any] | None = None) -> Bundle:
    """Merge parts into a bundle, in their order.

    `like` is the schema of an earlier seed set. If given, its scale of records is kept.
    """
    if len(parts) < 2:
        raise DataError("a seed set has the parts of at least two members")
    first = parts[0]
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for part in parts:
        if part.node in ranges:
            raise DataError(f"there are two parts of '{part.node}'")
        for what, mine, theirs in (
            ("classes", list(first.classes), list(part.classes)),
            ("schema", records.comparable(first.schema), records.comparable(part.schema)),
            ("shape of inputs", tuple(first.samples.inputs.shape[1:]), tuple(part.samples.inputs.shape[1:])),
            ("type of inputs", first.samples.inputs.dtype, part.samples.inputs.dtype),
            ("labels", *("all" if _labelled(each.samples) else "none" for each in (first, part))),
        ):
            if mine != theirs:
                raise DataError(f"'{first.node}' and '{part.node}' differ in their {what}: {mine} and {theirs}")
        ranges[part.node] = (end, end + len(part.samples))
        end += len(part.samples)
    schema, each = dict(first.schema), [part.samples for part in parts]
    if first.schema.get("kind") == records.KIND:
        schema, each = records.on_one_scale([(part.samples, part.schema) for part in parts], like)
    samples = Samples.concatenate(each)
    missing = sorted(set(range(len(first.classes))) - set(samples.labels.tolist()))
    if missing and _labelled(samples):
        raise DataError(f"class '{first.classes[missing[0]]}' is in no member's part, so no member can teach it")
    commitments = {part.node: part.commitment for part in parts if part.commitment}
    if commitments and len(commitments) < len(parts):
        without = next(part.node for part in parts if not part.commitment)
        raise DataError(f"the part of '{without}' has no commitment to a share of the seed, and others have one")
    return Bundle(federation, first.classes, schema, ranges, samples, commitments)


def _check(samples: Samples, classes: Sequence[str], where: str, finite: bool = True) -> None:
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise DataError(f"{where}: there must be at least two classes, no two of one name")
    if len(samples) == 0:
        raise DataError(f"{where} is empty")
    if _labelled(samples) and (int(samples.labels.min()) < 0 or int(samples.labels.max()) >= len(classes)):
        raise DataError(f"{where} has labels outside 0…{len(classes) - 1}, its {len(classes)} classes")
    if finite and samples.inputs.is_floating_point() and not bool(torch.isfinite(samples.inputs).all()):
        raise DataError(f"{where} contains NaN or infinite inputs")


def _labelled(samples: Samples) -> bool:
    return not bool((samples.labels == UNKNOWN).all())


def _save(path: Path, kind: str, about: Mapping[str, Any], samples: Samples) -> None:
    tensors = {"inputs": samples.inputs.contiguous(), "labels": samples.labels.contiguous()}
    data = save_tensors(tensors, metadata={METADATA: json.dumps({"format": kind, **about}, sort_keys=True)})
    try:
        write_atomically(path, data)
    except OSError as error:
        raise DataError(f"cannot write '{path}': {error.strerror}") from error


def _load(path: Path, kind: str, what: str) -> tuple[dict[str, Any], Samples]:
    try:
        about, tensors = read_tensors(path)
    except UnreadableError as error:
        raise DataError(f"cannot read '{path}': {shown(error)}") from error
    if about.get("format") != kind or set(tensors) != {"inputs", "labels"}:
        raise DataError(f"'{path}' is not {what}")
    for key, most in (("classes", MOST_CLASSES), ("ranges", MOST_MEMBERS), ("commitments", MOST_MEMBERS)):
        if isinstance(about.get(key), (list, dict)) and len(about[key]) > most:
            raise DataError(f"'{path}' has {len(about[key]):,} {key}; at most {most:,} are read")
    inputs, labels = tensors["inputs"], tensors["labels"]
    if labels.dtype != torch.int64 or labels.dim() != 1 or inputs.dim() < 2 or len(inputs) != len(labels):
        raise DataError(f"'{path}': it should hold one label for each input")
    try:
        pixels = Pixels.of(about["schema"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"'{path}': its schema is damaged ({shown(error, 80)})") from error
    if inputs.dim() == 4 and {len(pixels.mean), len(pixels.std)} - {1, inputs.shape[1]}:
        raise DataError(f"'{path}': its schema has a mean or deviation for another number of channels")
    return about, Samples(inputs, labels)


def _text(value: Any) -> str:
    """Return the value if it is printable text, else raise `ValueError`."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("a name is not printable text")
    return value


def _classes(about: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(_text, about["classes"]))
