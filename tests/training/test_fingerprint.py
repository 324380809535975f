"""A run is resumed with the data and the models that it was started with, and with nothing else."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from torch import nn

import fedh2l
from conftest import blobs
from fedh2l.data import digest as digest_module
from fedh2l.data.digest import data_digest
from fedh2l.errors import ConfigError, RunError
from fedh2l.training.fingerprint import difference, model_fingerprint

OPTIONS = {"rounds": 12, "eval_every": 4, "checkpoint_every": 4}


class Net(nn.Module):
    """Batch norm, dropout and a mask: what only some modes show, and what must stay as it is."""

    def __init__(self, activation=torch.relu, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.drop, self.activation = nn.Dropout(0.3), activation
        self.register_buffer("order", torch.arange(width))

    def forward(self, x):
        return self.out(self.drop(self.activation(self.norm(self.first(x)))[:, self.order]))


class Stop(fedh2l.Callback):
    def on_round(self, round):
        if round == 6:
            raise KeyboardInterrupt


def given(models=Net, seeds=(0, 1), weights: int = 0) -> list[fedh2l.Node]:
    torch.manual_seed(weights)
    return [fedh2l.Node(f"n{i}", models(), blobs(f"n{i}", seed=seed)) for i, seed in enumerate(seeds)]


@pytest.fixture(params=["finished", "interrupted"])
def started(request, tmp_path):
    """A run that has ended, and one that was stopped."""
    options = {**OPTIONS, "out": tmp_path / "run"}
    if request.param == "finished":
        fedh2l.train(given(), **options)
    else:
        with pytest.raises(KeyboardInterrupt):
            fedh2l.train(given(), **options, callbacks=[Stop()])
    return {**options, "resume": True}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (lambda: given(seeds=(0, 7)), "node 'n1' has other data than when"),
        (lambda: given(lambda: Net(torch.tanh)), "the model of node 'n0' computes other logits"),
        (lambda: given(lambda: Net(width=9)), "the model of node 'n0' has another architecture"),
    ],
)
def test_other_data_or_another_model_is_refused(started, changed, difference):
    with pytest.raises(ConfigError, match=difference):
        fedh2l.train(changed(), **started)


def test_models_that_are_built_again_are_the_same(started, caplog):
    rebuilt = given(weights=5)
    with caplog.at_level("INFO", "fedh2l"):
        result = fedh2l.train(rebuilt, **started)
        again = fedh2l.train(rebuilt, **started)  # the modules are trained now
    assert result == again
    assert caplog.text.count("its saved result is returned") >= 1


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_data(tmp_path):
    class AtOnce(fedh2l.Callback):
        def on_round(self, round):
            raise KeyboardInterrupt

    options = {**OPTIONS, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fedh2l.train(given(), **options, callbacks=[AtOnce()])
    with pytest.raises(ConfigError, match="node 'n0' has other data"):
        fedh2l.train(given(seeds=(3, 1)), **options, resume=True)
    assert fedh2l.train(given(), **options, resume=True).rounds == 12


def test_a_run_without_its_fingerprint_cannot_be_resumed(started):
    (started["out"] / "fingerprint.json").write_text("[]")
    with pytest.raises(RunError, match="the record of its data and models"):
        fedh2l.train(given(), **started)


def test_the_command_line_refuses_other_data(process, tmp_path):
    (tmp_path / "ours.py").write_text(
        "from conftest import blobs\nSHIFT = 0.0\n"
        "def clouds(seed):\n"
        "    return [blobs(f'site{i}', shift=SHIFT, seed=seed + i) for i in range(2)]\n"
    )
    changes = ["--set", "data.name=ours:clouds", "--set", "run.device=cpu"]
    assert process("run", *changes, "--rounds", "4", "--out", "run").returncode == 0
    done = process("run", "--resume", "run", "--allow", "ours", "--json")
    assert "its saved result is returned" in done.stderr
    assert json.loads(done.stdout)["rounds"] == 4
    module = tmp_path / "ours.py"
    module.write_text(module.read_text().replace("SHIFT = 0.0", "SHIFT = 0.5"))
    done = process("run", "--resume", "run", "--allow", "ours")
    assert done.returncode == 2
    assert "node 'site0' has other data than when" in " ".join(done.stderr.split())


def test_a_bench_refuses_results_of_other_data(process, tmp_path):
    (tmp_path / "ours.py").write_text(
        "from fedh2l.data.datasets.rotated_mnist import RotatedMNIST\nCOUNT = 20\n"
        "def digits(seed, splits):\n"
        "    return RotatedMNIST(per_class=COUNT, splits=splits).domains(seed)\n"
    )
    small = ["--set", "data.name=ours:digits", "--set", "run.batch_size=8", "--device", "cpu", "--methods", "fedh2l"]
    command = ["bench", "comparison", "--rounds", "2", "--seeds", "1", "--allow", "ours", *small]
    done = process(*command)
    assert done.returncode == 0, done.stderr
    assert process(*command).returncode == 0
    module = tmp_path / "ours.py"
    module.write_text(module.read_text().replace("COUNT = 20", "COUNT = 24"))
    done = process(*command)
    assert done.returncode == 2
    assert "node 'M0' has other data than when" in " ".join(done.stderr.split())


def test_a_peer_with_other_private_data_is_refused(town):
    made = town("run.rounds=400", "run.checkpoint_every=20", "data.angles=[0,20]", nodes=2, quorum=0, deadline=2.0)
    made.start("M0", "M20")
    made.until(lambda: made.round("M20") >= 40)
    assert made.kill("M20", signal.SIGTERM) == 0
    made.edit("M20", ("per_class = 20", "per_class = 21"))
    made.start("M20")
    made.until(lambda: made.dead("M20"))
    assert "node 'M20' has other data than when" in made.log("M20")
    assert "Traceback" not in made.log("M20")
    made.edit("M20", ("per_class = 21", "per_class = 20"))
    made.start("M20")
    made.until(lambda: made.dead("M20"))
    assert made.directory("M20").result()["rounds"] == 400
    made.edit("M20", ("per_class = 20", "per_class = 21"))  # also once it has ended
    made.start("M20")
    made.until(lambda: made.dead("M20"))
    assert made.log("M20").count("node 'M20' has other data than when") == 2


def test_looking_at_a_model_changes_nothing():
    torch.manual_seed(3)
    net = Net()
    net.norm.eval()  # one layer in another mode
    state = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    one = model_fingerprint(net, True, (2,))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [layer.training for layer in net.modules()] == [True, True, False, True, True]
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert one == model_fingerprint(Net(), True, (2,))
    other = model_fingerprint(Net(torch.tanh), True, (2,))
    assert difference({"a": {"data": "", **one}}, {"a": {"data": "", **other}}) is not None


def test_images_as_bytes_and_indices_have_fingerprints():
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8)
    words = torch.arange(60).view(-1, 1).expand(-1, 5).contiguous()
    labels = torch.arange(60) % 3
    for inputs, model in (
        (images, nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))),
        (words, nn.Sequential(nn.Embedding(60, 4), nn.Flatten(), nn.Linear(20, 3))),
    ):
        node = fedh2l.Node("a", model, fedh2l.Domain.split((inputs, labels), "a", 3))
        found = model_fingerprint(node.build("secret", 8), node.floating, node.input_shape)
        assert len(found["logits"]) == 4
        assert torch.tensor(found["logits"]).std() > 0


def test_a_model_that_cannot_be_looked_at_is_told_by_its_architecture():
    class Picky(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 4:
                raise ValueError("no four")
            return super().forward(x)

    assert model_fingerprint(Picky(2, 3), True, (2,))["logits"] is None


@pytest.mark.parametrize("large", [10**9, 1000])
def test_the_digest_of_data_sees_every_value_and_the_shape(monkeypatch, large):
    monkeypatch.setattr(digest_module, "LARGE", large)
    values = torch.arange(40_000, dtype=torch.float32)
    digest = data_digest([values])
    assert digest == data_digest([values.clone()])
    assert digest != data_digest([values.view(2, -1)])
    for place in (0, 20_000, 39_999):
        changed = values.clone()
        changed[place] += 1
        assert data_digest([changed]) != digest
    assert data_digest([values.flip(0)]) != digest
    assert data_digest([values.to(torch.bfloat16)]) != digest
