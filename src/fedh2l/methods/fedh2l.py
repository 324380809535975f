"""FedH2L (Li et al., 2021): mutual distillation on public data, with gradients that do not conflict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedh2l.methods.base import Method, PublicData
from fedh2l.methods.lesson import Lesson, mutual_losses
from fedh2l.protocol.messages import Encoding, Kind, Message, Posteriors
from fedh2l.protocol.messages.encodings import PATTERN
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.topology import Graph, check_topology, graph, teachers
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy
from fedh2l.training.projection import PROJECTIONS

ENCODINGS = f"^({PATTERN})$"
G_LOC, FIRST = "local_gradient", "first_local_gradient"
"""Keys of a node's memory."""


class FedH2L(Method):
    """Each node trains on its own data, publishes posteriors on its public data, and learns from the others'.

    A round of node i with the network f_i (`docs/algorithm.md` maps every equation):

    1. Local step with g_loc = ∇ CE on a local batch.
    2. Every `interval` rounds, send p_i = softmax f_i(x_i) on a batch x_i of the node's own public data, with its
       accuracy Acc_i. Nothing else leaves the node.
    3. g_pub = ∇ mean over teachers j of ( Acc_j · KL(p_j ‖ f_i(x_j)) + CE(f_i(x_j), y_j) ).
    4. If ⟨g_pub, g_loc⟩ < 0, project g_pub to the nearest g̃ with ⟨g̃, g_loc⟩ ≥ 0. Mutual step with g̃.
    """

    name: ClassVar[str] = "fedh2l"
    sends: ClassVar[tuple[Kind, ...]] = ("posteriors",)

    interval: int = Field(1, ge=0, description="Local steps per mutual step (E). 0 turns the exchange off.")
    local_data: LocalData = Field("private+all-public", description="Training data of the local step.")
    public_batch_size: int | None = Field(None, ge=1, description="Public samples per message (run.batch_size).")
    ce_weight: float = Field(1.0, ge=0, le=1e6, description="Weight of the cross-entropy on public labels.")
    kl_weight: float = Field(1.0, ge=0, le=1e6, description="Weight of the distillation loss.")
    temperature: float = Field(1.0, gt=0, le=1e3, description="Distillation temperature T. The loss is scaled by T².")
    project: Literal["qp", "none", "pcgrad"] = Field(
        "qp",
        description="With qp, a teaching gradient that conflicts with the local one is projected as in the paper. With "
        "none, it is unchanged. With pcgrad, both are projected and added.",
    )
    local_gradient: Literal["sum", "difference"] = Field(
        "sum", description="g_loc if interval > 1: the sum of the local gradients, or the last minus the first."
    )
    encoding: str = Field(
        "float32",
        pattern=ENCODINGS,
        description="Format of posteriors: float32, float16, int8, int4, or topk-K (the K most likely classes).",
    )
    topology: str | list[list[str]] = Field(
        "full", description="Connections: full, ring, line, regular-K, or a list of pairs of node names."
    )
    peers_per_round: int = Field(0, ge=0, description="Teachers drawn from a node's neighbours per round. 0 takes all.")
    pairing: Literal["independent", "pairs"] = Field(
        "independent", description="pairs: a random matching per round (the paper's asynchronous setting)."
    )

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if not (self.ce_weight or self.kl_weight):
            raise ValueError("ce_weight and kl_weight are both 0; set interval = 0 to turn the exchange off")
        return self

    @field_validator("topology")
    @classmethod
    def _known_topology(cls, topology: str | list[list[str]]) -> str | list[list[str]]:
        check_topology(topology)
        return topology

    def check(self, roster: Roster) -> None:
        graph(roster, self.topology)  # raises if the topology does not fit

    def exchanges(self, round: int) -> bool:
        return self.interval > 0 and round % self.interval == 0

    def teachers(self, roster: Roster, round: int) -> Graph:
        return teachers(roster, self.topology, self.pairing, self.peers_per_round, round)

    def local_step(self, node: Learner, round: int) -> None:
        """Take the local step, eqs. (1) and (2)."""
        batch = node.local_batch(round, self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        gradient = node.gradient(loss)
        node.record(round, local_loss=loss)
        if self.interval:
            self._accumulate(node.memory, gradient)
        node.step(gradient, "local")

    def emit(self, node: Learner, round: int) -> Message:
        """Return the message [p_i, Acc_i] on a batch of the node's own public data."""
        batch = node.public_batch(node.name, round, self.public_batch_rows(node.batch_size))
        labels = batch.labels if node.seed_set.labelled else None
        return Posteriors.of(node.name, round, torch.softmax(self.teach(node, batch.inputs), -1), labels, self.written)

    def teach(self, node: Learner, inputs: Tensor) -> Tensor:
        """Return the logits that a teacher sends as posteriors, `(rows, classes)`."""
        return node.predict(inputs)

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Take the mutual step, eqs. (3) to (8)."""
        g_loc = self._local_gradient(node.memory)
        if inbox:
            self.learn(node, Lesson.of(node, inbox, self.public_batch_rows(node.batch_size)), g_loc, round)

    def learn(self, node: Learner, lesson: Lesson, g_loc: Tensor, round: int) -> None:
        """Take one mutual step on the batches and posteriors of all teachers."""
        ce, kl = mutual_losses(node.logits(lesson.inputs, frozen=True), lesson, self.temperature)
        losses = [weight * loss for weight, loss in ((self.kl_weight, kl), (self.ce_weight, ce)) if weight]
        g_pub = node.gradient(losses[0] + losses[1] if len(losses) > 1 else losses[0])
        projection = PROJECTIONS[self.project](g_pub, g_loc, node.network.compute.kernels)
        node.step(projection.gradient, "mutual")
        labelled = {"ce": ce} if node.seed_set.labelled else {}
        node.record(round, **labelled, kl=kl, conflict_rate=projection.conflict, angle=projection.angle)

    def _accumulate(self, memory: dict[str, Tensor], gradient: Tensor) -> None:
        if self.local_gradient == "sum":
            memory[G_LOC] = memory[G_LOC] + gradient if G_LOC in memory else gradient
        else:
            memory.setdefault(FIRST, gradient)
            memory[G_LOC] = gradient

    def _local_gradient(self, memory: dict[str, Tensor]) -> Tensor:
        """Return g_loc since the last mutual step. With E = 1 there is no difference, so it is the gradient itself."""
        g_loc, first = memory.pop(G_LOC), memory.pop(FIRST, None)
        return g_loc if first is None or self.interval == 1 else g_loc - first

    @property
    def written(self) -> Encoding:
        return Encoding.of(self.encoding)

    def public_batch_rows(self, batch_size: int) -> int:
        return self.public_batch_size or batch_size

    def needs_labels(self) -> list[str]:
        return [*labels_for(self.local_data), *[f"method.ce_weight = {self.ce_weight:g}"] * bool(self.ce_weight)]

    def needs_public_data(self) -> PublicData:
        return "all" if self.interval else "none"
