"""Which model counts, and what the result says of it, worked out here by hand."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

import fedh2l
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Trainer


class Wrecked(FedH2L):
    """Learns for 20 rounds, then its models are spoiled in every round."""

    def local_step(self, node, round):
        super().local_step(node, round)
        if round > 20:
            node.parameters.zero_()


class Still(FedH2L):
    """Never moves, so that all evaluations are equal."""

    def local_step(self, node, round):
        pass

    def exchanges(self, round):
        return False


class Watch(fedh2l.Callback):
    """Keeps all weights at each evaluation, and everything that nodes record."""

    def __init__(self, trainer: Trainer) -> None:
        self.learners = trainer.engine.learners
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.metrics: list[dict] = []
        self.recorded: dict[str, dict[str, list[float]]] = {learner.name: {} for learner in self.learners}
        for learner in self.learners:
            learner.record = self._spy(learner.name, learner.record)

    def _spy(self, name, record):
        def recording(round, **values):
            for key, value in values.items():
                self.recorded[name].setdefault(key, []).append(float(value.detach()))
            record(round, **values)

        return recording

    def on_evaluation(self, metrics):
        self.weights[metrics["round"]] = {learner.name: learner.parameters.clone() for learner in self.learners}
        self.metrics.append(metrics)


def accuracy(module, vector, samples) -> float:
    torch.nn.utils.vector_to_parameters(vector, module.parameters())
    with torch.no_grad():
        return 100 * (module(samples.inputs).argmax(1) == samples.labels).double().mean().item()


def watched(fed, method, **settings) -> tuple[Trainer, Watch]:
    changed = fedh2l.experiment.experiment.Experiment(
        fed.nodes, method, fed.settings.model_copy(update=settings), fed.optimizer
    )
    trainer = Trainer(changed)
    watch = Watch(trainer)
    trainer.callbacks = [watch]
    return trainer, watch


@pytest.mark.parametrize("selection", ["best", "last"])
def test_the_result_worked_out_by_hand(federation, selection):
    fed = federation("run.eval_every=5", "data.per_class=30", "optimizer.lr=0.01")
    trainer, watch = watched(fed, Wrecked(), rounds=40, selection=selection)
    modules = [learner.module for learner in trainer.engine.learners]
    result = trainer.run()
    scratch = fed.nodes[0].build("x", 8)
    domains = [node.domain for node in fed.nodes]
    pooled = fedh2l.Samples.concatenate([domain.validation for domain in domains])
    assert len(pooled) == sum(len(domain.validation) for domain in domains) > len(domains[0].validation)
    matrices = {"best": [], "last": []}
    for i, node in enumerate(fed.nodes):
        curve = {r: accuracy(scratch, w[node.name], pooled) for r, w in watch.weights.items()}
        latest_best = max(curve, key=lambda r: (curve[r], r))
        assert latest_best <= 20
        rounds = {"best": latest_best, "last": 40}
        for which, taken in rounds.items():
            vector = watch.weights[taken][node.name]
            matrices[which].append([accuracy(scratch, vector, domain.test) for domain in domains])
        assert result.nodes[i].round == rounds[selection]
        left = torch.nn.utils.parameters_to_vector(modules[i].parameters())
        assert torch.equal(left, watch.weights[rounds[selection]][node.name])  # the module holds what was selected
        for entry in watch.metrics:
            shown = entry["nodes"][node.name]
            assert shown["validation_ACC"] == pytest.approx(curve[entry["round"]])
            assert shown["best_round"] == max((r for r in curve if r <= entry["round"]), key=lambda r: (curve[r], r))
    assert matrices["best"] != matrices["last"]
    for row, expected in zip(result.matrix, matrices[selection], strict=True):
        assert row == pytest.approx(expected)
    for which, shown in ((selection, result.average), ("last", result.last)):
        rows = matrices[which]
        assert shown["ACC"] == pytest.approx(fmean(fmean(row) for row in rows))  # equal test sets
        assert shown["WDP"] == pytest.approx(fmean(row[i] for i, row in enumerate(rows)))
        others = [fmean(v for j, v in enumerate(row) if j != i) for i, row in enumerate(rows)]
        assert shown["CDP"] == pytest.approx(fmean(others))


def test_metrics_are_means_since_the_last_evaluation(federation):
    trainer, watch = watched(federation("run.eval_every=5"), FedH2L(), rounds=20)
    result = trainer.run()
    for name, recorded in watch.recorded.items():
        for place, entry in enumerate(watch.metrics):
            for key, values in recorded.items():
                assert entry["nodes"][name][key] == pytest.approx(fmean(values[5 * place : 5 * place + 5]))
    conflicts = [value for recorded in watch.recorded.values() for value in recorded["conflict_rate"]]
    assert 0 < fmean(conflicts) < 1
    assert result.conflict_rate == pytest.approx(fmean(conflicts))
    messages, payload, encoded = 20 * 4 * 3, (8 * 10 + 1) * 4, 40 + (8 * 10 + 1) * 4
    assert result.bytes["payload"] == messages * payload
    assert result.bytes["total"] == messages * encoded == sum(result.bytes["edges"].values())
    assert result.bytes["per_round"] == messages * encoded / 20
    assert result.bytes["multicast"] == messages * encoded / 3


def test_the_latest_of_equals_is_kept(federation):
    trainer, _ = watched(federation(), Still(), rounds=40)
    assert [node.round for node in trainer.run().nodes] == [40] * 4


def test_threads_are_set_for_the_run_alone(federation, tmp_path):
    seen = set()

    class Look(fedh2l.Callback):
        def on_round(self, round):
            seen.add(torch.get_num_threads())

    before = torch.get_num_threads()
    Trainer(federation("run.threads=3"), RunDirectory.claim(tmp_path / "run", "x"), [Look()]).run()
    assert seen == {3}
    assert torch.get_num_threads() == before


def test_modules_are_left_as_they_were_found(federation):
    class Crash(fedh2l.Callback):
        def on_round(self, round):
            if round == 3:
                raise KeyboardInterrupt

    from conftest import blobs, tiny_net

    given = [fedh2l.Node(f"n{i}", tiny_net().eval(), blobs(f"n{i}", seed=i)) for i in range(2)]
    for callbacks in ([Crash()], []):
        try:
            fedh2l.train(given, rounds=5, dtype="float64", callbacks=callbacks)
        except KeyboardInterrupt:
            assert callbacks
        for node in given:
            weight = node.model[0].weight
            assert weight.untyped_storage().nbytes() == weight.nbytes
            assert weight.dtype is torch.float32
            assert not node.model.training
