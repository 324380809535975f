"""A sheet of public images and their augmented versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from fedh2l.data.domain import Domain
from fedh2l.data.pixels import Pixels, ready
from fedh2l.errors import ConfigError

ORIGINALS, VIEWS = 4, 3
"""Images per domain, and augmented versions per image."""
SIDE, GAP, LINE = 96, 8, 16
"""Pixels: the side of an image on the sheet, the gap between images, the height of a line of text."""
MODES = {1: "L", 3: "RGB"}


def write_sheet(domains: Sequence[Domain], seed: int, path: Path) -> None:
    """Write one row per domain: some public images, each followed by augmented versions of it."""
    rows = [_row(domain, seed) for domain in domains]
    width = max(row.width for row in rows) + 2 * GAP
    sheet = Image.new("RGB", (width, len(rows) * (LINE + SIDE + 2 * GAP) + GAP), "white")
    pen, top = ImageDraw.Draw(sheet), GAP
    for domain, row in zip(domains, rows, strict=True):
        pen.text((GAP, top), domain.name.encode("ascii", "replace").decode(), fill="black")
        sheet.paste(row, (GAP, top + LINE))
        top += LINE + SIDE + 2 * GAP
    try:
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--samples {path}: the sheet cannot be written: {error}") from error


def _row(domain: Domain, seed: int) -> Image.Image:
    """Return the images of one domain, each next to its augmented versions."""
    groups = _images(domain, seed)
    row = Image.new("RGB", (sum(len(group) * SIDE + GAP for group in groups) - GAP, SIDE), "white")
    left = 0
    for group in groups:
        for image in group:
            row.paste(image, (left, 0))
            left += SIDE
        left += GAP
    return row


def _images(domain: Domain, seed: int) -> list[list[Image.Image]]:
    """Return some public images, each with its augmented versions."""
    inputs = domain.public.inputs
    if inputs.dim() != 4 or inputs.shape[1] not in MODES:
        raise ConfigError(f"--samples: the inputs of domain '{domain.name}' are not grey or colour images")
    places = torch.linspace(0, len(inputs) - 1, min(ORIGINALS, len(inputs))).long()  # samples are sorted by class
    chosen, augmentation = inputs[places], domain.augmentation
    pixels = augmentation.pixels if augmentation else domain.pixels or Pixels()
    versions = [ready(chosen, pixels, torch.float32)]
    if augmentation is not None:
        views = augmentation.public or augmentation
        rounds = range(1, VIEWS + 1)
        versions += [views.views(chosen, torch.float32, "public-views", seed, domain.name, round) for round in rounds]
    drawn = [_drawn(version, pixels) for version in versions]
    return [list(group) for group in zip(*drawn, strict=True)]


def _drawn(inputs: Tensor, pixels: Pixels) -> list[Image.Image]:
    """Return a model's inputs as pictures in the size of the sheet."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (pixels.mean, pixels.std))
    values = ((inputs * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    pictures = []
    for image in values.permute(0, 2, 3, 1).numpy():
        picture = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
        how = Image.Resampling.NEAREST if picture.width < SIDE // 2 else Image.Resampling.LANCZOS
        pictures.append(picture.resize((SIDE, SIDE), how).convert("RGB"))
    return pictures
