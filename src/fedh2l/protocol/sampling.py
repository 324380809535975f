"""Addressed randomness: every draw is keyed by purpose, seed, node name and round.

There is no generator state between rounds: any participant can compute its draws at any time. Peers agree on public
batches without sending indices. A resumed run continues exactly as before, and the order of nodes makes no difference.
`docs/protocol.md` has the construction with test vectors.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

TAG = "fedh2l-1"
T = TypeVar("T")

PublicPurpose = Literal[
    "public-batch",
    "topology",
    "peers",
    "pairs",
    "digits",
    "split",
    "alignment",
    "server-batch",
    "torch-server",
    "public-views",
]
"""Drawn from the federation's seed, which every peer has."""

PrivatePurpose = Literal[
    "initial-weights", "local-batch", "local-views", "digest", "torch-local", "torch-emit", "torch-mutual"
]
"""Drawn from a node's secret, so that others cannot compute which private samples are in a batch."""

Purpose = PublicPurpose | PrivatePurpose | Literal["node-secret"]


def stream_key(purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> int:
    """Return the 128-bit Philox key of an address.

    The key is the first 16 bytes, little-endian, of SHA-256 over the five fields (tag, purpose, seed, node, round).
    Each field is UTF-8 text, with numbers in decimal, after its length as four big-endian bytes.
    """
    digest = _hashed(TAG, purpose, str(seed), node).copy()  # rounds differ in the last field only
    digest.update(_field(str(round)))
    return int.from_bytes(digest.digest()[:16], "little")


@functools.lru_cache(1 << 16)
def _hashed(*fields: str) -> hashlib._Hash:
    return hashlib.sha256(b"".join(map(_field, fields)))


def _field(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data


def random_words(count: int, purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> NDArray[np.uint64]:
    """Return the first `count` 64-bit words of an address's stream.

    Philox raw output is stable across NumPy versions.
    """
    return _words_of(stream_key(purpose, seed, node, round), count)


def _words_of(key: int, count: int) -> NDArray[np.uint64]:
    generator = _generators.philox
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": np.array([key & _MASK, key >> 64], np.uint64)},
        "buffer": _ZEROS,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    words: NDArray[np.uint64] = generator.random_raw(count)
    return words


class _Generators(threading.local):
    """One generator per thread. Setting it to another key is several times faster than making a new one."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)


_generators = _Generators()
_MASK = 2**64 - 1
_ZEROS = np.zeros(4, np.uint64)


def draw_indices(
    population: int, count: int, purpose: Purpose, seed: int | str, node: str = "", round: int = 0
) -> list[int]:
    """Return `count` distinct indices below `population`, or all in order if there are no more.

    The algorithm is partial Fisher–Yates. The i-th swap partner is i + floor(word_i · (population − i) / 2⁶⁴).
    """
    if count >= population:
        return list(range(population))
    moved: dict[int, int] = {}  # the shuffled array, where it differs from the identity
    drawn = []
    for i, word in enumerate(random_words(count, purpose, seed, node, round).tolist()):
        j = i + (word * (population - i) >> 64)
        drawn.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return drawn


def shuffled(items: Sequence[T], purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> list[T]:
    """Return all items in a random order."""
    order = list(items)
    for i, word in enumerate(random_words(max(len(order) - 1, 0), purpose, seed, node, round).tolist()):
        j = i + (word * (len(order) - i) >> 64)
        order[i], order[j] = order[j], order[i]
    return order


def torch_seed(purpose: Purpose, seed: int | str, node: str = "", round: int = 0) -> int:
    """Return a seed for torch's own generator, for draws inside torch (initial weights, dropout)."""
    return int(random_words(1, purpose, seed, node, round)[0] >> np.uint64(1))


def node_secret(seed: int, node: str) -> str:
    """Return the secret of a node in a simulation. A real peer draws its secret from its operating system."""
    return f"{stream_key('node-secret', seed, node):032x}"


def draw_block(populations: Sequence[int], count: int, keys: Sequence[int]) -> NDArray[np.int64]:
    """Return `draw_indices` for many addresses at once, `(rows, count)`. Row r has indices below `populations[r]`.

    `keys` come from `stream_key`. The result equals that of single draws, but takes much less time.
    """
    sizes = np.asarray(populations, dtype=np.uint64)
    if np.any(sizes < count) or (np.any(sizes == count) and np.any(sizes != count)):
        raise ValueError("every population must hold more than a batch")
    result = np.empty((len(keys), count), dtype=np.int64)
    if len(keys) and np.all(sizes == count):
        result[:] = np.arange(count)
        return result
    for start in range(0, len(keys), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        words = _philox_words(keys[part], count)
        few = count * count < int(sizes[part].max())  # then a search among the moved entries is faster
        result[part] = _sparse_fisher_yates(words, sizes[part]) if few else _fisher_yates(words, sizes[part])
    return result


def shuffle_block(population: int, keys: Sequence[int]) -> NDArray[np.int64]:
    """Return `shuffled(range(population))` for many addresses at once, `(rows, population)`."""
    cards = np.tile(np.arange(population, dtype=np.int32), (len(keys), 1))
    if population > 1:
        _swap(cards, _philox_words(keys, population - 1), np.full(len(keys), population, dtype=np.uint64))
    return cards.astype(np.int64)


def word_block(keys: Sequence[int], count: int) -> NDArray[np.uint64]:
    """Return `random_words` for many addresses at once, given by their keys, `(keys, count)`."""
    if count < _MANY_WORDS:
        return _philox_words(keys, count)
    words = np.empty((len(keys), count), dtype=np.uint64)
    for row, key in zip(words, keys, strict=True):
        row[:] = _words_of(key, count)
    return words


_BLOCK_ROWS = 4096
_MANY_WORDS = 64
"""Words per key from which NumPy's own generator is faster, although it must be set to each key."""
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = NDArray[np.uint64]


def _multiply(a: Words, b: np.uint64) -> tuple[Words, Words]:
    """Return the high and low 64 bits of a product of 64-bit numbers."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b


def _philox_words(keys: Sequence[int], count: int) -> Words:
    """Return the first `count` words of `numpy.random.Philox(key=…)` for each key, `(keys, count)`."""
    blocks = -(-count // 4)
    k0 = np.array([key & _MASK for key in keys], dtype=np.uint64)[:, None]
    k1 = np.array([key >> 64 for key in keys], dtype=np.uint64)[:, None]
    x0 = np.tile(np.arange(1, blocks + 1, dtype=np.uint64), (len(keys), 1))  # NumPy starts to count at 1
    x1, x2, x3 = (np.zeros_like(x0) for _ in range(3))
    with np.errstate(over="ignore"):  # arithmetic is modulo 2⁶⁴
        for turn in range(10):
            w0, w1 = np.uint64(_W0 * turn & _MASK), np.uint64(_W1 * turn & _MASK)
            (high0, low0), (high1, low1) = _multiply(x0, _M0), _multiply(x2, _M1)
            x0, x1, x2, x3 = high1 ^ x1 ^ (k0 + w0), low1, high0 ^ x3 ^ (k1 + w1), low0
    words: Words = np.stack([x0, x1, x2, x3], -1).reshape(len(keys), 4 * blocks)[:, :count]
    return words


def _fisher_yates(words: Words, sizes: Words) -> NDArray[np.int32]:
    cards = np.tile(np.arange(int(sizes.max()), dtype=np.int32), (len(words), 1))
    _swap(cards, words, sizes)
    return cards[:, : words.shape[1]]


def _sparse_fisher_yates(words: Words, sizes: Words) -> NDArray[np.int64]:
    """Draw like `_fisher_yates`, but store only the entries that differ from the identity."""
    count = words.shape[1]
    drawn = np.empty(words.shape, dtype=np.int64)
    places = np.full(words.shape, -1, dtype=np.int64)  # positions of the writes, in order; `values` has the values
    values = np.empty(words.shape, dtype=np.int64)

    def look(where: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
        found = where.copy()
        for step in range(steps):  # the last write to a position counts
            np.copyto(found, values[:, step], where=places[:, step] == where)
        return found

    for i in range(count):
        j = i + _below(words[:, i], sizes - np.uint64(i))
        drawn[:, i] = look(j, i)
        values[:, i] = look(np.full(len(words), i, dtype=np.int64), i)
        places[:, i] = j
    return drawn


def _below(word: Words, left: Words) -> NDArray[np.int64]:
    """Return ⌊word · left / 2⁶⁴⌋, for `left` below 2³²."""
    above = ((word >> _HALF) * left + (((word & _LOW) * left) >> _HALF)) >> _HALF
    return above.astype(np.int64)


def _swap(cards: NDArray[np.int32], words: Words, sizes: Words) -> None:
    """Apply a partial Fisher–Yates shuffle to every row, in place."""
    rows = np.arange(len(cards))
    for i in range(words.shape[1]):
        j = i + _below(words[:, i], sizes - np.uint64(i))
        cards[rows, i], cards[rows, j] = cards[rows, j], cards[rows, i].copy()
