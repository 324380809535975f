"""The paper's benchmarks on images, at toy size, on images that are drawn here: every architecture of the presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedh2l.bench.cells import takes_part
from fedh2l.bench.image_suites import image_suite
from fedh2l.bench.suite import Row, TableSpec
from fedh2l.bench.suites import SUITES
from fedh2l.data.datasets.image_folder import OfficeCaltech10, OfficeHome
from fedh2l.data.datasets.pacs import PACS
from fedh2l.data.image_cache import CACHE
from fedh2l.errors import ConfigError
from fedh2l.experiment.presets import ARCHITECTURES, PRESETS
from pictures import folders

DATASETS = {
    "pacs": (PACS.DOMAINS, PACS.CLASSES),
    "office-home": (OfficeHome.DOMAINS, ("bed", "bike", "chair")),
    "office-caltech10": (OfficeCaltech10.DOMAINS, ("bike", "mug")),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


pytestmark = pytest.mark.usefixtures("bench_in_process")
ALLOW = ["--allow", "byte_images"]


def toy(tmp_path: Path, dataset: str) -> list[str]:
    """Settings for a few drawn images, as small as the architectures take; sgd, since its state is small.

    The four networks of PACS have 218 million parameters, and a run has six copies of them: about 5 GB.
    """
    root = folders(tmp_path / "images", *DATASETS[dataset], each=8)
    changes = [f"data.root={root}", "data.size=64", "run.batch_size=4", "optimizer.name=sgd"]
    return [part for change in changes for part in ("--set", change)]


@pytest.mark.parametrize(
    ("dataset", "models", "methods"),
    [
        ("office-caltech10", "homogeneous", "fedh2l,fedavg"),
        pytest.param("office-home", "heterogeneous", "fedh2l", marks=pytest.mark.slow),
        pytest.param("pacs", "heterogeneous", None, marks=pytest.mark.slow),
        pytest.param("pacs", "homogeneous", None, marks=pytest.mark.slow),
        pytest.param("office-home", "homogeneous", None, marks=pytest.mark.slow),
        pytest.param("office-caltech10", "heterogeneous", None, marks=pytest.mark.slow),
    ],
)
def test_a_suite(cli, tmp_path, dataset, models, methods):
    options = ["--models", models, "--rounds", 1, "--seeds", 1, "--device", "cpu", "--jobs", 1]
    chosen = ["--methods", methods] if methods else []
    done = cli("bench", dataset, *options, *chosen, *toy(tmp_path, dataset))
    assert done.returncode == 0, done.stderr
    [table] = json.loads((tmp_path / "bench" / f"{dataset}.json").read_text())["tables"]
    lines = {line["row"]: line for line in table["rows"]}
    assert set(lines) == (
        {"FedH2L", "AGG", "FedMD", "IND", "FedAvg", "FedProx"} if not methods else
        {row.label for row in SUITES[dataset].tables[0].rows if row.method in methods.split(",")}
    )  # fmt: skip
    for label, line in lines.items():
        takes_part = models == "homogeneous" or label not in ("FedAvg", "FedProx")
        assert line["takes_part"] == takes_part
        assert bool(line["average"]) == takes_part
    printed = (tmp_path / "bench" / f"{dataset}.md").read_text()
    assert f"{dataset}, 64 × 64 pixels" in printed
    if dataset == "pacs":
        assert "protocol 'clean'" in printed
    left = [path.name for path in (tmp_path / "bench" / "cells").rglob("*") if path.is_file()]
    assert not [name for name in left if name.endswith((".safetensors", ".ckpt"))]


def test_models_of_a_file(cli, tmp_path):
    nodes = "\n".join(f'[[nodes]]\nname = "{name}"\nmodel = "byte_images:net"\n' for name in OfficeCaltech10.DOMAINS)
    (tmp_path / "own.toml").write_text(nodes)
    options = [
        "--models",
        "own.toml",
        "--allow",
        "byte_images",
        "--rounds",
        2,
        "--seeds",
        1,
        "--device",
        "cpu",
        "--methods",
        "fedh2l,fedavg",
    ]
    done = cli("bench", "office-caltech10", *options, "--keep-models", *toy(tmp_path, "office-caltech10"))
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in (tmp_path / "bench" / "cells").rglob("*.safetensors"))
    assert len(kept) == 2 * 4 * 2  # methods, nodes, best and last
    assert "models of own.toml" in (tmp_path / "bench" / "office-caltech10.md").read_text()


OWN = '[[nodes]]\nname = "{name}"\nmodel = "timm:create_model"\nmodel_args = {{model_name = "{model}"}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it should have a model for each of amazon, caltech10, dslr, webcam"),
        (
            OWN.format(name="dslr", model="resnet18"),
            "it should have a model for each of amazon, caltech10, dslr, webcam",
        ),
        ('[[nodes]]\nmodel = "cnn"\n', "nodes.0.name: this key is required"),
        ("[run]\nrounds = 3\n", "it has [run], and only [[nodes]] count here"),
    ],
)
def test_files_that_are_no_models(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        image_suite("office-caltech10", str(tmp_path / "own.toml"))
    assert message in str(refused.value)


def test_beyond_the_paper(cli, tmp_path):
    nodes = "\n".join(f'[[nodes]]\nname = "{name}"\nmodel = "byte_images:net"\n' for name in PACS.DOMAINS)
    (tmp_path / "own.toml").write_text(nodes)
    options = ["--models", "own.toml", "--allow", "byte_images", "--rounds", 3, "--seeds", 1, "--device", "cpu"]
    done = cli("bench", "plus-pacs", *options, *toy(tmp_path, "pacs"))
    assert done.returncode == 0, done.stderr
    [table] = json.loads((tmp_path / "bench" / "plus-pacs.json").read_text())["tables"]
    rows = [line["row"] for line in table["rows"] if line["average"]]
    assert rows == ["FedH2L+", "FedH2L", "FedH2L, local views", "AGG", "FedMD", "IND"]
    cells = [path.read_text() for path in (tmp_path / "bench" / "cells").rglob("config.toml")]
    views = {steps: sum(f'augment = "{steps}"' in text for text in cells) for steps in ("all", "local", "none")}
    assert views == {"all": 1, "local": 4, "none": 1}
    assert sum("ema_decay = 0.998" in text for text in cells) == 5


def test_a_word_that_is_no_models():
    with pytest.raises(ConfigError, match="Did you mean 'heterogeneous'"):
        image_suite("pacs", "heterogenous")


def test_one_factory_with_other_arguments_is_another_model(tmp_path):
    def table(*models: str) -> TableSpec:
        nodes = zip(OfficeCaltech10.DOMAINS, models, strict=True)
        (tmp_path / "own.toml").write_text("".join(OWN.format(name=name, model=model) for name, model in nodes))
        return image_suite("office-caltech10", str(tmp_path / "own.toml")).tables[0]

    fedavg = Row.of("FedAvg", "fedavg")
    assert takes_part(fedavg, table(*["resnet18"] * 4))
    assert not takes_part(fedavg, table("resnet18", "resnet18", "resnet18", "resnet34"))


def test_the_papers_figures_stand_beside_its_protocol_alone():
    for changes, shown in (((), False), (("data.protocol=clean",), False), (('data.protocol="paper"',), True)):
        rows = image_suite("pacs", "heterogeneous", changes).tables[0].rows
        assert any(row.paper for row in rows) is shown
    assert not any(row.paper for row in image_suite("pacs", "homogeneous", ["data.protocol=paper"]).tables[0].rows)


def test_bad_wishes(cli, tmp_path):
    done = cli("bench", "rotated-mnist", "--models", "homogeneous")
    assert done.returncode == 2
    assert "the models of 'rotated-mnist' are fixed" in done.stderr
    done = cli("bench", "pacs")
    assert done.returncode == 2
    assert "data.root: this key is required" in done.stderr
    done = cli("init", "own.toml", "--preset", "pacs-homogeneous", "--set", f"data.root={tmp_path}")
    assert done.returncode == 2
    assert "has no folder 'art_painting'" in done.stderr
    done = cli("bench", "pacs", "--set", "data.root=nowhere")
    assert done.returncode == 2
    assert "there is no folder 'nowhere'" in done.stderr
    done = cli("run", "--preset", "pacs-homogenous")
    assert done.returncode == 2
    assert "Did you mean 'pacs-homogeneous'" in done.stderr


def test_presets_name_all_nodes():
    assert len(PRESETS) == 6
    for dataset, models in ARCHITECTURES.items():
        assert set(models) == {name.replace(" ", "_") for name in DATASETS[dataset][0]}
        assert len({*models.values()}) == 4
        assert "run.rounds=10000" in PRESETS[f"{dataset}-heterogeneous"]
        assert "optimizer.lr=0.0001" in PRESETS[f"{dataset}-homogeneous"]


def test_a_preset_is_run(cli, tmp_path):
    own = [part for name in OfficeCaltech10.DOMAINS for part in ("--set", f"nodes.{name}.model=byte_images:net")]
    changes = [*toy(tmp_path, "office-caltech10"), *own]
    done = cli("run", "--preset", "office-caltech10-homogeneous", "--rounds", 2, "--out", "run", "--json", *changes)
    assert done.returncode == 0, done.stderr
    assert [node["model"] for node in json.loads(done.stdout)["nodes"]] == ["byte_images:net"] * 4
    assert "office-caltech10, 64 × 64 pixels" in done.stderr
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1  # of its last round
    predicted = cli("predict", "run", next((tmp_path / "images").rglob("*.png")), "--node", "dslr", *ALLOW)
    assert predicted.returncode == 0, predicted.stderr
    evaluated = cli("evaluate", "run", *ALLOW)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "64 × 64" in evaluated.stderr
    started = cli("init", "own.toml", "--preset", "office-caltech10-homogeneous", *changes)
    assert started.returncode == 0, started.stderr
    assert "# Width and height of the images in pixels.\nsize = 64" in (tmp_path / "own.toml").read_text()
