"""The two functions of the Python API: train an experiment, load a trained model."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fedh2l.errors import ConfigError, ModelError, RunError, did_you_mean
from fedh2l.experiment.config import FROM_PYTHON
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RaySettings, RunSettings
from fedh2l.experiment.toml import toml_text, toml_value
from fedh2l.methods.base import Method
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.registry import find_method, make_method
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
    for key in set(run) & set(OptimizerSettings.model_fields):
        raise ConfigError(f"{key} is the optimiser's: pass optimizer=fedh2l.Optimizer({key}=…)")
    labelled = all(node.domain.public_labels for node in nodes)
    chosen = _method(method, labelled)
    advice = {key: value for key, value in chosen.advice("run", labelled).items() if key not in run}
    settings = RunSettings.read({"rounds": rounds, "seed": seed, **advice, **run}, "run").resolved()
    given = optimizer.model_dump(exclude_unset=True) if optimizer else {}
    optimizer = OptimizerSettings(**{**chosen.advice("optimizer", labelled), **given})
    experiment = Experiment(list(nodes), chosen, settings, optimizer, ray or RaySettings())
    if resume and out is None:
        raise RunError("resume=True needs out=…, the directory of the run to continue")
    if resume and overwrite:
        raise ConfigError("resume=True continues the run in out=…, and overwrite=True removes it; give one of them")
    exists = out is not None and (Path(out) / CONFIG).exists()
    if resume and exists:
        _check_same(RunDirectory.open(str(out)), experiment)
        if ended := saved_result(RunDirectory(str(out)), experiment):
            return _recall(experiment, str(out), ended)
    shown = [LiveProgress(Console(stderr=True))] if progress else []
    listeners = [callbacks] if isinstance(callbacks, Callback) else callbacks
    trainer = Trainer(experiment, callbacks=[*shown, *listeners])
    new = out is not None and not (resume and exists)
    with trainer.preparing():
        if out is not None:
            _warn_of_models(nodes)
            description = _describe(experiment)
            trainer.directory = RunDirectory.claim(out, description, overwrite) if new else RunDirectory(out)
            if not new and not go_on(trainer, description):
                log.warning("%s has no checkpoint: starting from round 0", out)
    with ExitStack() as stack:
        for view in shown:
            stack.callback(view.close)
        if trainer.directory and new:
            stack.enter_context(trainer.directory.says_what_is_left())
        return trainer.run()


def _warn_of_models(nodes: Sequence[Node]) -> None:
    """Warn before training about saved models that `load` cannot build by name."""
    for node in nodes:
        if reason := node.recipe.obstacle():
            log.warning(
                "node '%s': its saved model cannot be loaded by name, since %s. Pass model=… to fedh2l.load, or give "
                "the node a class of a module, with model_args", node.name, reason,
            )  # fmt: skip


def _method(method: Method | str | None, labelled: bool) -> Method:
    """Return a method. A name stands for the method with the values that it recommends."""
    if not isinstance(method, str):
        return method or FedH2L()
    return make_method({"name": method, **find_method(method).advice("method", labelled)})


def _check_same(directory: RunDirectory, experiment: Experiment) -> None:
    """Refuse to resume a run under other settings, except device, engine, kernels, keep_checkpoint and more rounds."""
    then, now = (set(text.splitlines()) for text in (directory.config_text(), _describe(experiment)))
    before, rounds = directory.rounds(), experiment.settings.rounds
    grown = {f"rounds = {before}", f"rounds = {rounds}"} if rounds > before else set()
    free = ("device =", "engine =", "kernels =", "keep_checkpoint =")
    different = sorted(line for line in (then ^ now) - grown if not line.startswith(free))
    if different:
        raise RunError(f"'{directory.path}' was started with other settings: {'; '.join(different)}")


def _recall(experiment: Experiment, out: str, result: Result) -> Result:
    """Return the result of a run that has ended, and load its models into the given modules."""
    for node in experiment.nodes:
        if isinstance(node.model, nn.Module):
            load(out, node.name, result.selection, node.model)
    return result


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
