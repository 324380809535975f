"""How a network computes: precision, micro-batches and kernels."""

from __future__ import annotations

from typing import NamedTuple


class Compute(NamedTuple):
    """Precision and micro-batch size of forward passes, and whether compiled kernels may be used."""

    bf16: bool = False
    rows: int | None = None
    """Rows per pass. None: all."""
    kernels: bool = True

    def exactly(self) -> Compute:
        """Return this without mixed precision and micro-batches."""
        return Compute(kernels=self.kernels)


AS_USUAL = Compute()
