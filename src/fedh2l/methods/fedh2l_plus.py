"""FedH2L with what goes beyond the paper: fresh views of public data, an averaged teacher, longer mutual steps."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.learner import LocalData
from fedh2l.methods.base import Preset
from fedh2l.methods.fedh2l import ENCODINGS, FedH2L


def _help(key: str) -> str | None:
    return FedH2L.model_fields[key].description


class FedH2LPlus(FedH2L):
    """FedH2L, which sends posteriors as before, but is asked something else every time.

    `fedh2l` with other settings and nothing else (`docs/fedh2l-plus.md` has the reason for each): a moving average of
    each node's weights teaches and is what counts as its model (`run.average`), teachers and students see the same
    fresh views of a public batch (`data.augment`), twice as many of them and in a quarter of the bits, and students
    take longer steps after them, and where exchanges are rare they go on learning from the last ones in between. Where
    public data has no labels, nothing is asked of them, and teachers are believed always.
    """

    name: ClassVar[str] = "fedh2l-plus"

    revisit: int = Field(4, ge=0, le=16, description=_help("revisit"))
    local_data: LocalData = Field("private+own-public", description=_help("local_data"))
    public_batch_size: int = Field(64, ge=1, description="samples a teaching signal speaks of")
    encoding: str = Field("int8", pattern=ENCODINGS, description=_help("encoding"))
    teacher: Literal["present", "average"] = Field("average", description=_help("teacher"))
    pace: float = Field(3.0, gt=0, le=1e3, description=_help("pace"))
    temperature: float = Field(3.0, gt=0, le=1e3, description=_help("temperature"))
    kl_weight: float = Field(3.0, ge=0, le=1e6, description=_help("kl_weight"))

    @classmethod
    def recommends(cls, public_labels: bool) -> Preset:
        """An average and views; without public labels, to learn from posteriors alone, in steps as long as others."""
        alone = {"ce": False, "local_data": "private", "confidence": "none", "pace": 1.0}
        method = {} if public_labels else {f"method.{key}": value for key, value in alone.items()}
        return {"run.average": 0.998, "data.augment": "all", **method}
