"""IND: every node trains alone."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedh2l.learner import Learner, LocalData, labels_for
from fedh2l.losses import cross_entropy
from fedh2l.methods.base import Method


class Independent(Method):
    """IND: every node trains alone on its private and its own public data; nothing crosses."""

    name: ClassVar[str] = "independent"

    local_data: LocalData = Field("private+own-public", description="what a node trains on")

    def needs_labels(self) -> list[str]:
        """Those of public data that it trains on."""
        return labels_for(self.local_data)

    def local_step(self, node: Learner, round: int) -> None:
        """One step of cross-entropy."""
        batch = node.local_batch(round, self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)
