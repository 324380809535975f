"""Records of patients, drawn here, as files with comma-separated values."""

from __future__ import annotations

import csv
import random
from pathlib import Path

COLUMNS = ["age", "dose", "ward", "ill"]


def records(count: int, shift: float, seed: int) -> list[list[str]]:
    rows, dice = [], random.Random(seed)
    for row in range(count):
        ill = row % 3 == 0
        age = 40 + shift + 10 * ill + dice.uniform(0, 10)
        dose = "?" if dice.random() < 0.1 else str(dice.randrange(100, 1000))
        rows.append([f"{age:.2f}", dose, dice.choice("ABC"), "yes" if ill else "no"])
    return rows


def write(path: Path, rows: list[list[str]], header: list[str] | None = COLUMNS) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([*([header] if header else []), *rows])
