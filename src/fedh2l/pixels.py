"""From bytes to numbers: images are kept as bytes and become a model's inputs a batch at a time, where it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """What a byte of an image is to a model: `(byte / scale − mean) / std`, channel by channel."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @staticmethod
    def of(preprocessing: Mapping[str, Any]) -> Pixels:
        """As the preprocessing of a domain or of a saved model says."""
        mean, std = (preprocessing.get(key, [default]) for key, default in (("mean", 0.0), ("std", 1.0)))
        return Pixels(float(preprocessing.get("scale", 255)), tuple(map(float, mean)), tuple(map(float, std)))

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Images `(…, channels, height, width)` of bytes; what is not bytes is ready, and is given back as it is."""
        if inputs.dtype != torch.uint8:
            return inputs
        values = inputs.to(dtype)
        return values.div_(self.scale) if self.plain else self._shifted(values.div_(self.scale))

    def normalised(self, images: Tensor) -> Tensor:
        """The same for images whose values are 0 to 1 already."""
        return images if self.plain else self._shifted(images)

    @property
    def plain(self) -> bool:
        """Whether values 0 to 1 are what a model is fed."""
        return not any(self.mean) and all(deviation == 1 for deviation in self.std)

    def _shifted(self, values: Tensor) -> Tensor:
        factor, shift = _constants(self.mean, self.std, values.device, values.dtype)
        return torch.addcmul(shift, values, factor)


@lru_cache(64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Factor and shift by channel, made once: a recorded CUDA graph can only hold what is on the device already."""
    means, deviations = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    return (1 / deviations).to(device, dtype), (-means / deviations).to(device, dtype)


def ready(inputs: Tensor, pixels: Pixels | None, dtype: torch.dtype) -> Tensor:
    """Inputs as a model is fed them: pixels become numbers, numbers take on a type, indices stay what they are."""
    if pixels is not None and inputs.dtype == torch.uint8:
        return pixels(inputs, dtype)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs
