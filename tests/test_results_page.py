"""The tables of the documentation are those of `results/`."""

from __future__ import annotations

import shutil

import pytest
from results import ROOT, main


@pytest.fixture
def copy(tmp_path):
    for name in ("results", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_pages_have_the_numbers_of_the_results():
    assert main(["--check"]) == 0


def test_a_number_typed_into_a_page_is_found(copy, capsys):
    page = copy / "docs/results.md"
    page.write_text(page.read_text("utf-8").replace("90.17", "99.17"), "utf-8")
    assert main(["--check"], copy) == 1
    assert "docs/results.md differs" in capsys.readouterr().err
    assert main([], copy) == 0
    assert page.read_text("utf-8") == (ROOT / "docs/results.md").read_text("utf-8")


def test_a_number_changed_in_the_readme_is_found(copy, capsys):
    page = copy / "README.md"
    page.write_text(page.read_text("utf-8").replace("88.5", "98.5"), "utf-8")
    assert main(["--check"], copy) == 1
    assert "README.md" in capsys.readouterr().err
