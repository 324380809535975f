"""The two functions of the Python API: train a federation, load a trained model."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fedh2l.callbacks import Callback
from fedh2l.config import FROM_PYTHON
from fedh2l.errors import ConfigError, ModelError, RunError, did_you_mean
from fedh2l.federation import Federation
from fedh2l.methods.base import Method
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.registry import find_method, make_method
from fedh2l.models.saved import Classifier, load_model
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.reporting.progress import LiveProgress
from fedh2l.result import Result
from fedh2l.rundir import CONFIG, RunDirectory
from fedh2l.settings import RaySettings, RunSettings
from fedh2l.toml import toml_value
from fedh2l.trainer import Trainer

log = logging.getLogger("fedh2l")


def train(
    nodes: Sequence[Node],
    method: Method | str | None = None,
    rounds: int = 2000,
    seed: int = 0,
    *,
    optimizer: OptimizerSettings | None = None,
    ray: RaySettings | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] | Callback = (),
    **run: Any,
) -> Result:
    """Trains a federation and returns how every node's model does on everybody's test data.

    Afterwards each module given in `nodes` holds the selected model. With `out`, a run directory is written, whose
    models `load` reads; with `resume=True` as well, a run that was interrupted goes on, one that has ended is not
    trained again, and one that is not there yet starts. `progress` shows a bar. Further keywords are the keys of the
    `[run]` section: batch_size, device, engine, threads, dtype, precision, micro_batch, eval_every, checkpoint_every,
    selection, average; where nothing is said, they are what the method recommends. `ray` is how `engine="ray"` uses a
    cluster.
    """
    for key in set(run) & set(OptimizerSettings.model_fields):
        raise ConfigError(f"{key} is the optimiser's: pass optimizer=fedh2l.Optimizer({key}=…)")
    labelled = all(node.domain.public_labels for node in nodes)
    chosen = _method(method, labelled)
    advice = {key: value for key, value in chosen.advice("run", labelled).items() if key not in run}
    settings = RunSettings.read({"rounds": rounds, "seed": seed, **advice, **run}, "run").resolved()
    federation = Federation(list(nodes), chosen, settings, optimizer or OptimizerSettings(), ray or RaySettings())
    if resume and out is None:
        raise RunError("resume=True needs out=…, the directory of the run to go on with")
    exists = out is not None and (Path(out) / CONFIG).exists()
    if resume and exists:
        _check_same(RunDirectory.open(str(out)), federation)
        if ended := RunDirectory(str(out)).result():
            return _recall(federation, str(out), Result.from_dict(ended))
    shown = [LiveProgress(Console(stderr=True))] if progress else []
    listeners = [callbacks] if isinstance(callbacks, Callback) else callbacks
    trainer = Trainer(federation, callbacks=[*shown, *listeners])
    if out is not None:
        trainer.directory = RunDirectory(out) if resume and exists else RunDirectory.claim(out, _describe(federation))
    if resume and exists and not trainer.resume():
        log.warning("%s has no checkpoint: starting from round 0", out)
    try:
        return trainer.run()
    finally:
        for view in shown:
            view.close()


def _method(method: Method | str | None, labelled: bool) -> Method:
    """A method by its name is what it would be in a configuration that says no more."""
    if not isinstance(method, str):
        return method or FedH2L()
    return make_method({"name": method, **find_method(method).advice("method", labelled)})


def _check_same(directory: RunDirectory, federation: Federation) -> None:
    """Refuses to go on with a run under other settings than it was started with; device and engine may change."""
    then, now = (set(text.splitlines()) for text in (directory.config_path.read_text("utf-8"), _describe(federation)))
    different = sorted(line for line in then ^ now if not line.startswith(("device =", "engine =")))
    if different:
        raise RunError(f"'{directory.path}' was started with other settings: {'; '.join(different)}")


def _recall(federation: Federation, out: str, result: Result) -> Result:
    """The result of a run that has ended, with its models in the modules that were given."""
    for node in federation.nodes:
        if isinstance(node.model, nn.Module):
            load(out, node.name, result.selection, node.model)
    return result


def load(run: str | Path, node: str, which: str = "best", model: nn.Module | None = None) -> Classifier:
    """The best or last model of a node, ready to use: `classifier(inputs)` gives logits.

    `model` is needed only for a model whose class fedh2l could not note down (a lambda, a bare `nn.Sequential`).
    """
    directory = RunDirectory.open(run)
    path = directory.model_path(node, which)
    if which not in ("best", "last"):
        raise ModelError(f"which = '{which}': a run keeps the 'best' and the 'last' model of each node")
    if not path.exists():
        names = directory.nodes()
        if not names:
            raise RunError(f"'{run}' has no models yet: it has not ended; resume it")
        raise RunError(f"'{run}' has no node '{node}'.{did_you_mean(node, names)}")
    return load_model(path, model)


def _describe(federation: Federation) -> str:
    """The configuration of a run that was started from Python: all but the data can be written down."""
    for node in federation.nodes:
        try:
            json.dumps(dict(node.model_args))
        except TypeError as error:
            raise ConfigError(f"node '{node.name}': model_args cannot be saved with the run: {error}") from None
    sections: dict[str, dict[str, Any]] = {
        "run": federation.settings.model_dump(exclude={"out"}, exclude_none=True),
        "data": {"name": FROM_PYTHON},
        "method": {"name": federation.method.title, **federation.method.model_dump(exclude_none=True)},
        "optimizer": federation.optimizer.model_dump(exclude_none=True),
    }
    tables = [(f"[{name}]", values) for name, values in sections.items()]
    for node in federation.nodes:
        about = {"name": node.name, "model": node.model_name, "model_args": dict(node.model_args)}
        tables.append(("[[nodes]]", about | ({"weights": node.weights} if node.weights else {})))
    return "\n".join(
        f"{head}\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())
        for head, values in tables
    )
