"""A small model file cannot make a program take much memory."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save

from fedh2l.errors import ModelError
from fedh2l.files import METADATA
from fedh2l.models import saved
from fedh2l.models.saved import load_model
from fedh2l.vision import declare_missing_operators

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
SWIN = {"model_name": "swin_tiny_patch4_window7_224", "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 1]}


def write(path, weights, **arguments):
    about = {
        "format": saved.FORMAT, "node": "n", "which": "best", "round": 1, "factory": "timm:create_model",
        "arguments": SWIN | arguments, "classes": ["a", "b"], "input_shape": [3, 224, 224], "preprocessing": {},
        "floating": True, "said": [0.0, 0.0],
    }  # fmt: skip
    path.write_bytes(save(weights, metadata={METADATA: json.dumps(about)}))
    return path


def test_a_model_with_large_buffers_takes_no_memory(tmp_path):
    """Swin's attention masks grow with the image, and are not in the file."""
    declare_missing_operators()
    import timm

    with torch.device("meta"):
        model = timm.create_model(**SWIN, img_size=11200, num_classes=2)
    weights = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match="MB of buffers"):
        load_model(write(tmp_path / "n", weights, img_size=11200))


def test_a_model_with_many_layers_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "MODULES", 500)
    with pytest.raises(ModelError, match="more than 510 submodules"):
        load_model(write(tmp_path / "n", {"x": torch.zeros(1)}, depths=[2, 100_000]))
