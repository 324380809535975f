"""Shares of the federation's seed, so that no single member can choose the seed.

The seed determines the public samples of each round, and their augmentation. Each member therefore draws a random share
and puts a commitment, the hash of the share, into its part of the seed set. The shares are published only after the
seed set is merged, when commitments can no longer change. The seed is the hash of all shares.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedh2l.errors import ConfigError, shown
from fedh2l.files import UnreadableError, read_text, write_atomically

SIZE = 32
"""Bytes of a share, and of a commitment."""
_HEX = re.compile(f"[0-9a-f]{{{2 * SIZE}}}")


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


def read_share(path: Path) -> str:
    try:
        share = read_text(path).strip()
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"cannot read the share '{path}': {error}") from error
    if not is_hash(share):
        raise ConfigError(f"'{path}' holds no share: {2 * SIZE} hexadecimal digits were expected")
    return share


def commitment_to(share: str) -> str:
    """Return the hash that a member publishes before it reveals its share."""
    return hashlib.sha256(f"fedh2l-share-1\n{share}".encode()).hexdigest()


def seed_of(shares: Mapping[str, str]) -> int:
    """Return the seed: 63 bits of the hash of all shares."""
    lines = "".join(f"{name} {share}\n" for name, share in sorted(shares.items()))
    return int.from_bytes(hashlib.sha256(f"fedh2l-seed-1\n{lines}".encode()).digest()[:8], "big") >> 1


def check_shares(shares: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a value is not a share."""
    for name, share in shares.items():
        if not is_hash(share):
            raise ConfigError(f"shares.{shown(name, 80)}: {2 * SIZE} hexadecimal digits were expected")
