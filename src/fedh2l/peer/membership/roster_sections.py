"""The sections of `roster.toml`: agreed settings, members and timing."""

from __future__ import annotations

import base64
import binascii
from typing import Literal

from pydantic import Field, field_validator

from fedh2l.peer.transport.proxy import parse_address
from fedh2l.protocol.roster import check_name
from fedh2l.section import Section

MOST = 2**31
"""Rounds and versions: messages have 32 bits for their number."""


class Timing(Section):
    """The `[timing]` section: how long a peer waits for others."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="With synchronous, a round waits for messages until the deadline. With asynchronous, it never "
        "waits, and uses the newest message of each member.",
    )
    deadline: float = Field(30.0, gt=0, le=86400, description="Seconds that a round waits for other members.")
    quorum: int = Field(1, ge=0, description="Number of other members whose messages a round needs.")
    below_quorum: Literal["wait", "pause"] = Field(
        "wait",
        description="With wait, a peer below the quorum waits up to patience seconds and then pauses. With pause, "
        "it pauses at once. A paused peer saves its state, still answers, and continues when enough "
        "members are back.",
    )
    patience: float = Field(
        600.0,
        gt=0,
        le=2**31,
        description="Seconds to wait below the quorum. Also the time after which a peer trusts the round of a single "
        "member.",
    )
    linger: float = Field(
        600.0, ge=0, le=2**31, description="Seconds that a finished peer stays for members that are not finished."
    )
    staleness: int = Field(5, ge=0, description="Largest age of a message in exchanges, in asynchronous mode.")


class Member(Section):
    """An entry of `[[members]]`."""

    name: str = Field(description="Name of the member, as in its certificate.")
    address: str = Field(description="Address of the member, as host:port.")
    pin: str | None = Field(
        None, description="Pin of the member's public key: sha256//…, as `fedh2l pki show` prints it."
    )

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        check_name(name)
        return name

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        parse_address(address)
        return address

    @field_validator("pin")
    @classmethod
    def _is_pin(cls, pin: str | None) -> str | None:
        if pin is None:
            return None
        kind, _, hashed = pin.partition("//")
        try:
            size = len(base64.b64decode(hashed, validate=True))
        except (binascii.Error, ValueError):
            size = 0
        if kind != "sha256" or size != 32:
            raise ValueError("it should be sha256// and the base64 of 32 bytes, as `fedh2l pki show` prints it")
        return pin


class Agreement(Section):
    """The keys at the top of the file."""

    federation: str = Field(min_length=1, max_length=64, description="Name of the federation.")

    @field_validator("federation")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("it should have printable characters only")
        return name

    version: int = Field(1, ge=1, le=MOST, description="Version of the roster. A change of members makes a new one.")
    from_round: int = Field(1, ge=1, le=MOST, description="First round of this version.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of everything public and random. With [[shares]], it is their hash."
    )
    rounds: int = Field(ge=1, le=MOST, description="Number of rounds. A round is one local step on every node.")
    batch_size: int = Field(32, ge=1, description="Samples per local batch.")
    ema_decay: float = Field(0.0, ge=0, lt=1, description="EMA decay of each member's weights. 0 turns it off.")
    seedset: str = Field(
        pattern="^[0-9a-f]{64}$", description="Digest of the seed set, as `fedh2l seedset verify` prints it."
    )
