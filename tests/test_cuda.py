"""The same training on a GPU, in both engines; needs one."""

from __future__ import annotations

import pytest
import torch

from fedh2l.rundir import RunDirectory
from fedh2l.trainer import Trainer
from test_batched import BRANCHING, VARIANTS
from test_engine import NOISY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
LENETS = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]
RECORDABLE = {name: changes for name, changes in VARIANTS.items() if changes != BRANCHING}


def agree(federation, engine: str, changes: list[str]) -> None:
    """Parameters after 20 rounds in float64; a GPU adds in another order."""
    vectors = []
    for device, name in (("cpu", "local"), ("cuda", engine)):
        settings = ["run.dtype=float64", f"run.device={device}", f"run.engine={name}", "run.selection=last"]
        trainer = Trainer(federation(*settings, *changes))
        trainer.run()
        vectors.append([learner.parameters.cpu() for learner in trainer.engine.learners])
    for cpu, cuda in zip(*vectors, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [[], ["method.project=pcgrad", "method.interval=3"], ["method.pairing=pairs"], LENETS]
)
def test_one_by_one_agrees_with_the_cpu(federation, changes):
    agree(federation, "local", changes)


@pytest.mark.parametrize("variant", RECORDABLE)
def test_as_one_agrees_with_the_cpu(federation, variant):
    agree(federation, "batched", RECORDABLE[variant])


def test_a_gpu_runs_nodes_as_one_by_itself(federation):
    trainer = Trainer(federation("run.device=cuda"))
    assert type(trainer.engine).__name__ == "BatchedEngine"


def test_what_cannot_be_recorded_is_run_as_it_is(federation):
    agree(federation, "batched", BRANCHING)


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_dropout_and_resume(federation, tmp_path, engine):
    changes = [*NOISY, "run.device=cuda", "run.checkpoint_every=7", f"run.engine={engine}"]
    before = torch.cuda.get_rng_state()
    whole = Trainer(federation(*changes)).run()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    broken = Trainer(federation(*changes), RunDirectory.claim(tmp_path / "run", "x"))
    for _ in range(2):  # up to the checkpoint of round 7 and the evaluation of round 10
        broken.advance()
    resumed = Trainer(federation(*changes), RunDirectory.open(tmp_path / "run"))
    assert resumed.resume()
    assert resumed.round == 7
    again = resumed.run()
    assert (again.bytes, again.rounds) == (whole.bytes, whole.rounds)
    if engine == "local":  # the other records rounds at other times, and dropout may then draw otherwise
        assert again.matrix == whole.matrix
