"""A named pipe, a socket or a device among received files is refused: reading it would never end."""

from __future__ import annotations

import os
import shutil
import socket

import numpy as np
import pytest

import fedh2l
from conftest import blobs
from fedh2l.data.datasets import records
from fedh2l.data.images import file_content
from fedh2l.errors import DataError, FedH2LError, RunError
from fedh2l.files import UnreadableError, read_array, read_tensors, read_text

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended") / "run"
    fedh2l.train(nodes(), rounds=2, out=out)
    return out


def nodes() -> list[fedh2l.Node]:
    return [fedh2l.Node(name, "mlp", blobs(name), {"hidden": [4]}) for name in "ab"]


def odd(path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["models/a-best.safetensors", "result.json", "metrics.jsonl", "checkpoints", "x"])
def test_a_run_with_odd_files_is_not_used(ended, tmp_path, invoke, name, kind):
    out = tmp_path / "run"
    shutil.copytree(ended, out)
    if (out / name).is_dir():
        shutil.rmtree(out / name)
    (out / name).unlink(missing_ok=True)
    odd(out / name, kind)
    np.save(tmp_path / "x.npy", np.zeros(6, np.float32))
    for use in (lambda: fedh2l.load(out, "a"), lambda: fedh2l.train(nodes(), rounds=4, out=out, resume=True)):
        with pytest.raises(RunError, match="is neither a file nor a folder"):
            use()
    for command in (["predict", out, tmp_path / "x.npy", "--node", "a"], ["evaluate", out], ["run", "--resume", out]):
        code, _, err = invoke(*command)
        assert code == 2
        assert "is neither a file nor a folder" in " ".join(err.split())


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_odd_file_is_not_read(tmp_path, kind):
    path = tmp_path / "x"
    odd(path, kind)
    for read in (read_text, read_array, read_tensors):
        with pytest.raises(UnreadableError, match="not a regular file"):
            read(path)
    for read in (file_content, lambda path: records._csv(path, [])):
        with pytest.raises(DataError, match="not a regular file"):
            read(path)
    pytest.importorskip("cryptography")
    from fedh2l.peer.audit.log import lines_of
    from fedh2l.peer.pki import certificates

    for read in (certificates.read, lambda path: list(lines_of(path))):
        with pytest.raises(FedH2LError, match="not a regular file"):
            read(path)
