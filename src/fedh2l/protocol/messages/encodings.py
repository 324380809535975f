"""Encodings of posteriors: float32 as in the paper, or fewer bits. Decoded rows are distributions again.

| encoding | a row over M classes |
| --- | --- |
| float32 | the values, 4·M bytes |
| float16 | the values, 2·M bytes |
| int8 | distance of each logarithm from the largest, in 16ths, up to 255: M bytes |
| int4 | the same in halves, up to 15, two per byte: ⌈M/2⌉ bytes |
| topk-K | the K likeliest classes and their values in float16, 3·K bytes (4·K above 256 classes); the rest is uniform |

In int8 and int4, classes within half a step of the likeliest become equal to it. A row that is not a distribution is
decoded as NaN, which receivers reject. It can come from a network that has diverged, or from an attacker.

All functions work on tensors with any leading dimensions, on any device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedh2l.errors import MessageError

Array = tuple[str, tuple[int, ...]]
"""NumPy type and shape."""

STEPS = {"int8": (1 / 16, 255), "int4": (1 / 2, 15)}
"""Size of a step in logarithms, and the largest code."""
CODES = {"float32": 1, "float16": 2, "int8": 3, "int4": 4, "topk": 5}
"""Number of an encoding in the header."""
PATTERN = r"float32|float16|int8|int4|topk-[1-9][0-9]?"


@dataclass(frozen=True)
class Encoding:
    """One encoding. `kept` is the number of classes in a row of topk, else 0."""

    name: str
    kept: int = 0

    @staticmethod
    @cache
    def of(text: str) -> Encoding:
        """Return the encoding `float32`, `topk-3`, …."""
        if not re.fullmatch(PATTERN, text):
            raise MessageError(
                f"there is no encoding '{text}'; there are float32, float16, int8, int4 and topk-1 to 99"
            )
        name, _, kept = text.partition("-")
        return Encoding(name, int(kept or 0))

    def __str__(self) -> str:
        return f"{self.name}-{self.kept}" if self.kept else self.name

    @property
    def code(self) -> int:
        return CODES[self.name]

    def arrays(self, rows: int, classes: int) -> list[Array]:
        """Return the arrays for this number of rows."""
        if self.name == "topk":
            kept = min(self.kept, classes)
            return [("<u1" if classes <= 256 else "<u2", (rows, kept)), ("<f2", (rows, kept))]
        if self.name == "int4":
            return [("<u1", (rows, (classes + 1) // 2))]
        return [({"float32": "<f4", "float16": "<f2", "int8": "<u1"}[self.name], (rows, classes))]

    def written(self, p: Tensor) -> list[Tensor]:
        """Encode posteriors `(…, rows, classes)` into the shapes of `arrays`."""
        if self.name == "float32":
            return [p.to(torch.float32)]
        if self.name == "float16":
            return [p.to(torch.float16)]
        if self.name == "topk":
            values, classes = torch.topk(p, min(self.kept, p.shape[-1]), -1)
            return [classes, values.to(torch.float16)]
        step, most = STEPS[self.name]
        logarithms = torch.log(p.to(torch.float64))
        below = (logarithms.amax(-1, keepdim=True) - logarithms) / step
        codes = torch.nan_to_num(below, nan=most, posinf=most).round().clamp(0, most).to(torch.uint8)  # NaN: no code 0
        if self.name == "int4":
            codes = F.pad(codes, (0, codes.shape[-1] % 2))
            codes = codes[..., ::2] + 16 * codes[..., 1::2]
        return [codes]

    def read(self, arrays: Sequence[Tensor], classes: int) -> Tensor:
        """Decode posteriors. Rows sum to 1, except in float32, which is not changed."""
        if self.name == "float32":
            return arrays[0]
        if self.name == "float16":
            values = arrays[0].to(torch.float32)
            return _refused((values < 0).any(-1), values / values.sum(-1, keepdim=True))
        if self.name == "topk":
            return _filled(arrays[0].long(), arrays[1].to(torch.float32), classes)
        codes = arrays[0]
        if self.name == "int4":
            codes = torch.stack([codes % 16, codes // 16], -1).flatten(-2)[..., :classes]
        step, _ = STEPS[self.name]
        return _refused((codes != 0).all(-1), torch.softmax(codes.to(torch.float32) * -step, -1))


def _filled(places: Tensor, values: Tensor, classes: int) -> Tensor:
    """Return rows with values at some classes. The other classes share the remaining probability evenly."""
    missing = (1 - values.sum(-1, keepdim=True)).clamp_min(0) / max(classes - places.shape[-1], 1)
    rows = missing.expand(*missing.shape[:-1], classes).scatter(-1, places.clamp(0, classes - 1), values)
    ordered = places.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    wrong = twice | (places >= classes).any(-1) | (values < 0).any(-1)
    return _refused(wrong, rows / rows.sum(-1, keepdim=True))


def _refused(wrong: Tensor, rows: Tensor) -> Tensor:
    """Replace rows that no honest sender writes by NaN, so receivers reject them."""
    return rows.masked_fill(wrong.unsqueeze(-1), torch.nan)


PLAIN = Encoding.of("float32")
