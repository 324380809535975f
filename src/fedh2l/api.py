"""The two functions of the Python API: train an experiment, load a trained model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fedh2l.errors import ConfigError, ModelError, RunError, did_you_mean
from fedh2l.experiment.config import FROM_PYTHON, resolve
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RaySettings
from fedh2l.experiment.toml import toml_text, toml_value
from fedh2l.methods.base import Method
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.models.saved import Classifier, load_model
from fedh2l.report.progress import LiveProgress
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import CONFIG, RunDirectory
from fedh2l.runs.result import Result
from fedh2l.runs.resuming import go_on, saved_result
from fedh2l.runs.trainer import Trainer
from fedh2l.training.node import Node
from fedh2l.training.optimizers import OptimizerSettings

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
    overwrite: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] | Callback = (),
    **run: Any,
) -> Result:
    """Train an experiment and return the accuracy of every node's model on all test data.

    Each module given in `nodes` holds the selected model afterwards. With `out`, a run directory is written. `load`
    reads its models.

    `resume=True` continues an interrupted run in `out`, returns the saved result of a run that has ended, or starts a
    run if there is none. More `rounds` than before extend a run, even one that has ended. Data, models and settings
    must be those of the first start. `overwrite=True` first removes a run in `out`. It never removes other files.

    `progress` shows a progress bar. Further keywords are the keys of the `[run]` section: batch_size, device, engine,
    threads, dtype, precision, micro_batch, kernels, eval_every, checkpoint_every, keep_checkpoint, selection,
    ema_decay. Keys that are not given take the method's recommended values. `ray` configures the cluster of
    `engine="ray"`.
    """
    experiment = _experiment(nodes, method, {"rounds": rounds, "seed": seed, **run}, optimizer, ray)
    if resume and out is None:
        raise RunError("resume=True needs out=…, the directory of the run to continue")
    if resume and overwrite:
        raise ConfigError("resume=True continues the run in out=…, and overwrite=True removes it; give one of them")
    watched = partial(_watched, callbacks=callbacks, progress=progress)
    if out is not None and resume and (Path(out) / CONFIG).exists():
        return _go_on(RunDirectory.open(out), experiment, watched)
    return _start(out, experiment, watched, overwrite)


def _experiment(
    nodes: Sequence[Node],
    method: Method | str | None,
    run: dict[str, Any],
    optimizer: OptimizerSettings | None,
    ray: RaySettings | None,
) -> Experiment:
    """Return the experiment. A name stands for the method with the values that it recommends."""
    for key in set(run) & set(OptimizerSettings.model_fields):
        raise ConfigError(f"{key} is the optimiser's: pass optimizer=fedh2l.Optimizer({key}=…)")
    raw = {"run": run, "optimizer": optimizer.model_dump(exclude_unset=True) if optimizer else {}}
    labelled = all(node.domain.public_labels for node in nodes)
    if isinstance(method, str):
        found = resolve({**raw, "method": {"name": method}}, labelled=labelled)
    else:
        found = resolve(raw, method or FedH2L(), labelled)
    return Experiment(list(nodes), found.method, found.run, found.optimizer, ray or RaySettings())


def _start(
    out: str | Path | None, experiment: Experiment, watched: Callable[[Trainer], Result], overwrite: bool
) -> Result:
    """Train a new run, in a directory of its own if there is one."""
    trainer = Trainer(experiment)
    if out is None:
        return watched(trainer)
    with trainer.preparing():
        _warn_of_models(experiment.nodes)
        trainer.directory = RunDirectory.claim(out, _describe(experiment), overwrite)
    with trainer.directory.says_what_is_left():
        return watched(trainer)


def _go_on(directory: RunDirectory, experiment: Experiment, watched: Callable[[Trainer], Result]) -> Result:
    """Continue a run. If it has ended, return its result, and load its models into the given modules."""
    _check_same(directory, experiment)
    if ended := saved_result(directory, experiment):
        for node in experiment.nodes:
            if isinstance(node.model, nn.Module):
                load(directory.path, node.name, ended.selection, node.model)
        return ended
    trainer = Trainer(experiment, directory)
    with trainer.preparing():
        _warn_of_models(experiment.nodes)
        if not go_on(trainer, _describe(experiment)):
            log.warning("%s has no checkpoint: starting from round 0", directory.path)
    return watched(trainer)


def _watched(trainer: Trainer, callbacks: Sequence[Callback] | Callback, progress: bool) -> Result:
    """Train with these callbacks, and with a progress bar if `progress` is set."""
    given = [callbacks] if isinstance(callbacks, Callback) else callbacks
    if not progress:
        trainer.callbacks = given
        return trainer.run()
    with closing(LiveProgress(Console(stderr=True))) as view:
        trainer.callbacks = [view, *given]
        return trainer.run()


def _warn_of_models(nodes: Sequence[Node]) -> None:
    """Warn before training about saved models that `load` cannot build by name."""
    for node in nodes:
        if reason := node.recipe.obstacle():
            log.warning(
                "node '%s': its saved model cannot be loaded by name, since %s. Pass model=… to fedh2l.load, or give "
                "the node a class of a module, with model_args", node.name, reason,
            )  # fmt: skip


def _check_same(directory: RunDirectory, experiment: Experiment) -> None:
    """Refuse to resume a run under other settings, except device, engine, kernels, keep_checkpoint and more rounds."""
    then, now = (set(text.splitlines()) for text in (directory.config_text(), _describe(experiment)))
    before, rounds = directory.rounds(), experiment.settings.rounds
    grown = {f"rounds = {before}", f"rounds = {rounds}"} if rounds > before else set()
    free = ("device =", "engine =", "kernels =", "keep_checkpoint =")
    different = sorted(line for line in (then ^ now) - grown if not line.startswith(free))
    if different:
        raise RunError(f"'{directory.path}' was started with other settings: {'; '.join(different)}")


def load(
    run: str | Path, node: str, which: str = "best", model: nn.Module | None = None, allow: Sequence[str] = ()
) -> Classifier:
    """Return the best or last model of a node, ready to use: `classifier(inputs)` gives logits.

    A user-defined model is built only if its package is in `allow`, because the file names the code that builds it.
    Alternatively, pass a module as `model` to load the weights into. A lambda or a bare `nn.Sequential` needs this.
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
    return load_model(path, model, allow)


def _describe(experiment: Experiment) -> str:
    """Return the configuration of a run that was started from Python. It contains everything but the data."""
    for node in experiment.nodes:
        try:
            json.dumps(dict(node.model_args))
            toml_value(node.model_args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"node '{node.name}': model_args cannot be saved with the run: {error}") from None
    nodes = [
        {"name": node.name, "model": node.model_name, "model_args": node.model_args, "weights": node.weights or None}
        for node in experiment.nodes
    ]
    return toml_text(
        {
            "run": experiment.settings.model_dump(exclude={"out"}),
            "data": {"name": FROM_PYTHON},
            "method": {"name": experiment.method.title, **experiment.method.model_dump()},
            "optimizer": experiment.optimizer.model_dump(),
            "nodes": nodes,
        }
    )
