"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "make_reference.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "commands.md"])
def test_a_reference_page_is_up_to_date(script, name):
    written = (script.FOLDER / name).read_text(encoding="utf-8")
    assert written == script.PAGES[name](), "run: python docs/make_reference.py"


def test_every_key_and_every_option_is_described(script):
    for page in script.PAGES.values():
        rows = [line for line in page().splitlines() if line.startswith("| `")]
        assert rows
        assert [row for row in rows if row.endswith("|  |")] == []
