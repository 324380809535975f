"""A trained model as one safetensors file that can be loaded and used with nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedh2l.data.images import read_image
from fedh2l.errors import DataError, FedH2LError, ModelError
from fedh2l.models.factory import Recipe
from fedh2l.models.pretrained import fit_head
from fedh2l.node import Node
from fedh2l.pixels import Pixels

FORMAT = "fedh2l-model-1"
METADATA = "fedh2l"


class Prediction(NamedTuple):
    """What a model says of one input."""

    label: str
    probability: float


class Classifier(nn.Module):
    """A trained model with what is needed to use it: its classes and its preprocessing."""

    def __init__(
        self,
        module: nn.Module,
        classes: Sequence[str],
        input_shape: Sequence[int],
        preprocessing: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.module = module
        self.classes = tuple(classes)
        self.input_shape = tuple(input_shape)
        self.preprocessing = dict(preprocessing)
        self.about = dict(about)
        """Where the model comes from: node, round, which (best or last), factory and its arguments."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `(n, classes)` of preprocessed inputs `(n, …)`, or of images as bytes."""
        if inputs.dtype == torch.uint8 and len(self.input_shape) == 3 and self.about["floating"]:
            inputs = Pixels.of(self.preprocessing)(inputs, next(self.parameters()).dtype)
        logits: Tensor = self.module(inputs)
        return logits

    @torch.no_grad()
    def predict(self, sources: Sequence[str | Path | Tensor | NDArray[Any]]) -> list[Prediction]:
        """The class and its posterior for each of some inputs: image files, .npy files, arrays or tensors."""
        parameter = next(self.parameters())
        self.eval()
        predictions = []
        for source in sources:
            prepared = self.prepare(source)
            inputs = prepared.to(parameter.device, parameter.dtype if prepared.is_floating_point() else None)
            posterior = torch.softmax(self(inputs.unsqueeze(0)), -1).squeeze(0)
            best = int(posterior.argmax())
            predictions.append(Prediction(self.classes[best], float(posterior[best])))
        return predictions

    def prepare(self, source: str | Path | Tensor | NDArray[Any]) -> Tensor:
        """One input as the model is fed it. Arrays and .npy files are taken to be preprocessed already."""
        prepared = self._read(Path(source)) if isinstance(source, (str, Path)) else torch.as_tensor(source)
        if (1, *prepared.shape) == self.input_shape:  # a grey image without its channel
            prepared = prepared.unsqueeze(0)
        if tuple(prepared.shape) != self.input_shape:
            raise DataError(f"{source}: shape {tuple(prepared.shape)}, but the model takes {self.input_shape}")
        return prepared

    def _read(self, path: Path) -> Tensor:
        if not path.is_file():
            raise DataError(f"there is no file '{path}'")
        if path.suffix == ".npy":
            try:
                return torch.from_numpy(np.load(path, allow_pickle=False))
            except (ValueError, TypeError, EOFError, OSError) as error:
                raise DataError(f"'{path}' is not an array of numbers: {error}") from error
        if self.preprocessing.get("kind") != "image":
            raise DataError(f"'{path}': this model's data is not images; give a .npy file of shape {self.input_shape}")
        return read_image(path, self.preprocessing)


def probe(input_shape: Sequence[int], floating: bool, dtype: torch.dtype) -> Tensor:
    """One input `(1, …)`, the same for every model that takes this shape; holds nothing of anybody's data."""
    size = math.prod(input_shape)
    values = torch.linspace(-1, 1, size, dtype=dtype) if floating else torch.zeros(size, dtype=torch.long)
    return values.view(1, *input_shape)


def pack_model(weights: Mapping[str, Tensor], said: Tensor, node: Node, round: int, which: str) -> bytes:
    """The bytes of a model file: a state dict, and how to build and feed the model.

    `said` are the logits of the model on its `probe`: weights that fit are not proof that the model is the same one.
    """
    about = {
        "format": FORMAT,
        "node": node.name,
        "which": which,
        "round": round,
        "factory": node.recipe.factory,
        "arguments": dict(node.recipe.arguments),
        "classes": node.domain.classes,
        "input_shape": node.input_shape,
        "preprocessing": dict(node.domain.preprocessing),
        "floating": node.floating,
        "said": said.flatten().tolist(),
    }
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    # One entry: safetensors writes several in any order, and equal models should be equal files.
    return save_tensors(tensors, metadata={METADATA: json.dumps(about, sort_keys=True)})


def load_model(path: Path, module: nn.Module | None = None) -> Classifier:
    """The model in a file. `module` is needed only if the file does not say how to build one."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the model '{path}': {error}") from error
    if about.get("format") != FORMAT:
        raise ModelError(f"'{path}' is not a model that fedh2l saved")
    classes, input_shape = about["classes"], about["input_shape"]
    if module is None:
        if not about["factory"]:
            raise ModelError(f"'{path}' was trained from a module that has no importable factory; pass model=…")
        if about["factory"].startswith("__main__:"):
            raise ModelError(
                f"'{path}': its class was defined in the script that trained it; move it to a module, or pass model=…"
            )
        try:
            recipe = Recipe(about["factory"], about["arguments"])
            module = recipe.build(len(classes), input_shape, f"'{path}'")
            if not recipe.takes_classes():
                fit_head(module, probe(input_shape, about["floating"], torch.float32), len(classes))
        except FedH2LError as error:
            raise ModelError(f"{error}; if it cannot be built from here, pass model=…") from error
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    module = module.to(dtype).eval()
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"the weights in '{path}' do not fit the model: {error}; pass model=…") from error
    _check_probe(module, about, dtype, path)
    return Classifier(module, classes, input_shape, about["preprocessing"], about).eval()


@torch.no_grad()
def _check_probe(module: nn.Module, about: Mapping[str, Any], dtype: torch.dtype, path: Path) -> None:
    said = module(probe(about["input_shape"], about["floating"], dtype)).flatten()
    if not torch.allclose(said, torch.tensor(about["said"], dtype=dtype), rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"the weights in '{path}' fit, but the model built for them computes something else than the one that was "
            f"trained; if that was given arguments, pass model=… or train with Node(name, factory, domain, model_args)"
        )
