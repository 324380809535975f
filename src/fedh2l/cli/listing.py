"""`fedh2l list`: names of methods, datasets and models."""

from __future__ import annotations

from typing import Any

from fedh2l.cli.console import say
from fedh2l.data.registry import DATASETS
from fedh2l.experiment.presets import PRESETS
from fedh2l.methods.registry import METHODS, installed_methods
from fedh2l.models.registry import MODELS
from fedh2l.registry import Registry


def list_known() -> None:
    """List methods, datasets and models, one line each."""
    tables: dict[str, Registry[Any]] = {"methods": METHODS, "datasets": DATASETS, "models": MODELS}
    for title, known in tables.items():
        say(f"{title}:")
        for name, summary in known.summaries().items():
            say(f"  {name:<16} {summary}")
    say("presets:")
    for name, settings in PRESETS.items():
        own = dict.fromkeys(change.rpartition(":")[2] for change in settings if change.startswith("nodes."))
        say(f"  {name:<30} {', '.join(own)}")
    for name, path in installed_methods().items():
        say(f"method of another package: {name} ({path})")
    say(
        "To use your own, set data.name = 'package.module:function', nodes.N.model = 'package.module:factory', "
        "method.name = 'package.module:Class'."
    )
