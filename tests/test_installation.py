"""What `pip install fedh2l` brings is enough for everything that no extra is for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from conftest import MLPS, TINY

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
PLAIN = {"torch", "numpy", "pydantic", "typer", "rich", "safetensors", "pillow", "tomlkit"}
OPTIONAL = (
    "cryptography", "google.protobuf", "grpc", "grpc_health", "matplotlib", "pandas", "prometheus_client",
    "pyarrow", "ray", "scipy", "sklearn", "timm", "torchvision",
)  # fmt: skip
"""Modules that the tests may import, and a plain installation does not have."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements}


def test_a_plain_installation_is_light():
    assert names(PROJECT["dependencies"]) == PLAIN


def test_the_tests_have_every_extra():
    extras = PROJECT["optional-dependencies"]
    assert all(names(extra) <= names(extras["test"]) for extra in extras.values())


def test_training_needs_no_extra(tmp_path):
    changes = [word for change in (*TINY, *MLPS) for word in ("--set", change)]
    commands = [["run", "--rounds", "2", "--out", "run", *changes], ["evaluate", "run"], ["init"], ["list"]]
    program = (
        f"import sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"from fedh2l.cli import main\n"
        f"for arguments in {commands!r}:\n"
        f"    sys.argv = ['fedh2l', *arguments]\n"
        f"    try:\n"
        f"        main()\n"
        f"    except SystemExit as left:\n"
        f"        assert not left.code, arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/result.json").exists()
