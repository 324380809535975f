"""Random streams are addresses: pinned here and in docs/protocol.md, because peers must agree on them for ever."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from fedh2l.data.batches import BLOCK, Batches
from fedh2l.protocol.sampling import (
    draw_block,
    draw_indices,
    node_secret,
    random_words,
    shuffle_block,
    shuffled,
    stream_key,
    torch_seed,
    word_block,
)

VECTORS = ROOT / "docs" / "protocol.md"
ROW = re.compile(r"\| `([\w-]+)` \| `(\w+)` \| `(\w*)` \| (\d+) \| `([0-9a-f]{32})` \| `([0-9a-f]{16})` \|")


def documented():
    return ROW.findall(VECTORS.read_text(encoding="utf-8"))


def test_the_documented_vectors_hold():
    rows = documented()
    assert len(rows) >= 5
    for purpose, seed, node, round, key, word in rows:
        assert f"{stream_key(purpose, seed, node, int(round)):032x}" == key
        assert f"{int(random_words(1, purpose, seed, node, int(round))[0]):016x}" == word


def test_pinned_draws():
    assert draw_indices(100, 8, "public-batch", 0, "M0", 1) == [81, 84, 57, 62, 5, 93, 0, 45]
    assert node_secret(0, "M0") == "64e8efd4a19e9deb98449e2477e057af"
    assert shuffled("abcdef", "split", 0, "M0", 3) == list("caefdb")


def test_draws_are_distinct_and_stable():
    drawn = draw_indices(50, 20, "local-batch", "secret", "a", 4)
    assert len(set(drawn)) == 20
    assert set(drawn) <= set(range(50))
    assert drawn == draw_indices(50, 20, "local-batch", "secret", "a", 4)
    assert drawn[:5] == draw_indices(50, 5, "local-batch", "secret", "a", 4)  # a smaller batch is a prefix


@pytest.mark.parametrize("count", [5, 6, 100])
def test_a_small_population_is_used_whole(count):
    assert draw_indices(5, count, "public-batch", 0, "a", 1) == [0, 1, 2, 3, 4]


def test_every_part_of_an_address_matters():
    base = stream_key("local-batch", 1, "a", 2)
    others = [
        stream_key("public-batch", 1, "a", 2),
        stream_key("local-batch", 2, "a", 2),
        stream_key("local-batch", 1, "b", 2),
        stream_key("local-batch", 1, "a", 3),
        stream_key("local-batch", 1, "a2", 0),  # no way to slide characters from one field to the next
        stream_key("local-batch", 11, "", 2),
    ]
    assert len({base, *others}) == 7


def test_two_nodes_never_share_a_stream():
    streams = [
        tuple(random_words(4, purpose, node_secret(0, node), node, round).tolist())
        for node in ("M0", "M20", "M40")
        for round in range(50)
        for purpose in ("local-batch", "torch-local", "torch-mutual")
    ]
    assert len(set(streams)) == len(streams)
    assert torch_seed("initial-weights", node_secret(0, "M0"), "M0") != torch_seed(
        "initial-weights", node_secret(0, "M20"), "M20"
    )


def test_draws_are_even():
    counts = Counter(i for round in range(4000) for i in draw_indices(10, 3, "peers", 0, "a", round))
    assert all(abs(counts[i] - 1200) < 6 * (4000 * 0.3 * 0.7) ** 0.5 for i in range(10))
    firsts = Counter(shuffled("abc", "split", 0, "", round)[0] for round in range(3000))
    assert all(abs(n - 1000) < 160 for n in firsts.values())


@given(st.lists(st.tuples(st.integers(9, 3000), st.integers(0, 99)), min_size=1, max_size=40), st.integers(1, 8))
def test_blocks_of_draws_are_the_draws_one_by_one(addresses, count):
    keys = [stream_key("local-batch", "secret", "a", round) for _, round in addresses]
    block = draw_block([population for population, _ in addresses], count, keys)
    for row, (population, round) in zip(block.tolist(), addresses, strict=True):
        assert row == draw_indices(population, count, "local-batch", "secret", "a", round)


@pytest.mark.parametrize("population", [1, 2, 3, 4, 5, 64, 501])
def test_blocks_of_shuffles_are_the_shuffles_one_by_one(population):
    keys = [stream_key("digest", "secret", "a", round) for round in range(5)]
    for round, row in enumerate(shuffle_block(population, keys).tolist()):
        assert row == shuffled(range(population), "digest", "secret", "a", round)


def test_a_block_of_whole_populations_is_in_order():
    keys = [stream_key("local-batch", 0, "a", round) for round in range(3)]
    assert draw_block([4, 4, 4], 4, keys).tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(ValueError, match="more than a batch"):
        draw_block([5, 4, 5], 4, keys)
    with pytest.raises(ValueError, match="more than a batch"):
        draw_block([3], 4, keys[:1])


def test_blocks_beyond_what_is_drawn_at_a_time():
    keys = [stream_key("local-batch", 1, "a", round) for round in range(5000)]
    block = draw_block([50] * 5000, 3, keys)
    for round in (0, 4095, 4096, 4999):
        assert block[round].tolist() == draw_indices(50, 3, "local-batch", 1, "a", round)


@pytest.mark.parametrize("count", [1, 5, 63, 64, 200])
def test_words_of_many_addresses_are_those_of_each(count):
    keys = [stream_key("public-views", 3, "M20", round) for round in range(7)]
    block = word_block(keys, count)
    assert block.shape == (7, count)
    assert word_block([], count).shape == (0, count)
    for round, row in enumerate(block):
        assert row.tolist() == random_words(count, "public-views", 3, "M20", round).tolist()
        assert row.tolist() == np.random.Philox(key=keys[round]).random_raw(count).tolist()


@pytest.mark.parametrize(("population", "count"), [(1050, 32), (100, 32), (33, 32), (32, 32), (5, 32), (1, 1)])
def test_batches_of_many_rounds_are_what_one_would_draw(population, count):
    batches = Batches("secret", torch.device("cpu"))
    for round in (1, 2, BLOCK - 1, BLOCK, 5 * BLOCK + 3, 1):  # also back again
        drawn = draw_indices(population, count, "local-batch", "secret", "node", round)
        assert batches.indices(population, count, "local-batch", "node", round).tolist() == drawn
    others = batches.indices(population, count, "local-batch", "other", 1).tolist()
    assert others == draw_indices(population, count, "local-batch", "secret", "other", 1)


def test_threads_draw_the_same():
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda round: random_words(40, "local-batch", "secret", "node", round % 3), range(200)))
    alone = [random_words(40, "local-batch", "secret", "node", round % 3) for round in range(200)]
    assert all((a == b).all() for a, b in zip(drawn, alone, strict=True))
