"""Addressed randomness: every draw is keyed by purpose, seed, node name and round.

No generator is carried from round to round. Any participant can compute any draw it is entitled to at any time,
so peers agree on public batches without sending indices, a resumed run goes on exactly where it stopped, and the
order in which nodes happen to run changes nothing. `docs/protocol.md` holds the construction with test vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

TAG = "fedh2l-1"
T = TypeVar("T")

PublicPurpose = Literal[
    "public-batch", "topology", "peers", "pairs", "digits", "split", "alignment", "server-batch", "torch-server"
]
"""Drawn from the federation's seed, which every peer holds."""

PrivatePurpose = Literal["initial-weights", "local-batch", "digest", "torch-local", "torch-emit", "torch-mutual"]
"""Drawn from a node's secret, so that nobody else can tell which private samples were in a batch."""

Purpose = PublicPurpose | PrivatePurpose | Literal["node-secret"]


def stream_key(purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> int:
    """The 128-bit Philox key of an address.

    It is the first 16 bytes, little-endian, of SHA-256 over the five fields (tag, purpose, seed, node, round), each
    written as UTF-8 (numbers in decimal) behind its length as four big-endian bytes.
    """
    digest = hashlib.sha256()
    for field in (TAG, purpose, str(seed), node, str(round)):
        data = field.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return int.from_bytes(digest.digest()[:16], "little")


def random_words(count: int, purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> NDArray[np.uint64]:
    """The first `count` 64-bit words of an address's stream (Philox raw output is stable across NumPy versions)."""
    words: NDArray[np.uint64] = np.random.Philox(key=stream_key(purpose, seed, node, round)).random_raw(count)
    return words


def draw_indices(
    population: int, count: int, purpose: Purpose, seed: int | str, node: str = "", round: int = 0
) -> list[int]:
    """`count` distinct indices below `population` by partial Fisher–Yates; all of them, in order, if there are no more.

    The i-th swap partner is i + floor(word_i · (population − i) / 2⁶⁴).
    """
    if count >= population:
        return list(range(population))
    moved: dict[int, int] = {}  # a sparse view of the shuffled array: only what differs from the identity
    drawn = []
    for i, word in enumerate(random_words(count, purpose, seed, node, round).tolist()):
        j = i + (word * (population - i) >> 64)
        drawn.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return drawn


def shuffled(items: Sequence[T], purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> list[T]:
    """All items in a random order."""
    order = list(items)
    for i, word in enumerate(random_words(max(len(order) - 1, 0), purpose, seed, node, round).tolist()):
        j = i + (word * (len(order) - i) >> 64)
        order[i], order[j] = order[j], order[i]
    return order


def torch_seed(purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> int:
    """A seed for torch's own generator, for what draws inside torch (initial weights, dropout)."""
    return int(random_words(1, purpose, seed, node, round)[0] >> np.uint64(1))


def node_secret(seed: int, node: str) -> str:
    """The stand-in, in a simulation, for the secret that a real peer draws from its operating system."""
    return f"{stream_key('node-secret', seed, node):032x}"
