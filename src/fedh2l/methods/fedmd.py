"""FedMD (Li & Wang, 2019): a server averages everybody's logits on public data, and everybody digests the average."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import Field, PrivateAttr

from fedh2l.learner import Learner, LocalData, labels_for
from fedh2l.losses import correct_count, cross_entropy, take_rows
from fedh2l.messages import SERVER, Kind, Logits, Message
from fedh2l.methods.base import Method, Preset
from fedh2l.methods.schedule import batches, epoch_steps
from fedh2l.server import Server


class Schedule(NamedTuple):
    """FedMD's phases in rounds."""

    public: int
    """The first rounds train on everybody's public data,"""
    transfer: int
    """those up to here on the node's own,"""
    revisit: int
    """and from then on there is an exchange every so many rounds."""
    public_epoch: int
    """Rounds between two looks at the validation data in the first part,"""
    epoch: int
    """and in the second."""


class FedMD(Method):
    """FedMD: models of any kind agree on the logits of public data, then revisit their own.

    First each node trains on everybody's public data, then on its own (transfer learning). Then, again and again, it
    sends its logits z_k on the public data; the server answers with their mean z̃, the receiver's own included; the
    node *digests*, minimising mean |z_k − z̃| without labels, and *revisits* its private data with cross-entropy.

    Ours, where sources are silent or do not fit: batches are drawn at random and an epoch is as many of them as cover
    the pool; the transfer phase takes at most a fifth of the rounds and keeps, of each part, the weights that did
    best on pooled validation data (the reference stops early by its test data); revisits are short enough for three
    exchanges; digest and local steps have an optimiser state each, as in the reference; several digest epochs go
    through the samples in one order. Digest steps are no rounds. `native` has the reference's optimiser, epochs and
    batches of revisiting; batches of the transfer phase and the last layer are as in all methods.
    """

    name: ClassVar[str] = "fedmd"
    decentralised: ClassVar[bool] = False
    sends: ClassVar[tuple[Kind, ...]] = ("logits",)
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {
            "method.revisit_epochs": 4,
            "method.digest_batch_size": 256,
            "run.batch_size": 5,
            "optimizer.name": "adam",
            "optimizer.lr": 1e-3,
            "optimizer.weight_decay": 0.0,
        }
    }

    local_data: LocalData = Field("private", description="what is revisited; the paper's is private data alone")
    subset: int = Field(5000, ge=1, description="public samples of an exchange; all, if there are no more")
    digest_epochs: int = Field(1, ge=0, description="passes over them after an exchange; 0 is training alone")
    digest_batch_size: int = Field(256, ge=1, description="samples of a digest step")
    revisit_epochs: int = Field(4, ge=1, description="passes over local data between exchanges")
    public_epochs: int = Field(20, ge=0, description="passes over everybody's public data before the first exchange")
    private_epochs: int = Field(25, ge=0, description="passes over local data after that, before the first exchange")

    _schedule: Schedule = PrivateAttr(Schedule(0, 0, 1, 1, 1))

    def needs_labels(self) -> list[str]:
        """Those that the transfer phase trains on."""
        return ["method.public_epochs > 0"] * bool(self.public_epochs) + labels_for(self.local_data)

    def fitted(self, learners: Sequence[Learner], rounds: int) -> Self:
        """With its phases in rounds."""
        epoch = epoch_steps(learners, self.local_data)
        public_epoch = math.ceil(len(learners[0].seed_set.union) / learners[0].batch_size)
        public = self.public_epochs * public_epoch
        private = self.private_epochs * epoch
        limit = rounds // 5
        if public + private > limit:
            public = limit * public // (public + private)
            private = limit - public
        revisit = max(1, min(self.revisit_epochs * epoch, (rounds - public - private) // 3))
        copy = self.model_copy()
        copy._schedule = Schedule(public, public + private, revisit, public_epoch, epoch)
        return copy

    def exchanges(self, round: int) -> bool:
        """After the transfer phase, and after every revisit."""
        since = round - self._schedule.transfer
        return since >= 0 and since % self._schedule.revisit == 0

    def kind_of_round(self, round: int) -> Hashable:
        """Its phase, whether it looks at the validation data, and whether it exchanges."""
        plan = self._schedule
        return round <= plan.public, self._looks(round), round in (plan.public, plan.transfer), self.exchanges(round)

    def local_step(self, node: Learner, round: int) -> None:
        """One step on everybody's public data, or on the node's own."""
        batch = node.local_batch(round, "all-public" if round <= self._schedule.public else self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)
        self._keep_best(node, round)

    def emit(self, node: Learner, round: int) -> Message:
        """Raw logits on the public data of this exchange."""
        return Logits.of(node.name, round, node.predict(node.public_subset(round, self.subset).inputs))

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """The mean, the same for all."""
        logits = [message.values.double() for message in messages if isinstance(message, Logits)]
        return dict.fromkeys(server.roster.names, Logits.of(SERVER, round, torch.stack(logits).mean(0)))

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Digest."""
        (consensus,) = inbox
        assert isinstance(consensus, Logits)
        samples = node.public_subset(round, self.subset)
        rows = samples.labels.shape[-1]
        whole = self.digest_batch_size >= rows
        order = torch.arange(rows, device=samples.labels.device) if whole else node.order("digest", round, rows)
        for part in batches(order, self.digest_batch_size) * self.digest_epochs:
            target = take_rows(consensus.values, part).to(node.parameters.dtype)
            loss = (node.logits(samples.take(part).inputs) - target).abs().mean((-2, -1))
            node.step(node.gradient(loss), "mutual")
            node.record(round, digest=loss)

    def crossing(self) -> str:
        """On public data."""
        return "logits on public data"

    def _looks(self, round: int) -> bool:
        """Whether the validation data is looked at: after each epoch of the transfer phase, and at its parts' ends."""
        plan = self._schedule
        if round > plan.transfer:
            return False
        first = round <= plan.public
        start, end, epoch = (0, plan.public, plan.public_epoch) if first else (plan.public, plan.transfer, plan.epoch)
        return (round - start) % epoch == 0 or round == end

    def _keep_best(self, node: Learner, round: int) -> None:
        """In the transfer phase: each part ends with the weights that did best on validation data, epoch by epoch."""
        if not self._looks(round) or node.validation is None:
            return
        score = correct_count(node.predict(node.validation.inputs), node.validation.labels)
        memory, present = node.memory, node.shared()
        if "kept" in memory:
            better = score >= memory["score"]
            memory["kept"] = torch.where(better.unsqueeze(-1), present, memory["kept"])
            memory["score"] = torch.maximum(score, memory["score"])
        else:
            memory["kept"], memory["score"] = present, score
        if round in (self._schedule.public, self._schedule.transfer):
            node.adopt(memory.pop("kept"))
            del memory["score"]
