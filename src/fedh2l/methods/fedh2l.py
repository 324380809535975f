"""FedH2L (Li et al., 2021): mutual distillation on public seed data, with non-conflicting gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.learner import Learner, LocalData, labels_for
from fedh2l.losses import cross_entropy
from fedh2l.messages import Encoding, Kind, Message, Posteriors
from fedh2l.messages.encodings import PATTERN
from fedh2l.methods import specialist
from fedh2l.methods.base import Method
from fedh2l.methods.lesson import Confidence, Lesson, Shelf, mutual_losses, note_own, take_own
from fedh2l.methods.local_gradient import LocalGradient, recall, remember
from fedh2l.projection import Projection, pcgrad, project, unprojected
from fedh2l.roster import Roster
from fedh2l.topology import Graph, check_topology, graph, teachers

ENCODINGS = f"^({PATTERN})$"


class FedH2L(Method):
    """Each node trains on its own data, publishes its posteriors on its public data, and learns from the others'.

    Per round, for node i with model f_i (`docs/paper.md` maps every equation):

    1. g_loc = ∇ CE on a local batch; step.
    2. Every `interval` rounds, with the stepped model, p_i = softmax f_i(x_i) on a batch x_i of its *own* public
       data. p_i and its accuracy Acc_i are all that leaves the node.
    3. g_pub = ∇ mean over teachers j of ( Acc_j · KL(p_j ‖ f_i(x_j)) + CE(f_i(x_j), y_j) ).
    4. If ⟨g_pub, g_loc⟩ < 0, g_pub is moved to the nearest g̃ with ⟨g̃, g_loc⟩ ≥ 0; step with g̃.
    """

    name: ClassVar[str] = "fedh2l"
    sends: ClassVar[tuple[Kind, ...]] = ("posteriors",)

    interval: int = Field(
        1, ge=0, description="local steps per mutual step (E); 1: every round, 0: never, which is training alone"
    )
    revisit: int = Field(
        0,
        ge=0,
        le=16,
        description="lessons that a node keeps, to learn them again, in turn, in rounds without an exchange",
    )
    local_data: LocalData = Field(
        "private+all-public",
        description="what the local step trains on: private data with everybody's public data, or with the node's own",
    )
    public_batch_size: int | None = Field(
        None, ge=1, description="samples a teaching signal speaks of; run.batch_size if not given"
    )
    kl: bool = Field(True, description="whether to distil; false leaves cross-entropy on public labels alone")
    ce: bool = Field(True, description="whether the mutual step learns public labels too; false leaves distillation")
    kl_weight: float = Field(1.0, ge=0, le=1e6, description="what distillation counts beside cross-entropy")
    pace: float = Field(
        1.0, gt=0, le=1e3, description="rate of the mutual step as a multiple of optimizer.mutual_lr, or of lr"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        le=1e3,
        description="at which teachers and student are compared: above 1, what a teacher says of unlikely classes "
        "counts more; the loss is scaled by its square",
    )
    confidence: Confidence = Field(
        "accuracy",
        description="how much a teacher is believed: accuracy, its share of right answers in the batch (the paper's); "
        "right, only where its answer is right; label, the probability that it gives to the label; certain, the more "
        "the fewer classes it thinks possible; none, always",
    )
    encoding: str = Field(
        "float32",
        pattern=ENCODINGS,
        description="how posteriors are sent: float32; float16; int8 or int4, logarithms in so many bits; topk-K, the "
        "K likeliest classes alone",
    )
    teacher: Literal["present", "average"] = Field(
        "present",
        description="which weights teach: those of now, or, if run.average keeps one, the average of those so far",
    )
    specialist: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share, in what a node answers, of a second network of the same kind that it trains on local data "
        "alone, and keeps to itself; 0: there is none. method.teacher holds for it, too. Its answers tell more of "
        "private data",
    )
    own_lesson: bool = Field(
        False,
        description="whether what a node answers is a lesson for its own model too, beside those of the teachers that "
        "it hears",
    )
    project: Literal["qp", "none", "pcgrad"] = Field(
        "qp",
        description="what becomes of a teaching gradient that conflicts with the local one: qp, the paper's; "
        "none, it is used as it is; pcgrad, both are projected on each other's normal plane and summed",
    )
    pcgrad: Literal["after-local", "joint"] = Field(
        "after-local",
        description="of project = 'pcgrad': after-local, the local step is taken as usual; joint, in "
        "mutual rounds one step is taken with both gradients, at the same parameters",
    )
    local_gradient: LocalGradient = Field(
        "sum",
        description="g_loc when interval > 1: the sum of the local gradients since the last mutual step, the "
        "way the parameters went (θ_0 − θ_E), or the last of these gradients minus the first",
    )
    batch_norm: Literal["frozen", "joint", "per-domain"] = Field(
        "frozen",
        description="of models with batch norm, how the public batches of several teachers pass in the mutual step: "
        "frozen, with the statistics of the local steps; joint, as one batch; per-domain, each on its own",
    )
    optimizer_state: Literal["separate", "shared"] = Field(
        "separate", description="whether local and mutual steps have an optimiser state each"
    )
    topology: str | list[list[str]] = Field(
        "full", description="who is connected: full, ring, line, regular-K, or a list of pairs of node names"
    )
    peers_per_round: int = Field(
        0, ge=0, description="teachers that each node draws from its neighbours in a round; 0: all of them"
    )
    pairing: Literal["independent", "pairs"] = Field(
        "independent",
        description="pairs: a random matching each round, every node with one partner (the paper's "
        "asynchronous setting)",
    )

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if not (self.ce or (self.kl and self.kl_weight)):
            raise ValueError(
                "with neither ce nor kl (or kl_weight = 0) a mutual step would learn nothing; interval = 0 has none"
            )
        return self

    @model_validator(mode="after")
    def _is_heard(self) -> Self:
        if self.interval == 0 and self.specialist:
            raise ValueError(
                "with interval = 0 nobody says anything, so a specialist would not be heard; set specialist = 0"
            )
        return self

    @model_validator(mode="after")
    def _can_revisit(self) -> Self:
        unfit = {
            "pcgrad = 'joint'": self._joint,
            "local_gradient = 'difference'": self.local_gradient == "difference",
            "batch_norm = 'per-domain'": self.batch_norm == "per-domain",
        }
        if self._room and any(unfit.values()):
            found = ", ".join(what for what, is_so in unfit.items() if is_so)
            raise ValueError(f"lessons cannot be learned again with {found}; set revisit = 0")
        return self

    @field_validator("topology")
    @classmethod
    def _known_topology(cls, topology: str | list[list[str]]) -> str | list[list[str]]:
        check_topology(topology)
        return topology

    def check(self, roster: Roster) -> None:
        """Refuses a topology that does not fit the roster."""
        graph(roster, self.topology)

    def exchanges(self, round: int) -> bool:
        """Every `interval` rounds."""
        return self.interval > 0 and round % self.interval == 0

    def kind_of_round(self, round: int) -> Hashable:
        """By exchange, and by which lesson is kept or revisited."""
        return self.exchanges(round), self._place(round)

    def teachers(self, roster: Roster, round: int) -> Graph:
        """Whom each node hears."""
        return teachers(roster, self.topology, self.pairing, self.peers_per_round, round)

    def needs_labels(self) -> list[str]:
        """Those of what is trained on, and those that teachers are judged by."""
        judged = self.confidence in ("accuracy", "right", "label")
        return [
            *labels_for(self.local_data),
            *["method.ce = true"] * self.ce,
            *[f"method.confidence = '{self.confidence}'"] * judged,
        ]

    def public_batch_rows(self, batch_size: int) -> int:
        """As many as a local batch has, unless set."""
        return self.public_batch_size or batch_size

    def equip(self, node: Learner) -> None:
        """With a specialist, which starts as the node's model does."""
        if self.specialist:
            specialist.equip(node)

    def local_step(self, node: Learner, round: int) -> None:
        """Local optimisation, eqs. (1) and (2)."""
        batch = node.local_batch(round, self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        gradient = node.gradient(loss)
        node.record(round, local_loss=loss)
        if self.interval:
            remember(node, gradient, self.local_gradient, latest=self._joint)
        if not (self._joint and self.exchanges(round)):
            node.step(gradient, "local")
        if self.specialist:
            specialist.train(node, batch, round, self.teacher == "average")
        if not self.exchanges(round):
            self._revisit(node, round)

    def emit(self, node: Learner, round: int) -> Message:
        """The teaching signal [p_i, Acc_i] on the node's own public batch."""
        batch = self._public_batch(node, node.name, round)
        labels = batch.labels if node.seed_set.labelled else None
        signal = Posteriors.of(node.name, round, self._said(node, batch.inputs), labels, self.written)
        if self.own_lesson:
            note_own(node.memory, signal)
        return signal

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Global mutual optimisation, eqs. (3) to (8)."""
        place, shelf = self._place(round), Shelf(node.memory)
        own = [take_own(node.memory, node.name, round, self.written)] if self.own_lesson else []
        if not inbox:  # nobody was heard: nothing to learn, but a joint step still owes the local gradient
            g_loc = recall(node, self.interval)
            if place is not None:
                shelf.clear(place)
            if self._joint:
                node.step(g_loc, "mutual", self._mutual_state)
            return
        signals = [*(message for message in inbox if isinstance(message, Posteriors)), *own]
        batches = [self._public_batch(node, s.sender, s.round) for s in signals]
        lesson = Lesson.of(signals, batches, self.confidence, node.seed_set.labelled)
        answers = node.take_ready(tuple((s.sender, s.round) for s in signals))
        answers = self._answers(node, batches) if answers is None else answers
        self._learn(node, answers, lesson, round)
        if place is not None:
            shelf.put(place, _inputs(batches), lesson)

    def anticipate(self, node: Learner, senders: Sequence[str], round: int) -> None:
        """The pass forward on public batches, which are known before what teachers say of them is."""
        if senders and not (node.has_norms and self.batch_norm != "frozen"):
            owners = [*senders, *[node.name] * self.own_lesson]
            batches = [self._public_batch(node, owner, round) for owner in owners]
            node.ready = (tuple((owner, round) for owner in owners), self._answers(node, batches))

    @property
    def written(self) -> Encoding:
        """As set."""
        return Encoding.of(self.encoding)

    @property
    def wants_average(self) -> bool:
        """To teach with."""
        return self.teacher == "average"

    def crossing(self) -> str:
        """The teaching signals."""
        return "posteriors on public data"

    @property
    def keeps(self) -> bool:
        """Lessons, if they are revisited."""
        return self._room > 0

    def forget(self, node: Learner) -> None:
        """All lessons."""
        Shelf(node.memory).clear()

    @property
    def _room(self) -> int:
        """How many lessons are kept: no more than there are rounds to revisit them in."""
        return max(min(self.revisit, self.interval - 1), 0)

    def _place(self, round: int) -> int | None:
        """Where the lesson of a round is kept, or, if it has none of its own, the one that is learned again.

        After an exchange the newest comes first, then the one before it, and so on, and then the newest again.
        """
        before = (round - 1) // self.interval if self._room else 0
        if self.exchanges(round):
            return before % self._room if self._room else None
        if before == 0:
            return None
        back = (round % self.interval - 1) % min(before, self._room)
        return (before - 1 - back) % self._room

    def _revisit(self, node: Learner, round: int) -> None:
        """A mutual step with what teachers said in an earlier round, if they were heard then."""
        place = self._place(round)
        kept = None if place is None else Shelf(node.memory).at(place)
        if kept is not None:
            inputs, lesson = kept
            self._learn(node, node.logits(inputs, frozen=self.batch_norm == "frozen"), lesson, round)

    def _learn(self, node: Learner, answers: Tensor, lesson: Lesson, round: int) -> None:
        """A mutual step, from a student's answers on a lesson."""
        ce, kl = mutual_losses(answers, lesson, self.temperature)
        projection = self._projected(node.gradient(self._loss(ce, kl)), recall(node, self.interval))
        node.step(projection.gradient, "mutual", self._mutual_state, self.pace)
        labelled = {"ce": ce} if node.seed_set.labelled else {}
        node.record(round, **labelled, kl=kl, conflict_rate=projection.conflict, angle=projection.angle)

    def _loss(self, ce: Tensor, kl: Tensor) -> Tensor:
        if self.kl and self.ce:
            return self.kl_weight * kl + ce
        return self.kl_weight * kl if self.kl else ce

    def _said(self, node: Learner, inputs: Tensor) -> Tensor:
        """The posteriors that teach: of the node's model, of its specialist, or some of both."""
        averaged, share = self.teacher == "average", self.specialist
        special = specialist.posteriors(node, inputs, averaged) if share else None
        if share == 1 and special is not None:
            return special
        said = torch.softmax(node.teach(inputs) if averaged else node.predict(inputs), -1)
        return said if special is None else (1 - share) * said + share * special

    def _public_batch(self, node: Learner, owner: str, round: int) -> Samples:
        return node.public_batch(owner, round, self.public_batch_rows(node.batch_size))

    def _answers(self, node: Learner, batches: Sequence[Samples]) -> Tensor:
        """f_i(x_j) of all teachers j, `(rows, classes)`."""
        if node.has_norms and self.batch_norm == "per-domain":
            return torch.cat([node.logits(batch.inputs) for batch in batches], -2)
        return node.logits(_inputs(batches), frozen=self.batch_norm == "frozen")

    def _projected(self, g_pub: Tensor, g_loc: Tensor) -> Projection:
        return {"qp": project, "pcgrad": pcgrad, "none": unprojected}[self.project](g_pub, g_loc)

    @property
    def _joint(self) -> bool:
        return self.project == "pcgrad" and self.pcgrad == "joint"

    @property
    def _mutual_state(self) -> Literal["local", "mutual"]:
        return "local" if self.optimizer_state == "shared" else "mutual"


def _inputs(batches: Sequence[Samples]) -> Tensor:
    """Of all batches, one after the other."""
    return torch.cat([batch.inputs for batch in batches], batches[0].labels.dim() - 1)
