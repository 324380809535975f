"""Pretrained weights from a file or from torchvision, and new last layers for another number of classes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedh2l.errors import ModelError
from fedh2l.plugins import import_object

log = logging.getLogger("fedh2l")

FILES = (".safetensors", ".pth", ".pt", ".bin")
NESTED = ("state_dict", "model_state_dict", "model", "net")
"""Keys that training scripts use for a state dict in a file."""


@dataclass(frozen=True)
class Match:
    """The tensors that a model could load from some weights."""

    loaded: list[str]
    reshaped: list[str]
    """Tensors of another shape, usually those of the last layer. The model keeps its own."""
    missing: list[str]
    unused: list[str]
    share: float
    """Share of the model's values that were loaded."""

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded, {100 * self.share:.1f} % of the model"]
        for title, names in (
            ("of another shape, left as drawn", self.reshaped),
            ("not in the weights, left as drawn", self.missing),
            ("in the weights, but not in the model", self.unused),
        ):
            if names:
                parts.append(f"{title}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}")
        return "; ".join(parts)


def start_from(module: nn.Module, source: str, factory: str, where: str) -> Match:
    """Load matching weights into a model and log the rest. Raise an error if less than half of the model matches."""
    weights = _from_file(Path(source), where) if _is_file(source) else _from_torchvision(source, factory, where)
    match = take_over(module, weights)
    if match.share < 0.5:
        raise ModelError(f"{where}: the weights '{source}' are of another model: {match}")
    log.info("%s, weights '%s': %s", where, source, match)
    head = next((name for name, _ in reversed(_layers(module))), "")
    strange = [name for name in (*match.reshaped, *match.missing) if name.rpartition(".")[0] != head]
    if strange:
        log.warning(
            "%s: '%s' is not the last layer, and the weights '%s' do not fit it; are they of another model?",
            where, strange[0], source,
        )  # fmt: skip
    return match


def settle(module: nn.Module, example: Tensor) -> None:
    """Initialise layers that take their shape from the first input."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        _output(module, example)


@torch.no_grad()
def take_over(module: nn.Module, weights: Mapping[str, Tensor]) -> Match:
    """Copy every tensor with the same name and shape."""
    own = module.state_dict()
    loaded = [name for name, tensor in own.items() if name in weights and weights[name].shape == tensor.shape]
    for name in loaded:
        own[name].copy_(weights[name])
    total = sum(tensor.numel() for tensor in own.values())
    return Match(
        loaded,
        [name for name in own if name in weights and name not in loaded],
        [name for name in own if name not in weights and not name.endswith("num_batches_tracked")],
        [name for name in weights if name not in own],
        sum(own[name].numel() for name in loaded) / max(total, 1),
    )


def fit_head(module: nn.Module, example: Tensor, num_classes: int) -> bool:
    """Replace the last layer if the outputs are not `num_classes`. Return whether it was replaced.

    This is for models whose factory does not take `num_classes`. The last layer is the Linear or 1 × 1 convolution
    whose replacement gives the right number of outputs.
    """
    outputs = _output(module, example)
    if outputs is None or outputs == num_classes:  # `check_model` reports errors of the model
        return False
    for name, layer in reversed(_layers(module)):
        parent, _, last = name.rpartition(".")
        new = _narrowed(layer, outputs, num_classes)
        if new is None or not last:
            continue
        setattr(module.get_submodule(parent), last, new)
        if _output(module, example) == num_classes:
            log.info("'%s' of %s has %d outputs now, not %d", name, type(module).__name__, num_classes, outputs)
            return True
        setattr(module.get_submodule(parent), last, layer)
    return False


def _output(module: nn.Module, example: Tensor) -> int | None:
    """Return the number of outputs per input, or None if the model fails or returns something else."""
    was_training = module.training
    try:
        with torch.no_grad():
            output = module.eval()(example)
    except Exception:  # a user's model may fail in any way
        return None
    finally:
        module.train(was_training)
    return output.shape[1] if isinstance(output, Tensor) and output.dim() == 2 else None


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]


def _narrowed(layer: nn.Module, outputs: int, wanted: int) -> nn.Module | None:
    """Return a new layer with `wanted` outputs, or None if this cannot be the last layer."""
    if isinstance(layer, nn.Linear) and layer.out_features == outputs:
        return nn.Linear(layer.in_features, wanted, layer.bias is not None)
    if isinstance(layer, nn.Conv2d) and layer.out_channels == outputs and layer.kernel_size == (1, 1):
        return nn.Conv2d(layer.in_channels, wanted, 1, bias=layer.bias is not None)
    return None


def _is_file(source: str) -> bool:
    return "/" in source or Path(source).suffix.lower() in FILES


def _from_file(path: Path, where: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"{where}: there is no file of weights '{path}'")
    try:
        read: Any = (
            load_file(path)
            if path.suffix.lower() == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise ModelError(f"{where}: cannot read the weights '{path}': {error}") from error
    except Exception as error:  # unpickling an arbitrary file can raise anything
        raise ModelError(
            f"{where}: '{path}' holds more than tensors, or is damaged, and is not read: {type(error).__name__}"
        ) from error
    for key in NESTED:
        if isinstance(read, dict) and isinstance(read.get(key), dict):
            read = read[key]
    if not isinstance(read, dict):
        raise ModelError(f"{where}: '{path}' holds {type(read).__name__}, not the weights of a model")
    found = {str(name): value for name, value in read.items() if isinstance(value, Tensor)}
    if found and all(name.startswith("module.") for name in found):  # saved by DataParallel
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return found


def _from_torchvision(name: str, factory: str, where: str) -> dict[str, Tensor]:
    if not factory.startswith("torchvision.models"):
        raise ModelError(
            f"{where}: weights '{name}' are not a file ({', '.join(FILES)}). Names of weights work only for models of "
            "torchvision.models"
        )
    models = import_object("torchvision:models", where)
    try:
        known = models.get_model_weights(import_object(factory, where))
    except ValueError as error:
        raise ModelError(f"{where}: torchvision has no weights for '{factory}': {error}") from error
    if name not in known.__members__:
        raise ModelError(f"{where}: unknown weights '{name}'. There are: {', '.join(known.__members__)}")
    try:
        state: dict[str, Tensor] = known[name].get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{where}: the weights '{name}' could not be downloaded: {error}. Name a file") from error
    return state
