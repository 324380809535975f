"""Models of others: torchvision, timm, weights to start from, heads of other tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedh2l
from conftest import blobs
from fedh2l.engines.actor import init_payload
from fedh2l.errors import ConfigError, ModelError
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.models.factory import Recipe
from fedh2l.models.pretrained import fit_head, start_from, take_over
from fedh2l.plugins import import_object


def images(name: str, classes: int = 3, size: int = 64) -> fedh2l.Domain:
    pixels = torch.randint(0, 256, (40, 3, size, size), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return fedh2l.Domain.split((pixels, torch.arange(40) % classes), name, classes)


def thousand(width: int = 8) -> nn.Module:
    """A factory that does not take the number of classes."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1000))


class Squeezed(nn.Module):
    """Ends in a convolution, as SqueezeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 5, stride=4)
        self.head = nn.Sequential(nn.Conv2d(8, 1000, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("torchvision.models:squeezenet1_1", {}),
        ("torchvision.models:mobilenet_v2", {}),
        ("timm:create_model", {"model_name": "resnet10t"}),
        ("test_pretrained:Squeezed", {}),
    ],
)
def test_models_of_others(model, arguments):
    module = fedh2l.Node("a", model, images("a"), arguments).build("secret", 4)
    assert module(torch.rand(2, 3, 64, 64)).shape == (2, 3)


def test_a_torchvision_of_another_torch(tmp_path):
    """Whatever is installed here, the failure is the one that users meet: the compiled part is not there."""
    fake = tmp_path / "torchvision"
    fake.mkdir()
    (fake / "__init__.py").write_text(
        "import torch\nfrom torchvision import early\n"
        "torch.library.register_fake('torchvision::nms')(lambda dets, scores, iou_threshold: dets)\n"
        "from torchvision import models\n"
    )
    (fake / "early.py").write_text("")
    (fake / "models.py").write_text(
        "from torch import nn\ndef tiny(num_classes=5):\n    return nn.Linear(2, num_classes)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fedh2l.models.factory import Recipe\n"
        "print(Recipe('torchvision.models:tiny').build(3, (2,)).out_features)\n"
        "try:\n    import torchvision\nexcept RuntimeError:\n    print('failed')\nelse:\n    print('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["3", "imported"], done.stderr


@pytest.mark.parametrize(("package", "install"), [("torchvision", "fedh2l[vision]"), ("timm", "timm")])
def test_a_missing_package_is_named(monkeypatch, package, install):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install '{install}'".replace("[", r"\[")):
        import_object(f"{package}.models:resnet18", "nodes.0.model")


def test_a_head_of_another_task_is_replaced():
    node = fedh2l.Node("a", thousand, blobs("a"))
    module = node.build("secret", 4)
    assert isinstance(module, nn.Sequential)
    assert module[2].out_features == 3
    assert torch.equal(module[0].weight, fedh2l.Node("a", thousand, blobs("a")).build("secret", 4)[0].weight)


def test_a_model_that_fits_is_left_alone():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    before = list(module)
    assert not fit_head(module, torch.rand(1, 2), 3)
    assert list(module) == before
    assert not fit_head(nn.Linear(2, 7), torch.rand(1, 2), 3)


def test_a_replaced_head_is_there_again_when_the_model_is_loaded(tmp_path):
    nodes = [fedh2l.Node(name, thousand, blobs(name)) for name in "ab"]
    fedh2l.train(nodes, rounds=3, out=tmp_path / "run")
    classifier = fedh2l.load(tmp_path / "run", "a", allow=["test_pretrained"])
    assert classifier(torch.rand(5, 2)).shape == (5, 3)


@pytest.fixture
def trained(tmp_path):
    """Files of weights of a model for five classes, as people keep them."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    state = module.state_dict()
    save_file(state, tmp_path / "plain.safetensors")
    torch.save(state, tmp_path / "plain.pth")
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3}, tmp_path / "m.pth"
    )
    return tmp_path, state


def normed(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


@pytest.mark.parametrize("file", ["plain.safetensors", "plain.pth", "m.pth"])
def test_weights_to_start_from(trained, file, caplog):
    folder, state = trained
    caplog.set_level("INFO", "fedh2l")
    drawn = fedh2l.Node("a", normed, blobs("a")).build("secret", 4)
    module = fedh2l.Node("a", normed, blobs("a"), weights=str(folder / file)).build("secret", 4)
    for name in ("0.weight", "0.bias", "1.weight", "1.running_mean"):
        assert torch.equal(module.state_dict()[name], state[name])
    assert torch.equal(module[3].weight, drawn[3].weight)  # the head is as it would have been
    assert "6 tensors loaded" in caplog.text or "7 tensors loaded" in caplog.text
    assert "of another shape, left as drawn: 3.weight, 3.bias" in caplog.text


def test_a_report_of_what_matched(trained):
    _, state = trained
    other = nn.Sequential(nn.Linear(2, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3))
    match = take_over(other, state)
    assert match.loaded == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert match.missing == ["4.weight", "4.bias"]
    assert "1.running_mean" in match.unused
    assert match.share == pytest.approx(69 / 87)
    assert str(match).startswith("4 tensors loaded, 79.3 % of the model; not in the weights, left as drawn: 4.weight")


def test_weights_of_another_model_are_warned_of(tmp_path, caplog):
    """A wider one: what fits by chance is loaded, and layers before the last do not."""
    wide = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 40), nn.Linear(40, 3))
    save_file(
        {"3.weight": torch.zeros(40, 8), "3.bias": torch.zeros(40), "0.weight": torch.zeros(9, 2)},
        tmp_path / "w.safetensors",
    )
    start_from(wide, str(tmp_path / "w.safetensors"), "", "model")
    assert "'0.weight' is not the last layer, and the weights" in caplog.text


def test_weights_go_into_lazy_layers(tmp_path):
    save_file({"0.weight": torch.ones(8, 2), "0.bias": torch.zeros(8)}, tmp_path / "w.safetensors")

    def lazy(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1), nn.Linear(1, num_classes))

    module = fedh2l.Node("a", lazy, blobs("a"), weights=str(tmp_path / "w.safetensors")).build("secret", 4)
    assert torch.equal(module[0].weight, torch.ones(8, 2))


def test_weights_for_a_module_are_refused():
    with pytest.raises(ModelError, match="a module keeps its own weights"):
        fedh2l.Node("a", normed(3), blobs("a"), weights="w.pth").build("secret", 4)


def test_weights_do_not_travel_twice(trained, tmp_path):
    """An actor is sent a model's state; the file may not be where it is."""
    folder, _ = trained
    given = [fedh2l.Node(name, normed, blobs(name), weights=str(folder / "plain.pth")) for name in "ab"]
    federation = Experiment(given, fedh2l.FedH2L(), RunSettings(device="cpu", batch_size=4), fedh2l.Optimizer())
    learners = federation.learners()
    (folder / "plain.pth").unlink()
    _, parts = init_payload(federation, federation.method, learners)
    assert torch.equal(parts["a"].state["model.parameters"], learners[0].parameters)
    parts["a"].node.build("secret", 4)


class Aside(nn.Module):
    """The last layer that it has is not the one that answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Linear(2, 1000)
        self.aside = nn.Linear(2, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(x)


def test_the_layer_that_answers_is_replaced(caplog):
    caplog.set_level("INFO", "fedh2l")
    module = Aside()
    assert fit_head(module, torch.rand(1, 2), 3)
    assert (module.answer.out_features, module.aside.out_features) == (3, 1000)
    assert "'answer' of Aside has 3 outputs now, not 1000" in caplog.text


class Evil:
    def __reduce__(self):
        return (print, ("this would have been run",))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.pth", "there is no file of weights"),
        ("damaged.safetensors", "cannot read the weights"),
        ("evil.pth", "more than tensors, or is damaged"),
        ("list.pth", "holds list, not the weights of a model"),
        ("other.safetensors", "are of another model: 0 tensors loaded"),
        ("IMAGENET1K_V1", "are not a file .* only for models of"),
    ],
)
def test_weights_that_cannot_be_used(tmp_path, monkeypatch, capfd, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"not tensors")
    torch.save({"weights": Evil()}, tmp_path / "evil.pth")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    save_file({"elsewhere": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=message):
        start_from(normed(3), source, "test_pretrained:normed", "model")
    assert "this would have been run" not in capfd.readouterr().out


def test_names_of_torchvision():
    module = Recipe("torchvision.models:resnet18").build(3, (3, 64, 64))
    with pytest.raises(ModelError, match=r"unknown weights 'V9'\. There are: IMAGENET1K_V1"):
        start_from(module, "V9", "torchvision.models:resnet18", "model")
    with pytest.raises(ModelError, match="torchvision has no weights for"):
        start_from(module, "V9", "torchvision.models:ResNet", "model")
