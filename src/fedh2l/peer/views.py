"""The `[views]` of a roster: how all members see public images."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from fedh2l.augmentation import PublicViews
from fedh2l.errors import ConfigError
from fedh2l.peer.bundle import Bundle
from fedh2l.pixels import Pixels
from fedh2l.section import Section


class SharedViews(Section):
    """The `[views]` section: what becomes of public images, drawn by the federation's seed; nothing if not given."""

    crop: float = Field(1.0, gt=0, le=1, description="the least share of an image that is cut out")
    flip: float = Field(0.0, ge=0, le=1, description="how often an image is mirrored")
    jitter: float = Field(0.0, ge=0, lt=1, description="how far brightness, contrast and saturation go")
    shift: float = Field(0.0, ge=0, le=0.5, description="how far images are moved, as a share of the side")
    zoom: float = Field(0.0, ge=0, lt=1, description="how far their size is changed, by factors 1 ± this")
    erase: float = Field(0.0, ge=0, le=1, description="the largest square left out, as a share of the side")
    bend: float = Field(0.0, ge=0, le=0.5, description="how far parts of an image are moved on their own")
    mix: float = Field(0.0, ge=0, le=0.5, description="how much of another image is in one, at most")
    border: Literal["reflection", "zeros"] = Field("reflection", description="what is seen beyond the edge")

    @staticmethod
    def like(views: PublicViews | None) -> SharedViews:
        """Those of a simulation."""
        if views is None:
            return AS_THEY_ARE
        return SharedViews(**{name: getattr(views, name) for name in SharedViews.model_fields})

    def of(self, bundle: Bundle) -> PublicViews | None:
        """For the images of a seed set; None: they are seen as they are."""
        if self == AS_THEY_ARE:
            return None
        pixels, inputs = Pixels.of(bundle.schema), bundle.samples.inputs
        if inputs.dim() != 4 or not (inputs.dtype == torch.uint8 or pixels.plain):
            raise ConfigError(
                "[views] of the roster: the seed set holds no images of bytes, or of values 0 to 1, which alone can be "
                "seen otherwise"
            )
        return PublicViews(pixels, **dict(self))


AS_THEY_ARE = SharedViews()
"""No views."""
