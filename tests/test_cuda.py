"""The same training on a GPU; needs one."""

from __future__ import annotations

import pytest
import torch

from fedh2l.rundir import RunDirectory
from fedh2l.trainer import Trainer
from test_engine import NOISY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
LENETS = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]


@pytest.mark.parametrize(
    "changes", [[], ["method.project=pcgrad", "method.interval=3"], ["method.pairing=pairs"], LENETS]
)
def test_agrees_with_the_cpu(federation, changes):
    vectors = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(federation("run.dtype=float64", f"run.device={device}", *changes))
        trainer.engine.advance(1, 20, lambda _: True)
        trainer.engine.verify()
        vectors.append([learner.parameters.cpu() for learner in trainer.engine.learners])
    for cpu, cuda in zip(*vectors, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-6)


def test_dropout_and_resume(federation, tmp_path):
    changes = [*NOISY, "run.device=cuda", "run.checkpoint_every=7"]
    before = torch.cuda.get_rng_state()
    whole = Trainer(federation(*changes)).run()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    broken = Trainer(federation(*changes), RunDirectory.claim(tmp_path / "run", "x"))
    for _ in range(2):  # up to the checkpoint of round 7 and the evaluation of round 10
        broken.advance()
    resumed = Trainer(federation(*changes), RunDirectory.open(tmp_path / "run"))
    assert resumed.resume()
    assert resumed.round == 7
    assert resumed.run().matrix == whole.matrix
