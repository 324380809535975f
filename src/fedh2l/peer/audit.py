"""What left this machine: one line for each message, in a file whose past cannot be changed unseen.

Every line holds the hash of the one before, so a changed or removed line breaks the chain. That lines were cut off at
the end shows too: length and last hash, signed by this node, are given to other peers now and then (`Head`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.errors import FedH2LError
from fedh2l.peer.certificates import now

START = "start"
"""The kind of the first line."""
SIGNAL = "posteriors"
"""The kind of a line for a teaching signal."""
TORN = "torn"
"""The kind of a line that closes one which was not written to its end."""


class AuditError(FedH2LError):
    """The record of what left this machine cannot be read or written."""


def line_hash(entry: dict[str, Any]) -> str:
    """Of everything in a line but the hash itself."""
    rest = {key: value for key, value in entry.items() if key != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Head:
    """How long a node's record is and how it ends, signed; what others keep as witnesses."""

    node: str
    length: int
    hash: str
    signature: str

    @staticmethod
    def sign(node: str, length: int, last: str, key: ec.EllipticCurvePrivateKey) -> Head:
        """By the node's own key."""
        signature = key.sign(_signed(node, length, last), ec.ECDSA(hashes.SHA256()))
        return Head(node, length, last, base64.b64encode(signature).decode())

    def is_signed_by(self, key: Any) -> bool:
        """Whether the holder of a public key said this."""
        try:
            signature = base64.b64decode(self.signature, validate=True)
            key.verify(signature, _signed(self.node, self.length, self.hash), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, binascii.Error, ValueError):
            return False
        return True

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str) -> Head:
        """What `to_json` wrote."""
        try:
            raw = json.loads(text)
            return Head(str(raw["node"]), int(raw["length"]), str(raw["hash"]), str(raw["signature"]))
        except (ValueError, KeyError, TypeError) as error:
            raise AuditError(f"not the head of an audit log: {text[:80]!r}") from error


def read_heads(path: Path) -> list[Head]:
    """What a witness kept; a line that was not written to its end is passed over."""
    heads = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"cannot read '{path}': {error}") from error
    for line in lines:
        try:
            heads.append(Head.from_json(line))
        except AuditError:
            if line.endswith("}"):
                raise
    return heads


def _signed(node: str, length: int, last: str) -> bytes:
    return f"fedh2l-audit-1\n{node}\n{length}\n{last}".encode()


class AuditLog:
    """The file, open for more; safe to use from several threads."""

    def __init__(self, path: Path, node: str, federation: str, key: ec.EllipticCurvePrivateKey) -> None:
        self.node, self._key = node, key
        self._lock = threading.Lock()
        whole, torn = _whole_lines(path)
        complete = _parsed(torn)
        only_its_end = isinstance(complete, dict) and line_hash(complete) == complete.get("hash")
        self._length, self._last = 0, ""
        self.sent: Counter[str] = Counter()
        """Bytes of signals to each of the others, since the first line."""
        for entry in [*whole, complete] if only_its_end else whole:
            if isinstance(entry, dict):
                self._length, self._last = self._length + 1, str(entry.get("hash", ""))
                self._count(entry)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise AuditError(f"cannot write '{path}': {error.strerror}") from error
        if torn:
            os.write(self._file, b"\n")
        if torn and not only_its_end:
            self._append({"kind": TORN, "bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()})
        if not any(isinstance(entry, dict) and entry.get("kind") == START for entry in whole):
            self._append({"kind": START, "node": node, "federation": federation})

    def _count(self, entry: dict[str, Any]) -> None:
        if entry.get("kind") == SIGNAL and isinstance(entry.get("bytes"), int):
            self.sent[str(entry.get("peer"))] += entry["bytes"]

    def record(self, kind: str, peer: str, round: int, payload: bytes) -> None:
        """Notes what is about to be sent; a line is there before the message leaves."""
        sent = {"peer": peer, "round": round, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        with self._lock:
            self._append({"kind": kind, **sent})

    def _append(self, about: dict[str, Any]) -> None:
        entry = {"line": self._length + 1, "time": now().isoformat(), **about, "previous": self._last}
        entry["hash"] = line_hash(entry)
        data = (json.dumps(entry, separators=(",", ":")) + "\n").encode()
        if self._file < 0:
            raise AuditError("cannot note what is sent, so nothing is: the record is closed")
        try:
            end = os.fstat(self._file).st_size
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, end)  # no half of a line is left
                raise
        except OSError as error:
            raise AuditError(f"cannot note what is sent, so nothing is: {error.strerror}") from error
        self._length, self._last = self._length + 1, entry["hash"]
        self._count(entry)

    def head(self) -> Head:
        """As it is now, on the disk for good."""
        with self._lock:
            os.fsync(self._file)
            return Head.sign(self.node, self._length, self._last, self._key)

    def close(self) -> None:
        """All of it on the disk; nothing more can be noted, and so sent."""
        with self._lock:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def _whole_lines(path: Path) -> tuple[list[Any], bytes]:
    """What the lines of a file say, None for what is no JSON object, and what comes after the last whole one."""
    if not path.exists():
        return [], b""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise AuditError(f"cannot read '{path}': {error.strerror}") from error
    return [_parsed(line) for line in lines], rest


def _parsed(line: bytes) -> Any:
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return entry if isinstance(entry, dict) else line


@dataclass
class Report:
    """What an audit found."""

    node: str = ""
    federation: str = ""
    lines: int = 0
    last: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of message."""
    messages: Counter[str] = field(default_factory=Counter)
    receivers: set[str] = field(default_factory=set)
    last_round: int = 0
    torn: list[int] = field(default_factory=list)
    """Lines that were closed after one was not written to its end."""
    witnessed: int = 0
    """How many lines others can vouch for."""
    problems: list[str] = field(default_factory=list)


def audit(path: Path, witnesses: Sequence[Head] = (), key: Any = None) -> Report:
    """Reads a record from its first line to its last, and holds it to what others were told of it."""
    report = Report()
    if not path.exists():
        raise AuditError(f"there is no audit log '{path}'")
    whole, rest = _whole_lines(path)
    if rest:
        report.problems.append(f"it ends in the middle of a line, of which {len(rest)} bytes are there")
    hashes_of: dict[int, str] = {}
    for number, entry, fragment in _with_fragments(whole, report):
        if line_hash(entry) != entry.get("hash"):
            report.problems.append(f"line {number} was changed")
        if entry.get("previous") != report.last or entry.get("line") != report.lines + 1:
            report.problems.append(f"before line {number} something was removed or put in")
        _take(entry, fragment, number, report)
        report.lines, report.last = report.lines + 1, str(entry.get("hash"))
        hashes_of[report.lines] = report.last
    for head in witnesses:
        _hold(head, hashes_of, key, report)
    return report


def _with_fragments(whole: Sequence[Any], report: Report) -> Iterator[tuple[int, dict[str, Any], bytes | None]]:
    """Entries with their place in the file, and with what stood before them that was no line."""
    fragment: bytes | None = None
    for number, entry in enumerate(whole, 1):
        if isinstance(entry, dict):
            yield number, entry, fragment
            fragment = None
        else:
            if fragment is not None:
                report.problems.append(f"line {number - 1} cannot be read")
            fragment = entry
    if fragment is not None:
        report.problems.append(f"line {len(whole)} cannot be read")


def _take(entry: dict[str, Any], fragment: bytes | None, number: int, report: Report) -> None:
    kind = str(entry.get("kind"))
    if kind == TORN:
        if fragment is None or hashlib.sha256(fragment).hexdigest() != entry.get("sha256"):
            report.problems.append(f"line {number} closes a torn line that is not there")
        report.torn.append(number)
    elif fragment is not None:
        report.problems.append(f"line {number - 1} cannot be read")
    if kind == START:
        report.node, report.federation = str(entry.get("node")), str(entry.get("federation"))
        if report.lines > len(report.torn):
            report.problems.append(f"line {number} starts the record anew")
    elif kind != TORN:
        size, round = entry.get("bytes"), entry.get("round")
        if not isinstance(size, int) or not isinstance(round, int):
            report.problems.append(f"line {number} does not say how much was sent")
            return
        report.sent[kind] += size
        report.messages[kind] += 1
        report.receivers.add(str(entry.get("peer")))
        report.last_round = max(report.last_round, round)
    if not report.node and kind not in (START, TORN):
        report.problems.append("its beginning is missing")


def _hold(head: Head, hashes_of: dict[int, str], key: Any, report: Report) -> None:
    if head.node != report.node:
        return
    if key is not None and not head.is_signed_by(key):
        report.problems.append(f"a witness has a head of {head.length} lines that this node did not sign")
    elif head.length > report.lines:
        report.problems.append(f"{head.length - report.lines} lines were cut off: a witness saw {head.length}")
    elif hashes_of.get(head.length) != head.hash:
        report.problems.append(f"a witness saw another line {head.length}")
    else:
        report.witnessed = max(report.witnessed, head.length)
