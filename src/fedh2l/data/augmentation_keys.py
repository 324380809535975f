"""The configuration keys of image augmentation, and suitable values for kinds of images.

Type, bounds and description of a key are declared here. A section that has the key only adds its own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field

Number = TypeVar("Number", float, float | None)
"""A key with its own default, or one whose default depends on the kind of images."""

Crop = Annotated[
    Number, Field(gt=0, le=1, description="Smallest share of the area that a random crop keeps. 1 turns it off.")
]
Flip = Annotated[Number, Field(ge=0, le=1, description="Probability of a mirror image.")]
Jitter = Annotated[
    Number, Field(ge=0, lt=1, description="Brightness, contrast and saturation change by factors of 1 ± this.")
]
Shift = Annotated[Number, Field(ge=0, le=0.5, description="Largest shift, as a share of the side.")]
Zoom = Annotated[Number, Field(ge=0, lt=1, description="The size changes by factors of 1 ± this.")]
Erase = Annotated[Number, Field(ge=0, le=1, description="Largest erased square, as a share of the side.")]
Bend = Annotated[
    Number,
    Field(ge=0, le=0.5, description="Largest shift of single points, as a share of the side. Public images only."),
]
Mix = Annotated[
    Number, Field(ge=0, le=0.5, description="Largest share of another image that is mixed in. Public images only.")
]

Kind = Literal["any", "photographs", "drawings"]
ImageKind = Annotated[
    Kind,
    Field(
        description="Kind of images. It sets the defaults of the keys from crop to mix. With any: shift, zoom and "
        "erase. With photographs: crop, flip and jitter. With drawings: crop and flip."
    ),
]
UNCHANGED: Mapping[str, float] = {
    "crop": 1.0, "flip": 0.0, "jitter": 0.0, "shift": 0.0, "zoom": 0.0, "erase": 0.0, "bend": 0.0, "mix": 0.0,
}  # fmt: skip
"""Values that leave an image unchanged."""
SETS: Mapping[Kind, Mapping[str, float]] = {
    "any": {"shift": 0.1, "zoom": 0.15, "erase": 0.3},
    "photographs": {"crop": 0.8, "flip": 0.5, "jitter": 0.4},
    # As photographs, but without jitter: line art has two colours, and in many drawings colours have a meaning.
    "drawings": {"crop": 0.8, "flip": 0.5},
}


def values_for(kind: Kind) -> dict[str, float]:
    """Return all augmentation keys for a kind of images."""
    return {**UNCHANGED, **SETS[kind]}
