"""FedH2L with what goes beyond the paper: fresh views of public data, an averaged teacher, a softer comparison."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.methods.base import Preset
from fedh2l.methods.fedh2l import Confidence, FedH2L


class FedH2LPlus(FedH2L):
    """FedH2L, which sends the same few posteriors, but is asked something else every time.

    `fedh2l` with other settings and nothing else: a moving average of each node's weights teaches and is what counts
    as its model (`run.average`), teachers and students see the same fresh views of a public batch (`data.augment`),
    and what they say of it is compared at a temperature, whatever a teacher's accuracy there. Where public data has no
    labels, nothing is asked of them.
    """

    name: ClassVar[str] = "fedh2l-plus"

    teacher: Literal["present", "average"] = Field("average", description=FedH2L.model_fields["teacher"].description)
    temperature: float = Field(3.0, gt=0, le=1e3, description=FedH2L.model_fields["temperature"].description)
    kl_weight: float = Field(3.0, ge=0, le=1e6, description=FedH2L.model_fields["kl_weight"].description)
    confidence: Confidence = Field("none", description=FedH2L.model_fields["confidence"].description)

    @classmethod
    def recommends(cls, public_labels: bool) -> Preset:
        """An average and views; without public labels, to learn from posteriors alone."""
        alone = {} if public_labels else {"method.ce": False, "method.local_data": "private"}
        return {"run.average": 0.998, "data.augment": "all", **alone}
