"""FedMD (Li & Wang, 2019): a server averages the nodes' logits on public data, and the nodes digest the average."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import Field, PrivateAttr

from fedh2l.methods.base import Method, Preset, PublicData
from fedh2l.methods.schedule import batches, epoch_steps
from fedh2l.protocol.messages import SERVER, Kind, Logits, Message
from fedh2l.protocol.messages.base import correct_count
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy, take_rows
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class Schedule(NamedTuple):
    """The phases of FedMD in rounds."""

    public: int
    """Last round of the first part, which trains on all public data."""
    transfer: int
    """Last round of the second part, which trains on the node's local data."""
    revisit: int
    """Rounds between exchanges after that."""
    public_epoch: int
    """Rounds between evaluations on validation data in the first part."""
    epoch: int
    """Rounds between evaluations on validation data in the second part."""


class FedMD(Method):
    """FedMD: models of any architecture agree on the logits of public data, then revisit their private data.

    Each node first trains on all public data, then on its local data (transfer learning). After that, nodes repeat
    three steps. They send their logits z_k on the public data, and the server returns the mean z̃ over all nodes. They
    *digest* it by minimising mean |z_k − z̃| without labels. They *revisit* their private data with cross-entropy.

    Choices of this project, where paper and code give no rule or do not fit:

    - Batches are drawn at random. An epoch is the number of batches that covers the pool.
    - The transfer phase takes at most a fifth of the rounds. Each of its parts ends with the weights that were best on
      pooled validation data. (The reference stops early by its test data.)
    - Revisits are short enough for three exchanges.
    - Digest and local steps have separate optimiser states, as in the reference.
    - All digest epochs of an exchange use the same order of samples. Digest steps do not count as rounds.
    - `native` has the reference's optimiser, revisit epochs and revisit batches. Batches of the transfer phase and the
      last layer are the same as for all methods.
    """

    name: ClassVar[str] = "fedmd"
    decentralised: ClassVar[bool] = False
    sends: ClassVar[tuple[Kind, ...]] = ("logits",)
    depends_on_rounds: ClassVar[bool] = True
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

    local_data: LocalData = Field(
        "private", description="Training data between exchanges. The paper uses private data alone."
    )
    subset: int = Field(5000, ge=1, description="Largest number of public samples per exchange.")
    digest_epochs: int = Field(1, ge=0, description="Digest epochs per exchange. 0 means that nodes train alone.")
    digest_batch_size: int = Field(256, ge=1, description="Samples per digest step.")
    revisit_epochs: int = Field(4, ge=1, description="Epochs on local data between exchanges.")
    public_epochs: int = Field(20, ge=0, description="Epochs on all public data before the first exchange.")
    private_epochs: int = Field(25, ge=0, description="Epochs on local data after that, before the first exchange.")

    _schedule: Schedule = PrivateAttr(Schedule(0, 0, 1, 1, 1))

    def needs_labels(self) -> list[str]:
        """Return the settings that need labels: those of the transfer phase and of the local steps."""
        return ["method.public_epochs > 0"] * bool(self.public_epochs) + labels_for(self.local_data)

    def needs_public_data(self) -> PublicData:
        """Return `some`: all nodes use the same public samples, from whichever nodes have them."""
        return "some"

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return the method with its phases in rounds."""
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
        """Return whether the transfer phase or a revisit has just ended."""
        since = round - self._schedule.transfer
        return since >= 0 and since % self._schedule.revisit == 0

    def kind_of_round(self, round: int) -> Hashable:
        """Return the phase, whether validation data is evaluated, and whether there is an exchange."""
        plan = self._schedule
        return round <= plan.public, self._looks(round), round in (plan.public, plan.transfer), self.exchanges(round)

    def local_step(self, node: Learner, round: int) -> None:
        """Take one step on all public data, or on the node's local data."""
        batch = node.local_batch(round, "all-public" if round <= self._schedule.public else self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)
        self._keep_best(node, round)

    def emit(self, node: Learner, round: int) -> Message:
        """Return the logits on the public data of this exchange."""
        return Logits.of(node.name, round, node.predict(node.public_subset(round, self.subset).inputs))

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Return the mean of the logits, the same for all nodes."""
        logits = [message.values.double() for message in messages if isinstance(message, Logits)]
        return dict.fromkeys(server.roster.names, Logits.of(SERVER, round, torch.stack(logits).mean(0)))

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Digest the mean of the logits."""
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

    def _looks(self, round: int) -> bool:
        """Return whether to evaluate validation data: after each epoch of the transfer phase and each of its parts."""
        plan = self._schedule
        if round > plan.transfer:
            return False
        first = round <= plan.public
        start, end, epoch = (0, plan.public, plan.public_epoch) if first else (plan.public, plan.transfer, plan.epoch)
        return (round - start) % epoch == 0 or round == end

    def _keep_best(self, node: Learner, round: int) -> None:
        """End each part of the transfer phase with the weights that were best on validation data."""
        if not self._looks(round) or node.validation is None:
            return
        score = correct_count(node.predict(node.validation.inputs), node.validation.labels)
        memory, present = node.memory, node.network.shared()
        if "kept" in memory:
            better = score >= memory["score"]
            memory["kept"] = torch.where(better.unsqueeze(-1), present, memory["kept"])
            memory["score"] = torch.maximum(score, memory["score"])
        else:
            memory["kept"], memory["score"] = present, score
        if round in (self._schedule.public, self._schedule.transfer):
            node.network.adopt(memory.pop("kept"))
            del memory["score"]
