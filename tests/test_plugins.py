"""A name in a file runs no code, unless the user allows it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedh2l
from conftest import MLPS, TINY, blobs
from fedh2l import plugins
from fedh2l.errors import ConfigError, ModelError
from fedh2l.experiment.config import load_config
from fedh2l.models.factory import Recipe
from fedh2l.runs.directory import RunDirectory

EXAMPLES = Path(__file__).parent.parent / "examples"
ABOUT = {
    "format": "fedh2l-model-1",
    "node": "n0",
    "which": "best",
    "round": 1,
    "factory": "os:system",
    "arguments": {"command": "touch ran"},
    "classes": ["a", "b"],
    "input_shape": [2],
    "preprocessing": {},
    "floating": True,
    "said": [0.0, 0.0],
}
EVIL = """
from pathlib import Path
Path("ran").touch()
import fedh2l
class Method(fedh2l.FedH2L):
    name = "evil"
def data(**keys): return []
def net(**keys): return None
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module that leaves a trace when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "evil.py").write_text(EVIL)
    return tmp_path


def model_file(folder: Path, **changes) -> Path:
    """A run directory that holds one crafted model."""
    (folder / "models").mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\n")
    tensors = changes.pop("tensors", {"w": torch.zeros(1)})
    save_file(tensors, folder / "models" / "n0-best.safetensors", {"fedh2l": json.dumps({**ABOUT, **changes})})
    return folder


NESTED = {
    "factory": "fedh2l.methods.fedgkt:EdgeNet",
    "arguments": {"model": "evil:net", "model_args": {}, "trunk": "mlp", "trunk_args": {}},
}


@pytest.mark.parametrize("changes", [{}, {"factory": "evil:net", "arguments": {}}, NESTED])
def test_a_model_file_runs_nothing(here, cli, changes):
    model_file(here / "run", **changes)
    torch.save(torch.zeros(2), here / "x.pt")
    done = cli("predict", "run", "x.npy", "--node", "n0")
    assert done.returncode == 2
    assert "--allow" in done.stderr
    with pytest.raises(ModelError, match="If you trust this code, allow it"):
        fedh2l.load(here / "run", "n0")
    assert not (here / "ran").exists()


def test_what_the_user_allows_is_built(tmp_path):
    given = [fedh2l.Node(f"n{i}", Own, blobs(f"n{i}")) for i in range(2)]
    fedh2l.train(given, rounds=2, out=tmp_path / "run")
    with pytest.raises(ModelError, match=r"allow=\['test_plugins'\]"):
        fedh2l.load(tmp_path / "run", "n0")
    assert isinstance(fedh2l.load(tmp_path / "run", "n0", allow=["test_plugins"]).module, Own)
    assert isinstance(fedh2l.load(tmp_path / "run", "n0", model=Own(3)).module, Own)


class Own(nn.Linear):
    def __init__(self, num_classes: int) -> None:
        super().__init__(2, num_classes)


@pytest.mark.parametrize(
    "text",
    ['[method]\nname = "evil:Method"', '[data]\nname = "evil:data"', '[[nodes]]\nname = "M0"\nmodel = "evil:net"',
     '[method]\nname = "fml"\nmeme = "evil:net"'],
)  # fmt: skip
@pytest.mark.parametrize(
    "command", ["run --resume run", "evaluate run", "check run/config.toml", "rehearse run/config.toml"]
)
def test_a_configuration_that_the_user_does_not_run_is_not_imported(here, invoke, text, command):
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text(text)
    code, _, errors = invoke(*shlex.split(command))
    assert code == 2, errors
    assert "--allow evil" in errors
    assert "evil" not in sys.modules
    assert not (here / "ran").exists()


def test_the_configuration_that_the_user_runs_is_imported(here, invoke):
    (here / "own.toml").write_text('[data]\nname = "evil:data"')
    invoke("run", "own.toml")
    assert (here / "ran").exists()


def test_a_roster_imports_nothing(here, invoke, tmp_path):
    from fedh2l.peer.rehearsal import Rehearsal

    folder = tmp_path / "federation"
    folder.mkdir()
    config, _ = load_config(None, [*TINY, *MLPS, "run.rounds=2"], None, {"device": "cpu", "engine": "local"})
    Rehearsal(config, config.experiment(), folder)
    roster = folder / "roster.toml"
    roster.write_text(roster.read_text().replace('name = "fedh2l"', 'name = "evil:Method"'))
    arguments = ["roster", "check", str(roster), "--seedset", str(folder / "seedset.safetensors")]
    code, _, errors = invoke(*arguments)
    assert (code, "--allow evil" in errors) == (2, True)
    assert invoke("peer", str(folder / "M0" / "peer.toml"))[0] == 2
    assert not (here / "ran").exists()
    assert invoke(*arguments, "--allow", "evil")[0] == 0
    assert (here / "ran").exists()


def test_a_run_of_own_code_is_resumed_with_permission(tmp_path, monkeypatch, invoke):
    for file in ("sites.py", "federation.toml"):
        shutil.copy(EXAMPLES / "own" / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert invoke("run", "federation.toml", "--rounds", "2", "--out", "run")[0] == 0
    (tmp_path / "run" / "result.json").unlink()
    code, _, errors = invoke("run", "--resume", "run")
    assert (code, "--allow sites" in errors) == (2, True)
    assert invoke("run", "--resume", "run", "--allow", "sites")[0] == 0
    assert invoke("evaluate", "run")[0] == 2
    assert invoke("evaluate", "run", "--allow", "sites")[0] == 0


def test_no_file_has_this_machine_join_a_cluster(here, invoke):
    (here / "run").mkdir()
    (here / "run" / "config.toml").write_text('[run]\nengine = "ray"\n[ray]\naddress = "ray://10.0.0.1:10001"\n')
    code, _, errors = invoke("run", "--resume", "run")
    assert code == 2
    assert "--allow ray" in errors


def test_models_of_a_bench_are_named_by_a_file(here, invoke):
    names = ("amazon", "caltech10", "dslr", "webcam")
    nodes = "".join(f'[[nodes]]\nname = "{name}"\nmodel = "evil:net"\n' for name in names)
    (here / "own.toml").write_text(nodes)
    bench = ["bench", "office-caltech10", "--models", "own.toml", "--set", "data.root=none"]
    code, _, errors = invoke(*bench)
    assert (code, "--allow evil" in errors) == (2, True)
    assert not (here / "ran").exists()
    assert "--allow evil" not in invoke(*bench, "--allow", "evil")[2]  # data.root is what is wrong now


def test_a_package_in_the_working_directory_is_not_installed(here):
    info = here / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedh2l.models]\nevil = evil:net\n")
    sys.path.insert(0, str(here))
    try:
        plugins.installed.cache_clear()
        assert "evil" not in plugins.installed("fedh2l.models")
    finally:
        sys.path.remove(str(here))
        plugins.installed.cache_clear()


def test_an_entry_point_of_an_installed_package_is_allowed(here, monkeypatch):
    site = here / "site"
    info = site / "evil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedh2l.models]\nharmless = evil:net\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    plugins.installed.cache_clear()
    with plugins.only():
        plugins.check_allowed("evil:net", "x")
        with pytest.raises(ConfigError):
            plugins.check_allowed("evil:data", "x")
        with pytest.raises(ModelError, match="NoneType"):
            Recipe("harmless").build(2, [2])
    plugins.installed.cache_clear()


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("torchvision.models:resnet18", True),
        ("torchvision.models.resnet:resnet18", True),
        ("torchvision.models:get_model", False),
        ("torchvision.datasets:MNIST", False),
        ("torchvision.models.resnet:ResNet.load_state_dict", False),
        ("timm:create_model", True),
        ("timm.models:load_checkpoint", False),
        ("fedh2l.models.small:mlp", True),
        ("fedh2l.plugins:import_object", False),
        ("torch.router:load", False),
        ("builtins:exec", False),
    ],
)
def test_only_constructors_are_known(path, known):
    assert plugins.is_known(path) == known


def test_known_constructors_fetch_no_weights():
    with plugins.only():
        assert plugins.safe_arguments("torchvision.models:resnet18", {"weights": "DEFAULT", "num_classes": 3}) == {
            "weights": None,
            "num_classes": 3,
        }
        for name in ("hf-hub:somebody/model", "local-dir:/tmp/x", 3):
            with pytest.raises(ConfigError, match="is not the name of a model in timm"):
                plugins.safe_arguments("timm:create_model", {"model_name": name, "pretrained": True})
    given = {"weights": "DEFAULT"}
    assert plugins.safe_arguments("torchvision.models:resnet18", given) == given  # the user's own code


def test_a_model_larger_than_its_weights_takes_no_memory(tmp_path):
    model_file(tmp_path / "run", factory="mlp", arguments={"hidden": [10**6, 10**6]})
    with pytest.raises(ModelError, match="do not fit"):
        fedh2l.load(tmp_path / "run", "n0")


def test_an_allowed_package_reaches_the_peers_of_a_rehearsal(tmp_path):
    from fedh2l.peer.rehearsal import Rehearsal

    with plugins.only(["agreement"]):
        config, _ = load_config(None, [*TINY, *MLPS, "run.rounds=2"], None, {"device": "cpu", "engine": "local"})
        (tmp_path / "f").mkdir()
        assert Rehearsal(config, config.experiment(), tmp_path / "f").packages == ["agreement"]


def test_the_run_directory_is_the_only_file_that_is_read(tmp_path):
    """A damaged configuration is refused before anything is imported."""
    (tmp_path / "config.toml").write_text("\n")
    with pytest.raises(fedh2l.FedH2LError, match="empty"):
        RunDirectory.open(tmp_path)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_a_folder_of_others_gives_no_modules(tmp_path, process):
    """A known constructor imports packages that may be missing. None of them is taken from beside the model."""
    folder = model_file(tmp_path / "run", factory="torchvision.models:resnet18", arguments={}, input_shape=[3, 32, 32])
    text = '[data]\nname = "rotated-mnist"\n[method]\nname = "fedh2l"\n[[nodes]]\nname = "n0"\nmodel = "mlp"\n'
    (folder / "config.toml").write_text(text)
    for name in ("accimage", "apex", "inplace_abn"):
        (folder / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    done = process("evaluate", "run", "--node", "n0")
    assert "do not fit the model" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_working_directory_is_searched_for_what_the_user_allows_alone(here, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(here))])
    with plugins.only():
        assert plugins.import_object("fedh2l.models.small:mlp", "model")
        plugins.search(str(here))
        assert str(here) not in sys.path
        plugins.allow(["evil"])
        assert plugins.import_object("evil:net", "model")
    assert str(here) in sys.path
