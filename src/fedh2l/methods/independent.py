"""IND: every node trains alone."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedh2l.methods.base import Method, PublicData
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy


class Independent(Method):
    """IND: every node trains alone on its private and its own public data."""

    name: ClassVar[str] = "independent"

    local_data: LocalData = Field("private+own-public", description="Training data of the local step.")

    def needs_labels(self) -> list[str]:
        return labels_for(self.local_data)

    def needs_public_data(self) -> PublicData:
        return "none"

    def local_step(self, node: Learner, round: int) -> None:
        """Take one step with cross-entropy."""
        batch = node.local_batch(round, self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)
