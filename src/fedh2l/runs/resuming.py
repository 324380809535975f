"""Resume a run directory. A run that has ended is not trained again, and only the same run is continued."""

from __future__ import annotations

import logging

from fedh2l.errors import RunError
from fedh2l.experiment.experiment import Experiment
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.result import Result
from fedh2l.runs.trainer import Trainer

log = logging.getLogger("fedh2l")


NOT_KEPT = (
    "'{}' has ended, and its last checkpoint is gone, so it cannot be extended. A run keeps it if it is under 200 MB, "
    "or if run.keep_checkpoint = true is set before the run ends; `fedh2l bench` keeps none. Start a new run"
)


def go_on(trainer: Trainer, config: str) -> bool:
    """Prepare a trainer to continue the run in its directory, for the trainer's number of rounds.

    `config` is the configuration to write if the run is extended. Return False if the run starts from round 0.
    """
    directory = trainer.directory
    assert directory is not None
    ended, found = directory.result() is not None, trainer.resume()
    if ended and not found:
        raise RunError(NOT_KEPT.format(directory.path))
    if ended or directory.rounds() != trainer.settings.rounds:
        directory.extend(config)
    return found


def saved_result(directory: RunDirectory, experiment: Experiment) -> Result | None:
    """Return the result of a run that has done all rounds, or None if some are left.

    Refuse data and models that differ from those of the run.
    """
    found = directory.result()
    experiment.check_rounds(directory.rounds())
    if found is not None or directory.signed:
        directory.check(experiment.fingerprint)
    if found is None:
        return None
    result = Result.from_dict(found)
    if result.rounds < experiment.settings.rounds:
        if not directory.checkpoints.paths():
            raise RunError(NOT_KEPT.format(directory.path))
        return None
    log.info("'%s' has already ended, with this data and these models: its saved result is returned", directory.path)
    return result
