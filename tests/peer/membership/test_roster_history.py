"""Members come and go: versions of a roster, and the round from which each holds."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.bundle import Part, merge
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_history import pair_up
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.transport.handshake import RosterDigests
from members import CLASSES, join, part, pin, raw

ABC = merge("zoo", [part(name, seed=seed) for seed, name in enumerate("abc")])
ABD = merge("zoo", [part(name, seed=seed) for seed, name in enumerate("abcd")])


def charter(version: int = 1, from_round: int = 1, names: str = "abc", bundle=ABC, **changes) -> RosterFile:
    members = [{"name": name, "address": f"{name}.example:7443", "pin": pin(name)} for name in names]
    about = {"seedset": bundle.digest, "members": members, "version": version, "from_round": from_round}
    return RosterFile.read(raw(**about, **changes))


FIRST, SECOND = charter(), charter(2, 51, "abd", ABD)
BOTH, OLD, NEW = (RosterDigests.of(held, CLASSES) for held in ([FIRST, SECOND], [FIRST], [SECOND]))


def test_who_takes_part_in_which_round():
    terms = pair_up([SECOND, FIRST], [ABD, ABC])
    assert [terms.at(round).roster.names for round in (1, 50, 51, 99)] == [tuple("abc")] * 2 + [tuple("abd")] * 2
    assert [len(terms.from_round(round)) for round in (0, 1, 50, 51)] == [2, 2, 2, 1]
    assert {name: terms.rounds_of(name) for name in "abcd"} == {"a": 100, "b": 100, "c": 50, "d": 100}
    assert terms.names == tuple("abcd")
    joined = terms.since("d")
    assert [term.first for term in joined.all] == [51]
    assert joined.at(50) is joined.at(51)
    with pytest.raises(ConfigError, match="'e' is not a member: a, b, c, d are"):
        terms.since("e")
    assert terms.at(60).shape("d") == (4, 2)
    assert terms.largest("d") > 0
    assert terms.largest("nobody") == 0
    with pytest.raises(ConfigError, match="holds from round 101, after the last one"):
        pair_up([FIRST, charter(2, 101)], [ABC])


def test_seed_sets_that_do_not_fit():
    with pytest.raises(ConfigError, match="none of the seed sets is that of version 2"):
        pair_up([FIRST, SECOND], [ABC, merge("zoo", [part("a"), part("b", seed=5)])])
    with pytest.raises(ConfigError, match="but the roster agrees on"):
        pair_up([FIRST], [ABD])


def test_public_samples_of_a_member_that_stays():
    """It knows the seed, so it could choose which of its samples are in which batch."""
    parts = [part(name, seed=seed) for seed, name in enumerate("abcd")]
    changed = merge("zoo", [replace(parts[0], samples=parts[0].samples.take([3, 2, 1, 0])), *parts[1:]])
    with pytest.raises(ConfigError, match="other public samples of 'a', a member that stays"):
        pair_up([FIRST, charter(2, 51, "abd", changed)], [ABC, changed])


def met(mine: RosterDigests, my_round: int, theirs: RosterDigests, their_round: int) -> None:
    mine.check("b", theirs.hello("b", their_round), my_round)


@pytest.mark.parametrize(
    ("mine", "my_round", "theirs", "their_round"),
    [
        (BOTH, 10, BOTH, 10),
        (BOTH, 10, OLD, 10),
        (OLD, 10, BOTH, 10),
        (BOTH, 10, BOTH, 60),  # one has changed over, the other is about to
        (BOTH, 60, BOTH, 10),
        (BOTH, 60, NEW, 51),
        (BOTH, 10, NEW, 51),  # whoever joins is there before its time
        (NEW, 51, BOTH, 10),
    ],
)
def test_who_understands_each_other(mine, my_round, theirs, their_round):
    met(mine, my_round, theirs, their_round)


@pytest.mark.parametrize(("mine", "my_round", "theirs", "their_round"), [(BOTH, 60, OLD, 60), (OLD, 60, BOTH, 60)])
def test_who_was_not_given_the_new_version(mine, my_round, theirs, their_round):
    named = "differs in: from_round, members, pins, seedset, version"
    with pytest.raises(PeerRefusedError, match=named):
        met(mine, my_round, theirs, their_round)


def test_what_is_to_come_is_said(caplog):
    met(OLD, 10, BOTH, 10)
    assert "'b' holds version 2 of the roster, from round 51, and this peer does not" in caplog.text


JOINS = 700
"""The round from which M60 is a member, and M40 is not."""


@pytest.mark.slow
def test_one_joins_and_one_leaves_while_the_others_train(town):
    made = town("run.rounds=900", "run.eval_every=20", "run.checkpoint_every=50", deadline=1.0, linger=20.0)
    folder, whole = made.folder, made.rehearsed.roster_file
    bundle = made.rehearsed.bundle
    held = {name: made.rehearsed.federation.nodes[place].domain for place, name in enumerate(made.rehearsed.names)}
    for number, names, first in ((1, ("M0", "M20", "M40"), 1), (2, ("M0", "M20", "M60"), JOINS)):
        domains = {name: held[name] for name in names}
        parts = [Part(name, d.classes, d.preprocessing, d.public) for name, d in domains.items()]
        merged = merge(bundle.federation, parts)
        merged.save(folder / f"seedset-{number}.safetensors")
        agreement = whole.agreement.model_copy(
            update={"version": number, "from_round": first, "seedset": merged.digest}
        )
        members = tuple(member for member in whole.members if member.name in names)
        text = RosterFile(agreement, whole.method, whole.timing, members, whole.views).to_toml()
        (folder / f"roster-{number}.toml").write_text(text)

    def hold(name: str, *numbers: int) -> None:
        for what, end in (("roster", "toml"), ("seedset", "safetensors")):
            lines = (folder / name / "peer.toml").read_text().splitlines()
            files = json.dumps([f"../{what}-{number}.{end}" for number in numbers])
            lines = [f"{what} = {files}" if line.startswith(f"{what} =") else line for line in lines]
            (folder / name / "peer.toml").write_text("\n".join(lines))

    hold("M0", 1, 2)
    hold("M20", 1)
    hold("M40", 1, 2)
    hold("M60", 2)
    config = folder / "M60" / "peer.toml"
    config.write_text(config.read_text().replace("[peer]\n", "[peer]\njoined = true\n"))
    made.start("M0", "M20", "M40")
    made.until(lambda: made.round("M20") >= 60)
    assert "'M0' holds version 2 of the roster" in made.log("M20")
    assert made.kill("M20", signal.SIGTERM) == 0
    hold("M20", 1, 2)  # it is given the new version in time
    made.start("M20", "M60")
    results = made.finish()
    done = {name: result["rounds"] for name, result in results.items()}
    assert done == {"M0": 900, "M20": 900, "M40": JOINS - 1, "M60": 900}
    for name in ("M0", "M20"):
        assert "version 2 of the roster holds" in made.log(name)
    assert results["M0"]["bytes"]["edges"]["M0->M60"] > 0
    assert results["M60"]["bytes"]["edges"].keys() == {"M60->M0", "M60->M20"}
    assert results["M60"]["peer"]["conflicts"][1] > 0  # it has learned from the others
    reasons = {why.partition(": ")[2] for result in results.values() for why in result["peer"]["refused"]}
    assert reasons <= {"round is past", "round is in the future"}  # of M20 and for it, while it was away
    assert "cannot be reached: 'M60' refuses" not in made.log("M40")  # who never is a member with it


def test_the_next_version_from_the_command_line(cli, tmp_path):
    founder = Authority.found(tmp_path / "authority", "zoo")
    members = []
    for name in "abcd":
        join(founder, tmp_path / name, name, 365, ["127.0.0.1"])
        members.append(f"{name}/node.pem@127.0.0.1:{9000 + ord(name)}")
    ABC.save(tmp_path / "seedset.safetensors")
    ABD.save(tmp_path / "seedset-2.safetensors")
    assert cli("roster", "init", *members[:3], "--rounds", 100).returncode == 0
    change = ["roster", "amend", "--from-round", 51, "--add", members[3], "--remove", "c"]
    early = cli(*change)
    assert early.returncode == 2
    assert "member 'd' gave no part of the seed set" in early.stderr
    made = cli(*change, "--seedset", "seedset-2.safetensors", "--rounds", 120)
    assert made.returncode == 0, made.stderr
    assert 'roster = ["roster.toml", "roster-2.toml"]' in made.stderr
    second = RosterFile.load(tmp_path / "roster-2.toml")
    assert second.names == ("a", "b", "d")
    assert (second.agreement.version, second.agreement.from_round, second.agreement.rounds) == (2, 51, 120)
    terms = pair_up([RosterFile.load(tmp_path / "roster.toml"), second], [ABC, ABD])
    assert terms.rounds_of("c") == 50
    again = cli(*change, "--seedset", "seedset-2.safetensors")
    assert "exists already" in again.stderr
    nobody = cli("roster", "amend", "--from-round", 9, "--remove", "e", "--out", "x.toml")
    assert nobody.returncode == 2
    assert "--remove e: there is no such member" in nobody.stderr
    past = cli("roster", "amend", "--from-round", 1, "--remove", "c", "--out", "x.toml")
    assert "does not follow version 1" in past.stderr
