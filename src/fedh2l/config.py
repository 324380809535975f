"""Configuration: TOML, checked section by section, with errors that name the key and what would be right."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from fedh2l.data.base import Dataset, FunctionDataset
from fedh2l.data.registry import DATASETS
from fedh2l.errors import ConfigError, did_you_mean
from fedh2l.federation import Federation
from fedh2l.methods.base import Method
from fedh2l.methods.registry import METHODS, find_method, make_method
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.plugins import is_path, search
from fedh2l.section import Section
from fedh2l.settings import RaySettings, RunSettings

SECTIONS = ("run", "data", "method", "optimizer", "ray", "nodes")
FROM_PYTHON = "python"
"""`data.name` of a run whose data was handed over in Python."""

Raw = dict[str, Any]


class NodeSettings(Section):
    """One `[[nodes]]` entry."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = Field(description="the node's name")
    domain: str | None = Field(None, description="the domain it holds; the one of the node's name if not given")
    model: str = Field("lenet", description="a built-in model, or package.module:factory")
    model_args: dict[str, Any] = Field({}, description="arguments of the model")
    weights: str | None = Field(
        None, description="what the model starts from: a .safetensors or .pth file, or a name that torchvision knows"
    )
    resources: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None, description="what it asks a Ray cluster for: num_cpus, num_gpus, memory, or others of the cluster's own"
    )


@dataclass(frozen=True)
class Config:
    """A complete configuration; nothing in it is left to defaults."""

    run: RunSettings
    data: Dataset
    method: Method
    optimizer: OptimizerSettings
    nodes: tuple[NodeSettings, ...]
    ray: RaySettings = field(default_factory=RaySettings)

    @property
    def data_name(self) -> str:
        """The dataset's name or path."""
        return self.data.title

    def federation(self) -> Federation:
        """Loads the data and puts the nodes together."""
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
        return Federation(nodes, self.method, self.run, self.optimizer, self.ray)

    def sections(self) -> Raw:
        """Plain values, section by section."""
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
) -> tuple[Config, list[str]]:
    """A configuration from a TOML file (or the embedded default) with changes, and notices to show.

    `overrides` are `section.key=value`; `method` and `run` come from options of the command line and win over them.
    """
    raw = read_toml(source) if source else {}
    if source:
        search(str(source.absolute().parent))
    changes = [_parse_override(text) for text in overrides]
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


def read_toml(path: Path) -> Raw:
    """The content of a TOML file whose sections are all known."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file '{path}'; `fedh2l init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file '{path}': {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{path}' is not valid TOML: {error}") from error
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
        raise ConfigError(f"unknown section [{name}].{did_you_mean(name, SECTIONS)}")


def _choose_method(raw: Raw, method: str | None, changes: Sequence[tuple[list[str], Any]]) -> list[str]:
    """Lets `--method`, or a change of `method.name`, replace the file's method.

    Parameters of the one do not fit the other; what the file says elsewhere stays, and a notice says what of it the
    one or the other method would have otherwise.
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
    notices = [f"{asked}: the file's [method] keys are left out: {', '.join(dropped)}"] if dropped else []
    return notices + (_left_over(raw, METHODS[before], find_method(chosen)) if before in METHODS else [])


def _left_over(raw: Raw, before: type[Method], chosen: type[Method]) -> list[str]:
    """What a file that was made for another method says of what that one, or this one, recommends."""
    labelled = raw.get("data", {}).get("public_labels", True)
    old, new = ({k: v for k, v in m.recommends(labelled).items() if k[:7] != "method."} for m in (before, chosen))
    found = []
    for key in dict.fromkeys([*old, *new]):
        section, _, name = key.partition(".")
        written = raw.get(section, {})
        if name in written and written[name] != new.get(key) and (key in new or written[name] == old[key]):
            wish = f"{chosen.name} would have {new[key]!r}" if key in new else f"which is what {before.name} would have"
            found.append(f"{key} stays {written[name]!r}, as the file says; {wish}")
    return found


def _apply_preset(raw: Raw) -> None:
    """Fills in what `method.preset` stands for, where nothing else is said."""
    written = raw.get("method", {})
    if "preset" not in written:
        return
    raw["method"] = {key: value for key, value in written.items() if key != "preset"}
    method = find_method(written.get("name", "fedh2l"))
    preset = written["preset"]
    if preset not in method.presets:
        known = ", ".join(method.presets) or "none"
        raise ConfigError(f"method.preset: {method.name} has no preset '{preset}'; it has: {known}")
    for key, value in method.presets[preset].items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {}).setdefault(name, value)


def _apply_recommended(raw: Raw) -> None:
    """Fills in what a method does best with in other sections, where nothing is said and the data knows of it."""
    method, data = find_method(raw.get("method", {}).get("name", "fedh2l")), raw.get("data", {})
    dataset_class = DATASETS.get(str(data.get("name", "rotated-mnist")))
    for key, value in method.recommends(data.get("public_labels", True)).items():
        section, _, name = key.partition(".")
        if section != "data" or (dataset_class is not None and name in dataset_class.model_fields):
            raw.setdefault(section, {}).setdefault(name, value)


def _drop_other_data(raw: Raw, changes: Sequence[tuple[list[str], Any]]) -> None:
    """Keys of one dataset do not fit another: a change of `data.name` leaves the file's other keys out."""
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
    """A TOML value; what is not one is a string, so that quotes can be left out."""
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
    """The dataset that a `[data]` section describes."""
    values = dict(raw)
    name = values.pop("name", "rotated-mnist")
    if not isinstance(name, str):
        raise ConfigError(f"data.name: a string was expected, not {name!r}")
    if is_path(name):
        return FunctionDataset.of(name, values)
    if name == FROM_PYTHON:
        raise ConfigError("data.name: this run's data was given in Python; run or resume it there, by fedh2l.train(…)")
    if name not in DATASETS:
        raise ConfigError(
            f"data.name: unknown dataset '{name}'.{did_you_mean(name, DATASETS)} "
            f"Data of your own is 'package.module:function'."
        )
    return DATASETS[name].read(values, "data")


def _nodes(
    raw: list[Raw] | None, data: Dataset, seed: int, changes: Sequence[tuple[list[str], Any]]
) -> tuple[NodeSettings, ...]:
    entries = raw if raw is not None else [{"name": name} for name in data.domain_names(seed)]
    for path, value in changes:
        _apply({"nodes": entries}, path, value)
    return tuple(NodeSettings.read(entry, f"nodes.{place}") for place, entry in enumerate(entries))
