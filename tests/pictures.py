"""Images that tests draw themselves: shapes for classes, styles for domains, in the layout of the real datasets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

STYLES = (("white", "black"), ("black", "white"), ("steelblue", "gold"), ("pink", "darkgreen"))
"""Background and colour of each domain."""


def draw(number: int, style: int, where: random.Random, side: int = 40) -> Image.Image:
    """The shape of a class, somewhere, in the colours of a domain: the more corners, the higher its number."""
    background, colour = STYLES[style % len(STYLES)]
    image = Image.new("RGB", (side, side), background)
    size = where.uniform(0.28, 0.4) * side
    x, y = (where.uniform(size, side - size) for _ in range(2))
    pen = ImageDraw.Draw(image)
    if number == 0:
        pen.ellipse((x - size, y - size, x + size, y + size), fill=colour)
    elif number == 1:
        pen.line((x - size, y, x + size, y), fill=colour, width=4)
    else:
        pen.regular_polygon((x, y, size), number + 1, rotation=where.randrange(360), fill=colour)
    return image


def folders(root: Path, domains: Sequence[str], classes: Sequence[str], each: int = 20, suffix: str = ".png") -> Path:
    """`each` images of every class in every domain."""
    for style, domain in enumerate(domains):
        for number, name in enumerate(classes):
            folder = root / domain / name
            folder.mkdir(parents=True)
            where = random.Random(f"{domain} {name}")
            for place in range(each):
                draw(number, style, where).save(folder / f"pic_{place:03d}{suffix}")
    return root
