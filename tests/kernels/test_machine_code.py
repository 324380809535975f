"""Layers, steps of optimisers and the projection in machine code: as by PyTorch, with a compiler and without."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedh2l.engines.actor import init_payload
from fedh2l.experiment.config import load_config
from fedh2l.kernels import projection
from fedh2l.kernels.cpu import adam as adam_in_c
from fedh2l.kernels.cpu import compiler
from fedh2l.kernels.cpu import projection as projection_in_c
from fedh2l.kernels.cpu.compiler import library
from fedh2l.kernels.cpu.convolution import PooledConvolution, Shape, can_convolve
from fedh2l.kernels.pooled import allowing, pooled
from fedh2l.peer.rehearsal import PEER, Rehearsal
from fedh2l.peer.settings import load_peer
from fedh2l.runs.trainer import Trainer
from fedh2l.training.compute import Compute
from fedh2l.training.optimizers import OptimizerSettings
from fedh2l.training.projection import project

LENET = Shape(1, 28, 28, 6, 5, 2)
needs_compiler = pytest.mark.skipif(compiler._found() is None, reason="there is no C compiler")

SHAPES = {
    "LeNet's first": (40, LENET),
    "LeNet's second": (40, Shape(6, 14, 14, 16, 5, 0)),
    "the wide LeNet's first": (9, Shape(1, 28, 28, 20, 5, 0)),
    "the wide LeNet's second": (9, Shape(20, 12, 12, 50, 5, 0)),
    "photographs, not square": (3, Shape(3, 32, 24, 12, 3, 1)),
    "odd sizes": (2, Shape(2, 9, 11, 3, 3, 0)),
    "an even window": (2, Shape(1, 9, 9, 2, 4, 1)),
    "a window of one pixel": (5, Shape(3, 4, 4, 64, 1, 0)),
    "as large as it may be": (2, Shape(16, 8, 8, 64, 5, 2)),
    "one pixel left": (1, Shape(4, 4, 4, 9, 3, 0)),
}


def case(count: int, shape: Shape, *, bias: bool = True) -> tuple[torch.Tensor, nn.Conv2d]:
    generator = torch.Generator().manual_seed(count)
    torch.manual_seed(count)
    x = torch.randn(count, shape.C, shape.H, shape.W, generator=generator)
    x[:, :, : shape.H // 2] = 0  # where several pixels are the largest
    return x.requires_grad_(), nn.Conv2d(shape.C, shape.O, shape.K, padding=shape.P, bias=bias)


def by_pytorch(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.max_pool2d(layer(x), 2))


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_pytorch(name, bias):
    count, shape = SHAPES[name]
    x, layer = case(count, shape, bias=bias)
    ours = PooledConvolution.apply(x, layer.weight, layer.bias, shape.P)
    theirs = by_pytorch(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    above = torch.randn(theirs.shape)
    wanted = [x, *layer.parameters()]
    for mine, other in zip(*(torch.autograd.grad(said, wanted, above) for said in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_images_and_filters_may_lie_in_memory_in_any_way():
    x, layer = case(*SHAPES["LeNet's second"])
    usual = PooledConvolution.apply(x, layer.weight, layer.bias, 0)
    every_other = torch.stack([x, x], 1).flatten(0, 1)[::2]
    turned = layer.weight.transpose(2, 3).contiguous().transpose(2, 3)
    for images in (every_other, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).clone().mT):
        assert torch.equal(PooledConvolution.apply(images, turned, layer.bias, 0), usual)


@needs_compiler
def test_threads_share_the_images():
    x, layer = case(100, LENET)
    above = torch.randn(100, 6, 14, 14)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            said = PooledConvolution.apply(x, layer.weight, layer.bias, 2)
            found.append((said, *torch.autograd.grad(said, [x, *layer.parameters()], above)))
    finally:
        torch.set_num_threads(before)
    (said, to_x, *rest), (again, to_x_again, *rest_again) = found
    assert torch.equal(said, again)
    assert torch.equal(to_x, to_x_again)
    for one, other in zip(rest, rest_again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@needs_compiler
def test_second_derivatives():
    x, layer = case(4, Shape(2, 8, 8, 3, 3, 1))
    penalties = []
    for said in (PooledConvolution.apply(x, layer.weight, layer.bias, 1), by_pytorch(layer, x)):
        (slope,) = torch.autograd.grad(said.square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*penalties, rtol=1e-4, atol=1e-3)


@needs_compiler
def test_what_is_no_number_is_not_hidden():
    """A run that falls apart must be seen to."""
    x, layer = case(2, LENET)
    with torch.no_grad():
        layer.weight[3] = float("nan")
    said = PooledConvolution.apply(x, layer.weight, layer.bias, 2)
    assert said[:, 3].isnan().all()
    assert not said[:, :3].isnan().any()
    x, layer = case(2, LENET)
    with torch.no_grad():
        x[0, 0, 5, 6] = float("nan")
    said = PooledConvolution.apply(x, layer.weight, layer.bias, 2)
    assert torch.equal(said.isnan(), by_pytorch(layer, x).isnan())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 2, 3, dtype=torch.float64), (2, 1, 8, 8)),
        (nn.Conv2d(64, 64, 3), (2, 64, 8, 8)),
        (nn.Conv2d(1, 2, (3, 5)), (2, 1, 8, 8)),
        (nn.Conv2d(3, 8, 3), (1, 3, 224, 224)),
        (nn.Conv2d(1, 2, 3), (0, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3), (1, 8, 8)),
    ],
)
def test_what_it_is_not_for(layer, shape):
    x = torch.randn(shape, dtype=layer.weight.dtype)
    assert not can_convolve(x, layer.weight, layer.bias, 0)
    with allowing(True):
        torch.testing.assert_close(pooled(layer, x), by_pytorch(layer, x))


@pytest.mark.parametrize("fault", ["shallow", "deep", "bias", "padding"])
def test_what_does_not_fit_is_refused_as_ever(fault):
    """And nothing is read or written where nothing is."""
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, {"shallow": 2, "deep": 4}.get(fault, 3), 8, 8)
    if fault == "bias":
        layer.bias = nn.Parameter(torch.zeros(2))
    if fault == "padding":
        layer.padding = (-1, -1)
    with allowing(True), pytest.raises(RuntimeError, match=r"channels|bias|negative padding"):
        pooled(layer, x)


@needs_compiler
def test_tensors_without_memory_are_left_alone():
    layer, settings = nn.Conv2d(1, 2, 3), OptimizerSettings()
    with FakeTensorMode(allow_non_fake_inputs=True), allowing(True):
        assert pooled(layer, torch.randn(2, 1, 8, 8)).shape == (2, 2, 3, 3)
    x, vector = torch.randn(2, 1, 8, 8), torch.randn(9)
    usual = by_pytorch(layer, x)
    with torch.device("meta"), allowing(True):  # where new tensors would be, if nobody said otherwise
        torch.testing.assert_close(pooled(layer, x), usual)
        assert project(vector, -vector).gradient.device.type == "cpu"
        settings.step(vector, vector.clone(), settings.initial_state(vector), 0.1)


@needs_compiler
@pytest.mark.parametrize("size", [1, 7, 1003, 300_000])
@pytest.mark.parametrize("name", ["adam", "amsgrad"])
def test_steps_of_the_optimiser(name, size):
    settings = OptimizerSettings(name=name, weight_decay=0.1)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    other, state, others = vector.clone(), settings.initial_state(vector), settings.initial_state(vector)
    for step in range(10):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(step)) / (1 + step)
        assert adam_in_c.can_step(vector, gradient, state)
        settings.step(vector, gradient, state, 1e-2, compiled=True)
        settings.step(other, gradient, others, 1e-2, compiled=False)
    torch.testing.assert_close(vector, other, rtol=1e-5, atol=1e-6)
    for key in state:
        torch.testing.assert_close(state[key], others[key], rtol=1e-5, atol=1e-7)


@needs_compiler
def test_a_step_does_not_hide_what_is_no_number():
    settings = OptimizerSettings()
    vector, gradient = torch.ones(20), torch.ones(20)
    state = settings.initial_state(vector)
    gradient[3] = float("nan")
    settings.step(vector, gradient, state, 1e-2)
    gradient[3] = 1
    settings.step(vector, gradient, state, 1e-2)
    assert vector.isnan().nonzero().flatten().tolist() == [3]
    assert state["largest"][3].isnan()


@needs_compiler
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1, 15, 16, 61_706])
def test_inner_products_and_the_projection(size, sign):
    a = torch.randn(size, generator=torch.Generator().manual_seed(size))
    b = sign * a + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(size + 1))
    wide_a, wide_b = a.double(), b.double()
    assert projection_in_c.can_project(a, b)
    relation = projection.relate(a, b, compiled=True)
    inner, first, second, conflict, angle = relation
    products = torch.stack([wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b])
    torch.testing.assert_close(torch.stack([inner, first, second]), products, rtol=1e-12, atol=1e-12)
    cosine = (products[0] / (products[1] * products[2]).sqrt()).clamp(-1, 1)
    torch.testing.assert_close(angle, torch.rad2deg(torch.acos(cosine)), rtol=1e-9, atol=1e-5)
    assert bool(conflict) == bool(products[0] < 0)
    v = (-products[0]).clamp_min(0) / products[2]
    torch.testing.assert_close(projection.move(a, b, relation, compiled=True), (wide_a + v * wide_b).float())
    by_pytorch = projection.relate(a, b, compiled=False)
    torch.testing.assert_close(torch.stack(relation), torch.stack(by_pytorch), rtol=1e-9, atol=1e-5)
    torch.testing.assert_close(*(projection.move(a, b, relation, compiled=each) for each in (True, False)))


@needs_compiler
def test_vectors_that_are_left_to_pytorch():
    settings, vector = OptimizerSettings(), torch.ones(6)
    for other in (torch.ones(2, 3), torch.ones(6, dtype=torch.float64), torch.ones(6, device="meta")):
        assert not adam_in_c.can_step(other, other, {})
        assert not projection_in_c.can_project(other, other)
    assert not projection_in_c.can_project(vector, torch.ones(7))
    every_other = torch.arange(12.0)[::2]  # gradients may lie in memory in any way, parameters must not
    assert not adam_in_c.can_step(every_other, vector, {})
    for odd in (vector.double(), torch.ones(5), every_other):
        assert not adam_in_c.can_step(vector, vector, settings.initial_state(vector) | {"square": odd})
    learned = torch.ones(6, requires_grad=True)
    assert project(learned, vector).gradient.requires_grad
    assert float(projection.relate(every_other, vector, True).inner) == 30


def answer(**environment: str) -> tuple[bool, float]:
    """Whether a LeNet in a new process uses machine code, and what it says."""
    program = """
import torch
from fedh2l.kernels.cpu.convolution import Shape, _functions
from fedh2l.models.lenet import LeNet
from fedh2l.training.network import Network
from fedh2l.peer.rehearsal import PEER, Rehearsal
from fedh2l.peer.settings import load_peer
from fedh2l.runs.trainer import Trainer
from fedh2l.training.compute import Compute
from fedh2l.training.optimizers import OptimizerSettings
torch.manual_seed(0)
said = Network(LeNet(), OptimizerSettings()).logits(torch.randn(3, 1, 28, 28))
print(_functions(Shape(1, 28, 28, 6, 5, 2)) is not None, float(said.square().sum()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    used, value = done.stdout.split()
    return used == "True", float(value)


def counting(folder: Path) -> tuple[str, Path]:
    """A compiler that notes each time that it compiles, and where its notes are."""
    notes, script = folder / "notes", folder / "cc"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiled >> {notes}\nexec cc "$@"\n')
    script.chmod(0o755)
    notes.touch()
    return str(script), notes


@needs_compiler
def test_without_a_compiler_pytorch_does_the_work(tmp_path):
    with_one = answer(XDG_CACHE_HOME=str(tmp_path))
    assert with_one[0]
    garbage = tmp_path / "garbage"
    garbage.write_text("#!/bin/sh\nprintf '\\377\\376'\nprintf '\\377' >&2\n[ \"$1\" = --version ]\n")
    garbage.chmod(0o755)
    for command in ("", "no-such-compiler", "false", "true", "cc 'x", str(garbage)):
        used, value = answer(FEDH2L_CC=command, XDG_CACHE_HOME=str(tmp_path / "other"))
        assert not used
        assert value == pytest.approx(with_one[1], rel=1e-5)


@needs_compiler
@pytest.mark.parametrize(("engine", "kernels"), [("local", "auto"), ("local", "off"), ("processes", "off")])
def test_a_run_without_kernels_compiles_nothing(tmp_path, engine, kernels):
    command, notes = counting(tmp_path)
    options = ["run.rounds=2", "data.per_class=20", f"run.engine={engine}", f"run.kernels={kernels}"]
    environment = {**os.environ, "FEDH2L_CC": command, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    given = [part for option in options for part in ("--set", option)]
    subprocess.run(
        [sys.executable, "-m", "fedh2l", "run", "--out", str(tmp_path / "run"), *given],
        capture_output=True, check=True, env=environment,
    )  # fmt: skip
    assert bool(notes.read_text()) == (kernels == "auto")
    assert f'kernels = "{kernels}"' in (tmp_path / "run" / "config.toml").read_text()


@needs_compiler
def test_what_was_compiled_is_used_again(tmp_path):
    command, notes = counting(tmp_path)
    first = answer(FEDH2L_CC=command, XDG_CACHE_HOME=str(tmp_path))
    compiled = notes.read_text()
    assert compiled
    assert answer(FEDH2L_CC=command, XDG_CACHE_HOME=str(tmp_path)) == first == (True, first[1])
    assert notes.read_text() == compiled
    kept = tmp_path / "fedh2l" / "code"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert {path.suffix for path in kept.iterdir()} == {".so"}
    for path in kept.iterdir():
        path.write_bytes(path.read_bytes()[:100])  # a disk that was full
    assert answer(FEDH2L_CC=command, XDG_CACHE_HOME=str(tmp_path)) == first
    assert len(notes.read_text()) == 2 * len(compiled)


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path, mode):
    """Whoever can write there could have any code run."""
    folder = tmp_path / "fedh2l" / "code"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    used, _ = answer(XDG_CACHE_HOME=str(tmp_path))
    assert used
    assert not list(folder.iterdir())


@needs_compiler
def test_a_compiler_that_hangs_is_waited_for_once(tmp_path, monkeypatch, caplog):
    slow = tmp_path / "cc"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 30\n')
    slow.chmod(0o755)
    monkeypatch.setenv("FEDH2L_CC", str(slow))
    monkeypatch.setattr(compiler, "PATIENCE", 1)
    monkeypatch.setattr(compiler, "_hangs", [])
    compiler._found.cache_clear()
    try:
        began = time.monotonic()
        assert [library("adam.c", N=number) for number in range(5)] == [None] * 5
        assert time.monotonic() - began < 4
        assert caplog.text.count("cannot be compiled here") == 1
    finally:
        compiler._found.cache_clear()


@needs_compiler
def test_processes_that_start_at_once(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: answer(XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert len(set(answers)) == 1
    assert answers[0][0]


def test_a_peer_compiles_nothing_unless_its_file_says_so(tmp_path):
    """A rehearsal writes the setting of its run."""
    config, _ = load_config(None, ["run.device=cpu", "data.per_class=20", "data.angles=[0,20]"])
    Rehearsal(config, config.experiment(), tmp_path)
    path = tmp_path / "M0" / PEER
    assert load_peer(path).run.compute.kernels
    path.write_text(path.read_text().replace('kernels = "auto"\n', ""))
    assert not load_peer(path).run.compute.kernels


def test_servers_and_processes_follow_the_setting():
    """Also in a Ray actor or a process, which builds its learners from these settings."""
    given = ["run.device=cpu", "data.per_class=20", "run.kernels=off", "method.name=fedgkt", "run.micro_batch=8"]
    trainer = Trainer(load_config(None, given)[0].experiment())
    learners, server = trainer.engine.learners, trainer.engine.router.server
    assert server.networks
    networks = [*server.networks.values(), *(learner.network for learner in learners)]
    assert not any(network.compute.kernels for network in networks)
    common, _ = init_payload(trainer.experiment, trainer.experiment.method, learners)
    assert common.training.compute == Compute(rows=8, kernels=False)
