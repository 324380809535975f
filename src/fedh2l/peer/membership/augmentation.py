"""The `[views]` section of a roster: augmentation of public images, the same for all members."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import torch
from pydantic import Field

from fedh2l.data.augmentation import Augmentation, PublicViews
from fedh2l.data.augmentation_keys import Bend, Crop, Erase, Flip, Jitter, Kind, Mix, Shift, Zoom, values_for
from fedh2l.data.pixels import Pixels
from fedh2l.errors import ConfigError
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.section import Section


class SharedViews(Section):
    """The `[views]` section: augmentation of public images, drawn by the federation's seed. By default none."""

    crop: Crop[float] = 1.0
    flip: Flip[float] = 0.0
    jitter: Jitter[float] = 0.0
    shift: Shift[float] = 0.0
    zoom: Zoom[float] = 0.0
    erase: Erase[float] = 0.0
    bend: Bend[float] = 0.0
    mix: Mix[float] = 0.0
    border: Literal["reflection", "zeros"] = Field(
        "reflection", description="Pixels beyond the edge. With reflection they are mirrored, with zeros they are 0."
    )
    local: bool = Field(
        False,
        description="Members augment their own images in the same way, unless their data has its own augmentation.",
    )

    @staticmethod
    def like(views: PublicViews | None) -> SharedViews:
        """Convert the augmentation of a simulation."""
        if views is None:
            return AS_THEY_ARE
        return SharedViews(**{name: getattr(views, name) for name in SharedViews.model_fields if name != "local"})

    @staticmethod
    def suited_to(bundle: Bundle, kind: Kind) -> SharedViews:
        """Return views for members that all augment their images, or none if the seed set has no such images."""
        return SharedViews.read({**values_for(kind), "local": True}, "views") if _are_images(bundle) else AS_THEY_ARE

    def of(self, bundle: Bundle) -> PublicViews | None:
        """Return the augmentation for the images of a seed set, or None if there is none."""
        if self.model_copy(update={"local": False}) == AS_THEY_ARE:
            return None
        if not _are_images(bundle):
            raise ConfigError(
                "[views] of the roster: the seed set holds no images of bytes or of values 0 to 1, so it cannot be "
                "augmented"
            )
        return PublicViews(Pixels.of(bundle.schema), **self.model_dump(exclude={"local"}))

    def own(self, bundle: Bundle) -> Augmentation | None:
        """Return the same augmentation for a member's own images, without mixing and bending, or None if it is off."""
        views = self.of(bundle) if self.local else None
        if views is None:
            return None
        return Augmentation(**{each.name: getattr(views, each.name) for each in fields(Augmentation)} | {"bend": 0.0})


def _are_images(bundle: Bundle) -> bool:
    """Return whether a seed set has images that can be augmented: bytes, or values from 0 to 1."""
    inputs = bundle.samples.inputs
    return inputs.dim() == 4 and (inputs.dtype == torch.uint8 or Pixels.of(bundle.schema).plain)


AS_THEY_ARE = SharedViews()
"""No augmentation."""
