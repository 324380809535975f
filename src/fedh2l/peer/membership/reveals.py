"""Signatures that bind a member's share of the seed to one seed set.

The founder sees all shares before it writes the roster. It could then merge the seed set again, such that the seed or
the samples fit its wishes. The roster would need new signatures of all members for that.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.peer.membership.shares import Reveal, bind_share, commitment_to, read_share
from fedh2l.peer.pki.certificates import UNREADABLE, pin_of

_ALGORITHM = ec.ECDSA(hashes.SHA256())


def reveal(path: Path, bundle: Bundle, key: ec.EllipticCurvePrivateKey) -> Reveal:
    """Sign the share in a file for a seed set. The member is the one with the commitment to it."""
    commitment = commitment_to(read_share(path)[0])
    owners = [name for name, known in bundle.commitments.items() if known == commitment]
    if len(owners) != 1:
        members = f"of {len(owners)} members " if owners else "of no member "
        raise ConfigError(f"the share in '{path}' is that {members}in this seed set; it should be that of one")
    share = bind_share(path, bundle.digest)
    signature = key.sign(_signed(bundle.federation, owners[0], bundle.digest, share), _ALGORITHM)
    return Reveal(name=owners[0], share=share, seedset=bundle.digest, key=_der(key).hex(), signature=signature.hex())


def check_reveal(reveal: Reveal, bundle: Bundle, pin: str | None) -> None:
    """Raise `ConfigError` if a share was not revealed for this seed set, with the pinned key of its member."""
    name = reveal.name
    if reveal.seedset != bundle.digest:
        raise ConfigError(
            f"[[shares]]: '{name}' revealed its share for the seed set {reveal.seedset}, and this one is "
            f"{bundle.digest}. Somebody merged the parts again after that"
        )
    try:
        key = serialization.load_der_public_key(bytes.fromhex(reveal.key))
        if pin_of(key) != pin:
            raise ConfigError(
                f"[[shares]]: the share of '{name}' is signed with another key than the one in [[members]]"
            )
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        text = _signed(bundle.federation, name, reveal.seedset, reveal.share)
        key.verify(bytes.fromhex(reveal.signature), text, _ALGORITHM)
    except (*UNREADABLE, InvalidSignature):
        raise ConfigError(f"[[shares]]: the share of '{name}' does not carry its signature") from None


def _der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _signed(federation: str, name: str, seedset: str, share: str) -> bytes:
    return f"fedh2l-reveal-1\n{federation}\n{name}\n{seedset}\n{share}".encode()
