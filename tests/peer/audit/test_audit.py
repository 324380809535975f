"""The record of what left a machine: no line of it can be changed, removed, added or cut off unseen."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.peer.audit import AuditError, AuditLog, Head, audit, line_hash, read_heads
from fedh2l.peer.audit import log as logs
from fedh2l.peer.audit.witness import Witnesses
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.transport import fedh2l_pb2 as pb
from members import join

KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def log(tmp_path):
    made = AuditLog(tmp_path / "audit.jsonl", "north", "zoo", KEY)
    for round in range(1, 6):
        made.record("posteriors", "south", round, bytes(100))
        made.record("posteriors", "east", round, bytes(100))
    return made


@pytest.fixture
def path(log, tmp_path):
    log.close()
    return tmp_path / "audit.jsonl"


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_a_whole_record(path):
    report = audit(path)
    assert report.problems == []
    assert (report.node, report.federation, report.lines, report.last_round) == ("north", "zoo", 11, 5)
    assert report.sent == {"posteriors": 1000}
    assert report.receivers == {"south", "east"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_goes_on_after_a_restart(path):
    again = AuditLog(path, "north", "zoo", KEY)
    again.record("goodbye", "south", 6, b"x")
    again.close()
    report = audit(path)
    assert report.problems == []
    assert report.lines == 12


@pytest.mark.parametrize("place", range(11))
def test_a_removed_line_shows(path, place):
    kept = lines(path)
    del kept[place]
    path.write_bytes(b"".join(kept))
    problems = audit(path, [Head.sign("north", 11, "x" * 64, KEY)]).problems
    assert problems, place


@pytest.mark.parametrize("place", range(11))
@pytest.mark.parametrize("key", ["peer", "bytes", "sha256", "round", "time", "kind", "previous"])
def test_a_changed_line_shows_even_with_a_new_hash(path, place, key):
    kept = lines(path)
    for again in (False, True):
        entry = json.loads(kept[place])
        entry[key] = {"bytes": 7, "round": 4000}.get(key, "changed")
        if again:
            entry["hash"] = line_hash(entry)
        changed = [*kept[:place], (json.dumps(entry) + "\n").encode(), *kept[place + 1 :]]
        path.write_bytes(b"".join(changed))
        head = Head.sign("north", 11, json.loads(kept[-1])["hash"], KEY)  # what a peer was told
        assert audit(path, [head], KEY.public_key()).problems


def test_lines_in_another_order_or_twice(path):
    kept = lines(path)
    for changed in ([kept[0], kept[2], kept[1], *kept[3:]], [*kept, kept[-1]], [*kept, kept[0]]):
        path.write_bytes(b"".join(changed))
        assert audit(path).problems


def test_a_tail_that_was_cut_off_shows_by_what_others_saw(path, log, tmp_path):
    whole = lines(path)
    head = Head.sign("north", 11, json.loads(whole[-1])["hash"], KEY)
    path.write_bytes(b"".join(whole[:8]))
    assert audit(path).problems == []  # alone, it cannot be seen
    assert audit(path, [head], KEY.public_key()).problems == ["3 lines were cut off: a witness saw 11"]
    early = Head.sign("north", 8, json.loads(whole[7])["hash"], KEY)
    assert audit(path, [early], KEY.public_key()).witnessed == 8
    forged = Head.sign("north", 5000, "0" * 64, ec.generate_private_key(ec.SECP256R1()))
    assert "did not sign" in audit(path, [forged], KEY.public_key()).problems[0]


def test_a_rewritten_past_shows_by_what_others_saw(path, tmp_path):
    head = Head.sign("north", 5, json.loads(lines(path)[4])["hash"], KEY)
    path.unlink()
    again = AuditLog(path, "north", "zoo", KEY)
    for round in range(1, 20):
        again.record("posteriors", "nobody", round, b"")
    again.close()
    assert audit(path).problems == []
    assert audit(path, [head], KEY.public_key()).problems == ["a witness saw another line 5"]


def test_heads_say_what_they_said(log):
    head = Head.from_json(log.head().to_json())
    assert head.is_signed_by(KEY.public_key())
    assert not Head(head.node, head.length + 1, head.hash, head.signature).is_signed_by(KEY.public_key())
    assert not Head(head.node, head.length, head.hash, "%%%").is_signed_by(KEY.public_key())
    for wrong in ("", "{}", "[1]", '{"node": 1, "length": "x"}'):
        with pytest.raises(AuditError, match="not the head of an audit log"):
            Head.from_json(wrong)


@pytest.mark.parametrize("left", [1, 50, -1])
def test_a_torn_line_is_closed_and_told(path, left):
    kept = lines(path)
    path.write_bytes(b"".join(kept[:-1]) + kept[-1][:left])
    assert "is incomplete" in audit(path).problems[0]
    again = AuditLog(path, "north", "zoo", KEY)
    again.record("posteriors", "south", 6, b"x")
    again.close()
    report = audit(path)
    assert report.problems == []
    assert len(report.torn) == (left > 0)  # with only its end missing, a line is whole
    torn = bytearray(path.read_bytes())
    torn[torn.index(kept[-1][:left], len(b"".join(kept[:-1])))] ^= 1  # the torn piece itself is kept as it was
    path.write_bytes(bytes(torn))
    assert audit(path).problems


def test_killed_in_the_middle_of_it(tmp_path):
    """A process that writes as fast as it can, killed; what it leaves is gone on with."""
    program = f"""
import sys
from cryptography.hazmat.primitives import serialization
from fedh2l.peer.audit import AuditLog
key = serialization.load_pem_private_key(sys.stdin.buffer.read(), None)
log = AuditLog(__import__("pathlib").Path({str(tmp_path / "a")!r}), "north", "zoo", key)
print("there", flush=True)
round = 0
while True:
    round += 1
    log.record("posteriors", "south", round, bytes(1000))
"""
    from fedh2l.peer.pki.certificates import key_bytes

    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdin.write(key_bytes(KEY))
        process.stdin.close()
        assert process.stdout.readline() == b"there\n"
        threading.Event().wait(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    AuditLog(tmp_path / "a", "north", "zoo", KEY).close()
    report = audit(tmp_path / "a")
    assert report.problems == []
    assert report.messages["posteriors"] > 100


def test_many_threads(tmp_path):
    log = AuditLog(tmp_path / "a", "north", "zoo", KEY)
    threads = [
        threading.Thread(target=lambda i=i: [log.record("posteriors", f"p{i}", r, b"x") for r in range(200)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert audit(tmp_path / "a").problems == []
    assert audit(tmp_path / "a").messages["posteriors"] == 800


def test_where_nothing_can_be_noted_nothing_is_sent(log):
    os.close(log._file)
    with pytest.raises(AuditError, match="cannot write the audit log, so nothing is sent: Bad file"):
        log.record("posteriors", "south", 6, b"x")


def test_from_the_command_line(cli, path, log):
    said = cli("audit", path)
    assert said.returncode == 0, said.stderr
    assert said.stdout == (
        "1.0 kB of posteriors on public data in 10 messages to 2 peers\n"
        "'north' in 'zoo': 11 lines up to round 5, nothing else\n"
    )
    head = Head.sign("north", 11, json.loads(lines(path)[-1])["hash"], KEY)
    (path.parent / "witness.jsonl").write_text(head.to_json() + "\n")
    path.write_bytes(b"".join(lines(path)[:-1]))
    cut = cli("audit", path, "--witness", path.parent / "witness.jsonl")
    assert cut.returncode == 1
    assert "1 lines were cut off" in cut.stderr


def test_a_disk_that_is_full_for_a_while_leaves_no_half_of_a_line(log, path, monkeypatch):
    again = AuditLog(path, "north", "zoo", KEY)
    write = os.write

    def half(file, data):
        write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(AuditError, match="No space left"):
        again.record("posteriors", "south", 6, b"x")
    monkeypatch.undo()
    again.record("posteriors", "south", 6, b"x")
    again.close()
    assert audit(path).problems == []
    assert audit(path).messages["posteriors"] == 11
    with pytest.raises(AuditError, match="the record is closed"):
        again.record("posteriors", "south", 7, b"x")


def word(length: int, key=KEY, node: str = "north", last: str = "a" * 64) -> pb.Head:
    said = Head.sign(node, length, last, key)
    return pb.Head(length=said.length, hash=said.hash, signature=said.signature)


def test_a_witness_keeps_what_is_signed(tmp_path, caplog):
    kept = Witnesses(tmp_path / "witness")
    for length in (3, 7, 7, 9):
        kept.take("north", word(length), KEY.public_key())
    assert [head.length for head in read_heads(kept.path("north"))] == [3, 7, 9]
    for forged in (word(20, ec.generate_private_key(ec.SECP256R1())), word(20, node="south")):
        with pytest.raises(PeerRefusedError, match="that it did not sign"):
            kept.take("north", forged, KEY.public_key())
    kept.take("north", word(4), KEY.public_key())  # a record that was shortened: the old word stays, and this one too
    assert "had 9 lines, and now it has 4" in caplog.text
    assert [head.length for head in read_heads(kept.path("north"))] == [3, 7, 9, 4]


def test_a_witness_that_was_killed_while_it_wrote(tmp_path):
    kept = Witnesses(tmp_path)
    kept.take("north", word(3), KEY.public_key())
    with open(kept.path("north"), "a") as file:
        file.write('{"node": "north", "len')
    again = Witnesses(tmp_path)
    again.take("north", word(3), KEY.public_key())
    again.take("north", word(5), KEY.public_key())
    assert [head.length for head in read_heads(kept.path("north"))] == [3, 5]
    kept.path("north").write_text('{"node": "north"}\n')
    with pytest.raises(AuditError, match="not the head of an audit log"):
        read_heads(kept.path("north"))


def test_a_head_of_nothing(path):
    assert audit(path, [Head.sign("north", 0, "", KEY)], KEY.public_key()).problems == ["a witness saw another line 0"]


def test_a_witness_keeps_nothing_that_is_no_head(tmp_path):
    kept = Witnesses(tmp_path)
    for strange in (
        word(3, last="x" * 64),
        word(3, last="a" * 4000),
        pb.Head(length=3, hash="a" * 64, signature="A" * 999),
    ):
        with pytest.raises(PeerRefusedError, match="invalid head"):
            kept.take("north", strange, KEY.public_key())
    assert list(tmp_path.iterdir()) == []


def test_torn_in_its_first_line_it_is_verified_all_the_same(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"line":1,"ti')
    log = AuditLog(path, "north", "zoo", KEY)
    for round in range(1, 4):
        log.record("posteriors", "south", round, b"x")
    head = log.head()
    log.close()
    report = audit(path, [head], KEY.public_key())
    assert (report.problems, report.node, report.witnessed) == ([], "north", 5)
    path.write_bytes(b"".join(lines(path)[:-2]))
    assert audit(path, [head], KEY.public_key()).problems == ["2 lines were cut off: a witness saw 5"]


def test_what_is_no_number_is_told(path):
    changed = [json.loads(line) for line in lines(path)]
    changed[3]["bytes"] = "abc"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))
    assert "line 4 does not give the number of bytes sent" in audit(path).problems


@pytest.mark.parametrize("value", [10**400, -5])
@pytest.mark.parametrize("field", ["bytes", "round", "line"])
def test_numbers_that_no_log_has(path, invoke, field, value):
    changed = [json.loads(line) for line in lines(path)]
    changed[3][field] = value
    changed[3]["hash"] = line_hash(changed[3])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))
    code, out, err = invoke("audit", path)
    assert code == 1
    assert "error: " in err
    assert "-" not in out


def test_a_log_under_another_name_is_not_passed_over_by_witnesses(path, tmp_path, invoke):
    """Whoever writes its log anew must not come away with another name in it."""
    head = Head.sign("north", 5, json.loads(lines(path)[4])["hash"], KEY)
    (tmp_path / "witness.jsonl").write_text(head.to_json() + "\n")
    path.unlink()
    AuditLog(path, "North", "zoo", KEY).close()
    code, _, err = invoke("audit", path, "--witness", tmp_path / "witness.jsonl")
    assert code == 1
    assert "no witness speaks of 'North'" in err
    join(Authority.found(tmp_path / "authority", "zoo"), tmp_path / "keys")
    code, _, err = invoke("audit", path, "--certificate", tmp_path / "keys" / "node.pem")
    assert code == 1
    assert "the certificate is that of 'north', the log that of 'North'" in err


def many(folder, rounds: int = 400, monkeypatch=None) -> None:
    """A log of several files."""
    monkeypatch.setattr(logs, "LARGEST", 20_000)
    for first in range(1, rounds + 1, 100):  # with restarts
        log = AuditLog(folder / "audit.jsonl", "north", "zoo", KEY)
        for round in range(first, first + 100):
            log.record("posteriors", "south", round, bytes(100))
        assert log.sent["south"] == 100 * (first + 99)
        log.close()


def test_a_large_log_is_several_files(tmp_path, monkeypatch, invoke):
    many(tmp_path, monkeypatch=monkeypatch)
    files = sorted(tmp_path.glob("audit-*.jsonl"))
    assert len(files) > 3
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    report = audit(tmp_path / "audit.jsonl")
    assert (report.problems, report.files) == ([], len(files) + 1)
    assert (report.node, report.messages["posteriors"], report.last_round) == ("north", 400, 400)
    assert report.lines == 401 + len(files)
    code, out, _ = invoke("audit", tmp_path / "audit.jsonl")
    assert (code, f" lines in {len(files) + 1} files up to round 400, nothing else" in out) == (0, True)
    first = int(files[1].stem.rpartition("-")[2])
    last = int(files[2].stem.rpartition("-")[2]) - 1
    files[1].unlink()
    (problem,) = audit(tmp_path / "audit.jsonl").problems
    assert problem == f"entries {first} to {last} are missing before {files[2].name}, line 1"


def test_killed_between_two_files(tmp_path, monkeypatch):
    many(tmp_path, 100, monkeypatch)
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit-000000000090.jsonl")
    log = AuditLog(tmp_path / "audit.jsonl", "north", "zoo", KEY)
    log.record("posteriors", "south", 101, bytes(100))
    assert log.sent["south"] == 10_100
    log.close()
    report = audit(tmp_path / "audit.jsonl")
    assert (report.problems, report.messages["posteriors"]) == ([], 101)


@pytest.mark.parametrize("place", [0, 1, 700])
def test_one_deleted_line_is_one_finding(tmp_path, invoke, place):
    log = AuditLog(tmp_path / "audit.jsonl", "north", "zoo", KEY)
    for round in range(1, 1001):
        log.record("posteriors", "south", round, bytes(100))
    log.close()
    kept = lines(tmp_path / "audit.jsonl")
    del kept[place]
    (tmp_path / "audit.jsonl").write_bytes(b"".join(kept))
    problems = audit(tmp_path / "audit.jsonl").problems
    assert problems[0] == f"entry {place + 1} is missing before line {place + 1}"
    assert problems[1:] == ([] if place else ["its beginning is missing"])
    code, _, errors = invoke("audit", tmp_path / "audit.jsonl")
    assert (code, errors.count("error:")) == (1, len(problems))


def test_very_many_problems_are_not_all_shown(tmp_path, invoke):
    log = AuditLog(tmp_path / "audit.jsonl", "north", "zoo", KEY)
    for round in range(1, 101):
        log.record("posteriors", "south", round, bytes(100))
    log.close()
    text = (tmp_path / "audit.jsonl").read_text().replace('"bytes":100', '"bytes":200')
    (tmp_path / "audit.jsonl").write_text(text)
    _, _, errors = invoke("audit", tmp_path / "audit.jsonl")
    assert errors.count("error:") == 21
    assert "and 80 more problems" in errors
