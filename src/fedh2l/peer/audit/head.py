"""Heads of an audit log: its length and last hash, signed. Other peers keep them as witnesses."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.errors import FedH2LError, shown
from fedh2l.files import UnreadableError, json_object, read_text


class AuditError(FedH2LError):
    """An audit log cannot be read or written."""


@dataclass(frozen=True)
class Head:
    """Length and last hash of a node's log, signed by the node."""

    node: str
    length: int
    hash: str
    signature: str

    @staticmethod
    def sign(node: str, length: int, last: str, key: ec.EllipticCurvePrivateKey) -> Head:
        signature = key.sign(_signed(node, length, last), ec.ECDSA(hashes.SHA256()))
        return Head(node, length, last, base64.b64encode(signature).decode())

    def is_signed_by(self, key: Any) -> bool:
        try:
            signature = base64.b64decode(self.signature, validate=True)
            key.verify(signature, _signed(self.node, self.length, self.hash), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, binascii.Error, ValueError):
            return False
        return True

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str) -> Head:
        try:
            raw = json_object(text)
            return Head(str(raw["node"]), int(raw["length"]), str(raw["hash"]), str(raw["signature"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise AuditError(f"not the head of an audit log: '{shown(text, 80)}'") from error


def read_heads(path: Path) -> list[Head]:
    """Return the heads in a file. An incomplete last line is skipped."""
    heads = []
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnreadableError) as error:
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
