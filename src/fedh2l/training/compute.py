"""Precision and micro-batches of forward passes."""

from __future__ import annotations

from typing import NamedTuple


class Compute(NamedTuple):
    """Precision and micro-batch size of forward passes."""

    bf16: bool = False
    rows: int | None = None
    """Rows per pass. None: all."""


AS_USUAL = Compute()
