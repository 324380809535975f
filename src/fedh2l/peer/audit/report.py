"""Verification of an audit log: its hash chain, and the heads that witnesses keep."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedh2l.peer.audit.head import AuditError, Head
from fedh2l.peer.audit.log import CONTINUES, START, TORN, files_of, line_hash, lines_of

MOST = 2**63
"""Bytes, rounds and lines that a log may speak of."""


@dataclass
class Report:
    """Result of an audit."""

    node: str = ""
    federation: str = ""
    lines: int = 0
    """Number of the last line."""
    last: str = ""
    """Hash of the last line."""
    files: int = 1
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of message."""
    messages: Counter[str] = field(default_factory=Counter)
    receivers: set[str] = field(default_factory=set)
    last_round: int = 0
    torn: list[int] = field(default_factory=list)
    """Numbers of the lines that follow an incomplete line."""
    witnessed: int = 0
    """Number of lines that a witness confirms."""
    problems: list[str] = field(default_factory=list)


def audit(path: Path, witnesses: Sequence[Head] = (), key: Any = None) -> Report:
    """Read all files of a log in order, check the chain, and compare it with the witnesses' heads."""
    files = files_of(path)
    if not files[-1].exists():
        raise AuditError(f"there is no audit log '{path}'")
    walk = _Walk({head.length for head in witnesses}, Report(files=len(files)))
    for file in files:
        walk.read(file, f"{file.name}, line " if len(files) > 1 else "line ")
    if not walk.report.node:
        walk.problem("its beginning is missing")
    for head in witnesses:
        _hold(head, walk.hashes_of, key, walk.report)
    if witnesses and all(head.node != walk.report.node for head in witnesses):
        walk.problem(f"no witness speaks of '{walk.report.node}', whose log this says it is")
    return walk.report


class _Walk:
    """Reads the lines of a log in order. After a problem it continues from the line that it found."""

    def __init__(self, wanted: set[int], report: Report) -> None:
        self.report = report
        self.problem = report.problems.append
        self.hashes_of: dict[int, str] = {}
        """Hashes of the lines that the witnesses' heads refer to."""
        self._wanted = wanted
        self._fragment: bytes | None = None
        """Unreadable bytes in the line before the current one."""

    def read(self, file: Path, where: str) -> None:
        """Read and check one file."""
        number = 0
        for number, (entry, rest) in enumerate(lines_of(file), 1):
            if rest:
                self.problem(f"{where}{number} is incomplete and has only {len(rest)} bytes")
            elif isinstance(entry, dict):
                self._check_chain(entry, f"{where}{number}")
                self._take(entry, f"{where}{number}", f"{where}{number - 1}")
                self._fragment = None
            else:
                if self._fragment is not None:
                    self.problem(f"{where}{number - 1} cannot be read")
                self._fragment = entry
        if self._fragment is not None:
            self.problem(f"{where}{number} cannot be read")
            self._fragment = None

    def _check_chain(self, entry: dict[str, Any], place: str) -> None:
        report, line, hashed = self.report, entry.get("line"), str(entry.get("hash"))
        if line_hash(entry) != entry.get("hash"):
            self.problem(f"{place} was changed")
        expected = report.lines + 1
        if entry.get("previous") != report.last or line != expected:
            self.problem(f"{_gap(expected, line)} before {place}")
        report.lines, report.last = (line if isinstance(line, int) and 0 < line <= MOST else expected), hashed
        if report.lines in self._wanted:
            self.hashes_of[report.lines] = hashed

    def _take(self, entry: dict[str, Any], place: str, before: str) -> None:
        report, kind = self.report, str(entry.get("kind"))
        if kind == TORN:
            self._close_torn(entry, place)
        elif self._fragment is not None:
            self.problem(f"{before} cannot be read")
        if kind in (START, CONTINUES):
            if kind == START and report.lines > 1 + len(report.torn):
                self.problem(f"{place} starts the record anew")
            report.node, report.federation = str(entry.get("node")), str(entry.get("federation"))
        elif kind != TORN:
            self._sum_up(entry, kind, place)

    def _close_torn(self, entry: dict[str, Any], place: str) -> None:
        if self._fragment is None or hashlib.sha256(self._fragment).hexdigest() != entry.get("sha256"):
            self.problem(f"{place} closes a torn line that is not there")
        self.report.torn.append(self.report.lines)

    def _sum_up(self, entry: dict[str, Any], kind: str, place: str) -> None:
        size, round = entry.get("bytes"), entry.get("round")
        if not isinstance(size, int) or not isinstance(round, int) or min(size, round) < 0 or max(size, round) > MOST:
            self.problem(f"{place} does not give the number of bytes sent")
            return
        report = self.report
        report.sent[kind] += size
        report.messages[kind] += 1
        report.receivers.add(str(entry.get("peer")))
        report.last_round = max(report.last_round, round)


def _gap(expected: int, found: Any) -> str:
    """Describe a break in the sequence of line numbers."""
    if not isinstance(found, int) or found <= expected:
        return "lines were removed or inserted"
    return f"entry {expected} is missing" if found == expected + 1 else f"entries {expected} to {found - 1} are missing"


def _hold(head: Head, hashes_of: dict[int, str], key: Any, report: Report) -> None:
    """Compare the log with the head that a witness keeps."""
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
