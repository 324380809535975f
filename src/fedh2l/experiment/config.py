"""Configurations: presets, a method's advice and defaults fill in the values that nobody has given.

Everything that runs is resolved here: a file with options (`load_config`), keywords in Python, a cell of a benchmark
and a member's settings (`resolve`). Errors name the key and the valid values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from fedh2l.data.base import Dataset, FunctionDataset
from fedh2l.data.registry import DATASETS
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RaySettings, RunSettings
from fedh2l.experiment.values import (
    DEFAULT_DATA,
    Change,
    Raw,
    apply,
    choose_method,
    drop_other_data,
    parse_change,
    read_toml,
)
from fedh2l.methods.base import Method, Preset
from fedh2l.methods.registry import DEFAULT, find_method, make_method
from fedh2l.plugins import allow_named, check_allowed, installed, is_path, search, trust
from fedh2l.section import Section
from fedh2l.training.node import Node
from fedh2l.training.optimizers import OptimizerSettings

FROM_PYTHON = "python"
"""`data.name` of a run whose data was passed in Python."""


class NodeSettings(Section):
    """One `[[nodes]]` entry."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = Field(description="Name of the node.")
    domain: str | None = Field(None, description="Domain with the node's data. By default the domain of the same name.")
    model: str = Field(
        "lenet",
        description="Built-in model or package.module:factory. By default a built-in model that fits the inputs.",
    )
    model_args: dict[str, Any] = Field({}, description="Arguments of the model.")
    weights: str | None = Field(
        None,
        description="Initial weights: a .safetensors or .pth file, or a torchvision name. By default random.",
    )
    resources: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None, description="Resources to request from a Ray cluster: num_cpus, num_gpus, memory, or custom ones."
    )


@dataclass(frozen=True)
class Config:
    """A complete configuration, with all defaults filled in."""

    run: RunSettings
    data: Dataset
    method: Method
    optimizer: OptimizerSettings
    nodes: tuple[NodeSettings, ...]
    ray: RaySettings

    @property
    def data_name(self) -> str:
        """Name or path of the dataset."""
        return self.data.title

    def on(self, device: str) -> Config:
        """Return the same configuration for another device."""
        return replace(self, run=self.run.model_copy(update={"device": device}).resolved())

    def experiment(self) -> Experiment:
        """Load the data and build the experiment."""
        found = self.data.domains(self.run.seed)
        if not self.data.public_labels:
            found = [replace(domain, public_labels=False) for domain in found]
        domains = {domain.name: domain for domain in found}
        nodes = []
        for place, node in enumerate(self.nodes):
            domain = node.domain or node.name
            if domain not in domains:
                key = "domain" if node.domain else "name"
                raise ConfigError(
                    f"nodes.{place}.{key}: there is no domain '{domain}' in {self.data_name}."
                    f"{did_you_mean(domain, domains)}"
                )
            given = (node.model_args, node.resources or {}, node.weights)
            nodes.append(Node(node.name, node.model, domains[domain], *given))
        return Experiment(nodes, self.method, self.run, self.optimizer, self.ray)

    def sections(self) -> Raw:
        """Return plain values, section by section."""
        data = self.data.model_dump()
        return {
            "run": self.run.model_dump(exclude={"out"}),
            "data": {"name": self.data_name, **data},
            "method": {"name": self.method.title, **self.method.model_dump()},
            "optimizer": self.optimizer.model_dump(),
            **({"ray": self.ray.model_dump()} if self.run.engine == "ray" else {}),
            "nodes": [node.model_dump() for node in self.nodes],
        }


class Resolved(NamedTuple):
    """The sections of a configuration with all values filled in."""

    run: RunSettings
    method: Method
    optimizer: OptimizerSettings
    ray: RaySettings
    data: Raw
    """Values of `[data]`. Data may also come from Python, or from a member's own files."""


def resolve(raw: Raw, method: Method | None = None, labelled: bool = True) -> Resolved:
    """Fill in the values that `raw` does not have, and check them all.

    A preset of the method comes first, then the values that the method recommends, then the defaults. `method` takes
    the place of `[method]`. `labelled` says whether public data has labels.
    """
    written = raw.get("method", {})
    chosen = type(method) if method else find_method(written.get("name", DEFAULT))
    values = {section: dict(raw.get(section, {})) for section in ("run", "data", "method", "optimizer", "ray")}
    preset = _preset(chosen, values["method"].pop("preset")) if "preset" in written else {}
    for key, value in {**_advice(chosen, values["data"], labelled), **preset}.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {}).setdefault(name, value)
    return Resolved(
        RunSettings.read(values["run"], "run").resolved(),
        method or make_method(values["method"]),
        OptimizerSettings.read(values["optimizer"], "optimizer"),
        RaySettings.read(values["ray"], "ray"),
        values["data"],
    )


def _preset(method: type[Method], name: Any) -> Preset:
    if name not in method.presets:
        known = ", ".join(method.presets) or "none"
        raise ConfigError(f"method.preset: {method.name} has no preset '{name}'. Its presets: {known}")
    return method.presets[name]


def _advice(method: type[Method], data: Raw, labelled: bool) -> Raw:
    """Return the values that a method recommends, without keys of `[data]` that the dataset does not have."""
    kind = DATASETS.get(str(data.get("name", DEFAULT_DATA)))
    keys = {f"data.{name}" for name in kind.model_fields} if kind else set()
    return {key: value for key, value in method.recommends(labelled).items() if key[:5] != "data." or key in keys}


def load_config(
    source: Path | None = None,
    overrides: Sequence[str] = (),
    method: str | None = None,
    run: Mapping[str, Any] | None = None,
    trusted: bool = False,
) -> tuple[Config, list[str]]:
    """Return a configuration from a TOML file (or the embedded default) with changes, and notices to show.

    `overrides` are `section.key=value`. `method` and `run` come from command-line options and take precedence.
    `trusted` means that the user runs this file, so the names in it may be imported as if the user had typed them.
    """
    raw = read_toml(source) if source else {}
    changes = [parse_change(text) for text in overrides]
    allow_named([method, *(value for _, value in changes)])
    if trusted:
        allow_named(list(_names_of_code(raw).values()))
    if source:
        search(str(source.absolute().parent))
    if not trusted:
        _check_trust(raw)
    notices = choose_method(raw, method, changes)
    drop_other_data(raw, changes)
    for change in changes:
        if change[0][0] != "nodes":
            apply(raw, change)
    raw.setdefault("run", {}).update({key: value for key, value in (run or {}).items() if value is not None})
    found = resolve(raw, labelled=raw.get("data", {}).get("public_labels", True))
    data = dataset(found.data)
    nodes = _nodes(raw.get("nodes"), data, found.run.seed, [change for change in changes if change[0][0] == "nodes"])
    return Config(found.run, data, found.method, found.optimizer, nodes, found.ray), notices


def _names_of_code(raw: Raw) -> dict[str, str]:
    """Return all values of a configuration that name code, by key."""
    method = raw.get("method", {})
    named = {"method.name": method.get("name"), "method.meme": method.get("meme")}
    named["data.name"] = raw.get("data", {}).get("name")
    nodes = enumerate(raw.get("nodes", []))
    named |= {f"nodes.{place}.model": node.get("model") for place, node in nodes if isinstance(node, dict)}
    return {key: value for key, value in named.items() if isinstance(value, str) and is_path(value)}


def _check_trust(raw: Raw) -> None:
    """Refuse foreign code and a Ray cluster in a configuration, unless the user has allowed them.

    Members of a Ray cluster can run any code on this machine.
    """
    for key, path in _names_of_code(raw).items():
        check_allowed(path, key)
    address = raw.get("ray", {}).get("address")
    if address is not None and not trust().allows("ray:init"):
        raise ConfigError(
            f"ray.address = {address!r}: this file names a Ray cluster, whose members can run code on this machine. "
            f"If you trust it, allow it: --allow ray"
        )


def dataset(raw: Raw) -> Dataset:
    """Return the dataset that a `[data]` section describes."""
    values = dict(raw)
    name = values.pop("name", DEFAULT_DATA)
    if not isinstance(name, str):
        raise ConfigError(f"data.name: a string was expected, not {name!r}")
    path = installed("fedh2l.datasets").get(name, name)
    if is_path(path):
        return FunctionDataset.of(path, values)
    if name == FROM_PYTHON:
        raise ConfigError("data.name: this run has its data from Python. Run or resume it with fedh2l.train(…)")
    if name not in DATASETS:
        raise ConfigError(
            f"data.name: unknown dataset '{name}'.{did_you_mean(name, DATASETS)} "
            f"For your own data, write 'package.module:function'."
        )
    return DATASETS[name].read(values, "data")


def _nodes(raw: list[Raw] | None, data: Dataset, seed: int, changes: Sequence[Change]) -> tuple[NodeSettings, ...]:
    entries = raw if raw is not None else [{"name": name} for name in data.domain_names(seed)]
    for change in changes:
        apply({"nodes": entries}, change)
    if any(isinstance(entry, dict) and "model" not in entry for entry in entries):
        model = data.suitable_model(seed)
        entries = [{"model": model, **entry} if isinstance(entry, dict) else entry for entry in entries]
    return tuple(NodeSettings.read(entry, f"nodes.{place}") for place, entry in enumerate(entries))
