"""`peer.toml`: what one organisation brings to a federation, and where it keeps it."""

from __future__ import annotations

import os
import secrets
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from fedh2l.config import dataset
from fedh2l.data.base import Dataset
from fedh2l.domain import Domain
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.optimizers import OptimizerSettings
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.certificates import Identity, write_private
from fedh2l.peer.charter import Charter
from fedh2l.plugins import search
from fedh2l.section import Section
from fedh2l.settings import RunSettings


class PeerSettings(Section):
    """The `[peer]` section; paths are relative to the file."""

    model_config = ConfigDict(protected_namespaces=())

    listen: str = Field(description="where others reach this peer: host:port, as 0.0.0.0:7443")
    roster: str = Field("roster.toml", description="the roster that all members hold")
    seedset: str = Field("seedset.safetensors", description="the seed set that all members hold")
    certificate: str = Field("keys/node.pem", description="this node's certificate")
    key: str = Field("keys/node.key", description="its key, which never leaves this machine")
    authority: str = Field("ca.pem", description="the authority's certificate")
    revoked: str | None = Field(None, description="the list of what the authority took back")
    secret: str = Field("keys/secret", description="what private batches are drawn by; made if it is not there")
    out: str = Field("peer", description="folder for checkpoints, metrics, models and the audit log")
    model: str = Field("lenet", description="a built-in model, or package.module:factory")
    model_args: dict[str, Any] = Field({}, description="arguments of the model")
    domain: str | None = Field(None, description="the domain of [data] that is this node's; its name if not given")
    snapshots: bool = Field(False, description="keep the model of every evaluation, as rehearsals want")


LOCAL = ("device", "threads", "dtype", "eval_every", "checkpoint_every", "selection")
"""The keys of `[run]` that are a peer's own; the others are the roster's."""


@dataclass(frozen=True)
class PeerConfig:
    """Everything that a peer starts from, read and checked."""

    settings: PeerSettings
    run: RunSettings
    optimizer: OptimizerSettings
    charter: Charter
    bundle: Bundle
    identity: Identity
    domain: Domain
    secret: str
    folder: Path
    text: str

    def path(self, name: str) -> Path:
        """A path of the file."""
        return self.folder / name

    @property
    def name(self) -> str:
        """Of this node."""
        return self.identity.about.name

    @property
    def revoked(self) -> Path | None:
        """Where the list of what is revoked is."""
        return self.path(self.settings.revoked) if self.settings.revoked else None


def load_peer(path: Path) -> PeerConfig:
    """From `peer.toml`."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    unknown = [key for key in raw if key not in ("peer", "run", "data", "optimizer")]
    if unknown:
        raise ConfigError(f"{path}: unknown section [{unknown[0]}]; there are [peer], [run], [data] and [optimizer]")
    folder = path.absolute().parent
    search(str(folder))
    settings = PeerSettings.read(raw.get("peer", {}), "peer")
    given = raw.get("run", {})
    foreign = [key for key in given if key not in LOCAL]
    if foreign:
        raise ConfigError(f"run.{foreign[0]}: for a peer this is agreed in the roster, or has no meaning")
    charter, bundle = Charter.load(folder / settings.roster), Bundle.load(folder / settings.seedset)
    charter.check_bundle(bundle)
    agreed = charter.agreement
    run = RunSettings.read(
        {**given, "rounds": agreed.rounds, "seed": agreed.seed, "batch_size": agreed.batch_size, "engine": "local"},
        "run",
    ).resolved()
    identity = Identity.load(*(folder / name for name in (settings.certificate, settings.key, settings.authority)))
    domain = _own_domain(dataset(raw.get("data", {})), settings.domain or identity.about.name, agreed.seed, bundle)
    return PeerConfig(
        settings,
        run,
        OptimizerSettings.read(raw.get("optimizer", {}), "optimizer"),
        charter,
        bundle,
        identity,
        replace(domain, public=bundle.part(identity.about.name)),
        _secret(folder / settings.secret),
        folder,
        text,
    )


def _own_domain(data: Dataset, name: str, seed: int, bundle: Bundle) -> Domain:
    domains = {domain.name: domain for domain in data.domains(seed)}
    if name not in domains:
        raise ConfigError(f"peer.domain: there is no domain '{name}' in {data.title}.{did_you_mean(name, domains)}")
    domain = domains[name]
    if domain.classes != bundle.classes:
        raise ConfigError(
            f"the classes of this node's data are {list(domain.classes)}, those of the seed set {list(bundle.classes)}"
        )
    mine, theirs = domain.private.inputs, bundle.samples.inputs
    if mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
        raise ConfigError(
            f"this node's inputs are {mine.dtype} of shape {tuple(mine.shape[1:])}, those of the seed set "
            f"{theirs.dtype} of shape {tuple(theirs.shape[1:])}"
        )
    return domain


def _secret(path: Path) -> str:
    """What is in the file; drawn from the operating system once, if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, secrets.token_hex(16).encode())
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"'{path}' can be read by other users of this machine; chmod 600 it")
    secret = path.read_text().strip()
    if len(secret) < 32:
        raise ConfigError(f"'{path}' is too short to be a secret; remove it, and a new one is drawn")
    return secret
