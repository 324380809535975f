"""FedH2L+: FedH2L with augmented public data, an averaged teacher, long mutual steps and replayed lessons."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from fedh2l.methods.base import Preset
from fedh2l.methods.fedh2l import ENCODINGS, FedH2L
from fedh2l.methods.lesson import Lesson, LessonCache
from fedh2l.protocol.messages import Message
from fedh2l.training.learner import Learner, LocalData


class FedH2LPlus(FedH2L):
    """FedH2L with four additions and other defaults.

    `docs/fedh2l-plus.md` has the reason and the gain of each addition.

    - Teachers predict with the exponential moving average of their weights (`run.ema_decay`).
    - Teachers and students see the same fresh augmentation of a public batch (`data.augment`).
    - Mutual steps are longer (`optimizer.mutual_lr_scale`) and use a higher temperature.
    - If exchanges are rare, a node repeats the last lessons in the rounds between (`replay`).

    If public data has no labels, the node trains locally on private data alone and learns from posteriors alone.
    """

    name: ClassVar[str] = "fedh2l-plus"

    local_data: LocalData = Field("private+own-public", description="Training data of the local step.")
    public_batch_size: int = Field(64, ge=1, description="Public samples per message.")
    kl_weight: float = Field(3.0, ge=0, le=1e6, description="Weight of the distillation loss.")
    temperature: float = Field(3.0, gt=0, le=1e3, description="Distillation temperature T. The loss is scaled by T².")
    encoding: str = Field("int8", pattern=ENCODINGS, description="Format of posteriors, as in fedh2l.")
    replay: int = Field(4, ge=0, le=16, description="Lessons to keep and repeat in rounds without an exchange.")

    @model_validator(mode="after")
    def _can_replay(self) -> Self:
        if self._capacity and self.local_gradient == "difference":
            raise ValueError("local_gradient = 'difference' spans an exchange; set replay = 0")
        return self

    @classmethod
    def recommends(cls, public_labels: bool) -> Preset:
        settings = {"run.ema_decay": 0.998, "data.augment": "all"}
        if public_labels:
            return {**settings, "optimizer.mutual_lr_scale": 3.0}
        return {**settings, "method.ce_weight": 0.0, "method.local_data": "private"}

    def teach(self, node: Learner, inputs: Tensor) -> Tensor:
        return node.teach(inputs)

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Learn from the inbox, and keep it for later rounds."""
        g_loc, slot = self._local_gradient(node.memory), self._slot(round)
        lesson = Lesson.of(node, inbox, self.public_batch_rows(node.batch_size)) if inbox else None
        if lesson is not None:
            self.learn(node, lesson, g_loc, round)
        if slot is not None:
            LessonCache(node.memory).put(slot, lesson)

    def local_step(self, node: Learner, round: int) -> None:
        """Take a local step. In rounds without an exchange, also take a mutual step with an earlier lesson."""
        super().local_step(node, round)
        slot = None if self.exchanges(round) else self._slot(round)
        lesson = None if slot is None else LessonCache(node.memory).get(slot)
        if lesson is not None:
            self.learn(node, lesson, self._local_gradient(node.memory), round)

    def kind_of_round(self, round: int) -> Hashable:
        return self.exchanges(round), self._slot(round)

    @property
    def wants_average(self) -> bool:
        return True

    @property
    def keeps(self) -> bool:
        return self._capacity > 0

    def forget(self, node: Learner) -> None:
        LessonCache(node.memory).clear()

    @property
    def _capacity(self) -> int:
        """Return the number of lessons to keep: at most the number of rounds that can repeat one."""
        return max(min(self.replay, self.interval - 1), 0)

    def _slot(self, round: int) -> int | None:
        """Return the cache slot that a round writes (with an exchange) or reads (without), the newest lesson first."""
        exchanges_before = (round - 1) // self.interval if self._capacity else 0
        if self.exchanges(round):
            return exchanges_before % self._capacity if self._capacity else None
        if exchanges_before == 0:
            return None
        back = (round % self.interval - 1) % min(exchanges_before, self._capacity)
        return (exchanges_before - 1 - back) % self._capacity
