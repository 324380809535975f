"""What can go wrong between peers, one thing at a time: all of them end, as good as if nothing had."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import Enum, auto

import pytest

from conftest import train
from faulty import AT, FAULT, SLOW
from town import NAMES, Town

ROUNDS = 400
WITHIN = 2.0
"""Points of accuracy that a fault may cost, or bring."""
SETTINGS = [
    f"run.rounds={ROUNDS}",
    "run.eval_every=20",
    "run.checkpoint_every=50",
    "run.batch_size=32",
    "data.per_class=100",
    *(f"nodes.{place}.model=faulty:net" for place in range(4)),
    *(f"nodes.{place}.model_args={{}}" for place in range(4)),
]


class Fault(Enum):
    """What goes wrong."""

    NONE = auto()
    KILLED_BEFORE_SENDING = auto()
    KILLED_AFTER_SENDING_TO_HALF = auto()
    KILLED_WRITING_A_CHECKPOINT = auto()
    STOPPED_PAST_THE_DEADLINE = auto()
    CUT_IN_ONE_DIRECTION = auto()
    CUT_INTO_HALVES = auto()
    DELAYED = auto()
    DUPLICATED = auto()
    REORDERED = auto()
    TRUNCATED = auto()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> float:
    """The accuracy of the last models when nothing goes wrong; a rehearsal ends with the same ones, bit for bit."""
    from fedh2l.experiment.config import load_config

    config, _ = load_config(None, [*SETTINGS, "run.selection=last", "run.device=cpu", "run.engine=local"])
    return train(config.experiment(), tmp_path_factory.mktemp("undisturbed"))[2]["average"]["ACC"]


def killed(how: str) -> Callable[[Town], None]:
    def play(town: Town) -> None:
        others = [name for name in NAMES if name != "M20"]
        town.start(*others, **{SLOW: "0.01"})  # so that there is time for M20 to come back
        town.start("M20", **{SLOW: "0.01", FAULT: how})
        town.until(lambda: town.dead("M20"))
        assert town.processes["M20"].returncode == -signal.SIGKILL
        assert AT - 20 <= town.round("M20") <= AT + 50
        town.start("M20", **{SLOW: "0.01"})

    return play


def misbehaving(how: str) -> Callable[[Town], None]:
    def play(town: Town) -> None:
        town.start(*(name for name in NAMES if name != "M20"))
        town.start("M20", **{FAULT: how})

    return play


def on_the_way(town: Town) -> None:
    town.start(*NAMES)
    town.until(lambda: all(town.round(name) >= AT for name in NAMES))


def stopped(town: Town) -> None:
    on_the_way(town)
    town.processes["M20"].send_signal(signal.SIGSTOP)
    town.until(lambda: all("'M20' did not answer in round" in town.log(name) for name in NAMES if name != "M20"))
    time.sleep(1)
    town.processes["M20"].send_signal(signal.SIGCONT)


def cut(*groups: tuple[tuple[str, ...], tuple[str, ...]]) -> Callable[[Town], None]:
    """Nobody in the first of a pair reaches anybody in the second, for a while."""

    def play(town: Town) -> None:
        links = town.link()
        on_the_way(town)
        severed = [links[dialler, dialled] for here, there in groups for dialler in here for dialled in there]
        town.relay.cut(*severed)
        missed = [(dialler, dialled) for here, there in groups for dialler in here for dialled in there]
        town.until(lambda: all(f"'{silent}' did not answer in round" in town.log(name) for silent, name in missed))
        town.relay.heal(*severed)

    return play


def delayed(town: Town) -> None:
    """Longer than anybody waits."""
    links = town.link()
    on_the_way(town)
    slow = [link for pair, link in links.items() if "M20" in pair]
    for link in slow:
        link.delay = 1.5
    town.until(lambda: "'M20' did not answer in round" in town.log("M0"))
    time.sleep(1)
    for link in slow:
        link.delay = 0.0


PLAYS: dict[Fault, Callable[[Town], None]] = {
    Fault.NONE: lambda town: town.start(*NAMES),
    Fault.KILLED_BEFORE_SENDING: killed("before sending"),
    Fault.KILLED_AFTER_SENDING_TO_HALF: killed("after half"),
    Fault.KILLED_WRITING_A_CHECKPOINT: killed("writing a checkpoint"),
    Fault.STOPPED_PAST_THE_DEADLINE: stopped,
    Fault.CUT_IN_ONE_DIRECTION: cut((("M20",), ("M0", "M40", "M60"))),
    Fault.CUT_INTO_HALVES: cut((NAMES[:2], NAMES[2:]), (NAMES[2:], NAMES[:2])),
    Fault.DELAYED: delayed,
    Fault.DUPLICATED: misbehaving("duplicated"),
    Fault.REORDERED: misbehaving("reordered"),
    Fault.TRUNCATED: misbehaving("truncated"),
}
PATIENT = (Fault.NONE, Fault.DUPLICATED)
"""In which nobody need be late, however slow the machine is."""
BACK = "'M20' is back in round"
SHOWS: dict[Fault, tuple[str, ...]] = {
    Fault.KILLED_BEFORE_SENDING: ("M20: goes on after round 100", "M0: 'M20' is lost in round", f"M0: {BACK}"),
    Fault.KILLED_AFTER_SENDING_TO_HALF: ("M20: goes on after round 100", f"M0: {BACK}"),
    Fault.KILLED_WRITING_A_CHECKPOINT: ("M20: goes on after round 100", f"M60: {BACK}"),
    Fault.STOPPED_PAST_THE_DEADLINE: ("M20: goes on from there", f"M40: {BACK}"),
    Fault.CUT_IN_ONE_DIRECTION: ("M0: 'M20' did not answer", f"M0: {BACK}"),
    Fault.CUT_INTO_HALVES: ("M40: 'M0' did not answer", "M0: 'M40' is back in round", "M60: 'M20' is back in round"),
    Fault.DELAYED: ("M0: 'M20' did not answer", f"M0: {BACK}"),
    Fault.REORDERED: ("M20: holds back round 120",),
    Fault.DUPLICATED: ("M0: dropped a signal of 'M20'",),
    Fault.TRUNCATED: ("M40: dropped a signal of 'M20'", f"M40: {BACK}"),
}
"""In whose log it shows, and how."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_all_end_well(town, undisturbed, fault):
    made = town(*SETTINGS, deadline=60.0 if fault in PATIENT else 1.0, linger=30.0)
    PLAYS[fault](made)
    results = made.finish(180)  # also that no checkpoint is damaged, and that every record is whole
    assert all(result["rounds"] == ROUNDS for result in results.values())
    for shown in SHOWS.get(fault, ()):
        name, _, words = shown.partition(": ")
        assert words in made.log(name), shown
    if fault is Fault.NONE:
        assert all(result["peer"]["skipped"] == 0 and result["peer"]["refused"] == {} for result in results.values())
    found = made.accuracy()
    assert abs(found - undisturbed) <= (0.0 if fault is Fault.NONE else WITHIN)


@pytest.mark.slow
def test_a_slow_peer_that_was_away_is_waited_for_again(town):
    """It is slower than the others, who did not wait for it; they do once it is heard, if too late."""
    made = town(*SETTINGS, deadline=2.0, linger=30.0)
    made.start(*NAMES, **{SLOW: "0.02"})
    made.until(lambda: made.round("M20") >= 60)
    made.kill("M20")
    made.until(lambda: "'M20' is lost" in made.log("M0"))
    made.start("M20", **{SLOW: "0.05"})
    results = made.finish(180)
    assert BACK in made.log("M0")
    assert made.log("M20").count("goes on from there") <= 10
    assert results["M20"]["peer"]["skipped"] < 300


@pytest.mark.slow
def test_who_is_silent_does_not_stop_those_it_is_paired_with(town):
    made = town("run.rounds=60", "method.pairing=pairs", "method.peers_per_round=1", deadline=0.5, linger=0.0)
    made.start("M0", "M20", "M40")
    assert {result["rounds"] for result in made.finish().values()} == {60}
