"""Rosters and seed sets of very many members or classes are refused at once: work grows with their square."""

from __future__ import annotations

import time

import pytest
import torch

from fedh2l.data.domain import Samples
from fedh2l.errors import ConfigError, DataError
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.peer.membership.roster_file import RosterFile
from members import SCHEMA, raw


@pytest.mark.parametrize("method", [{}, {"name": "fedh2l", "topology": "ring"}])
def test_a_roster_of_very_many_members(method):
    members = [{"name": f"n{place}", "address": f"h{place}:1000"} for place in range(40_000)]
    began = time.monotonic()
    with pytest.raises(ConfigError, match="at most 1,000 members, not 40,000"):
        RosterFile.read(raw(members=members, method=method))
    assert time.monotonic() - began < 1
    assert len(RosterFile.read(raw(members=members[:1000])).names) == 1000


@pytest.mark.parametrize(("classes", "members", "which"), [(3000, 2, "classes"), (2, 3000, "ranges")])
def test_a_seed_set_of_very_many(tmp_path, classes, members, which):
    samples = Samples(torch.zeros(3000, 1, 4, 6, dtype=torch.uint8), torch.arange(3000) % classes)
    each = 3000 // members
    ranges = {f"n{place}": (each * place, each * (place + 1)) for place in range(members)}
    Bundle("zoo", tuple(map(str, range(classes))), SCHEMA, ranges, samples).save(tmp_path / "s")
    with pytest.raises(DataError, match=f"3,000 {which}; at most 1,000"):
        Bundle.load(tmp_path / "s")
