"""The seed of a federation comes from all members: nobody can choose it, and nobody can change it later."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.bundle import Bundle, Part
from fedh2l.peer.membership.roster_comparison import check_versions
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.shares import Reveal, commitment_to, read_share, seed_of
from fedh2l.peer.settings import load_peer

NAMES = ("north", "south", "east")


@pytest.fixture
def founded(tmp_path, invoke, monkeypatch):
    """Certificates, a seed set with commitments, revealed shares, and the options of `roster init`."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        code, out, err = invoke(*words)
        return code, out, " ".join(err.split())

    assert call("pki", "init", "--federation", "f")[0] == 0
    members = []
    for place, name in enumerate(NAMES):
        assert call("pki", "request", "--name", name, "--host", "localhost", "--dir", f"{name}/keys")[0] == 0
        assert call("pki", "sign", f"{name}/keys/node.csr", "--yes")[0] == 0
        members.append(f"{name}/keys/node.pem@localhost:{7000 + place}")
        text = "".join(f"{place}.{row},{'yes' if row % 2 else 'no'}\n" for row in range(6))
        (tmp_path / f"{name}.csv").write_text(f"x,label\n{text}")
        give(call, name)
    merge(call)
    for name in NAMES:
        assert reveal(call, name)[0] == 0
    return call, members, [word for name in NAMES for word in ("--share", f"{name}.reveal")]


def give(call, name: str) -> None:
    words = ("--classes", "no,yes", "--table", f"{name}.csv", "--columns", "x", "--yes")
    assert call("seedset", "part", "--name", name, *words)[0] == 0


def merge(call) -> None:
    parts = [f"{name}.part.safetensors" for name in NAMES]
    assert call("seedset", "merge", *parts, "--federation", "f")[0] == 0


def reveal(call, name: str, key: str = "") -> tuple[int, str, str]:
    return call("seedset", "reveal", "--share", f"{name}.share", "--key", f"{key or name}/keys/node.key")


def shared(charter: RosterFile) -> dict[str, str]:
    return {name: each.share for name, each in charter.shares.items()}


def test_the_seed_is_the_hash_of_all_shares(founded, tmp_path):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    kept = {name: read_share(tmp_path / f"{name}.share") for name in NAMES}
    assert kept == {name: (share, bundle.digest) for name, share in shared(charter).items()}
    assert charter.agreement.seed == seed_of(shared(charter))
    assert bundle.commitments == {name: commitment_to(share) for name, share in shared(charter).items()}
    code, _, err = call("roster", "check")
    assert code == 0
    assert "chosen by" not in err


def test_the_founder_cannot_choose_the_seed(founded, tmp_path):
    call, members, shares = founded
    code, _, err = call("roster", "init", *members, "--rounds", 40, "--seed", 7)
    assert code == 2
    assert "committed to shares of the seed" in err
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares[:4])
    assert code == 2
    assert "the shares of east are missing" in err
    own = tmp_path / "north.reveal"
    Reveal.load(own).model_copy(update={"share": "ab" * 32}).save(own)
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares)
    assert code == 2
    assert "the share of 'north' is not the one that it committed to" in err
    code, _, err = call("roster", "init", *members, "--rounds", 40, "--share", "north.share")
    assert code == 2
    assert "'north.share' holds no revealed share, as `fedh2l seedset reveal` writes it" in err


@pytest.mark.parametrize("forged", ["seed", "share", "nothing left"])
def test_members_refuse_a_roster_with_another_seed(founded, tmp_path, forged):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    other = dict(charter.shares)
    if forged == "share":
        other["north"] = other["north"].model_copy(update={"share": "ab" * 32})
    seed = seed_of({name: each.share for name, each in other.items()}) if forged == "share" else 7
    agreement = charter.agreement.model_copy(update={"seed": seed})
    with pytest.raises(ConfigError, match=r"not the one that \[\[shares\]\] give|committed to|chose the seed"):
        replace(charter, agreement=agreement, shares={} if forged == "nothing left" else other).check_bundle(bundle)


def test_a_share_is_not_used_twice(founded, tmp_path):
    """Whoever saw the shares of a first try could choose its own for the second."""
    call, members, shares = founded
    before = (tmp_path / "north.share").read_text()
    give(call, "north")
    assert (tmp_path / "north.share").read_text() != before
    code, _, err = reveal(call, "north")
    assert code == 2
    assert "is that of no member in this seed set" in err
    merge(call)
    assert reveal(call, "north")[0] == 0
    code, _, err = reveal(call, "south")
    assert code == 2
    assert "'south.share' was revealed for the seed set" in err
    assert "Prepare a new part with `fedh2l seedset part`, which draws a new share" in err
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares)
    assert code == 2
    assert "'south' revealed its share for the seed set" in err
    assert stat.S_IMODE((tmp_path / "south.share").stat().st_mode) == 0o600
    for name in NAMES:
        give(call, name)
    merge(call)
    for name in NAMES:
        assert reveal(call, name)[0] == 0
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0


def test_the_founder_cannot_merge_again_when_it_knows_the_shares(founded, tmp_path):
    """The other samples, or their order, would decide which of them are in which batch."""
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    part = Part.load(tmp_path / "north.part.safetensors")
    replace(part, samples=part.samples.take([5, 4, 3, 2, 1, 0])).save(tmp_path / "north.part.safetensors")
    merge(call)
    again = Bundle.load(tmp_path / "seedset.safetensors")
    agreement = charter.agreement.model_copy(update={"seedset": again.digest})
    with pytest.raises(ConfigError, match=f"'north' revealed its share for the seed set {bundle.digest}, and this"):
        replace(charter, agreement=agreement).check_bundle(again)
    forged = {name: each.model_copy(update={"seedset": again.digest}) for name, each in charter.shares.items()}
    text = replace(charter, agreement=agreement, shares=forged).to_toml()
    (tmp_path / "forged.toml").write_text(text)
    code, _, err = call("roster", "check", "forged.toml")
    assert code == 2
    assert "[[shares]]: the share of 'north' does not carry its signature" in err


def test_nobody_reveals_the_share_of_another_member(founded, tmp_path):
    call, members, shares = founded
    assert reveal(call, "south", "north")[0] == 0
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares)
    assert code == 2
    assert "the share of 'south' is signed with another key than the one in [[members]]" in err


def test_the_founder_cannot_choose_who_is_left_out(founded, tmp_path):
    """Else it could add many members of its own, and try which of their shares give the seed that it wants."""
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    two = {name: charter.shares[name] for name in NAMES[:2]}
    seed = seed_of({name: each.share for name, each in two.items()})
    fewer = replace(
        charter, agreement=charter.agreement.model_copy(update={"seed": seed}), members=charter.members[:2], shares=two
    )
    with pytest.raises(ConfigError, match="'east' committed to a share, and it is not in the roster"):
        fewer.check_bundle(bundle)


def test_a_later_member_does_not_change_the_seed(founded, tmp_path):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter = RosterFile.load(tmp_path / "roster.toml")
    later = charter.agreement.model_copy(update={"version": 2, "from_round": 100, "seed": 1})
    with pytest.raises(ConfigError, match=r"not the one that \[\[shares\]\] give"):
        replace(charter, agreement=later)
    west = charter.shares["north"].model_copy(update={"name": "west", "share": "ab" * 32})
    for changed in ({}, {**charter.shares, "west": west}):
        seed = seed_of({name: each.share for name, each in changed.items()}) if changed else 1
        newer = replace(charter, agreement=later.model_copy(update={"seed": seed}), shares=changed)
        with pytest.raises(ConfigError, match="another seed"):
            check_versions([charter, newer])


def test_a_first_roster_that_calls_itself_a_later_one_is_refused(founded, tmp_path):
    """Its shares cannot be checked: those of members that have left are in it, and those of new members are not."""
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter = RosterFile.load(tmp_path / "roster.toml")
    ghost = charter.shares["south"].model_copy(update={"name": "ghost", "share": "ab" * 32})
    chosen = {"north": charter.shares["north"], "ghost": ghost}
    about = {"version": 2, "seed": seed_of({name: each.share for name, each in chosen.items()})}
    with pytest.raises(ConfigError, match="one share of the seed for each member"):
        replace(charter, agreement=charter.agreement.model_copy(update=about), shares=chosen)
    late = replace(charter, agreement=charter.agreement.model_copy(update={**about, "from_round": 2}), shares=chosen)
    (tmp_path / "late.toml").write_text(late.to_toml())
    code, _, err = call("roster", "check", "late.toml")
    assert code == 2
    assert "this roster starts with version 2 for this member" in err
    assert "with --after. If you really join later, use --joined" in err
    code, _, err = call("roster", "check", "late.toml", "--after", "roster.toml")
    assert code == 2
    assert "has another seed than version 1" in err
    code, _, err = call("roster", "check", "late.toml", "--joined")
    assert code == 0
    assert "does not come from shares of south, east" in err
    (tmp_path / "south/ca.pem").write_bytes((tmp_path / "authority/ca.pem").read_bytes())
    peer = '[peer]\nlisten = "localhost:7001"\nroster = "../late.toml"\nseedset = "../seedset.safetensors"\n'
    (tmp_path / "south/peer.toml").write_text(peer)
    with pytest.raises(ConfigError, match="this roster starts with version 2 for this member"):
        load_peer(tmp_path / "south/peer.toml")
    (tmp_path / "south/peer.toml").write_text(f"{peer}joined = true\n")
    with pytest.raises(ConfigError, match="no domain 'south'"):
        load_peer(tmp_path / "south/peer.toml")
    early = replace(charter, agreement=charter.agreement.model_copy(update={"version": 2}))
    with pytest.raises(ConfigError, match="holds from round 1, and no other does"):
        check_versions([early])


def test_a_seed_that_the_founder_chose_is_named(founded, tmp_path):
    call, members, _ = founded
    for name in NAMES:
        path = tmp_path / f"{name}.part.safetensors"
        replace(Part.load(path), commitment="").save(path)
    merge(call)
    code, _, err = call("roster", "init", *members, "--rounds", 40, "--seed", 7)
    assert code == 0
    assert "committed to no shares of the seed, so you choose it" in err
    assert "The author of this roster chose the seed" in call("roster", "check")[2]


def test_a_later_version_is_checked_after_the_first(founded, tmp_path):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    assert call("roster", "amend", "--from-round", 20, "--remove", "east")[0] == 0
    code, _, err = call("roster", "check", "roster-2.toml", "--after", "roster.toml")
    assert code == 0
    assert "does not come from shares" not in err
    assert call("roster", "check", "roster-2.toml")[0] == 2
