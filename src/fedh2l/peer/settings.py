"""`peer.toml`: the settings, data and files of one organisation's peer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ConfigDict, Field

from fedh2l.data.base import model_for
from fedh2l.data.domain import Domain
from fedh2l.errors import ConfigError, shown
from fedh2l.experiment.config import Resolved, resolve
from fedh2l.experiment.settings import RunSettings
from fedh2l.files import UnreadableError, read_text, read_toml
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.peer.membership.roster_comparison import check_start
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion, pair_up
from fedh2l.peer.own_data import own_domain
from fedh2l.peer.pki.certificates import Identity, folder_for, write_private
from fedh2l.peer.transport.auth import InsecureLoopback, MutualTLS, PeerAuth, require_loopback
from fedh2l.peer.transport.proxy import check_proxy, without_password
from fedh2l.plugins import allow_named, search
from fedh2l.section import Section
from fedh2l.training.node_learner import Training
from fedh2l.training.optimizers import OptimizerSettings


class PeerSettings(Section):
    """The `[peer]` section. Paths are relative to the file."""

    model_config = ConfigDict(protected_namespaces=())

    listen: str = Field(description="Address to listen on, as host:port. Example: 0.0.0.0:7443.")
    status: str | None = Field(None, description="Local address for `fedh2l status` and health checks, as host:port.")
    metrics: str | None = Field(None, description="Local address for Prometheus, as host:port.")
    roster: str | list[str] = Field("roster.toml", description="Roster file, or a list of all versions.")
    seedset: str | list[str] = Field(
        "seedset.safetensors", description="Seed set file, or a list of the seed sets of all versions."
    )
    joined: bool = Field(False, description="This member joined with a later version of the roster than the first.")
    certificate: str = Field("keys/node.pem", description="Certificate of this node.")
    key: str = Field("keys/node.key", description="Private key of this node. It never leaves this machine.")
    authority: str = Field("ca.pem", description="Certificate of the authority.")
    revoked: str | None = Field(None, description="List of revoked certificates.")
    secret: str = Field(
        "keys/secret", description="Secret that draws private batches. The peer creates it if it is missing."
    )
    out: str = Field("peer", description="Folder for checkpoints, metrics, models and the audit log.")
    model: str | None = Field(
        None, description="Built-in model or package.module:factory. By default a built-in model that fits the inputs."
    )
    model_args: dict[str, Any] = Field({}, description="Arguments of the model.")
    weights: str | None = Field(
        None,
        description="Initial weights: a .safetensors or .pth file, or a torchvision name. By default random.",
    )
    domain: str | None = Field(
        None, description="Domain of [data] with this node's data. By default the domain of the same name."
    )
    proxy: str | None = Field(None, description="HTTP proxy for connections to other members, as http://host:port.")
    name: str | None = Field(None, description="Name of this node. Only with --insecure, without a certificate.")
    snapshots: bool = Field(False, description="Keep the model of every evaluation. Rehearsals need it.")


LOCAL = ("device", "threads", "dtype", "precision", "micro_batch", "kernels", "eval_every", "checkpoint_every")
"""Keys of `[run]` that each peer sets. The roster sets the others."""
DEFAULTS = {"kernels": "off"}
"""Values of these keys where a peer's own defaults differ from those of a run: nothing is compiled on its machine."""


@dataclass(frozen=True)
class PeerConfig:
    """All settings of a peer, loaded and validated."""

    settings: PeerSettings
    run: RunSettings
    optimizer: OptimizerSettings
    history: RosterHistory
    identity: Identity | None
    """None without certificates."""
    name: str
    """Name of this node."""
    domain: Domain
    secret: str
    folder: Path
    text: str
    """What it was read from, without the password of a proxy: a copy is kept, which others may read."""

    def path(self, name: str) -> Path:
        return self.folder / name

    @cached_property
    def signer(self) -> ec.EllipticCurvePrivateKey:
        """Key that signs the audit log. Without certificates, a temporary one."""
        return self.identity.signer if self.identity is not None else ec.generate_private_key(ec.SECP256R1())

    def auth(self) -> PeerAuth:
        """Return the authentication of other peers."""
        roster_file = self.history.all[0].roster_file
        if self.identity is None:
            return InsecureLoopback(self.name, dict.fromkeys(roster_file.names, ""))
        return MutualTLS(self.identity, roster_file.pins, self.revoked, self.settings.proxy)

    def training(self) -> Training:
        """Return the public data of the first roster version, this member's validation data, and the settings."""
        return Training(
            seed_set=self.history.all[0].seed_set,
            validation=self.domain.validation,
            optimizer=self.optimizer,
            batch_size=self.run.batch_size,
            dtype=self.run.torch_dtype,
            compute=self.run.compute,
            ema_decay=self.run.ema_decay,
        )

    @property
    def revoked(self) -> Path | None:
        return self.path(self.settings.revoked) if self.settings.revoked else None


def load_peer(path: Path, insecure: bool = False) -> PeerConfig:
    """Load `peer.toml`. With `insecure`, there are no certificates and all addresses must be local."""
    raw, text = _read(path)
    folder = path.absolute().parent
    settings = _own_settings(raw, folder)
    roster_files = [RosterFile.load(folder / name) for name in _files(settings.roster)]
    identity = None if insecure else _identity(folder, settings)
    name = identity.about.name if identity is not None else settings.name
    if name is None:
        raise ConfigError("peer.name: without certificates a peer must be given its name")
    _check_addresses(roster_files, settings, insecure)
    history = _history(roster_files, folder, settings, name)
    first = history.all[0]
    found = _resolved(raw, first, history.rounds_of(name))
    data, seed = raw.get("data", {}), found.run.seed
    domain = own_domain(data, name, settings.domain, seed, first.bundle, first.roster_file.views)
    if domain.private.inputs.dtype != first.bundle.samples.inputs.dtype:
        history = history.as_numbers()
    if settings.model is None:
        settings = settings.model_copy(update={"model": model_for(domain.private.inputs.shape[1:])})
    return PeerConfig(
        settings,
        found.run,
        found.optimizer,
        history,
        identity,
        name,
        replace(domain, public=history.all[0].part(name), public_labels=first.bundle.labelled),
        _secret(folder / settings.secret),
        folder,
        without_password(text),
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the sections of the file, and its text."""
    try:
        raw, text = read_toml(path), read_text(path)
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"cannot read '{path}': {shown(error)}") from error
    for key, section in raw.items():
        if key not in ("peer", "run", "data", "optimizer"):
            raise ConfigError(f"{path}: unknown section [{key}]; there are [peer], [run], [data] and [optimizer]")
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: write {key} as a section, [{key}]")
    return raw, text


def _own_settings(raw: Mapping[str, Any], folder: Path) -> PeerSettings:
    """Return the `[peer]` section. The names in the file may be imported, since the member runs it."""
    settings = PeerSettings.read(raw.get("peer", {}), "peer")
    allow_named([settings.model, raw.get("data", {}).get("name")])
    search(str(folder))
    for key, address in (("status", settings.status), ("metrics", settings.metrics)):
        if address is not None:
            require_loopback(f"peer.{key}", address)
    if settings.proxy is not None:
        check_proxy(settings.proxy)
    for key in raw.get("run", {}):
        if key not in LOCAL:
            raise ConfigError(f"run.{key}: for a peer this is agreed in the roster, or has no meaning")
    return settings


def _history(roster_files: Sequence[RosterFile], folder: Path, settings: PeerSettings, name: str) -> RosterHistory:
    """Return the versions of the roster, each with its seed set, from the first of this member on."""
    history = pair_up(roster_files, [Bundle.load(folder / file) for file in _files(settings.seedset)]).since(name)
    remedy = "Name all versions in peer.roster. If this member really joins later, set peer.joined = true"
    check_start(history.all[0].roster_file, settings.joined, remedy)
    return history


def _resolved(raw: Mapping[str, Any], version: RosterVersion, rounds: int) -> Resolved:
    """Return the sections `[run]` and `[optimizer]`, with what the roster says."""
    agreed = version.roster_file.agreement
    run = {
        **DEFAULTS, **raw.get("run", {}), "rounds": rounds, "seed": agreed.seed, "ema_decay": agreed.ema_decay,
        "batch_size": agreed.batch_size, "engine": "local",
    }  # fmt: skip
    return resolve({"run": run, "optimizer": raw.get("optimizer", {})}, version.method, version.bundle.labelled)


def _files(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _identity(folder: Path, settings: PeerSettings) -> Identity:
    files = [folder / name for name in (settings.certificate, settings.key, settings.authority)]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise ConfigError(
            f"there is no '{missing[0]}', and a peer needs certificates. Make them with `fedh2l pki`. "
            "To try things out on this machine alone, use --insecure"
        )
    return Identity.load(*files)


def _check_addresses(roster_files: Sequence[RosterFile], settings: PeerSettings, insecure: bool) -> None:
    for roster_file in roster_files:
        for member in roster_file.members:
            if insecure:
                require_loopback("without certificates, a federation", member.address)
            elif member.pin is None:
                raise ConfigError(f"member '{member.name}' has no pin; `fedh2l pki show` prints that of a certificate")
    if insecure:
        require_loopback("without certificates, peer.listen", settings.listen)


def _secret(path: Path) -> str:
    """Return the secret in a file. If the file is missing, create it with random bytes of the operating system."""
    if not path.exists():
        folder_for(path.parent)
        write_private(path, secrets.token_hex(16).encode())
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"'{path}' can be read by other users of this machine; chmod 600 it")
    try:
        secret = read_text(path).strip()
    except (OSError, UnreadableError) as error:
        raise ConfigError(f"cannot read '{path}': {shown(error)}") from error
    if len(secret) < 32:
        raise ConfigError(f"'{path}' is too short to be a secret; remove it, and a new one is drawn")
    return secret
