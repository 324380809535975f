"""The seed of a federation comes from all members: nobody can choose it, and nobody can change it later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.bundle import Bundle, Part
from fedh2l.peer.membership.roster_file import RosterFile, check_versions
from fedh2l.peer.membership.shares import commitment_to, read_share, seed_of

NAMES = ("north", "south", "east")


@pytest.fixture
def founded(tmp_path, invoke, monkeypatch):
    """Certificates, a seed set with commitments, and the options of `roster init`."""
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
    return call, members, [word for name in NAMES for word in ("--share", f"{name}.share")]


def give(call, name: str) -> None:
    words = ("--classes", "no,yes", "--table", f"{name}.csv", "--columns", "x", "--yes")
    assert call("seedset", "part", "--name", name, *words)[0] == 0


def merge(call) -> None:
    parts = [f"{name}.part.safetensors" for name in NAMES]
    assert call("seedset", "merge", *parts, "--federation", "f")[0] == 0


def test_the_seed_is_the_hash_of_all_shares(founded, tmp_path):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    assert charter.shares == {name: read_share(tmp_path / f"{name}.share") for name in NAMES}
    assert charter.agreement.seed == seed_of(charter.shares)
    assert bundle.commitments == {name: commitment_to(share) for name, share in charter.shares.items()}
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
    own = tmp_path / "north.share"
    before = own.read_text()
    own.write_text("ab" * 32)
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares)
    assert code == 2
    assert "matches no member's commitment" in err
    own.write_text(before)


@pytest.mark.parametrize("forged", ["seed", "share", "nothing left"])
def test_members_refuse_a_roster_with_another_seed(founded, tmp_path, forged):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter, bundle = RosterFile.load(tmp_path / "roster.toml"), Bundle.load(tmp_path / "seedset.safetensors")
    other = dict(charter.shares)
    if forged == "share":
        other["north"] = "ab" * 32
    seed = seed_of(other) if forged == "share" else 7
    agreement = charter.agreement.model_copy(update={"seed": seed})
    with pytest.raises(ConfigError, match=r"not the one that \[shares\] give|did not|committed to|chose the seed"):
        replace(charter, agreement=agreement, shares={} if forged == "nothing left" else other).check_bundle(bundle)


def test_a_share_is_not_used_twice(founded, tmp_path):
    """Whoever saw the shares of a first try could choose its own for the second."""
    call, members, shares = founded
    before = (tmp_path / "north.share").read_text()
    give(call, "north")
    assert (tmp_path / "north.share").read_text() != before
    code, _, err = call("roster", "init", *members, "--rounds", 40, *shares)
    assert code == 2
    assert "matches no member's commitment" in err
    merge(call)
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0


def test_a_later_member_does_not_change_the_seed(founded, tmp_path):
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter = RosterFile.load(tmp_path / "roster.toml")
    later = charter.agreement.model_copy(update={"version": 2, "from_round": 100, "seed": 1})
    with pytest.raises(ConfigError, match=r"not the one that \[shares\] give"):
        replace(charter, agreement=later)
    for changed in ({}, {**charter.shares, "west": "ab" * 32}):
        seed = seed_of(changed) if changed else 1
        newer = replace(charter, agreement=later.model_copy(update={"seed": seed}), shares=changed)
        with pytest.raises(ConfigError, match="another seed"):
            check_versions([charter, newer])


def test_a_first_roster_that_calls_itself_a_later_one_is_told(founded, tmp_path):
    """Of later versions some members have no share in the seed, and some shares are of members that have left."""
    call, members, shares = founded
    assert call("roster", "init", *members, "--rounds", 40, *shares)[0] == 0
    charter = RosterFile.load(tmp_path / "roster.toml")
    chosen = {"north": charter.shares["north"], "ghost": "ab" * 32}
    about = {"version": 2, "seed": seed_of(chosen)}
    with pytest.raises(ConfigError, match="one share of the seed for each member"):
        replace(charter, agreement=charter.agreement.model_copy(update=about), shares=chosen)
    late = replace(charter, agreement=charter.agreement.model_copy(update={**about, "from_round": 2}), shares=chosen)
    (tmp_path / "late.toml").write_text(late.to_toml())
    code, _, err = call("roster", "check", "late.toml")
    assert code == 0
    assert "does not come from shares of south, east" in err
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
