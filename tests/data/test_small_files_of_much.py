"""Small files of others that hold very much are refused, or read with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedh2l.data import images
from fedh2l.data.datasets import records
from fedh2l.data.images import decode
from fedh2l.errors import DataError

READ = """
import resource, sys
from pathlib import Path
from fedh2l.data.images import decode
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[1])
decode(path, path.read_bytes(), "L", (8, 8), "stretch")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def memory(path: Path) -> int:
    """MB that decoding takes."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("mode", ["I;16", "1"])
def test_an_image_of_very_many_pixels_is_refused(tmp_path, mode):
    path = tmp_path / "x.png"
    Image.new(mode, (8000, 8000)).save(path)
    with pytest.raises(DataError, match="8000 x 8000 pixels; at most 50,000,000"):
        decode(path, path.read_bytes(), "L", (8, 8), "stretch")


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in kB")
@pytest.mark.parametrize(("mode", "how"), [("I;16", {}), ("1", {"transparency": 1}), ("RGBA", {})])
def test_a_large_image_takes_little_memory(tmp_path, mode, how):
    path = tmp_path / "x.png"
    Image.new(mode, (7000, 7000)).save(path, **how)
    assert memory(path) < (350 if mode != "RGBA" else 500)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
def test_transparency_is_removed_in_bands(tmp_path, monkeypatch, mode, kind):
    drawn = np.random.default_rng(0).integers(0, 256, (40, 30, 4), dtype=np.uint8)
    image = Image.fromarray(drawn, "RGBA").convert(kind)
    if kind == "P":
        image.info["transparency"] = 3
    whole = images._on_white(image, mode)
    monkeypatch.setattr(images, "BAND", 7)
    assert images._on_white(image, mode).tobytes() == whole.tobytes()
    colour = image.convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour).convert(mode)
    assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("cells", "why"), [(["x"] * 200_000, "records of"), (["x" * 10_000] * 90_000, "bytes when it is unpacked")]
)
def test_a_parquet_file_of_very_much_is_refused(tmp_path, monkeypatch, cells, why):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(records, "MOST_CELLS", 100_000)
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"a": arrow.array(cells).dictionary_encode()}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=why):
        records._parquet(path)
