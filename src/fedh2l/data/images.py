"""Conversion of image files to inputs of models."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedh2l.data.pixels import Pixels
from fedh2l.errors import DataError
from fedh2l.files import check_regular

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
"""Image formats that are read, whatever the suffix. Pillow knows more. One of them, EPS, starts Ghostscript."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
"""Modes of grey images with 16 bits."""

LARGEST = 50_000_000
"""Largest number of pixels of an image. A small file may hold very many."""
BAND = 512
"""Rows of an image whose transparency is removed at once."""

UNSAID = {"fit": "stretch", "mean": [0.0], "std": [1.0]}
"""Defaults for keys that a preprocessing does not have."""

Fit = Literal["stretch", "crop"]
"""Treatment of images with another aspect ratio: distort them or crop them."""


def read_image(path: Path, preprocessing: Mapping[str, Any]) -> Tensor:
    """Return the pixels of a file `(channels, height, width)`, in the mode, size and scale of `preprocessing`."""
    return Pixels.of(preprocessing)(read_bytes(path, preprocessing), torch.float32)


def read_bytes(path: Path, preprocessing: Mapping[str, Any]) -> Tensor:
    """Return the pixels of a file as bytes."""
    size = (int(preprocessing["size"][0]), int(preprocessing["size"][1]))
    mode, fit = preprocessing["mode"], preprocessing.get("fit", "stretch")
    return torch.from_numpy(decode(path, file_content(path), mode, size, fit))


def decode(path: Path, content: bytes, mode: str, size: tuple[int, int], fit: Fit) -> NDArray[np.uint8]:
    """Decode the content of an image file to bytes `(channels, height, width)`. `path` is for the error message."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > LARGEST:
                raise ValueError(f"it has {image.width} x {image.height} pixels; at most {LARGEST:,} are read")
            ImageOps.exif_transpose(image, in_place=True)
            plain = _plain(image, mode)
            sized = ImageOps.fit(plain, size, Image.Resampling.BILINEAR) if fit == "crop" else plain.resize(size)
    except UnidentifiedImageError:
        raise DataError(f"'{path}' cannot be read as an image: it has none of the known formats") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' cannot be read as an image: {error}") from error
    width, height = size
    pixels = np.asarray(sized, dtype=np.uint8).reshape(height, width, -1)
    return pixels.transpose(2, 0, 1).copy()


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to a mode. 16-bit values are scaled, and transparent pixels become white."""
    if image.mode in DEEP:
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"its values are {values.min()} to {values.max()}, more than 16 bits")
        image = Image.fromarray((values // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, and the value of white is unknown")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return _on_white(image, mode)
    return image if image.mode == mode else image.convert(mode)


def _on_white(image: Image.Image, mode: str) -> Image.Image:
    opaque = Image.new(mode, image.size)
    for top in range(0, image.height, BAND):
        box = (0, top, image.width, min(top + BAND, image.height))
        colour = image.crop(box).convert("RGBA")
        opaque.paste(Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour).convert(mode), box)
    return opaque


def file_content(path: Path) -> bytes:
    """Return the content of an image file."""
    try:
        check_regular(path)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path is not valid
        raise DataError(f"'{path}' cannot be read as an image: {error}") from error
