"""The same training on a GPU, in both engines; needs one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from test_conformance import AS_ONE, BRANCHING
from torch import nn
from torch.func import vmap

from byte_images import IMAGENET, net, nodes
from conftest import LENETS, NOISY
from fedh2l.data.augmentation import Augmentation, PublicViews
from fedh2l.data.domain import Samples
from fedh2l.data.pixels import Pixels
from fedh2l.engines.batched.graphs import GraphRecorder
from fedh2l.engines.batched.layers import STACKED
from fedh2l.engines.batched.overrides import FunctionOverrides
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.kernels.cuda.adam import can_step
from fedh2l.kernels.cuda.layers import can_convolve
from fedh2l.kernels.cuda.projection import can_project
from fedh2l.kernels.pooled import allowing
from fedh2l.methods.registry import find_method
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Trainer
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings
from fedh2l.training.projection import pcgrad, project, unprojected

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
RECORDABLE = {name: changes for name, changes in AS_ONE.items() if changes != BRANCHING}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("nets", "rows", "channels", "size", "filters", "window", "padding"),
    [
        (4, 32, 1, (28, 28), 6, (5, 5), (2, 2)),
        (40, 96, 6, (14, 14), 16, (5, 5), (0, 0)),
        (3, 7, 20, (12, 12), 50, (5, 5), (0, 0)),
        (2, 5, 3, (9, 7), 5, (3, 2), (1, 0)),
        (1, 1, 2, (6, 6), 17, (1, 1), (0, 0)),
    ],
)
def test_stacked_convolutions(nets, rows, channels, size, filters, window, padding, dtype):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_()

    x, weight, bias = (
        random(nets, rows, channels, *size),
        random(nets, filters, channels, *window),
        random(nets, filters),
    )
    if not can_convolve(x[0], weight[0], padding):
        assert dtype is torch.float64  # twice the memory
        return
    with allowing(True), FunctionOverrides(STACKED):
        ours = vmap(lambda x, w, b: F.conv2d(x, w, b, padding=padding))(x, weight, bias)
        shared = vmap(lambda w: F.conv2d(x[0], w, padding=padding))(weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    theirs = torch.stack([F.conv2d(a, b, c, padding=padding) for a, b, c in zip(*wide, strict=True)])
    above = random(*ours.shape).detach()
    found = (ours, *torch.autograd.grad(ours, (x, weight, bias), above))
    wanted = (theirs, *torch.autograd.grad(theirs, wide, above.double()))
    far = 1e-5 if dtype is torch.float32 else 1e-13
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=far * b.abs().max().item())
    alone = torch.stack([F.conv2d(wide[0][0], w, padding=padding) for w in wide[1]])
    torch.testing.assert_close(shared.double(), alone, rtol=0, atol=far * alone.abs().max().item())


@pytest.mark.parametrize(("size", "k"), [((3, 2, 4, 28, 28), 2), ((2, 3, 1, 9, 7), 2), ((2, 3, 2, 11, 10), 3)])
def test_stacked_pooling(size, k):
    x = torch.randn(size, device="cuda").mul(2).round().requires_grad_()  # with ties
    with allowing(True), FunctionOverrides(STACKED):
        ours = vmap(lambda x: F.max_pool2d(x, k))(x)
    theirs = F.max_pool2d(x.flatten(0, 1), k).view(ours.shape)
    above = torch.randn_like(ours)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours, x, above)[0], torch.autograd.grad(theirs, x, above)[0])


@pytest.mark.parametrize("shape", [(3, 1000), (1 << 21,)])
@pytest.mark.parametrize("name", ["adam", "amsgrad"])
def test_a_step(name, shape):
    settings = OptimizerSettings(name=name, lr=0.01)
    ours = torch.randn(shape, dtype=torch.float64, device="cuda")
    theirs = ours.clone()
    states = [settings.initial_state(ours) for _ in range(2)]
    assert can_step(ours, theirs, {})
    assert not can_step(ours, theirs.float(), {})
    assert not can_step(ours, theirs.cpu(), {})
    for _ in range(5):
        gradient = torch.randn_like(ours)
        settings.step(ours, gradient, states[0], 0.01, compiled=True)
        settings.step(theirs, gradient, states[1], 0.01, compiled=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (3, 1000), (1 << 21,)])
@pytest.mark.parametrize("scale", [1.0, 1e-25])
@pytest.mark.parametrize("rule", [project, pcgrad, unprojected])
def test_projection(rule, scale, shape, dtype):
    g_pub, g_loc = (scale * torch.randn(shape, dtype=dtype) for _ in range(2))
    g_pub -= g_loc  # they are in conflict
    assert can_project(g_pub.cuda(), g_loc.cuda())
    ours, theirs = rule(g_pub.cuda(), g_loc.cuda()), rule(g_pub, g_loc)
    far = 1e-6 if dtype is torch.float32 else 1e-14
    torch.testing.assert_close(ours.gradient.cpu(), theirs.gradient, rtol=far, atol=far * scale)
    torch.testing.assert_close(ours.angle.cpu(), theirs.angle, rtol=0, atol=1e-5)
    assert torch.equal(ours.conflict.cpu(), theirs.conflict)
    assert ours.gradient.shape == shape
    assert ours.angle.shape == shape[:-1]


def seen_as_one(num_classes: int = 3) -> nn.Module:
    """A model that wants to see what a layer returns as rows, which it cannot where channels come last."""

    class Rows(nn.Module):
        def forward(self, x):
            return x.view(len(x), -1)

    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(3), Rows(), nn.Linear(16, num_classes))


@pytest.mark.parametrize(("model", "turned"), [(net, True), (seen_as_one, False)])
def test_channels_come_last_where_a_model_takes_them_so(model, turned):
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    module = model()
    ours, theirs = (
        Network(copy.deepcopy(module).to(device), OptimizerSettings(), Pixels.of(IMAGENET))
        for device in ("cuda", "cpu")
    )
    ours.module[1].eval()  # a layer that is frozen stays so
    ours._said(images.cuda(), {})
    assert ours._channels_last is turned
    assert [layer.training for layer in ours.module[:3]] == [True, False, True]
    torch.testing.assert_close(ours.predict(images.cuda()).cpu(), theirs.predict(images), rtol=1e-2, atol=1e-2)


VIEWS = Augmentation(Pixels.of(IMAGENET), public=PublicViews(Pixels.of(IMAGENET), bend=0.1, mix=0.5))


@pytest.mark.parametrize("model", [net, seen_as_one])
@pytest.mark.parametrize("views", [None, VIEWS])
def test_images_agree_with_the_cpu(model, views):
    found = {}
    for device in ("cpu", "cuda"):
        trainer = Trainer(
            Experiment(
                nodes(views, model),
                find_method("fedh2l")(),
                RunSettings(rounds=20, batch_size=8, dtype="float64", device=device, engine="local", selection="last"),
                OptimizerSettings(),
            )
        )
        trainer.run()
        found[device] = [learner.parameters.cpu() for learner in trainer.engine.learners]
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-6)


def test_indices_reach_the_device_without_waiting():
    samples = Samples(torch.arange(50.0).cuda(), torch.arange(50).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = samples.take([3, 1, 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken.labels.tolist() == [3, 1, 4]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_views_agree_with_the_cpu(dtype):
    """Of the numbers that are drawn every bit, of the pixels that they make 1e-4."""
    images = torch.randint(0, 256, (64, 3, 28, 28), dtype=torch.uint8)
    images = images if dtype is torch.uint8 else images / 255
    views = Augmentation(Pixels(), crop=0.7, shift=0.1, zoom=0.2, erase=0.3, border="zeros")
    here, there = (views.views(x, torch.float32, "public-views", 0, "a", 1) for x in (images, images.cuda()))
    edges = (here == 0) != (there.cpu() == 0)  # of a square that is left out
    assert edges.float().mean() < 1e-3
    torch.testing.assert_close(there.cpu()[~edges], here[~edges], rtol=0, atol=1e-4)


def test_nothing_is_collected_while_a_round_is_recorded(federation, monkeypatch):
    """A graph that is found dead in the middle of a recording gives its memory back to CUDA, which ends it."""

    class Kept:
        pass

    def dead():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            values = torch.zeros(1 << 20, device="cuda") + 1
        kept = Kept()
        kept.itself, kept.held = kept, (graph, values)  # only a collection ends it
        return kept

    waiting, perform, recorded = [dead() for _ in range(3)], GraphRecorder._perform, []

    def disturbed(self, recording, round):
        if torch.cuda.is_current_stream_capturing():
            waiting.clear()
            recorded.append([[] for _ in range(10_000)])  # more than enough for a collection
        perform(self, recording, round)

    monkeypatch.setattr(GraphRecorder, "_perform", disturbed)
    assert Trainer(federation("run.device=cuda", "run.engine=batched")).run().average["ACC"] > 0
    assert recorded
    assert gc.isenabled()
