"""Configuration from TOML, checked section by section. Errors name the key and the valid values."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from fedh2l import files
from fedh2l.data.base import Dataset, FunctionDataset
from fedh2l.data.registry import DATASETS
from fedh2l.errors import ConfigError, did_you_mean, shown
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RaySettings, RunSettings
from fedh2l.methods.base import Method
from fedh2l.methods.registry import METHODS, find_method, make_method
from fedh2l.plugins import allow_named, check_allowed, installed, is_path, search, trust
from fedh2l.section import Section
from fedh2l.training.node import Node
from fedh2l.training.optimizers import OptimizerSettings

SECTIONS = ("run", "data", "method", "optimizer", "ray", "nodes")
FROM_PYTHON = "python"
"""`data.name` of a run whose data was passed in Python."""

Raw = dict[str, Any]


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
    ray: RaySettings = field(default_factory=RaySettings)

    @property
    def data_name(self) -> str:
        """Name or path of the dataset."""
        return self.data.title

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
    changes = [_parse_override(text) for text in overrides]
    allow_named([method, *(value for _, value in changes)])
    if trusted:
        allow_named(list(_names_of_code(raw).values()))
    if source:
        search(str(source.absolute().parent))
    if not trusted:
        _check_trust(raw)
    notices = _choose_method(raw, method, changes)
    _drop_other_data(raw, changes)
    for path, value in changes:
        if path[0] != "nodes":
            _apply(raw, path, value)
    _apply_preset(raw)
    _apply_recommended(raw)
    raw.setdefault("run", {}).update({key: value for key, value in (run or {}).items() if value is not None})
    settings = RunSettings.read(raw["run"], "run").resolved()
    data = dataset(raw.get("data", {}))
    nodes = _nodes(raw.get("nodes"), data, settings.seed, [c for c in changes if c[0][0] == "nodes"])
    config = Config(
        settings,
        data,
        make_method(raw.get("method", {})),
        OptimizerSettings.read(raw.get("optimizer", {}), "optimizer"),
        nodes,
        RaySettings.read(raw.get("ray", {}), "ray"),
    )
    return config, notices


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


def read_toml(path: Path) -> Raw:
    """Return the content of a TOML file. All its sections must be known."""
    try:
        raw = files.read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file '{path}'; `fedh2l init` writes one to start from") from None
    except files.UnreadableError as error:
        raise ConfigError(f"'{path}': {shown(error)}") from error
    for name, section in raw.items():
        if name in RunSettings.model_fields and not isinstance(section, dict):
            raise ConfigError(f"'{path}': {name} stands in no section; write it under [run]")
        _check_section_name(name)
        if not isinstance(section, list if name == "nodes" else dict):
            raise ConfigError(f"'{path}': write {name} as a section, [[nodes]]" if name == "nodes" else
                              f"'{path}': write {name} as a section, [{name}]")  # fmt: skip
    return raw


def _check_section_name(name: str) -> None:
    if name not in SECTIONS:
        raise ConfigError(f"unknown section [{shown(name, 80)}].{did_you_mean(name, SECTIONS)}")


def _choose_method(raw: Raw, method: str | None, changes: Sequence[tuple[list[str], Any]]) -> list[str]:
    """Let `--method`, or a change of `method.name`, replace the file's method. Return notices to show.

    The parameters of the old method are dropped, because they do not fit the new one. Other sections keep the file's
    values. Notices list those that only suit the old method, or that the new method would set differently.
    """
    named = [value for path, value in changes if path == ["method", "name"]]
    chosen = method if method is not None else named[-1] if named else None
    if chosen is None:
        return []
    written = raw.get("method", {})
    before = written.get("name", "fedh2l")
    if before == chosen:
        raw["method"] = {**written, "name": chosen}
        return []
    raw["method"] = {"name": chosen}
    dropped = sorted(set(written) - {"name"})
    asked = f"--method {method}" if method is not None else f"method.name = {chosen!r}"
    notices = [f"{asked}: ignored these [method] keys of the file: {', '.join(dropped)}"] if dropped else []
    return notices + (_left_over(raw, METHODS[before], find_method(chosen)) if before in METHODS else [])


def _left_over(raw: Raw, before: type[Method], chosen: type[Method]) -> list[str]:
    """Return notices about the file's values that suit the old method, or that the new method would set differently."""
    labelled = raw.get("data", {}).get("public_labels", True)
    old, new = ({k: v for k, v in m.recommends(labelled).items() if k[:7] != "method."} for m in (before, chosen))
    found = []
    for key in dict.fromkeys([*old, *new]):
        section, _, name = key.partition(".")
        written = raw.get(section, {})
        if name in written and written[name] != new.get(key) and (key in new or written[name] == old[key]):
            wish = f"{chosen.name} recommends {new[key]!r}" if key in new else f"it suits {before.name}"
            found.append(f"{key} stays {written[name]!r}, as in the file; {wish}")
    return found


def _apply_preset(raw: Raw) -> None:
    """Fill in the values of `method.preset` where the configuration has none."""
    written = raw.get("method", {})
    if "preset" not in written:
        return
    raw["method"] = {key: value for key, value in written.items() if key != "preset"}
    method = find_method(written.get("name", "fedh2l"))
    preset = written["preset"]
    if preset not in method.presets:
        known = ", ".join(method.presets) or "none"
        raise ConfigError(f"method.preset: {method.name} has no preset '{preset}'. Its presets: {known}")
    for key, value in method.presets[preset].items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {}).setdefault(name, value)


def _apply_recommended(raw: Raw) -> None:
    """Fill in the method's recommended values for other sections, where keys are not set and the data has them."""
    method, data = find_method(raw.get("method", {}).get("name", "fedh2l")), raw.get("data", {})
    dataset_class = DATASETS.get(str(data.get("name", "rotated-mnist")))
    for key, value in method.recommends(data.get("public_labels", True)).items():
        section, _, name = key.partition(".")
        if section != "data" or (dataset_class is not None and name in dataset_class.model_fields):
            raw.setdefault(section, {}).setdefault(name, value)


def _drop_other_data(raw: Raw, changes: Sequence[tuple[list[str], Any]]) -> None:
    """Drop the file's other `[data]` keys if `data.name` is changed: keys of one dataset do not fit another."""
    written = raw.get("data", {})
    named = [value for path, value in changes if path == ["data", "name"]]
    if named and named[-1] != written.get("name", "rotated-mnist"):
        raw["data"] = {}


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {text}: write --set section.key=value, for example --set method.interval=5")
    _check_section_name(path[0])
    return path, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """Return a TOML value. Text that is not TOML is returned as a string, so that quotes can be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _apply(raw: Any, path: Sequence[str], value: Any) -> None:
    here = raw
    for step in path[:-1]:
        if isinstance(here, list):
            names = [entry.get("name") if isinstance(entry, dict) else None for entry in here]
            place = names.index(step) if step in names else int(step) if step.isdecimal() else len(here)
            if place >= len(here):
                raise ConfigError(f"--set {'.'.join(path)}: '{step}' is not a node; use a name or 0 to {len(here) - 1}")
            here = here[place]
        else:
            here = here.setdefault(step, {})
        if not isinstance(here, (dict, list)):
            raise ConfigError(f"--set {'.'.join(path)}: '{step}' is a value, not a section")
    if isinstance(here, list):
        raise ConfigError(f"--set {'.'.join(path)}: say which key of a node, for example nodes.0.model=mlp")
    here[path[-1]] = value


def dataset(raw: Raw) -> Dataset:
    """Return the dataset that a `[data]` section describes."""
    values = dict(raw)
    name = values.pop("name", "rotated-mnist")
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


def _nodes(
    raw: list[Raw] | None, data: Dataset, seed: int, changes: Sequence[tuple[list[str], Any]]
) -> tuple[NodeSettings, ...]:
    entries = raw if raw is not None else [{"name": name} for name in data.domain_names(seed)]
    for path, value in changes:
        _apply({"nodes": entries}, path, value)
    if any(isinstance(entry, dict) and "model" not in entry for entry in entries):
        model = data.suitable_model(seed)
        entries = [{"model": model, **entry} if isinstance(entry, dict) else entry for entry in entries]
    return tuple(NodeSettings.read(entry, f"nodes.{place}") for place, entry in enumerate(entries))
