from __future__ import annotations

from collections import Counter

import pytest

from fedh2l.errors import ConfigError
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.topology import graph, teachers


def roster(size: int, seed: int = 0) -> Roster:
    return Roster(tuple(f"n{i}" for i in range(size)), seed)


def test_full_ring_and_line():
    assert graph(roster(4), "full")["n1"] == ("n0", "n2", "n3")
    assert graph(roster(4), "ring") == {
        "n0": ("n1", "n3"),
        "n1": ("n0", "n2"),
        "n2": ("n1", "n3"),
        "n3": ("n0", "n2"),
    }
    line = graph(roster(4), "line")
    assert (line["n0"], line["n3"]) == (("n1",), ("n2",))
    assert graph(roster(2), "ring") == {"n0": ("n1",), "n1": ("n0",)}


def test_an_edge_list_works_both_ways():
    assert graph(roster(3), [["n0", "n2"], ["n1", "n2"]])["n2"] == ("n0", "n1")


@pytest.mark.parametrize(("size", "degree"), [(4, 3), (6, 2), (8, 3), (64, 5), (10, 9), (64, 60), (100, 97)])
def test_random_regular_graphs(size, degree):
    drawn = graph(roster(size), f"regular-{degree}")
    assert all(len(neighbours) == degree for neighbours in drawn.values())
    assert all(name in drawn[other] for name, neighbours in drawn.items() for other in neighbours)
    reached = {"n0"}
    for _ in range(size):
        reached |= {other for name in reached for other in drawn[name]}
    assert len(reached) == size


def test_a_random_graph_follows_the_seed():
    assert graph(roster(12, 1), "regular-3") == graph(roster(12, 1), "regular-3")
    assert graph(roster(12, 1), "regular-3") != graph(roster(12, 2), "regular-3")


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        ("regular-4", "no graph"),
        ("regular-0", "no graph"),
        ([["n0", "n1"]], "no neighbour"),
        ([["n0", "x"], ["n0", "n1"]], "not a node"),
    ],
)
def test_impossible_topologies_are_refused(topology, reason):
    with pytest.raises(ConfigError, match=reason):
        graph(roster(4), topology)


def test_odd_regular_graphs_do_not_exist():
    with pytest.raises(ConfigError, match="even"):
        graph(roster(5), "regular-3")


@pytest.mark.parametrize("size", [2, 4, 5, 9])
def test_pairs_are_matchings(size):
    partners = Counter()
    for round in range(200):
        heard = teachers(roster(size), "full", "pairs", 0, round)
        paired = {name: other for name, (other,) in ((n, o) for n, o in heard.items() if o)}
        assert all(paired[other] == name for name, other in paired.items())
        assert len(paired) == size - size % 2
        partners.update(paired.items())
    assert len(partners) == size * (size - 1)  # in time everybody meets everybody


def test_pairs_follow_the_edges():
    for round in range(50):
        heard = teachers(roster(6), "ring", "pairs", 0, round)
        edges = graph(roster(6), "ring")
        assert all(set(other) <= set(edges[name]) for name, other in heard.items())


def test_independent_choice_of_peers():
    seen = Counter()
    for round in range(300):
        heard = teachers(roster(6), "full", "independent", 2, round)
        assert all(len(set(others)) == 2 and name not in others for name, others in heard.items())
        assert all(list(others) == sorted(others) for others in heard.values())
        seen.update((name, other) for name, others in heard.items() for other in others)
    assert len(seen) == 30
    assert min(seen.values()) > 80
    assert teachers(roster(4), "full", "independent", 9, 1) == graph(roster(4), "full")
