"""README's rows from the lines of `make bench`: `make bench | tee lines.jsonl; python benchmarks/table.py lines.jsonl`.

What a benchmark is about comes from the first sentence of its script. The last line of an id counts; one that broke is
said to have broken.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from run import in_order, scripts


def about(script: Path) -> str:
    """The first sentence of its docstring, without the id."""
    first = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0]
    return " ".join(first.split()).partition(": ")[2].split(". ")[0].rstrip(".")


def row(line: dict[str, Any], script: Path) -> str:
    """One row: what, figure, goal or floor, command."""
    start, end = f"| {line['id']} {about(script)} |", f"| `make bench ONLY={line['id']}` |"
    if "value" not in line:
        return f"{start} broke: {line['detail']['error']} | {end}"
    against = [] if line["goal"] is None else [f"goal {number(line['goal'])}"]
    if line["share"] is not None:
        least = "" if line["goal_share"] is None else f" of at least {line['goal_share']}"
        against.append(f"floor {number(line['floor'])}, share {line['share']:.2f}{least}")
    missed = "" if line["ok"] else " (missed)"
    return f"{start} {number(line['value'])} {line['unit']}{missed} | {'; '.join(against)} {end}"


def number(value: float) -> str:
    """As a person writes it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(lines: str) -> None:
    """Print the rows in order of id."""
    found = {line["id"]: line for line in map(json.loads, lines.splitlines())}
    known = scripts([])
    for name in sorted(found, key=in_order):
        print(row(found[name], known[name]))


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text() if sys.argv[1:] else sys.stdin.read())
