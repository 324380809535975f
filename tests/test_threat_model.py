"""Statements of the threat model that something is prevented name tests, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "threat-model.md"
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def test_every_test_that_it_names_exists():
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    for file, test in named:
        (path,) = Path(__file__).parent.rglob(f"{file}.py")
        assert f"\ndef {test}(" in path.read_text(), f"{file}::{test}"


def test_every_row_of_a_table_of_statements_names_one():
    for table in PAGE.read_text().split("\n\n"):
        head, *rows = table.splitlines()
        if head.endswith("| test |"):
            for row in rows[1:]:
                assert NAMED.search(row.rstrip(" |").rpartition(" | ")[2]), row
