"""The public seed set of a real federation: one file that every member holds, and the parts that it is made of.

Each member gives a part: samples that it says are public. The founder merges them into a bundle, whose digest all
members agree on before the first round, so that everybody knows what everybody's answers are about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from fedh2l.checkpoints import write_atomically
from fedh2l.domain import UNKNOWN, Samples
from fedh2l.errors import DataError
from fedh2l.roster import check_name

PART, BUNDLE = "fedh2l-seedset-part-1", "fedh2l-seedset-1"
METADATA = "fedh2l"


@dataclass(frozen=True)
class Part:
    """What one member gives: samples, and what they are; each has a label, or none has."""

    node: str
    classes: tuple[str, ...]
    schema: Mapping[str, Any]
    """How an input is made; the same for all members."""
    samples: Samples

    def __post_init__(self) -> None:
        check_name(self.node)
        _check(self.samples, self.classes, f"the part of '{self.node}'")

    def save(self, path: Path) -> None:
        """As one safetensors file."""
        about = {"node": self.node, "classes": self.classes, "schema": dict(self.schema)}
        _save(path, PART, about, self.samples)

    @staticmethod
    def load(path: Path) -> Part:
        """What `save` wrote."""
        about, samples = _load(path, PART, "the part of a seed set")
        try:
            return Part(about["node"], tuple(map(str, about["classes"])), dict(about["schema"]), samples)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"'{path}': what it says of itself is damaged") from error


@dataclass(frozen=True)
class Bundle:
    """Everybody's public samples, in ranges, one a member."""

    federation: str
    classes: tuple[str, ...]
    schema: Mapping[str, Any]
    ranges: Mapping[str, tuple[int, int]]
    samples: Samples

    @cached_property
    def content(self) -> str:
        """The SHA-256 of all inputs and labels, in hexadecimal."""
        sha = hashlib.sha256()
        for tensor in (self.samples.inputs, self.samples.labels):
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.contiguous().numpy().tobytes())
        return sha.hexdigest()

    def manifest(self) -> dict[str, Any]:
        """What the bundle is, without the samples themselves."""
        return {
            "federation": self.federation,
            "classes": list(self.classes),
            "schema": dict(self.schema),
            "ranges": {name: list(span) for name, span in self.ranges.items()},
            "sha256": self.content,
        }

    @cached_property
    def digest(self) -> str:
        """What members compare: the SHA-256 of the manifest, and with it of everything."""
        text = json.dumps(self.manifest(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def part(self, node: str) -> Samples:
        """The public samples of a member."""
        start, end = self.ranges[node]
        return Samples(self.samples.inputs[start:end], self.samples.labels[start:end])

    @cached_property
    def labelled(self) -> bool:
        """Whether anybody knows what its samples are."""
        return _labelled(self.samples)

    def counts(self) -> dict[str, list[int]]:
        """For each member, how many samples of each class it gave; of samples without labels, how many there are."""
        size = len(self.classes)
        if not self.labelled:
            return {name: [end - start] for name, (start, end) in self.ranges.items()}
        return {name: torch.bincount(self.part(name).labels, minlength=size).tolist() for name in self.ranges}

    def save(self, path: Path) -> None:
        """As one safetensors file."""
        _save(path, BUNDLE, self.manifest(), self.samples)

    @staticmethod
    def load(path: Path) -> Bundle:
        """What `save` wrote, refused if it is not as it was."""
        about, samples = _load(path, BUNDLE, "a seed set")
        try:
            spans = sorted(about["ranges"].items(), key=lambda item: item[1])
            ranges = {str(name): (int(start), int(end)) for name, (start, end) in spans}
            classes = tuple(map(str, about["classes"]))
            bundle = Bundle(str(about["federation"]), classes, dict(about["schema"]), ranges, samples)
            content = about["sha256"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"'{path}': its manifest is damaged") from error
        if bundle.content != content:
            raise DataError(f"'{path}' was changed after it was merged: its samples are not those of its manifest")
        _check(samples, bundle.classes, f"'{path}'")
        ends = [0, *(end for _, end in ranges.values())]
        if [start for start, _ in ranges.values()] != ends[:-1] or ends[-1] != len(samples):
            raise DataError(f"'{path}': the ranges of its members do not cover its samples one after the other")
        return bundle


def merge(federation: str, parts: Sequence[Part]) -> Bundle:
    """The bundle of some parts, in their order."""
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
            ("schema", dict(first.schema), dict(part.schema)),
            ("shape of inputs", tuple(first.samples.inputs.shape[1:]), tuple(part.samples.inputs.shape[1:])),
            ("type of inputs", first.samples.inputs.dtype, part.samples.inputs.dtype),
            ("labels", *("all" if _labelled(each.samples) else "none" for each in (first, part))),
        ):
            if mine != theirs:
                raise DataError(f"'{first.node}' and '{part.node}' differ in their {what}: {mine} and {theirs}")
        ranges[part.node] = (end, end + len(part.samples))
        end += len(part.samples)
    samples = Samples.concatenate([part.samples for part in parts])
    missing = sorted(set(range(len(first.classes))) - set(samples.labels.tolist()))
    if missing and _labelled(samples):
        raise DataError(f"class '{first.classes[missing[0]]}' is in nobody's part, so nobody could teach it")
    return Bundle(federation, first.classes, first.schema, ranges, samples)


def _check(samples: Samples, classes: Sequence[str], where: str) -> None:
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise DataError(f"{where}: there must be at least two classes, no two of one name")
    if len(samples) == 0:
        raise DataError(f"{where} is empty")
    if _labelled(samples) and (int(samples.labels.min()) < 0 or int(samples.labels.max()) >= len(classes)):
        raise DataError(f"{where} has labels outside 0…{len(classes) - 1}, its {len(classes)} classes")
    if samples.inputs.is_floating_point() and not bool(torch.isfinite(samples.inputs).all()):
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
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            names = set(file.keys())
            if about.get("format") != kind or names != {"inputs", "labels"}:
                raise DataError(f"'{path}' is not {what}")
            inputs, labels = file.get_tensor("inputs"), file.get_tensor("labels")
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if labels.dtype != torch.int64 or labels.dim() != 1 or len(inputs) != len(labels):
        raise DataError(f"'{path}': it should hold one label for each input")
    return about, Samples(inputs, labels)
