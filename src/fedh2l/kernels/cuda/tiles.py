"""How a convolution is divided among the threads and the shared memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil, sqrt

ACCUMULATORS = 80
"""Most sums that a thread keeps in registers."""
TILE = 42
"""Most outputs per thread. With more, there are too few threads."""
THREADS = 320
"""Most threads in a block with several samples. Many small blocks are faster than few large ones."""
RESIDENT = 224 * 1024
"""Shared memory of a multiprocessor in bytes, for all its blocks."""


@dataclass(frozen=True)
class Shape:
    """Shape of a convolution with stride 1, named as in `convolution.cu`."""

    C: int
    H: int
    W: int
    O: int  # noqa: E741
    KH: int
    KW: int
    PH: int
    PW: int

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of the output."""
        return self.H + 2 * self.PH - self.KH + 1, self.W + 2 * self.PW - self.KW + 1

    def constants(self) -> dict[str, int]:
        """Return all constants for the compiler."""
        return asdict(self) | dict(zip(("HO", "WO"), self.size, strict=True))

    def backward(self) -> Shape:
        """Return the shape of the convolution that computes the gradient for the input."""
        return Shape(self.O, *self.size, self.C, self.KH, self.KW, self.KH - 1 - self.PH, self.KW - 1 - self.PW)


@dataclass(frozen=True)
class Tiles:
    """Tiling of `correlate`: pixels and filters per thread, samples and threads per block, channels per step."""

    PX: int
    OT: int
    S: int
    T: int
    CC: int
    shared: int
    """Shared memory in bytes."""


def _tilings(shape: Shape, rows: int, item: int, limit: int) -> Iterator[Tiles]:
    pixels = shape.size[0] * shape.size[1]
    plane = (shape.H + 2 * shape.PH) * (shape.W + 2 * shape.PW)
    for groups in range(1, shape.O + 1):
        filters = ceil(shape.O / groups)
        if filters > 16 or (groups > 1 and filters == ceil(shape.O / (groups - 1))):
            continue
        for per_thread in (1, 2, 3, 4, 5, 7, 8):
            for samples in range(1, min(rows, 8) + 1):
                threads = ceil(samples * pixels / per_thread / 32) * 32
                channel = item * (shape.KH * shape.KW * ceil(filters / 4) * 4 + samples * plane)  # bytes per channel
                if channel > limit or threads > (THREADS if samples > 1 else 1024):
                    continue
                if per_thread * filters * item // 4 <= TILE:
                    pieces = ceil(shape.C * channel / min(limit, RESIDENT // 3)) if channel < RESIDENT // 3 else shape.C
                    at_a_time = ceil(shape.C / pieces)
                    yield Tiles(per_thread, filters, samples, threads, at_a_time, at_a_time * channel)


def _cost(shape: Shape, tiles: Tiles, nets: int, rows: int, processors: int) -> float:
    """Estimate the cycles. A multiprocessor issues four instructions per cycle, one of them to shared memory.

    Few blocks take as long as one block. Many blocks take as long as the busiest unit. Factors are fitted to an H200.
    """
    taps = shape.C * shape.KH * shape.KW
    loads, products = tiles.PX + ceil(tiles.OT / 4), tiles.PX * tiles.OT
    blocks = nets * ceil(rows / tiles.S) * ceil(shape.O / tiles.OT)
    warps = tiles.T // 32
    filled = tiles.shared / 4 / tiles.T * ceil(shape.C / tiles.CC)  # values that each thread copies to shared memory
    alone = 2.5 * taps * (loads + products) + 100 * filled + 3000
    resident = warps * min(RESIDENT // tiles.shared, 64 // warps)
    waiting = sqrt(max(1.0, 24 / resident))  # with few warps, there are cycles without a ready warp
    busy = warps * (taps * max(loads, (loads + products) / 4) + 5 * filled) * waiting
    return max(alone, 1.6 * busy * blocks / processors)


@cache
def plan(shape: Shape, nets: int, rows: int, item: int, processors: int, limit: int) -> Tiles | None:
    """Return the fastest tiling of `correlate`, or None."""
    if min(shape.PH, shape.PW) < 0 or min(shape.size) < 1:
        return None
    found = list(_tilings(shape, rows, item, limit))
    return min(found, key=lambda tiles: _cost(shape, tiles, nets, rows, processors)) if found else None


@dataclass(frozen=True)
class Split:
    """Tiling of `weights`: filters per thread, parts of the rows, threads, shared memory in bytes."""

    OT: int
    PARTS: int
    T: int
    shared: int


@cache
def plan_weights(shape: Shape, item: int, limit: int) -> Split | None:
    """Return a tiling of `weights`, or None."""
    height, width = shape.size
    slots = shape.C * shape.KH + 1
    for groups in range(ceil(shape.O / 8), 0, -1):
        filters = ceil(shape.O / groups)
        if filters * shape.KW * item > ACCUMULATORS * 4 or slots * groups > 512:
            continue
        parts = max(d for d in range(1, height + 1) if height % d == 0 and (d == 1 or slots * groups * d <= 256))
        steps = ceil(width / shape.KW) * shape.KW
        image = shape.C * (shape.H + 2 * shape.PH) * ((steps + shape.KW - 1) | 1)
        above = groups * filters * height * (steps | 1)
        sums = parts * slots * groups * filters * shape.KW if parts > 1 else 0
        shared = item * max(image + ((steps + shape.KW - 1) | 1) + above, sums)
        if shared <= limit:
            return Split(filters, parts, ceil(slots * groups * parts / 32) * 32, shared)
    return None
