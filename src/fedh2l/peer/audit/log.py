"""Hash-chained log of sent messages, with one line per message.

Each line holds the hash of the previous line, so a changed or removed line breaks the chain. The node regularly signs
the length and last hash (`Head`) and sends them to other peers, so that a truncated log is detected too. A file that
exceeds `LARGEST` bytes is renamed, and the chain continues in a new file.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.files import UnreadableError, check_regular, json_object
from fedh2l.peer.audit.head import AuditError, Head
from fedh2l.peer.pki.certificates import now

START = "start"
"""Kind of the first line."""
CONTINUES = "continues"
"""Kind of the first line of a continuation file. The line holds the number of bytes sent so far."""
SIGNAL = "posteriors"
"""Kind of a line for a message with posteriors."""
TORN = "torn"
"""Kind of a line that follows an incomplete line and records its hash."""
LARGEST = 64 * 2**20
"""File size in bytes above which a new file is started."""


def line_hash(entry: dict[str, Any]) -> str:
    """Return the hash of a line without its `hash` field."""
    rest = {key: value for key, value in entry.items() if key != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return all files of a log, oldest first. Older files are named after the number of their first line."""
    aside = sorted(path.parent.glob(f"{path.stem}-{'[0-9]' * 12}{path.suffix}"))
    return [*aside, path] if path.exists() or not aside else aside


def lines_of(path: Path) -> Iterator[tuple[Any, bytes]]:
    """Yield a pair per line: the parsed line and no bytes, or None and the bytes of an incomplete line."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            for line in file:
                whole = line.endswith(b"\n")
                yield (parsed(line[:-1]), b"") if whole else (None, line)
    except OSError as error:
        raise AuditError(f"cannot read '{path}': {error.strerror}") from error
    except UnreadableError as error:
        raise AuditError(f"cannot read '{path}': {error}") from error


def parsed(line: bytes) -> Any:
    """Return the JSON object in a line, or the line itself if it holds none."""
    try:
        return json_object(line)
    except UnreadableError:
        return line


class AuditLog:
    """An audit log open for appending. Thread-safe."""

    def __init__(self, path: Path, node: str, federation: str, key: ec.EllipticCurvePrivateKey) -> None:
        self.node, self._key, self._federation, self._path = node, key, federation, path
        self._lock = threading.Lock()
        self._length, self._last, self._first = 0, "", 1
        self.sent: Counter[str] = Counter()
        """Bytes of posteriors sent to each peer since the first line."""
        torn, closes = self._take_up(files_of(path)[-1])
        self._file = self._open()
        if torn:
            os.write(self._file, b"\n")
        if torn and not closes:
            self._append({"kind": TORN, "bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()})
        self._begin()

    def _take_up(self, newest: Path) -> tuple[bytes, bool]:
        """Read the newest file. Return its incomplete last line, and whether that line lacks only the newline."""
        torn, begun = b"", False
        for entry, rest in lines_of(newest) if newest.exists() else ():
            torn = rest
            found = parsed(rest) if rest else entry
            if not isinstance(found, dict) or (rest and line_hash(found) != found.get("hash")):
                continue
            if not begun:
                self._first, begun = _number(found.get("line"), 1), True
                self._length = self._first - 1
            self._length, self._last = self._length + 1, str(found.get("hash", ""))
            self._count(found)
            if rest:
                return torn, True
        return torn, False

    def _begin(self) -> None:
        """Write the first line of a file if it is missing."""
        if self._length == 0 or not self._started():
            self._append({"kind": START, "node": self.node, "federation": self._federation})
        elif os.fstat(self._file).st_size == 0:
            about = {"node": self.node, "federation": self._federation, "sent": dict(sorted(self.sent.items()))}
            self._first = self._length + 1
            self._append({"kind": CONTINUES, **about})

    def _started(self) -> bool:
        oldest = files_of(self._path)[0]
        kinds = (entry.get("kind") for entry, _ in lines_of(oldest) if isinstance(entry, dict))
        return any(kind in (START, CONTINUES) for kind in kinds)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise AuditError(f"cannot write '{self._path}': {error.strerror}") from error

    def _count(self, entry: dict[str, Any]) -> None:
        kind, size, sent = entry.get("kind"), entry.get("bytes"), entry.get("sent")
        if kind == SIGNAL and isinstance(size, int):
            self.sent[str(entry.get("peer"))] += size
        elif kind == CONTINUES and isinstance(sent, dict):
            self.sent = Counter({str(peer): _number(total, 0) for peer, total in sent.items()})

    def record(self, kind: str, peer: str, round: int, payload: bytes) -> None:
        """Append a line for a message. It is called before sending, so every sent message has a line."""
        sent = {"peer": peer, "round": round, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        with self._lock:
            self._append({"kind": kind, **sent})

    def _append(self, about: dict[str, Any]) -> None:
        if self._file < 0:
            raise AuditError("cannot write the audit log, so nothing is sent: the record is closed")
        try:
            end = os.fstat(self._file).st_size
            if end >= LARGEST:
                self._put_aside()
                end = os.fstat(self._file).st_size
            entry = {"line": self._length + 1, "time": now().isoformat(), **about, "previous": self._last}
            entry["hash"] = line_hash(entry)
            data = (json.dumps(entry, separators=(",", ":")) + "\n").encode()
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, end)  # never leave a partial line
                raise
        except OSError as error:
            raise AuditError(f"cannot write the audit log, so nothing is sent: {error.strerror}") from error
        self._length, self._last = self._length + 1, entry["hash"]
        self._count(entry)

    def _put_aside(self) -> None:
        """Rename the full file and start the next one."""
        os.fsync(self._file)
        aside = self._path.with_name(f"{self._path.stem}-{self._first:012}{self._path.suffix}")
        os.rename(self._path, aside)
        os.close(self._file)
        self._file = self._open()
        self._begin()

    def head(self) -> Head:
        """Flush the log to disk and return its signed head."""
        with self._lock:
            os.fsync(self._file)
            return Head.sign(self.node, self._length, self._last, self._key)

    def close(self) -> None:
        """Flush the log to disk and close it. No message can be logged afterwards, so none can be sent."""
        with self._lock:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value >= 0 else otherwise
