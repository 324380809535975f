from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fedh2l
from conftest import blobs, tiny_net
from fedh2l.errors import ConfigError, DataError, ModelError, RunError

ROOT = Path(__file__).parent.parent


class Net(nn.Module):
    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, num_classes))

    def forward(self, x):
        return self.layers(x)


def nodes(count: int = 3, model=Net, **arguments) -> list[fedh2l.Node]:
    return [fedh2l.Node(f"n{i}", model, blobs(f"n{i}", 0.3 * i, seed=i), **arguments) for i in range(count)]


def test_the_readme_example_runs(tmp_path, monkeypatch):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) < 15
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_learning_together_beats_learning_alone():
    far = [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", shift=0.7 * i, seed=i)) for i in range(3)]
    alone = [fedh2l.Node(n.name, tiny_net(), n.domain) for n in far]
    together = fedh2l.train(far, rounds=300, batch_size=16, optimizer=fedh2l.Optimizer(lr=0.01))
    solo = fedh2l.train(
        alone,
        fedh2l.FedH2L(interval=0, local_data="private+own-public"),
        rounds=300,
        batch_size=16,
        optimizer=fedh2l.Optimizer(lr=0.01),
    )
    assert together.average["CDP"] > solo.average["CDP"] + 5
    assert solo.bytes["total"] == 0


def test_initial_weights_follow_seed_and_name():
    from fedh2l.protocol.sampling import node_secret

    def start(seed, name):
        module = fedh2l.Node(name, Net, blobs(name)).build(node_secret(seed, name), 8)
        return torch.nn.utils.parameters_to_vector(module.parameters())

    assert torch.equal(start(0, "a"), start(0, "a"))
    assert not torch.equal(start(0, "a"), start(1, "a"))
    assert not torch.equal(start(0, "a"), start(0, "b"))


def test_lazy_layers_get_addressed_weights():
    def lazy(num_classes):
        return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(num_classes))

    one, two = (fedh2l.train(nodes(2, lazy), rounds=5, eval_every=5).to_dict() for _ in range(2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.first, self.second, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, num_classes)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))

    given = [fedh2l.Node(f"n{i}", Tied(3), blobs(f"n{i}", seed=i)) for i in range(2)]
    fedh2l.train(given, rounds=5)
    assert given[0].model.second.weight is given[0].model.first.weight


def test_one_script_starts_resumes_and_ends(tmp_path):
    def script(callbacks=()):
        given = [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", seed=i)) for i in range(2)]
        result = fedh2l.train(
            given, "fedh2l", rounds=12, eval_every=4, checkpoint_every=4, out=tmp_path / "run", resume=True,
            callbacks=callbacks,
        )  # fmt: skip
        return result, given

    class Stop(fedh2l.Callback):
        def on_round(self, round):
            if round == 10:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        script([Stop()])
    result, trained = script()
    again, recalled = script()  # it has ended: nothing is trained, and the modules hold what was selected
    assert again == result
    x = trained[0].domain.test.inputs
    assert torch.equal(trained[1].model(x), recalled[1].model(x))
    with pytest.raises(RunError, match="belongs to another run"):
        fedh2l.train(nodes(2), rounds=1, out=tmp_path / "run")


def test_going_on_with_other_settings_is_refused(tmp_path):
    class Stop(fedh2l.Callback):
        def on_round(self, round):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedh2l.train(nodes(2), rounds=9, out=tmp_path / "run", callbacks=[Stop()])
    for other in ({"rounds": 8}, {"rounds": 9, "seed": 1}, {"rounds": 9, "eval_every": 3}):
        with pytest.raises(RunError, match="other settings"):
            fedh2l.train(nodes(2), **other, out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"other settings: .*width"):
        fedh2l.train(nodes(2, model_args={"width": 3}), rounds=9, out=tmp_path / "run", resume=True)


def test_going_on_with_other_data_is_refused(tmp_path):
    class Stop(fedh2l.Callback):
        def on_round(self, round):
            if round == 5:
                raise KeyboardInterrupt

    options = {"rounds": 9, "checkpoint_every": 3, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fedh2l.train(nodes(2), callbacks=[Stop()], **options)
    changed = [fedh2l.Node(f"n{i}", Net, blobs(f"n{i}", 0.3 * i, seed=7 + i)) for i in range(2)]
    with pytest.raises(ConfigError, match="node 'n0' has other data than when"):
        fedh2l.train(changed, resume=True, **options)
    assert fedh2l.train(nodes(2), resume=True, **options).rounds == 9


def test_callbacks_hear_of_everything(tmp_path):
    heard = []

    class Listener(fedh2l.Callback):
        def on_start(self, names, first_round, rounds):
            heard.append(("start", names, first_round, rounds))

        def on_round(self, round):
            heard.append(round)

        def on_evaluation(self, metrics):
            heard.append(("evaluation", metrics["round"], set(metrics["nodes"]["n0"])))

        def on_checkpoint(self, round, path):
            heard.append(("checkpoint", round, path.exists()))

        def on_end(self, result):
            heard.append(("end", result.rounds))

    options = {"rounds": 5, "eval_every": 2, "checkpoint_every": 3, "out": tmp_path / "run"}
    fedh2l.train(nodes(), callbacks=[Listener()], **options)
    keys = {"validation_ACC", "best_round", "local_loss", "ce", "kl", "angle", "conflict_rate"}
    assert heard == [
        ("start", ["n0", "n1", "n2"], 1, 5),
        1, 2, ("evaluation", 2, keys),
        3, ("checkpoint", 3, True),
        4, ("evaluation", 4, keys),
        5, ("evaluation", 5, keys),
        ("end", 5),
    ]  # fmt: skip


def test_four_different_architectures_learn_from_each_other():
    from fedh2l.experiment.config import load_config

    models = [
        "nodes.0.model=lenet",
        "nodes.1.model=mlp",
        "nodes.2.model=lenet-wide",
        "nodes.3.model=cnn",
        "nodes.3.model_args.channels=[8,16,32,32]",
    ]
    fed = load_config(None, [*models, "run.rounds=60", "data.per_class=40"])[0].experiment()
    result = fedh2l.train(fed.nodes, rounds=60, eval_every=20)
    sizes = {type(node.build("x", 8)) for node in fed.nodes}, {node.model_name for node in fed.nodes}
    assert len(sizes[1]) == 4
    assert all(node.CDP > 40 for node in result.nodes), result  # chance is 10


def public_without(name: str, classes: set[int], seed: int = 0) -> fedh2l.Domain:
    domain = blobs(name, seed=seed)
    kept = [i for i, label in enumerate(domain.public.labels.tolist()) if label not in classes]
    parts = (domain.private, domain.public.take(kept), domain.validation, domain.test)
    return fedh2l.Domain(name, domain.classes, *parts)


def test_a_class_that_nobody_can_teach_is_refused(caplog):
    both = [fedh2l.Node(n, tiny_net(), public_without(n, {1})) for n in ("a", "b")]
    with pytest.raises(DataError, match="class 'c1' is not in the public data of any node"):
        fedh2l.train(both, rounds=1)
    one = [fedh2l.Node("a", tiny_net(), public_without("a", {1})), fedh2l.Node("b", tiny_net(), blobs("b"))]
    with caplog.at_level("INFO", "fedh2l"):
        fedh2l.train(one, rounds=1)
    assert "node 'a' has no public sample of: c1" in caplog.text
    assert "fewer than a batch of 32: all are used" in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        (lambda: nodes(1), ConfigError, "at least two nodes"),
        (lambda: [*nodes(2), nodes(1)[0]], ConfigError, "two nodes are named 'n0'"),
        (lambda: [*nodes(2), fedh2l.Node("n 3", Net, blobs("x"))], ConfigError, "node name 'n 3'"),
        (lambda: nodes(2, nn.Linear(2, 2)), DataError, "share parameters"),
        (lambda: nodes(2, lambda num_classes: nn.Linear(2, 2)), ModelError, "one logit for each of the 3 classes"),
        (lambda: [*nodes(2), fedh2l.Node("n3", Net, blobs("x", classes=4))], DataError, "same classes"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, error, reason):
    with pytest.raises(error, match=reason):
        fedh2l.train(given(), rounds=1)


def test_other_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.round: unknown key\. Did you mean 'rounds'"):
        fedh2l.train(nodes(), round=3)
    with pytest.raises(RunError, match="needs out"):
        fedh2l.train(nodes(), resume=True)
    with pytest.raises(RunError, match="not a run"):
        fedh2l.load(tmp_path, "n0")
    fedh2l.train(nodes(), rounds=1, out=tmp_path / "run")
    with pytest.raises(RunError, match="no node 'n9'"):
        fedh2l.load(tmp_path / "run", "n9")
    with pytest.raises(ConfigError, match=r"FedH2L\.interval = -1: it should be greater than or equal to 0"):
        fedh2l.FedH2L(interval=-1)
    with pytest.raises(ConfigError, match=r"optimizer=fedh2l\.Optimizer\(lr=…\)"):
        fedh2l.train(nodes(), lr=0.1)
