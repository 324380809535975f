"""Shares of the federation's seed, so that no single member can choose the seed.

The seed determines the public samples of each round, and their augmentation. Each member therefore draws a random share
and puts a commitment, the hash of the share, into its part of the seed set. The shares are revealed only after the seed
set is merged, when commitments can no longer change. A member reveals its share for one seed set only, and signs this
(`reveals.py`). The seed is the hash of all shares.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from fedh2l.errors import ConfigError, shown
from fedh2l.experiment.toml import toml_text
from fedh2l.files import UnreadableError, read_text, read_toml, write_atomically
from fedh2l.protocol.roster import check_name
from fedh2l.section import Section

SIZE = 32
"""Bytes of a share, and of a commitment."""
_HEX = re.compile(f"[0-9a-f]{{{2 * SIZE}}}")


class Reveal(Section):
    """An entry of `[[shares]]`: a share that its member has revealed for one seed set."""

    name: str = Field(description="Name of the member.")
    share: str = Field(pattern=f"^{_HEX.pattern}$", description="Share of the seed.")
    seedset: str = Field(pattern=f"^{_HEX.pattern}$", description="Digest of the seed set that it was revealed for.")
    key: str = Field(pattern="^([0-9a-f]{2}){1,500}$", description="Public key of the member.")
    signature: str = Field(pattern="^([0-9a-f]{2}){1,500}$", description="Signature of the member.")

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        check_name(name)
        return name

    @staticmethod
    def load(path: Path) -> Reveal:
        """Read a file that `fedh2l seedset reveal` has written."""
        try:
            return Reveal.read(read_toml(path), "share")
        except (OSError, UnreadableError, ConfigError) as error:
            raise ConfigError(
                f"'{path}' holds no revealed share, as `fedh2l seedset reveal` writes it: {shown(error)}"
            ) from error

    def save(self, path: Path) -> None:
        write_atomically(path, toml_text(self.model_dump()).encode())


def is_hash(text: Any) -> bool:
    """Return whether this is a share or a commitment: 32 bytes in hexadecimal."""
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


def draw_share(path: Path) -> str:
    """Draw a new share and write it to a file that only its owner can read.

    A share must not be reused. After a first merge, others know it and could choose their shares to fit.
    """
    share = secrets.token_hex(SIZE)
    write_atomically(path, f"{share}\n".encode(), private=True)
    return share


def read_share(path: Path) -> tuple[str, str]:
    """Return a share, and the digest of the seed set that it was revealed for. The digest is empty before that."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"cannot read the share '{path}': {error}") from error
    if len(lines) not in (1, 2) or not all(map(is_hash, lines)):
        raise ConfigError(f"'{path}' holds no share: {2 * SIZE} hexadecimal digits were expected")
    return lines[0], "".join(lines[1:])


def bind_share(path: Path, seedset: str) -> str:
    """Return a share to reveal for a seed set, and record this in its file. Refuse every other seed set from then on.

    Others know a share that was revealed. With another seed set, they could still choose theirs to fit.
    """
    share, before = read_share(path)
    if before not in ("", seedset):
        raise ConfigError(
            f"'{path}' was revealed for the seed set {before}, and this one is {seedset}. Whoever made it knew your "
            "share, and could choose the seed. Prepare a new part with `fedh2l seedset part`, which draws a new share"
        )
    write_atomically(path, f"{share}\n{seedset}\n".encode(), private=True)
    return share


def commitment_to(share: str) -> str:
    """Return the hash that a member publishes before it reveals its share."""
    return hashlib.sha256(f"fedh2l-share-1\n{share}".encode()).hexdigest()


def seed_of(shares: Mapping[str, str]) -> int:
    """Return the seed: 63 bits of the hash of all shares."""
    lines = "".join(f"{name} {share}\n" for name, share in sorted(shares.items()))
    return int.from_bytes(hashlib.sha256(f"fedh2l-seed-1\n{lines}".encode()).digest()[:8], "big") >> 1
