"""docs/benchmarks.md and the figures of README are what docs/results records, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # its scripts import each other by their names

import results
import table

ROOT = Path(__file__).parents[3]
LINE = {
    "id": "G4", "value": 7047.0, "unit": "turns/s", "goal": 1500, "ok": False, "floor": 11410.0, "share": 0.6176,
    "goal_share": 0.65, "load": 1.0, "detail": {},
}  # fmt: skip
STRUCK = {"id": "brokers-wipe", "kills": 20, "lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}


def test_the_page_and_readme_are_generated_from_the_records() -> None:
    assert (ROOT / "docs/benchmarks.md").read_text() == table.page(results.FOLDER), "run `make docs`"
    readme = (ROOT / "README.md").read_text()
    assert readme == table.with_figures(readme, table.readme_figures(results.FOLDER)), "run `make docs`"
    assert "make bench ONLY=G" not in readme.partition(table.END)[2], "README has figures between its marks alone"


def test_a_record_replaces_the_one_before_it_and_its_row_follows(tmp_path: Path) -> None:
    assert f"| {table.UNMEASURED} | | `make bench ONLY=G4` |" in table.page(tmp_path)
    assert "G4" not in table.readme_figures(tmp_path)
    for value in (1.0, LINE["value"]):
        results.record("bench", LINE | {"value": value}, tmp_path)
    results.record("chaos", STRUCK, tmp_path)
    (line,) = map(json.loads, (tmp_path / "bench.jsonl").read_text().splitlines())
    assert line == LINE | results.provenance()
    assert set(results.provenance()) == {"machine", "commit", "date"}
    assert (
        "| 7,047 turns/s (missed) | goal 1,500; floor 11,410, share 0.62 of at least 0.65 | `make bench ONLY=G4` |"
    ) in table.page(tmp_path)
    assert "| brokers-wipe | 20 | 0 lost, 0 twice, 0 skipped, replay identical | `make chaos ONLY=brokers` |" in (
        table.page(tmp_path)
    )
    assert "| 7,047 turns/s (missed) | `make bench ONLY=G4` |" in table.readme_figures(tmp_path)
    assert "| 20 kills of roles and servers | 0 lost, 0 twice, 0 skipped" in table.readme_figures(tmp_path)
