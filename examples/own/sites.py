"""Your own data and model, named in `federation.toml`.

Three sites measure the same two quantities. Their instruments are turned against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedh2l


def measurements(sites: int, samples: int, seed: int) -> list[fedh2l.Domain]:
    """Return one domain per site. `sites` and `samples` are keys of [data]; `seed` is the seed of the run."""
    return [
        fedh2l.Domain.split(_site(0.6 * site, samples, seed + site), name=f"site{site}", classes=3, seed=seed)
        for site in range(sites)
    ]


def _site(turn: float, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    angle = 2 * torch.pi / 3 * labels + turn
    centres = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    return centres + 0.7 * torch.randn(samples, 2, generator=generator), labels


class Net(nn.Sequential):
    """A small network. fedh2l passes `num_classes`; `width` is in model_args."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, num_classes))
