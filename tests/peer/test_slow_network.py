"""Four machines with a slow network between them that loses packets."""

from __future__ import annotations

import time

import pytest
from test_faults import ROUNDS, SETTINGS, WITHIN, undisturbed  # noqa: F401 - a fixture

from fedh2l.peer.membership.roster_sections import Timing
from network import Netem, NotAllowedError, Tun
from town import NAMES, Town, rehearsal

DELAY, JITTER, LOSS = 0.02, 0.005, 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Netem, Tun], ids=["netem", "tun"])
def test_slow_lines_that_lose_packets(tmp_path, undisturbed, kind):  # noqa: F811
    try:
        network = kind(NAMES, DELAY, JITTER, LOSS)
    except NotAllowedError as why:
        pytest.skip(f"this machine does not allow it: {why}")
    made = Town(
        rehearsal(tmp_path / "town", *SETTINGS, timing=Timing(deadline=10.0), hosts=network.addresses), network.within
    )
    try:
        began = time.monotonic()
        made.start(*NAMES)
        results = made.finish(180)
        seconds = time.monotonic() - began
    finally:
        made.close()
        network.close()
    assert seconds > ROUNDS * DELAY  # every round waits for a packet
    if isinstance(network, Tun):
        assert network.lost > ROUNDS * 12 * LOSS / 2  # at least one packet a signal
    assert all(result["rounds"] == ROUNDS for result in results.values())
    assert all(why.endswith("round is past") for result in results.values() for why in result["peer"]["refused"])
    assert abs(made.accuracy() - undisturbed) <= WITHIN
