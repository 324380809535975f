"""The roster of a real federation: what members agree on, and how they find out that they do not."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
import torch

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.augmentation import SharedViews
from fedh2l.peer.membership.bundle import merge
from fedh2l.peer.membership.roster_comparison import check_versions, differences
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.transport.proxy import parse_address
from members import CLASSES, part, pin, raw, unlabelled


@pytest.fixture
def bundle():
    return merge("zoo", [part("a"), part("b", seed=1), part("c", seed=2)])


def test_a_roster_is_written_and_read(tmp_path, bundle):
    charter = RosterFile.read(
        raw(seedset=bundle.digest, method={"name": "fedh2l", "interval": 2}, timing={"quorum": 2})
    )
    (tmp_path / "roster.toml").write_text(charter.to_toml())
    again = RosterFile.load(tmp_path / "roster.toml")
    assert again == charter
    again.check_bundle(bundle)
    assert "topology" not in tomllib.loads(charter.to_toml())["method"]


def test_what_the_digest_covers():
    """Method, parameters, seed, rounds, classes, seed set, names and their order, keys; not addresses or deadlines."""
    first = RosterFile.read(raw())
    digest = first.roster(CLASSES).digest
    moved = [{**m, "address": f"10.0.0.{i}:1"} for i, m in enumerate(raw()["members"])]
    impostor = [*raw()["members"][:2], {**raw()["members"][2], "pin": pin("x")}]
    for same in (raw(members=moved), raw(timing={"deadline": 1.0, "quorum": 2, "mode": "asynchronous"})):
        assert RosterFile.read(same).roster(CLASSES).digest == digest
    for other in (
        raw(federation="circus"),
        raw(version=2),
        raw(from_round=7),
        raw(seed=1),
        raw(rounds=101),
        raw(batch_size=16),
        raw(seedset="1" * 64),
        raw(method={"name": "fedh2l", "kl_weight": 0.0}),
        raw(views={"shift": 0.1}),
        raw(members=raw()["members"][::-1]),
        raw(members=raw()["members"][:2]),
        raw(members=impostor),
        raw(ema_decay=0.9),
    ):
        assert RosterFile.read(other).roster(CLASSES).digest != digest, other
    assert first.roster(CLASSES[::-1]).digest != digest


def test_what_differs_is_named():
    mine = RosterFile.read(raw()).canonical(CLASSES)
    theirs = RosterFile.read(raw(seed=1, method={"name": "fedh2l", "interval": 5}, members=raw()["members"][:2]))
    found = differences(mine, theirs.canonical(CLASSES))
    assert found == [
        "seed: 0 here, 1 there",
        "method.interval: 1 here, 5 there",
        "members: ['a', 'b', 'c'] here, ['a', 'b'] there",
        f"pins.c: {pin('c')!r} here, nothing there",
    ]
    assert differences(mine, mine) == []
    assert differences({"a": 1}, {"b": "x" * 200}) == [
        "a: 1 here, nothing there",
        f"b: nothing here, '{'x' * 76}… there",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": {"name": "fedavg"}}, "only posteriors on public data may cross, and there is no server"),
        ({"method": {"name": "fml"}}, "this method sends parameters"),
        ({"method": {"name": "fedh2l", "topology": [["a", "z"]]}}, "z"),
        ({"members": raw()["members"][:1]}, "at least two nodes"),
        ({"members": [raw()["members"][0]] * 2}, "two nodes are named 'a'"),
        ({"members": [{**m, "pin": pin("a")} for m in raw()["members"]]}, "'a' and 'b' have one pin"),
        ({"members": [{**m, "address": "h:1"} for m in raw()["members"]]}, "'a' and 'b' have one address"),
        (
            {"members": [{"name": "a", "address": "h", "pin": pin("a")}]},
            "members.0.address = 'h': it should be host:port",
        ),
        (
            {"members": [{"name": "a", "address": "h:1", "pin": "md5//x"}]},
            "members.0.pin = 'md5//x': it should be sha256//",
        ),
        ({"members": [{"name": "a/b", "address": "h:1", "pin": pin("a")}]}, "use 1 to 63 letters"),
        ({"timing": {"quorum": 3}}, "a peer has 2 others"),
        ({"timing": {"deadlin": 3.0}}, "Did you mean 'deadline'"),
        ({"seedset": "abc"}, "roster.seedset"),
        ({"rounds": 0}, "roster.rounds"),
        ({"roundz": 3}, "Did you mean 'rounds'"),
        ({"members": "a"}, "tables \\[\\[members\\]\\]"),
    ],
)
def test_rosters_that_are_none(changes, why):
    with pytest.raises(ConfigError, match=why):
        RosterFile.read(raw(**changes))


def test_a_seed_set_that_is_not_the_agreed_one(bundle):
    with pytest.raises(ConfigError, match="but the roster agrees on 000"):
        RosterFile.read(raw()).check_bundle(bundle)
    with pytest.raises(ConfigError, match="the seed set is that of 'zoo', the roster that of 'circus'"):
        RosterFile.read(raw(seedset=bundle.digest, federation="circus")).check_bundle(bundle)
    fewer = merge("zoo", [part("a"), part("b", seed=1)])
    with pytest.raises(ConfigError, match="member 'c' gave no part"):
        RosterFile.read(raw(seedset=fewer.digest)).check_bundle(fewer)


def test_views_are_agreed_on(tmp_path, bundle):
    """They say how images are seen, and mean nothing for a seed set of anything else."""
    charter = RosterFile.read(raw(seedset=bundle.digest, views={"shift": 0.1, "mix": 0.5, "border": "zeros"}))
    (tmp_path / "roster.toml").write_text(charter.to_toml())
    assert RosterFile.load(tmp_path / "roster.toml") == charter
    charter.check_bundle(bundle)
    numbers = replace(bundle, samples=replace(bundle.samples, inputs=torch.zeros(len(bundle.samples), 5)))
    with pytest.raises(ConfigError, match=r"\[views\] of the roster: the seed set holds no images"):
        charter.views.of(numbers)
    plain = RosterFile.read(raw())
    assert "views" not in tomllib.loads(plain.to_toml())
    assert differences(plain.canonical(CLASSES), RosterFile.read(raw(views={"mix": 0.5})).canonical(CLASSES)) == [
        "views.mix: 0.0 here, 0.5 there"
    ]
    seen = charter.views.of(bundle)
    assert (seen.shift, seen.mix, seen.flip, seen.border) == (0.1, 0.5, 0.0, "zeros")
    assert SharedViews.like(seen) == charter.views


def test_a_seed_set_without_labels():
    nothing = merge("zoo", [unlabelled("a"), unlabelled("b"), unlabelled("c")])
    with pytest.raises(ConfigError, match=r"has no labels, and they are needed by method\.local_data = .*, method\.ce"):
        RosterFile.read(raw(seedset=nothing.digest)).check_bundle(nothing)
    alone = {"name": "fedh2l", "ce_weight": 0.0, "local_data": "private"}
    charter = RosterFile.read(raw(seedset=nothing.digest, method=alone))
    term = RosterVersion(charter, nothing)
    assert term.labels("a", 1) is None
    assert not term.seed_set.labelled
    labelled = merge("zoo", [part("a"), part("b"), part("c")])
    assert (
        term.size("a") == RosterVersion(replace(charter, agreement=agreed(charter, labelled)), labelled).size("a") - 4
    )
    later = replace(charter, agreement=agreed(charter, labelled, version=2, from_round=5))
    with pytest.raises(ConfigError, match="or only one has labels"):
        RosterHistory((term, RosterVersion(later, labelled)))


def agreed(charter, bundle, **changes):
    return charter.agreement.model_copy(update={"seedset": bundle.digest, **changes})


def test_versions_follow_each_other():
    first, second = RosterFile.read(raw()), RosterFile.read(raw(version=2, from_round=50, members=raw()["members"][:2]))
    check_versions([first, second])
    check_versions([second])  # of whoever joins later
    for wrong in (
        [RosterFile.read(raw(from_round=50))],
        [first, first],
        [first, RosterFile.read(raw(version=3, from_round=50))],
        [first, RosterFile.read(raw(version=2, from_round=1))],
        [first, RosterFile.read(raw(version=2, from_round=50, seed=9))],
        [first, RosterFile.read(raw(version=2, from_round=50, federation="circus"))],
        [first, RosterFile.read(raw(version=2, from_round=50, batch_size=8))],
        [first, RosterFile.read(raw(version=2, from_round=50, method={"name": "fedh2l", "kl_weight": 0.0}))],
    ):
        with pytest.raises(ConfigError):
            check_versions(wrong)


def test_addresses():
    assert parse_address("north.example:7443") == ("north.example", 7443)
    assert parse_address("[::1]:1") == ("::1", 1)
    for wrong in ("", "a", "a:", ":1", "a:0", "a:65536", "::1:80", "[zz]:1", "a b:1", "a:1:2", "http://a:1"):
        with pytest.raises(ValueError, match=r"."):
            parse_address(wrong)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="there is no roster"):
        RosterFile.load(tmp_path / "roster.toml")
    (tmp_path / "roster.toml").write_text("rounds = ")
    with pytest.raises(ConfigError, match="cannot read the roster"):
        RosterFile.load(tmp_path / "roster.toml")


def test_from_the_command_line(cli, tmp_path, bundle):
    pytest.importorskip("cryptography")
    from fedh2l.peer.pki import certificates
    from fedh2l.peer.pki.authority import Authority

    founder = Authority.found(tmp_path / "authority", "zoo")
    members = []
    for place, name in enumerate("abc"):
        path, _ = certificates.request(tmp_path / name, name, ["127.0.0.1"])
        signed = founder.sign(certificates.read_request(path))
        certificates.write(tmp_path / name / "node.pem", certificates.pem(signed))
        members.append(f"{name}/node.pem@127.0.0.1:{7001 + place}")
    bundle.save(tmp_path / "seedset.safetensors")
    made = cli("roster", "init", *members, "--rounds", 50)
    assert made.returncode == 0, made.stderr
    checked = cli("roster", "check")
    charter = RosterFile.load(tmp_path / "roster.toml")
    assert checked.stdout == f"digest: {charter.roster(bundle.classes).digest.hex()}\n"
    assert charter.pins["b"] == certificates.About.of(certificates.read_certificate(tmp_path / "b/node.pem")).pin
    other = replace(charter, agreement=charter.agreement.model_copy(update={"rounds": 60}))
    (tmp_path / "other.toml").write_text(other.to_toml())
    compared = cli("roster", "check", "--with", "other.toml")
    assert compared.returncode == 2
    assert "rounds: 50 here, 60 there" in compared.stderr


@pytest.mark.parametrize("key", ["rounds", "version", "from_round"])
def test_numbers_that_no_message_can_hold(key):
    with pytest.raises(ConfigError, match=key):
        RosterFile.read(raw(**{key: 2**32}))
