from __future__ import annotations

import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from fedh2l.data.datasets.mnist import embedded_digits
from fedh2l.data.datasets.rotated_mnist import RotatedMNIST, rotate_clockwise
from fedh2l.errors import DataError


def arrow() -> torch.Tensor:
    """An arrow that points up and is not symmetric, 28 × 28."""
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 4:24, 13:15] = 1
    image[0, 0, 4:8, 9:19] = 0.5
    image[0, 0, 20:22, 15:20] = 0.25
    return image


def test_the_digits_in_the_package_are_mnist():
    """Their bytes and their order: every pinned number depends on them."""
    images, labels = embedded_digits()
    assert (images.dtype, labels.dtype, images.shape) == (np.uint8, np.int64, (5000, 28, 28))
    assert hashlib.sha256(images.tobytes()).hexdigest() == (
        "2913c6b6527114b7307e1086335a7665e3f94c74aba3d67525e6f116bf5ae20f"
    )
    assert labels.tolist() == sorted(list(range(10)) * 500)


def test_a_quarter_turn_is_clockwise():
    turned = rotate_clockwise(arrow(), 90)
    torch.testing.assert_close(turned, torch.rot90(arrow(), -1, (2, 3)), atol=1e-5, rtol=0)
    assert turned[0, 0, 14, 20:24].sum() > turned[0, 0, 14, 0:4].sum()  # what was up is now to the right


@pytest.mark.parametrize("degrees", [20, 40, 60, -35, 180])
def test_agrees_with_pillow(degrees):
    picture = arrow()[0, 0].numpy()
    ours = rotate_clockwise(arrow(), degrees)[0, 0].numpy()
    # Pillow turns counter-clockwise, and keeps 8 bits a pixel.
    pillow = Image.fromarray((picture * 255).astype(np.uint8)).rotate(-degrees, Image.Resampling.BILINEAR)
    assert np.abs(ours - np.asarray(pillow) / 255).mean() < 0.01
    wrong = Image.fromarray((picture * 255).astype(np.uint8)).rotate(degrees + 3, Image.Resampling.BILINEAR)
    assert np.abs(ours - np.asarray(wrong) / 255).mean() > 0.01


def test_corners_are_black():
    white = torch.ones(1, 1, 28, 28)
    turned = rotate_clockwise(white, 45)[0, 0]
    assert turned[0, 0] == 0
    assert turned[14, 14] == 1


@pytest.mark.parametrize(("alpha", "sizes"), [(0.05, (700, 50)), (0.10, (650, 100)), (0.15, (600, 150))])
def test_sizes_of_the_paper(alpha, sizes):
    for domain in RotatedMNIST(alpha=alpha).domains(seed=0):
        assert (len(domain.private), len(domain.public)) == sizes
        assert (len(domain.validation), len(domain.test)) == (100, 150)
        for part in (domain.private, domain.public, domain.validation, domain.test):
            assert torch.bincount(part.labels, minlength=10).unique().numel() == 1  # stratified


def digits_of(domain, angle):
    """Which base digits each split holds, recognised after turning them back."""
    return {
        split: {
            rotate_clockwise(image[None], -angle)[0, 0, 8:20, 8:20].mul(4).round().numpy().tobytes()
            for image in getattr(domain, split).inputs
        }
        for split in ("private", "public", "validation", "test")
    }


def test_splits_are_disjoint_and_aligned_ones_alike():
    options = {"per_class": 20, "angles": [0.0, 90.0]}
    aligned = RotatedMNIST(splits="aligned", **options).domains(0)
    independent = RotatedMNIST(splits="independent", **options).domains(0)
    for domains in (aligned, independent):
        for domain, angle in zip(domains, (0, 90), strict=True):
            parts = list(digits_of(domain, angle).values())
            assert sum(map(len, parts)) == len(set().union(*parts)) == 200
    upright, turned = (digits_of(d, a) for d, a in zip(aligned, (0, 90), strict=True))
    assert upright == turned
    upright, turned = (digits_of(d, a) for d, a in zip(independent, (0, 90), strict=True))
    assert upright["test"] & turned["private"]


def test_data_follow_the_seed():
    a, b, c = (RotatedMNIST(per_class=20).domains(seed)[1] for seed in (0, 0, 1))
    assert torch.equal(a.private.inputs, b.private.inputs)
    assert not torch.equal(a.private.inputs, c.private.inputs)


def test_the_digits_follow_the_seed():
    def digits(seed):
        domain = RotatedMNIST(per_class=20).domains(seed)[0]
        parts = (domain.private, domain.public, domain.validation, domain.test)
        return {image.numpy().tobytes() for part in parts for image in part.inputs}

    zero, one = digits(0), digits(1)
    assert len(zero) == len(one) == 200
    assert len(zero & one) < 50  # 20 of 500 are drawn, so a few coincide


def test_any_angles_have_names():
    assert RotatedMNIST(angles=[0, 22.5, -30]).domain_names(0) == ["M0", "M22.5", "M-30"]


def write_idx(path, array, packed):
    data = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [True, False])
def test_full_mnist_from_idx_files(tmp_path, packed):
    images, labels = embedded_digits()
    end = ".gz" if packed else ""
    write_idx(tmp_path / f"train-images-idx3-ubyte{end}", images[::2], packed)
    write_idx(tmp_path / f"train-labels-idx1-ubyte{end}", labels[::2], packed)
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{end}", images[1::2], packed)
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{end}", labels[1::2], packed)
    domain = RotatedMNIST(per_class=400, root=str(tmp_path)).domains(0)[0]
    assert len(domain.test) == 600
    with pytest.raises(DataError, match="only 500"):
        RotatedMNIST(per_class=501, root=str(tmp_path)).domains(0)


def test_bad_idx_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        RotatedMNIST(root=str(tmp_path / "none")).domains(0)
    with pytest.raises(DataError, match="no pair"):
        RotatedMNIST(root=str(tmp_path)).domains(0)
    images, labels = embedded_digits()
    write_idx(tmp_path / "train-images-idx3-ubyte", images[:10], packed=False)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels[:10], packed=False)
    whole = (tmp_path / "train-images-idx3-ubyte").read_bytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(whole[:-5])
    with pytest.raises(DataError, match="cut short"):
        RotatedMNIST(root=str(tmp_path)).domains(0)


@pytest.mark.parametrize("splits", ["aligned", "independent"])
def test_digits_that_are_in_no_domain_can_be_tested_on(splits):
    usual, other = (RotatedMNIST(splits=splits, tests=tests).domains(seed=3) for tests in ("split", "rest"))
    images, labels = embedded_digits()
    for before, domain in zip(usual, other, strict=True):
        for part in ("private", "public", "validation"):
            assert torch.equal(getattr(domain, part).inputs, getattr(before, part).inputs)
        assert len(domain.test) == len(labels) - 1000
    upright = other[0]  # not turned: its digits can be looked up
    parts = [getattr(before, part) for before in usual[:1] for part in ("private", "public", "validation", "test")]
    found = {tuple((image * 255).round().int().flatten().tolist()) for part in parts for image in part.inputs}
    tested = {tuple((image * 255).round().int().flatten().tolist()) for image in upright.test.inputs}
    everything = {tuple(image.flatten().tolist()) for image in images.astype(int)}
    assert tested | found == everything
    assert len(tested & found) <= 5000 - len(everything)  # nothing but digits that are there twice
    assert torch.equal(other[2].test.inputs, rotate_clockwise(upright.test.inputs, 40))
    with pytest.raises(DataError, match=r"data\.tests = 'rest', but data\.per_class = 500"):
        RotatedMNIST(tests="rest", per_class=500).domains(seed=3)
