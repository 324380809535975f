"""A cluster of several machines: each is a Ray daemon of its own, with its own processes and object store."""

from __future__ import annotations

import os

import pytest
import ray
from ray.cluster_utils import Cluster

from fedh2l.engines.actor_group import patiently
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.trainer import Trainer

pytestmark = pytest.mark.slow


def homes(trainer: Trainer) -> list[str]:
    """On which machine each actor is."""
    where = [
        a.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for a in trainer.engine._actors.actors
    ]
    return ray.get(where)


def test_a_machine_is_lost_and_another_one_comes(federation, caplog):
    """Two machines with room for two nodes each; one goes away in round 23, and a new one comes."""
    undisturbed = Trainer(federation("run.rounds=60", "run.checkpoint_every=10", "run.engine=local")).run()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    some = {"num_cpus": 2, "object_store_memory": 200_000_000}
    head = {**some, "include_dashboard": False}
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    second = patiently(lambda: cluster.add_node(**some))
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = Trainer(federation("run.rounds=60", "run.checkpoint_every=10", "run.engine=ray"))
    before = homes(trainer)
    assert len(set(before)) == 2
    after: list[str] = []

    class Outage(Callback):
        def on_round(self, round: int) -> None:
            if round == 23 and not after:
                after.append("")
                cluster.remove_node(second, allow_graceful=False)
                patiently(lambda: cluster.add_node(**some))
            if round == 60:
                after[:] = homes(trainer)

    trainer.callbacks = [Outage()]
    try:
        result = trainer.run()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert result.matrix == undisturbed.matrix
    assert result.bytes == undisturbed.bytes
    assert "all nodes go on from round 2" in caplog.text
    lost = {home for home in before if home not in after}
    assert len(lost) == 1
    assert len(set(after)) == 2
