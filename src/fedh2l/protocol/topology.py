"""The communication graph of a federation, and the choice of teachers in each round."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Literal

from fedh2l.errors import ConfigError
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.sampling import draw_block, draw_indices, random_words, shuffled, stream_key

Edges = tuple[tuple[str, str], ...]
Graph = Mapping[str, tuple[str, ...]]
"""The neighbours of each member, in roster order."""

_REGULAR = re.compile(r"regular-([0-9]{1,9})")
_ATTEMPTS = 1000


def check_topology(topology: str | Sequence[Sequence[str]]) -> None:
    """Raise ValueError, as validators do, for a topology that is invalid for every roster."""
    if isinstance(topology, str):
        if topology not in ("full", "ring", "line") and not _REGULAR.fullmatch(topology):
            raise ValueError(
                f"'{topology}' is none of 'full', 'ring', 'line', 'regular-K' (K neighbours each, at random), "
                "or a list of pairs of names"
            )
    elif any(len(edge) != 2 or edge[0] == edge[1] for edge in topology):
        raise ValueError("an edge list is a list of pairs of two different names")


def graph(roster: Roster, topology: str | Sequence[Sequence[str]]) -> Graph:
    """Return the graph of a federation. A random graph is drawn once, from the federation's seed."""
    return _graph(roster, topology if isinstance(topology, str) else tuple((a, b) for a, b in topology))


@functools.lru_cache(maxsize=64)
def _graph(roster: Roster, topology: str | Edges) -> Graph:
    names = roster.names
    if topology == "full":
        return {name: roster.others(name) for name in names}
    if topology in ("ring", "line"):
        edges = list(pairwise(names))
        if topology == "ring" and len(names) > 2:
            edges.append((names[-1], names[0]))
    elif isinstance(topology, str):
        edges = _random_regular(roster, int(topology.removeprefix("regular-")))
    else:
        unknown = sorted({name for edge in topology for name in edge} - set(names))
        if unknown:
            raise ConfigError(f"method.topology: '{unknown[0]}' is not a node; the nodes are {', '.join(names)}")
        edges = list(topology)
    neighbours: dict[str, set[str]] = {name: set() for name in names}
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    alone = [name for name in names if not neighbours[name]]
    if alone:
        raise ConfigError(f"method.topology: node '{alone[0]}' has no neighbour; connect it to at least one node")
    return {name: tuple(other for other in names if other in neighbours[name]) for name in names}


def _random_regular(roster: Roster, degree: int) -> list[tuple[str, str]]:
    """Return the edges of a connected random graph in which each node has `degree` neighbours.

    Stubs are paired at random. Pairs that repeat an edge or join a node to itself are paired again. The graph is drawn
    again if pairing gets stuck or if the graph is not connected (Steger & Wormald, 1999).
    """
    size = len(roster.names)
    if not 1 <= degree < size or degree * size % 2:
        raise ConfigError(
            f"method.topology: no graph of {size} nodes has {degree} neighbours each; K must be below {size}, and "
            f"K × {size} even"
        )
    dense = degree > (size - 1) / 2  # then the missing edges are easier to draw
    for attempt in range(_ATTEMPTS):
        edges = _pair_stubs(roster, size - 1 - degree if dense else degree, attempt)
        if edges is not None and dense:
            edges = sorted(set(combinations(roster.names, 2)) - {e for a, b in edges for e in ((a, b), (b, a))})
        if edges is not None and _connected(roster.names, edges):
            return edges
    raise ConfigError(f"method.topology: found no connected graph of {size} nodes with {degree} neighbours each")


def _pair_stubs(roster: Roster, degree: int, attempt: int) -> list[tuple[str, str]] | None:
    stubs = [name for name in roster.names for _ in range(degree)]
    edges: set[tuple[str, str]] = set()
    trial = 0
    while stubs:
        stubs = shuffled(stubs, "topology", roster.seed, str(attempt), trial)
        trial += 1
        left: list[str] = []
        for a, b in zip(stubs[::2], stubs[1::2], strict=True):
            if a == b or (a, b) in edges or (b, a) in edges:
                left += [a, b]
            else:
                edges.add((a, b))
        if len(left) == len(stubs) and trial > degree + 10:
            return None
        stubs = left
    return sorted(edges)


def _connected(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> bool:
    neighbours: dict[str, set[str]] = {name: set() for name in names}
    for a, b in edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    reached, todo = {names[0]}, [names[0]]
    while todo:
        new = neighbours[todo.pop()] - reached
        reached |= new
        todo += new
    return len(reached) == len(names)


def teachers(
    roster: Roster,
    topology: str | Sequence[Sequence[str]],
    pairing: Literal["independent", "pairs"],
    peers_per_round: int,
    round: int,
) -> Graph:
    """Return the teachers of each member in a round, in roster order.

    `independent`: each member draws `peers_per_round` of its neighbours, or uses all of them if it is 0. `pairs`: a
    random matching along the graph's edges. Partners teach each other, and a member without a partner has no teacher.
    """
    everyone = graph(roster, topology)
    if pairing == "pairs":
        return _matching(roster, everyone, round)
    if peers_per_round == 0:
        return everyone
    picked = _picks(roster, everyone, peers_per_round, round)
    return {name: tuple(everyone[name][i] for i in sorted(drawn)) for name, drawn in picked.items()}


def _picks(roster: Roster, everyone: Graph, count: int, round: int) -> dict[str, list[int]]:
    """Return the positions of each member's teachers among its neighbours."""
    sizes = [len(neighbours) for neighbours in everyone.values()]
    if min(sizes) > count:  # one draw for all, which is fast for a thousand members
        keys = [stream_key("peers", roster.seed, name, round) for name in everyone]
        return dict(zip(everyone, draw_block(sizes, count, keys).tolist(), strict=True))
    return {
        name: draw_indices(size, count, "peers", roster.seed, name, round)
        for name, size in zip(everyone, sizes, strict=True)
    }


def _matching(roster: Roster, everyone: Graph, round: int) -> Graph:
    """Return a random matching. In random order, members choose a random neighbour that has no partner."""
    partner: dict[str, str] = {}
    picks = random_words(len(roster.names), "peers", roster.seed, "", round).tolist()
    for name, word in zip(shuffled(roster.names, "pairs", roster.seed, "", round), picks, strict=True):
        free = [other for other in everyone[name] if other not in partner]
        if name not in partner and free:
            other = free[word * len(free) >> 64]
            partner[name], partner[other] = other, name
    return {name: (partner[name],) if name in partner else () for name in roster.names}
