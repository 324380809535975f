"""Members of a federation called zoo: their keys, their entries in its roster, and what they give to its seed set."""

from __future__ import annotations

import base64
from dataclasses import replace

import torch

from fedh2l.data.domain import Samples
from fedh2l.peer.membership.bundle import Part
from fedh2l.peer.membership.public_samples import image_schema
from fedh2l.peer.pki import certificates

CLASSES = ("cat", "dog")
SCHEMA = image_schema("L:4x6")


def part(node: str, count: int = 4, seed: int = 0) -> Part:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 6, 4, generator=generator)
    return Part(node, CLASSES, SCHEMA, Samples(inputs, torch.arange(count) % 2))


def unlabelled(node: str) -> Part:
    samples = part(node).samples
    return Part(node, CLASSES, SCHEMA, replace(samples, labels=torch.full_like(samples.labels, -1)))


def pin(letter: str) -> str:
    return f"sha256//{base64.b64encode(letter.encode() * 32).decode()}"


def raw(**changes):
    members = [{"name": n, "address": f"{n}.example:7443", "pin": pin(n)} for n in ("a", "b", "c")]
    return {"federation": "zoo", "rounds": 100, "seedset": "0" * 64, "members": members, **changes}


def join(founder, folder, name="north", days=365, hosts=("north.example", "10.0.0.1", "::1")):
    """A member with everything that it needs."""
    path, _ = certificates.request(folder, name, hosts)
    signed = founder.sign(certificates.read_request(path), days)
    certificates.write(folder / certificates.NODE_CERTIFICATE, certificates.pem(signed))
    return signed
