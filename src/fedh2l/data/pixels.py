"""Conversion of images from bytes to model inputs, one batch at a time and on the model's device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Mapping from an image byte to a model input: `(byte / scale − mean) / std` per channel."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @staticmethod
    def of(preprocessing: Mapping[str, Any]) -> Pixels:
        """Return the mapping in the preprocessing of a domain or of a saved model."""
        mean, std = (preprocessing.get(key, [default]) for key, default in (("mean", 0.0), ("std", 1.0)))
        return Pixels(float(preprocessing.get("scale", 255)), tuple(map(float, mean)), tuple(map(float, std)))

    def __call__(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert images `(…, channels, height, width)` of bytes. Other inputs are returned unchanged."""
        if inputs.dtype != torch.uint8:
            return inputs
        values = inputs.to(dtype)
        return values.div_(self.scale) if self.plain else self._shifted(values.div_(self.scale))

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise images with values 0 to 1."""
        return images if self.plain else self._shifted(images)

    @property
    def plain(self) -> bool:
        """Whether model inputs are values 0 to 1."""
        return not any(self.mean) and all(deviation == 1 for deviation in self.std)

    def _shifted(self, values: Tensor) -> Tensor:
        factor, shift = _constants(self.mean, self.std, values.device, values.dtype)
        return torch.addcmul(shift, values, factor)


@lru_cache(64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return factor and shift per channel. They are cached, because a CUDA graph can only use tensors on the device."""
    means, deviations = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    return (1 / deviations).to(device, dtype), (-means / deviations).to(device, dtype)


def ready(inputs: Tensor, pixels: Pixels | None, dtype: torch.dtype) -> Tensor:
    """Return inputs for a model. Pixels become numbers, numbers get the type `dtype`, indices stay unchanged."""
    if pixels is not None and inputs.dtype == torch.uint8:
        return pixels(inputs, dtype)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs
