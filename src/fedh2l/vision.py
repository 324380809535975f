"""Support for a torchvision that was built for another version of torch."""

from __future__ import annotations

import sys
from typing import Any

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that torchvision's Python part registers, and that its compiled part defines."""

_libraries: list[Any] = []  # kept alive: without it, the operators are removed


def mismatched(error: BaseException) -> bool:
    """Return whether an import failed because torchvision's compiled part does not match torch."""
    return isinstance(error, RuntimeError) and "operator torchvision::" in str(error)


def declare_missing_operators() -> None:
    """Define the operators of torchvision's compiled part, so it can be imported without it.

    Models and transforms do not use these operators.
    """
    import torch

    if not _libraries:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name, schema in OPERATORS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _libraries.append(library)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # parts of a failed import
