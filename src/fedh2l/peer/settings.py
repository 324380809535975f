"""`peer.toml`: what one organisation brings to a federation, and where it keeps it."""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ConfigDict, Field

from fedh2l.config import dataset
from fedh2l.data.base import Dataset
from fedh2l.domain import Domain
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.optimizers import OptimizerSettings
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.certificates import Identity, write_private
from fedh2l.peer.charter import Charter
from fedh2l.peer.circle import Circle, Open, Sealed, require_loopback
from fedh2l.peer.terms import Terms, pair_up
from fedh2l.peer.views import AS_THEY_ARE, SharedViews
from fedh2l.plugins import search
from fedh2l.section import Section
from fedh2l.settings import RunSettings


class PeerSettings(Section):
    """The `[peer]` section; paths are relative to the file."""

    model_config = ConfigDict(protected_namespaces=())

    listen: str = Field(description="where others reach this peer: host:port, as 0.0.0.0:7443")
    status: str | None = Field(None, description="host:port on this machine for `fedh2l status` and health checks")
    metrics: str | None = Field(None, description="host:port on this machine where Prometheus finds metrics")
    roster: str | list[str] = Field("roster.toml", description="the roster that all members hold, or its versions")
    seedset: str | list[str] = Field(
        "seedset.safetensors", description="the seed set that all members hold, or those of the roster's versions"
    )
    certificate: str = Field("keys/node.pem", description="this node's certificate")
    key: str = Field("keys/node.key", description="its key, which never leaves this machine")
    authority: str = Field("ca.pem", description="the authority's certificate")
    revoked: str | None = Field(None, description="the list of what the authority took back")
    secret: str = Field("keys/secret", description="what private batches are drawn by; made if it is not there")
    out: str = Field("peer", description="folder for checkpoints, metrics, models and the audit log")
    model: str = Field("lenet", description="a built-in model, or package.module:factory")
    model_args: dict[str, Any] = Field({}, description="arguments of the model")
    weights: str | None = Field(
        None, description="what the model starts from: a .safetensors or .pth file, or a name that torchvision knows"
    )
    domain: str | None = Field(None, description="the domain of [data] that is this node's; its name if not given")
    name: str | None = Field(None, description="this node's name, where no certificate says it (`--insecure`)")
    snapshots: bool = Field(False, description="keep the model of every evaluation, as rehearsals want")


UNSAID = {"fit": "stretch", "mean": [0.0], "std": [1.0]}
"""What is true of images whose schema does not say it."""
LOCAL = ("device", "threads", "dtype", "precision", "micro_batch", "average", "eval_every", "checkpoint_every")
"""The keys of `[run]` that are a peer's own; the others are the roster's."""


@dataclass(frozen=True)
class PeerConfig:
    """Everything that a peer starts from, read and checked."""

    settings: PeerSettings
    run: RunSettings
    optimizer: OptimizerSettings
    terms: Terms
    identity: Identity | None
    """None without certificates."""
    name: str
    """Of this node."""
    domain: Domain
    secret: str
    folder: Path
    text: str

    def path(self, name: str) -> Path:
        """A path of the file."""
        return self.folder / name

    @cached_property
    def signer(self) -> ec.EllipticCurvePrivateKey:
        """What this node signs with; without certificates, something that nobody knows it by."""
        return self.identity.signer if self.identity is not None else ec.generate_private_key(ec.SECP256R1())

    def circle(self) -> Circle:
        """Who this peer speaks to."""
        charter = self.terms.all[0].charter
        if self.identity is None:
            return Open(self.name, dict.fromkeys(charter.names, ""))
        return Sealed(self.identity, charter.pins, self.revoked)

    @property
    def revoked(self) -> Path | None:
        """Where the list of what is revoked is."""
        return self.path(self.settings.revoked) if self.settings.revoked else None


def load_peer(path: Path, insecure: bool = False) -> PeerConfig:
    """From `peer.toml`; `insecure` is without certificates, and with addresses of this machine alone."""
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
    for key in ("status", "metrics"):
        address = getattr(settings, key)
        if address is not None:
            require_loopback(f"peer.{key}", address)
    given = raw.get("run", {})
    foreign = [key for key in given if key not in LOCAL]
    if foreign:
        raise ConfigError(f"run.{foreign[0]}: for a peer this is agreed in the roster, or has no meaning")
    charters = [Charter.load(folder / name) for name in _files(settings.roster)]
    identity = None if insecure else _identity(folder, settings)
    name = identity.about.name if identity is not None else settings.name
    if name is None:
        raise ConfigError("peer.name: without certificates a peer must be given its name")
    _check_addresses(charters, settings, insecure)
    terms = pair_up(charters, [Bundle.load(folder / file) for file in _files(settings.seedset)]).since(name)
    first = terms.all[0]
    agreed = {"rounds": terms.rounds_of(name), "seed": first.roster.seed}
    size = first.charter.agreement.batch_size
    run = RunSettings.read({**given, **agreed, "batch_size": size, "engine": "local"}, "run").resolved()
    if not run.average and any(term.method.wants_average for term in terms.all):
        raise ConfigError(
            "run.average: the roster says that averages of weights teach (method.teacher); set it, to 0.99 say"
        )
    data = dataset(raw.get("data", {}))
    domain = _own_domain(data, settings.domain or name, first.roster.seed, first.bundle, first.charter.views)
    if domain.private.inputs.dtype != first.bundle.samples.inputs.dtype:
        terms = terms.as_numbers()
    return PeerConfig(
        settings,
        run,
        OptimizerSettings.read(raw.get("optimizer", {}), "optimizer"),
        terms,
        identity,
        name,
        replace(domain, public=terms.all[0].part(name), public_labels=first.bundle.labelled),
        _secret(folder / settings.secret),
        folder,
        text,
    )


def _files(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _identity(folder: Path, settings: PeerSettings) -> Identity:
    files = [folder / name for name in (settings.certificate, settings.key, settings.authority)]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise ConfigError(
            f"there is no '{missing[0]}', and without certificates a peer does not start; make them with `fedh2l pki`, "
            "or try things out on this machine alone with --insecure"
        )
    return Identity.load(*files)


def _check_addresses(charters: Sequence[Charter], settings: PeerSettings, insecure: bool) -> None:
    for charter in charters:
        for member in charter.members:
            if insecure:
                require_loopback("without certificates, a federation", member.address)
            elif member.pin is None:
                raise ConfigError(f"member '{member.name}' has no pin; `fedh2l pki show` prints that of a certificate")
    if insecure:
        require_loopback("without certificates, peer.listen", settings.listen)


def _own_domain(data: Dataset, name: str, seed: int, bundle: Bundle, views: SharedViews = AS_THEY_ARE) -> Domain:
    domains = {domain.name: domain for domain in data.domains(seed)}
    if name not in domains:
        raise ConfigError(f"peer.domain: there is no domain '{name}' in {data.title}.{did_you_mean(name, domains)}")
    domain = domains[name]
    if domain.classes != bundle.classes:
        raise ConfigError(
            f"the classes of this node's data are {list(domain.classes)}, those of the seed set {list(bundle.classes)}"
        )
    if bundle.labelled and not (data.public_labels and domain.public_labels):
        raise ConfigError("data.public_labels: the seed set has labels; leave it at true")
    if domain.augmentation is not None and domain.augmentation.public:
        if SharedViews.like(domain.augmentation.public) != views:
            raise ConfigError(
                "data.augment: the roster agrees on other views of public images ([views]) than this node's data has; "
                "use 'local' or 'none'"
            )
        domain = replace(domain, augmentation=replace(domain.augmentation, public=None))
    if domain.private.inputs.dtype == torch.uint8:
        domain = _images_alike(domain, bundle)
    mine, theirs = domain.private.inputs, bundle.samples.inputs
    alike = mine.dtype == theirs.dtype or (mine.dtype == torch.float32 and theirs.dtype == torch.uint8)
    if mine.shape[1:] != theirs.shape[1:] or not alike:
        raise ConfigError(
            f"this node's inputs are {mine.dtype} of shape {tuple(mine.shape[1:])}, those of the seed set "
            f"{theirs.dtype} of shape {tuple(theirs.shape[1:])}"
        )
    return domain


def _images_alike(domain: Domain, bundle: Bundle) -> Domain:
    """Images as the seed set has them, which must have been made in the same way."""
    mine, theirs = dict(domain.preprocessing), dict(bundle.schema)
    different = sorted(key for key in {*mine, *theirs} if {**UNSAID, **mine}.get(key) != {**UNSAID, **theirs}.get(key))
    if different:
        said = "; ".join(f"{key}: {mine.get(key)} here, {theirs.get(key)} there" for key in different)
        raise ConfigError(f"this node's images are not made as those of the seed set are ({said})")
    if bundle.samples.inputs.dtype == torch.uint8:
        return domain
    if domain.augmentation is not None:
        raise ConfigError("data.augment: this seed set holds images as numbers, which are not augmented; use 'none'")
    return domain.as_numbers()


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
