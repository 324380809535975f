"""Image files as what a model is fed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedh2l.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def read_image(path: Path, preprocessing: Mapping[str, Any]) -> Tensor:
    """The pixels of a file `(channels, height, width)`, in the mode, size and scale of `preprocessing`."""
    try:
        with Image.open(path) as image:
            width, height = preprocessing["size"]
            grey_or_colour = image.convert(preprocessing["mode"]).resize((width, height))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"'{path}' cannot be read as an image: {error}") from error
    pixels = np.asarray(grey_or_colour, dtype=np.float32) / preprocessing["scale"]
    return torch.from_numpy(pixels.reshape(height, width, -1).transpose(2, 0, 1).copy())
