"""Fill the tables of the documentation from `results/*.json`.

    python benchmarks/results.py            # write them
    python benchmarks/results.py --check    # fail if a page differs from the JSON files

A page marks the places. `<!-- result: NAME -->` takes the title, the conclusion, the table and the setting of
`results/NAME.json`. `<!-- table: NAME -->` takes the table alone. Both end at `<!-- end -->`. On such a page, a figure
with ± in the text must be in a JSON file too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAIN = "docs/results.md"
"""The page that has every result."""
SUMMARY = "readme"
"""The result in the README."""
BLOCK = re.compile(r"<!-- (result|table): ([a-z0-9-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
FIGURE = re.compile(r"\d+\.\d+ ± \d+\.\d+")
Result = dict[str, Any]


def load(root: Path) -> dict[str, Result]:
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((root / "results").glob("*.json"))}
    for name, result in found.items():
        for row in result["rows"]:
            if len(row) != len(result["columns"]):
                raise SystemExit(
                    f"results/{name}.json: {len(result['columns'])} columns, but a row has {len(row)}: {row}"
                )
    return found


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def block(result: Result) -> str:
    """Return a result in the format of the results page."""
    setting = {name.replace("_", " "): text for name, text in result["setting"].items() if name != "uncertainty"}
    setting["command"] = f"`{setting['command']}`" if "fedh2l" in setting["command"] else setting["command"]
    rows = [[name, text] for name, text in setting.items()]
    body = table(result["columns"], result["rows"])
    if result.get("folded"):
        body = f"<details>\n<summary>Table</summary>\n\n{body}\n</details>\n"
    return (
        f"### {result['title']}\n\n{result['conclusion']}\n\n{body}\n{result['setting']['uncertainty']}\n\n"
        f"<details>\n<summary>Setting</summary>\n\n{table(['', ''], rows)}\n</details>\n"
    )


def fill(text: str, results: dict[str, Result], page: str) -> str:
    """Return the page with every marked place filled."""

    def filled(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        if name not in results:
            raise SystemExit(f"{page}: there is no results/{name}.json")
        result = results[name]
        body = block(result) if kind == "result" else table(result["columns"], result["rows"])
        return f"<!-- {kind}: {name} -->\n{body}<!-- end -->"

    return BLOCK.sub(filled, text)


def missing(root: Path, results: dict[str, Result]) -> list[str]:
    """Return the results that the results page lacks, and the rows of the summary that the README lacks."""
    shown = {match[2] for match in BLOCK.finditer((root / MAIN).read_text("utf-8"))}
    problems = [f"{MAIN} does not show results/{name}.json" for name in sorted(set(results) - shown)]
    summary = results[SUMMARY]
    wanted = table(summary["columns"], summary["rows"]).splitlines()[2:]
    there = {_plain(line) for line in (root / "README.md").read_text("utf-8").splitlines()}
    return problems + [
        f"README.md lacks a row of results/{SUMMARY}.json: {r}" for r in wanted if _plain(r) not in there
    ]


def unknown(text: str, results: dict[str, Result], page: str) -> list[str]:
    """Return the figures with ± on a page with marked places that no result has, ignoring their sign."""
    measured = {
        figure for result in results.values() for row in result["rows"] for figure in FIGURE.findall(" ".join(row))
    }
    typed = FIGURE.findall(text) if BLOCK.search(text) else []
    return [f"{page}: no file of results/ has {figure}" for figure in typed if figure not in measured]


def _plain(line: str) -> str:
    return re.sub(r"[*\s]", "", line)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Change nothing, and fail if a page would change.")
    options = parser.parse_args(arguments)
    results, problems = load(root), []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        page = str(path.relative_to(root))
        text = path.read_text("utf-8")
        filled = fill(text, results, page)
        problems += unknown(filled, results, page)
        if filled != text and options.check:
            problems.append(f"{page} differs from results/. Run python benchmarks/results.py")
        elif filled != text:
            path.write_text(filled, "utf-8")
    problems += missing(root, results)
    for problem in problems:
        print(problem, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
