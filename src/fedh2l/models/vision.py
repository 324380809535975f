"""Living with a torchvision that was built for another torch."""

from __future__ import annotations

import sys
from typing import Any

import torch

OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""What torchvision describes to torch when it is imported, and what its compiled part would have brought."""

_libraries: list[Any] = []  # what they define is gone when they are


def mismatched(error: BaseException) -> bool:
    """Whether an import failed because torchvision's compiled part is for another build of torch."""
    return isinstance(error, RuntimeError) and "operator torchvision::" in str(error)


def declare_missing_operators() -> None:
    """Lets torchvision be imported without its compiled part: models and transforms need none of it."""
    if not _libraries:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name, schema in OPERATORS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _libraries.append(library)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # halves of an import that failed
