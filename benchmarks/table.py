"""Generate docs/benchmarks.md and the figures of README.md from docs/results: `python benchmarks/table.py --write`.

Without `--write`, print the rows of lines of `make bench`: `make bench | python benchmarks/table.py`. What a benchmark
is about comes from the first sentence of its script. Of lines with the same id the last counts, and a benchmark that
broke has its error in its row.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results import FOLDER, ROOT, recorded
from run import in_order, scripts

UNMEASURED = "not measured at this release"
FIRST_AND_LAST = (slice(2), slice(-5, None))
"""Steps between which a reward rises."""
FIGURES = ("L2", "ENV", "T2", "G4", "G10", "LOOP")
"""Benchmarks whose figures README has."""
BEGIN, END = "<!-- figures: make docs -->\n", "<!-- end of figures -->\n"
PAGE = """\
# Benchmarks

This page is generated (`make docs`) from [results/bench.jsonl](results/bench.jsonl) and
[results/chaos.jsonl](results/chaos.jsonl), where each line has the machine, the commit and the date of its measurement,
the load of the machine meanwhile, and more figures. `make bench ONLY=ID` measures a row again and replaces its line.
Kafka runs as one broker with `acks=all`, so an acknowledged record is in the page cache.

A figure has a goal, and a floor: the same work done bare, in the same run. It is marked *missed* if it misses its goal
or its share of the floor. [results/README.md](results/README.md) has what recipes learn. `make demo`, `make soak` and
`make gpu` print figures of their own, of which no record is kept.

{machines}

## Speed and size

| what | figure | goal or floor in the same run | command |
|---|---|---|---|
{bench}

## Faults

Roles and servers are killed, stopped or cut off again and again. What is on the log afterwards is folded and compared.

| what is struck | kills | found | command |
|---|---|---|---|
{chaos}
"""


def about(script: Path) -> str:
    """Return the first sentence of a script's docstring, without the id."""
    first = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0]
    return " ".join(first.split()).partition(": ")[2].split(". ")[0].rstrip(".")


def row(line: dict[str, Any], script: Path) -> str:
    """Return one row: what, figure, goal or floor, command."""
    start, end = f"| {line['id']} {about(script)} |", f"| `make bench ONLY={line['id']}` |"
    if "value" not in line:
        return f"{start} broke: {line['detail']['error']} | {end}"
    against = [] if line["goal"] is None else [f"goal {number(line['goal'])}"]
    if line["share"] is not None:
        least = "" if line["goal_share"] is None else f" of at least {line['goal_share']}"
        against.append(f"floor {number(line['floor'])}, share {line['share']:.2f}{least}")
    return f"{start} {figure(line)} | {'; '.join(against)} {end}"


def figure(line: Mapping[str, Any]) -> str:
    """Return the value with its unit."""
    return f"{number(line['value'])} {line['unit']}{'' if line['ok'] else ' (missed)'}"


def number(value: float) -> str:
    """Return a number as a person writes it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def struck(line: Mapping[str, Any]) -> str:
    """Return the row of a line of `make chaos`."""
    start, end = f"| {line['id']} |", f"| `make chaos ONLY={line['id'].partition('-')[0]}` |"
    if "kills" not in line:
        return f"{start} | broke: {line['detail']['error']} {end}"
    return f"{start} {line['kills']} | {losses(line)}{'' if line['ok'] else ' (missed)'} {end}"


def losses(line: Mapping[str, Any]) -> str:
    """Return what was lost, trained twice and skipped under kills."""
    same = ", replay identical" if line["identical"] else ", replay differs"
    return f"{line['lost']} lost, {line['twice']} twice, {line['skipped']} skipped{same}"


def page(folder: Path) -> str:
    """Render docs/benchmarks.md from a folder of results."""
    bench, chaos, known = recorded("bench", folder), recorded("chaos", folder), scripts([])
    rows = (
        row(bench[name], script)
        if name in bench
        else f"| {name} {about(script)} | {UNMEASURED} | | `make bench ONLY={name}` |"
        for name, script in known.items()
    )
    strikes = [struck(line) for line in chaos.values()] or [
        f"| all roles and servers | | {UNMEASURED} | `make chaos` |"
    ]
    machines = sorted({line["machine"] for line in (*bench.values(), *chaos.values())})
    measured_on = f"Measured on {'; and on '.join(machines)}." if machines else "Nothing is measured."
    return PAGE.format(machines=measured_on, bench="\n".join(rows), chaos="\n".join(strikes))


def readme_figures(folder: Path) -> str:
    """Render the figures of README.md from a folder of results; what is not measured is left out."""
    rows = [*_learned(folder), *_survived(folder)]
    known, bench = scripts([]), recorded("bench", folder)
    for name in FIGURES:
        if "value" in bench.get(name, {}):
            rows.append(f"| {about(known[name])} | {figure(bench[name])} | `make bench ONLY={name}` |")
    return "\n".join(["| what | figure | command |", "|---|---|---|", *rows, ""])


def _learned(folder: Path) -> Iterator[str]:
    """Yield the row of the rewards in runs.json."""
    runs = json.loads((folder / "runs.json").read_text()) if (folder / "runs.json").exists() else []
    rewards = [run["rewards"] for run in runs if (run["recipe"], run["mode"]) == ("calc", "sync")]
    if rewards:
        first, last = (
            sum(sum(each[cut]) / len(each[cut]) for each in rewards) / len(rewards) for cut in FIRST_AND_LAST
        )
        what = f"mean reward of `calc`, first two to last five of {len(rewards[0])} steps, {len(rewards)} seeds"
        yield f"| {what} | {first:.3f} to {last:.3f} | `make learning ONLY=calc:sync` |"


def _survived(folder: Path) -> Iterator[str]:
    """Yield the row of all kills together."""
    lines = [line for line in recorded("chaos", folder).values() if "kills" in line]
    if lines:
        total = {name: sum(line[name] for line in lines) for name in ("kills", "lost", "twice", "skipped")}
        identical = all(line["identical"] for line in lines)
        found = losses(total | {"identical": identical})
        yield f"| {total['kills']} kills of roles and servers | {found} | `make chaos` |"


def with_figures(readme: str, figures: str) -> str:
    """Return README.md with other figures between its marks."""
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{figures}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> None:
    """Write the pages, or print the rows of lines in order of id."""
    if arguments == ["--write"]:
        (ROOT / "docs/benchmarks.md").write_text(page(FOLDER))
        readme = ROOT / "README.md"
        readme.write_text(with_figures(readme.read_text(), readme_figures(FOLDER)))
        return
    lines = Path(arguments[0]).read_text() if arguments else sys.stdin.read()
    found = {line["id"]: line for line in map(json.loads, lines.splitlines())}
    known = scripts([])
    for name in sorted(found, key=in_order):
        print(row(found[name], known[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
