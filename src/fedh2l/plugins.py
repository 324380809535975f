"""Import the objects that users name as `package.module:attribute`, and decide which names a file may use.

Importing a name runs its code. A name is allowed if a user typed it, or if it is in the configuration that the user
runs. Other files (saved models, run directories, rosters) may name only the constructors listed here and the entry
points of installed packages. The user can allow further packages (`--allow`).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from fedh2l.errors import ConfigError, shown
from fedh2l.vision import declare_missing_operators, mismatched

WANTED = {"torchvision": "fedh2l[vision]", "timm": "timm"}
"""Installation targets of packages that provide models."""

ENTRY_POINTS = ("fedh2l.methods", "fedh2l.models", "fedh2l.datasets")
"""Entry-point groups for the methods, models and datasets of installed packages."""

OWN = frozenset(
    {
        "fedh2l.models.lenet:LeNet",
        "fedh2l.models.lenet:LeNetWide",
        "fedh2l.models.small:mlp",
        "fedh2l.models.small:cnn",
        "fedh2l.methods.fedgkt:EdgeNet",
    }
)
"""Constructors of this package that a saved model may name."""
TORCHVISION = """
alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf
regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf
regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13
vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""
"""Constructors in `torchvision.models` that a file may name."""
TIMM = "timm:create_model"
NO_WEIGHTS: Mapping[str, Any] = {"weights": None, "weights_backbone": None, "pretrained": False, "checkpoint_path": ""}
"""Replacements for arguments that fetch or read weights in torchvision and timm. A saved model has its own."""


class Trust:
    """The names that may be imported."""

    def __init__(self, packages: Sequence[str] = (), anything: bool = False) -> None:
        self.packages = list(packages)
        self.anything = anything

    def allows(self, path: str) -> bool:
        """Return whether `package.module:attribute` may be imported."""
        module = path.partition(":")[0]
        allowed = any(module == package or module.startswith(f"{package}.") for package in self.packages)
        return self.anything or allowed or is_known(path) or path in _installed_paths()

    @property
    def is_open(self) -> bool:
        """Whether code of the user's own may be named, and so be looked for where the user keeps it."""
        return self.anything or bool(self.packages)


_trust: ContextVar[Trust | None] = ContextVar("trust", default=None)


def trust() -> Trust:
    """Return the current rule. Library calls allow everything, because names come from the user's own code."""
    return _trust.get() or Trust(anything=True)


@contextmanager
def only(packages: Sequence[str] = ()) -> Iterator[None]:
    """Allow only known names, and those of `packages`, within this context."""
    token = _trust.set(Trust(packages))
    try:
        yield
    finally:
        _trust.reset(token)


def allow(packages: Sequence[str]) -> None:
    """Allow the names of these packages from now on, in the current context."""
    trust().packages.extend(packages)


def allow_named(values: Sequence[Any]) -> None:
    """Allow the packages of all import paths among `values`, because the user gave them."""
    allow([value.partition(":")[0] for value in values if isinstance(value, str) and is_path(value)])


def check_allowed(path: str, where: str) -> None:
    """Refuse a name that the current rule does not allow, and explain how to allow it."""
    if not trust().allows(path):
        package = path.partition(":")[0].partition(".")[0]
        raise ConfigError(
            f"{where} names {path!r}. Importing it would run code because a file says so. "
            f"If you trust this code, allow it: --allow {shown(package)}, or allow=[{package!r}] in Python."
        )


def is_known(path: str) -> bool:
    """Return whether a path is one of the constructors that every file may name."""
    module, _, attribute = path.partition(":")
    vision = module == "torchvision.models" or module.startswith("torchvision.models.")
    return path in OWN or path == TIMM or (vision and attribute in TORCHVISION.split())


def safe_arguments(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's arguments for a constructor of torchvision or timm, without those that fetch weights."""
    module = path.partition(":")[0].partition(".")[0]
    if trust().anything or not is_known(path) or module not in WANTED:
        return dict(arguments)
    name = arguments.get("model_name", "")
    if path == TIMM and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.]+", name)):
        raise ConfigError(f"{name!r} is not the name of a model in timm")
    return {key: NO_WEIGHTS.get(key, value) for key, value in arguments.items()}


@cache
def installed(group: str) -> Mapping[str, str]:
    """Return the entry points of installed packages in a group, as `name: package.module:attribute`.

    A package in the working directory, or beside a config file, does not count as installed.
    """
    from importlib.metadata import distributions  # slow to import, and seldom needed

    places = {Path(folder).resolve() for folder in (os.getcwd(), *_searched)}
    found: dict[str, str] = {}
    for package in distributions():
        if Path(str(package.locate_file(""))).resolve() not in places:
            found |= {point.name: point.value for point in package.entry_points if point.group == group}
    return dict(sorted(found.items()))


def _installed_paths() -> set[str]:
    return {path for group in ENTRY_POINTS for path in installed(group).values()}


def is_path(name: str) -> bool:
    """Return whether a name is `package.module:attribute` rather than a built-in name."""
    return ":" in name


_searched: set[str] = set()


def search(folder: str) -> None:
    """Allow imports of modules in `folder`, if the user allows any.

    Installed packages import others that may be missing. If the folder holds files of somebody else, a module there
    could have the name of a missing one, and would run.
    """
    if trust().is_open and folder not in sys.path:
        sys.path.append(folder)
        _searched.add(folder)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if not mismatched(error):
            raise
    declare_missing_operators()
    return importlib.import_module(name)


def import_object(path: str, where: str) -> Any:
    """Import the object at `package.module:attribute`, also from the working directory or the folder of a config file.

    `where` is the configuration key that holds the path, for the error message.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{where}: {path!r} is not of the form 'package.module:attribute'")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{where}: write {path!r} with dots, as it would be imported: {f'{dotted}:{attribute}'!r}")
    check_allowed(path, where)
    if not is_known(path):
        search(os.getcwd())
    try:
        found: Any = _import(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        hint = (
            f"Run: pip install '{WANTED[missing]}'" if missing in WANTED else f"Install it, or put it in {os.getcwd()}"
        )
        raise ConfigError(f"{where}: cannot import {module_name!r} ({error}). {hint}") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: module {module_name!r} has no {attribute!r}") from error
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(f"{where}: importing {module_name!r} failed with {type(error).__name__}: {error}") from error
    return found
