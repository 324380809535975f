"""The federations of the paper on images: data, a model for each node, optimiser and rounds, under one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedh2l.data.image_folder import OfficeCaltech10, OfficeHome
from fedh2l.data.pacs import PACS
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
"""How the paper trains on images."""

ARCHITECTURES: dict[str, dict[str, str]] = {
    PACS.name: {"photo": "resnet18", "art_painting": "resnet34", "cartoon": "alexnet", "sketch": "vgg11"},
    OfficeHome.name: {
        "Art": "resnet34",
        "Clipart": "mobilenet_v2",
        "Product": "alexnet",
        "Real_World": "resnet50",
    },
    OfficeCaltech10.name: {"amazon": "resnet18", "caltech10": "resnet34", "dslr": "alexnet", "webcam": "vgg11"},
}
"""By dataset, which architecture the paper gives to which node (of Office-Caltech10 it says nothing: PACS's four)."""
ALIKE = "resnet18"
"""The architecture of all nodes, where they have the same."""


def models_of(dataset: str, models: Models) -> Changes:
    """The model of each node."""
    nodes: Mapping[str, str] = ARCHITECTURES[dataset]
    return tuple(
        f"nodes.{node}.model=torchvision.models:{own if models == 'heterogeneous' else ALIKE}"
        for node, own in nodes.items()
    )


def preset(dataset: str, models: Models) -> Changes:
    """A federation of the paper; where the images are is still to be said, in data.root."""
    return (f"data.name={dataset}", *TRAINING, "run.rounds=10000", *models_of(dataset, models))


KINDS: tuple[Models, ...] = ("heterogeneous", "homogeneous")
PRESETS: dict[str, Changes] = {f"{data}-{kind}": preset(data, kind) for data in ARCHITECTURES for kind in KINDS}


def of_preset(name: str | None) -> Changes:
    """The settings that a name stands for; none, if there is no name."""
    if name is None:
        return ()
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}'.{did_you_mean(name, PRESETS)} There are: {', '.join(PRESETS)}")
    return PRESETS[name]
