"""Your own method: learn from a teacher only where it is right. `agreement.toml` says how to run it."""

from typing import ClassVar

import torch
from pydantic import Field

import fedh2l
from fedh2l.protocol.messages import Posteriors
from fedh2l.training.losses import cross_entropy, kl_rows


class Agreement(fedh2l.Method):
    """Distils a teacher's posteriors on those of its public samples that it classifies correctly."""

    name: ClassVar[str] = "agreement"
    sends: ClassVar[tuple[str, ...]] = ("posteriors",)
    interval: int = Field(2, ge=1, description="Local steps per exchange.")

    def local_step(self, node, round):
        batch = node.local_batch(round, "private+own-public")
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)

    def exchanges(self, round):
        return round % self.interval == 0

    def emit(self, node, round):
        batch = node.public_batch(node.name, round, node.batch_size)
        return Posteriors.of(node.name, round, torch.softmax(node.predict(batch.inputs), -1), batch.labels)

    def receive(self, node, inbox, round):
        loss = 0.0
        for signal in inbox:
            batch = node.public_batch(signal.sender, signal.round, node.batch_size)
            right = signal.values.argmax(-1) == batch.labels
            log_p = torch.log_softmax(node.logits(batch.inputs), -1)
            loss = loss + (right * kl_rows(signal.values.to(log_p.dtype), log_p)).mean(-1) / len(inbox)
        node.step(node.gradient(loss), "mutual")
