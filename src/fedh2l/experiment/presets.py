"""The image experiments of the paper by name: data, a model per node, optimiser and rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedh2l.errors import ConfigError, did_you_mean

Changes = tuple[str, ...]
"""Settings of a run that differ from the defaults, as `section.key=value`."""
Models = Literal["heterogeneous", "homogeneous"]

TRAINING: Changes = (
    "optimizer.name=amsgrad",
    "optimizer.lr=0.0001",
    "optimizer.weight_decay=0.00001",
    "run.batch_size=32",
    "run.eval_every=100",
)
"""Training settings of the paper for images."""

ARCHITECTURES: dict[str, dict[str, str]] = {
    "pacs": {"photo": "resnet18", "art_painting": "resnet34", "cartoon": "alexnet", "sketch": "vgg11"},
    "office-home": {
        "Art": "resnet34",
        "Clipart": "mobilenet_v2",
        "Product": "alexnet",
        "Real_World": "resnet50",
    },
    "office-caltech10": {"amazon": "resnet18", "caltech10": "resnet34", "dslr": "alexnet", "webcam": "vgg11"},
}
"""Architecture of each node, by dataset, as in the paper. It gives none for Office-Caltech10: PACS's four."""
ALIKE = "resnet18"
"""Architecture of all nodes in a homogeneous experiment."""


def models_of(dataset: str, models: Models) -> Changes:
    """Return the settings of each node's model."""
    nodes: Mapping[str, str] = ARCHITECTURES[dataset]
    return tuple(
        f"nodes.{node}.model=torchvision.models:{own if models == 'heterogeneous' else ALIKE}"
        for node, own in nodes.items()
    )


def preset(dataset: str, models: Models) -> Changes:
    """Return the settings of an experiment of the paper. `data.root`, the folder of the images, is not included."""
    return (f"data.name={dataset}", *TRAINING, "run.rounds=10000", *models_of(dataset, models))


KINDS: tuple[Models, ...] = ("heterogeneous", "homogeneous")
PRESETS: dict[str, Changes] = {f"{data}-{kind}": preset(data, kind) for data in ARCHITECTURES for kind in KINDS}


def of_preset(name: str | None) -> Changes:
    """Return the settings of a preset, or none if `name` is None."""
    if name is None:
        return ()
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)} There are: {', '.join(PRESETS)}")
    return PRESETS[name]
