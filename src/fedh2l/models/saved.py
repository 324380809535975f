"""A trained model in one safetensors file. Loading it needs no other file."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from fedh2l.data.images import read_image
from fedh2l.data.pixels import Pixels
from fedh2l.errors import ConfigError, DataError, FedH2LError, ModelError, shown
from fedh2l.files import METADATA, UnreadableError, read_array, read_tensors
from fedh2l.models.factory import Recipe
from fedh2l.models.pretrained import fit_head
from fedh2l.models.registry import MODELS
from fedh2l.plugins import is_known, only, trust
from fedh2l.section import Section

FORMAT = "fedh2l-model-1"
LARGEST_SIDE, LARGEST_INPUT = 2**20, 2**28
"""Limits for the input shape in a file: the longest side, and the number of values."""

MODULES, BUFFERS = 10_000, 64 * 2**20
"""Largest model that is built from a file: submodules, and bytes of buffers. Ten submodules for each tensor of the
file, and four bytes for each byte of the file, are allowed besides."""


class Prediction(NamedTuple):
    """The predicted class of one input and its posterior."""

    label: str
    probability: float


class Classifier(nn.Module):
    """A trained model with its classes and its preprocessing."""

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
        """Origin of the model: node, round, which (best or last), factory and its arguments."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits `(n, classes)` of preprocessed inputs `(n, …)`, or of images as bytes."""
        if inputs.dtype == torch.uint8 and len(self.input_shape) == 3 and self.about["floating"]:
            inputs = Pixels.of(self.preprocessing)(inputs, next(self.parameters()).dtype)
        logits: Tensor = self.module(inputs)
        return logits

    @torch.no_grad()
    def predict(self, sources: Sequence[str | Path | Tensor | NDArray[Any]]) -> list[Prediction]:
        """Return the class and its posterior for each input: an image file, .npy file, array or tensor."""
        parameter = next(self.parameters())
        self.eval()
        predictions = []
        for source in sources:
            prepared = self.prepare(source)
            inputs = prepared.to(parameter.device, parameter.dtype if prepared.is_floating_point() else None)
            try:
                posterior = torch.softmax(self(inputs.unsqueeze(0)), -1).squeeze(0)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:  # wrong type, or index out of range
                raise DataError(f"{source}: the model fails on this input: {shown(error)}") from error
            best = int(posterior.argmax())
            predictions.append(Prediction(self.classes[best], float(posterior[best])))
        return predictions

    def prepare(self, source: str | Path | Tensor | NDArray[Any]) -> Tensor:
        """Convert one input for the model. Arrays and .npy files must be preprocessed already."""
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
                return torch.from_numpy(np.array(read_array(path)))
            except (ValueError, TypeError, OSError) as error:
                raise DataError(f"'{path}' is not an array of numbers: {error}") from error
        if self.preprocessing.get("kind") != "image":
            raise DataError(f"'{path}': this model's data is not images; give a .npy file of shape {self.input_shape}")
        try:
            width, height = map(int, self.preprocessing["size"])
            if (height, width) != self.input_shape[-2:]:
                raise ValueError(f"size is {width} x {height}, but the model takes {self.input_shape}")
            return read_image(path, self.preprocessing)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DataError(
                f"'{path}': the preprocessing of this model does not say how to read images ({shown(error)})"
            ) from error


def probe(input_shape: Sequence[int], floating: bool, dtype: torch.dtype) -> Tensor:
    """Return one fixed input `(1, …)` for this shape. It contains no data of a node."""
    size = math.prod(input_shape)
    values = torch.linspace(-1, 1, size, dtype=dtype) if floating else torch.zeros(size, dtype=torch.long)
    return values.view(1, *input_shape)


def pack_model(weights: Mapping[str, Tensor], said: Tensor, description: Mapping[str, Any]) -> bytes:
    """Return the bytes of a model file: a state dict and the description of the model (`Node.description`).

    `said` are the logits of the model on its `probe`. They show whether a rebuilt model is the same one, since weights
    can fit another model.
    """
    about = {"format": FORMAT, **description, "said": said.flatten().tolist()}
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    # One entry: safetensors writes several in random order, but equal models should give equal files.
    return save_tensors(tensors, metadata={METADATA: json.dumps(about, sort_keys=True)})


class _About(Section):
    """The metadata of a model file."""

    format: Literal["fedh2l-model-1"]
    node: str
    which: str
    round: int
    factory: str
    arguments: dict[str, Any]
    classes: list[str] = Field(min_length=1)
    input_shape: list[int] = Field(min_length=1, max_length=8)
    preprocessing: dict[str, Any]
    floating: bool
    said: list[float]


def load_model(path: Path, module: nn.Module | None = None, allow: Sequence[str] = ()) -> Classifier:
    """Load a model from a file. It is built by the constructor in the file, or loaded into `module`.

    Only known constructors and those of packages in `allow` are called.
    """
    try:
        read, tensors = read_tensors(path)
    except UnreadableError as error:
        raise ModelError(f"cannot read the model '{path}': {shown(error)}") from error
    if read.get("format") != FORMAT:
        raise ModelError(f"'{path}' is not a model that fedh2l saved")
    about = _checked(read, path)
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    try:
        if module is None:
            with only([*trust().packages, *allow]):
                module = _build(about, tensors, path)
        module = module.to(dtype).eval()
        module.load_state_dict(tensors)
        _check_probe(module, about, dtype, path)
    except FedH2LError:
        raise
    except Exception as error:  # a modified file can make a model fail in any way
        raise ModelError(f"the weights in '{path}' do not fit the model: {shown(error)}; pass model=…") from error
    return Classifier(module, about.classes, about.input_shape, about.preprocessing, about.model_dump()).eval()


def _checked(read: Mapping[str, Any], path: Path) -> _About:
    try:
        about = _About.read(dict(read), "its metadata")
        Pixels.of(about.preprocessing)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"'{path}' is damaged: {shown(error)}") from None
    if not all(0 < side <= LARGEST_SIDE for side in about.input_shape) or math.prod(about.input_shape) > LARGEST_INPUT:
        raise ModelError(f"'{path}' is damaged: its input_shape is {shown(about.input_shape, 80)}")
    return about


def _build(about: _About, tensors: Mapping[str, Tensor], path: Path) -> nn.Module:
    """Build the module named in a file, after checking that it is not larger than the file's weights."""
    if not about.factory:
        raise ModelError(f"'{path}' was trained from a module that has no importable factory; pass model=…")
    if about.factory.startswith("__main__:") and not trust().allows(about.factory):
        raise ModelError(
            f"'{path}': its class was defined in the script that trained it. Move it to a module, pass model=…, or, in "
            "that script, allow=['__main__']"
        )
    recipe = Recipe(about.factory, about.arguments)
    try:
        if is_known(about.factory) or about.factory in MODELS:
            with (
                suppress(NotImplementedError, RuntimeError),  # may not support meta
                torch.device("meta"),
                _few_modules(MODULES + 10 * len(tensors), path),
            ):
                _check_sizes(_constructed(recipe, about, path), tensors, path)
        return _constructed(recipe, about, path)
    except FedH2LError as error:
        raise ModelError(f"{error} Or pass model=…, a module to load the weights into.") from error


def _constructed(recipe: Recipe, about: _About, path: Path) -> nn.Module:
    module = recipe.build(len(about.classes), about.input_shape, f"'{path}'")
    if not recipe.takes_classes():
        example = probe(about.input_shape, about.floating, torch.float32)
        fit_head(module, example.to(next(module.parameters()).device), len(about.classes))
    return module


def _check_sizes(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise an error for a model that is larger than its weights, before it takes memory."""
    for name, tensor in module.state_dict().items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            raise ModelError(f"the weights in '{path}' do not fit the model: {shown(name)} differs")
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())  # also those of no file
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if buffers > BUFFERS + 4 * weights:
        raise ModelError(
            f"'{path}': its model has {buffers / 1e6:,.0f} MB of buffers, and {weights / 1e6:,.0f} of weights"
        )


@contextmanager
def _few_modules(most: int, path: Path) -> Iterator[None]:
    """Raise an error for a model with more submodules, while it is built."""
    left, builder = [most], threading.get_ident()

    def count(*_: object) -> None:
        left[0] -= threading.get_ident() == builder
        if left[0] < 0:
            raise ModelError(f"'{path}': its model has more than {most:,} submodules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def _check_probe(module: nn.Module, about: _About, dtype: torch.dtype, path: Path) -> None:
    said = module(probe(about.input_shape, about.floating, dtype)).flatten()
    if not torch.allclose(said, torch.tensor(about.said, dtype=dtype), rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"the weights in '{path}' fit, but the rebuilt model gives other outputs than the trained one. If the "
            f"trained model had arguments, pass model=… or train with Node(name, factory, domain, model_args)"
        )
