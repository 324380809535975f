"""Many kills in one training: a federation of four whose peers are killed again and again, at random.

    python tests/soak.py [--kills 50] [--rounds 6000] [--seed 0]

Every kill is `kill -9` of a random peer at a random round; it is started again after a random while, so that at times
several are away. At the end all peers must have done the last round, with every checkpoint and audit log whole, and
with an accuracy within two points of a training in which nothing happened. Exits with 1 if not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parent / "peer")]

from test_faults import SETTINGS, WITHIN

from conftest import train
from fedh2l.experiment.config import load_config
from fedh2l.peer.membership.roster_sections import Timing
from town import NAMES, Town, rehearsal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    settings = [*SETTINGS, f"run.rounds={given.rounds}", "run.selection=last"]
    config, _ = load_config(None, [*settings, "run.device=cpu", "run.engine=local"])
    with tempfile.TemporaryDirectory() as folder:
        wanted = train(config.experiment(), Path(folder) / "undisturbed")[2]["average"]["ACC"]
        town = Town(rehearsal(Path(folder) / "town", *settings, timing=Timing(deadline=1.0, linger=60.0, patience=5.0)))
        try:
            began = time.monotonic()
            town.start(*NAMES)
            kills = harass(town, dice, given.kills, given.rounds)
            results = town.finish(600)
        finally:
            town.close()
        found = town.accuracy()
    skipped = {name: result["peer"]["skipped"] for name, result in results.items()}
    print(f"{kills} kills in {given.rounds} rounds and {time.monotonic() - began:.0f} s; rounds skipped: {skipped}")
    print(f"accuracy {found:.2f}, undisturbed {wanted:.2f}: {abs(found - wanted):.2f} points, at most {WITHIN} wanted")
    return int(abs(found - wanted) > WITHIN or kills < given.kills)


def harass(town: Town, dice: random.Random, kills: int, rounds: int) -> int:
    """Kills at random until it was often enough, or the training is nearly over; then all are there again."""
    moments = sorted(dice.randrange(100, rounds - rounds // 5) for _ in range(kills))
    back: dict[str, float] = {}
    done = 0
    while moments or back:
        for name in [name for name, when in back.items() if when <= time.monotonic()]:
            del back[name]
            town.start(name)
        furthest = max(town.round(name) for name in NAMES)
        if moments and furthest >= moments[0]:
            alive = [name for name in NAMES if not town.dead(name)]
            if not alive and not back:
                break
            if len(alive) >= 2:
                moments.pop(0)
                victim = dice.choice(alive)
                town.kill(victim)
                back[victim] = time.monotonic() + dice.uniform(0.0, 3.0)
                done += 1
        for name in NAMES:
            assert town.processes[name].poll() in (None, 0, -9), town.log(name)[-2000:]
        time.sleep(0.02)
    return done


if __name__ == "__main__":
    sys.exit(main())
