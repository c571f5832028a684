"""One module decides when a reader has read up to an end: nobody else compares positions with offsets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins", "src/turnlog/verbs")
HOME = ("infra/history.py", "infra/kafka/")
ALLOWED = {
    "consumers/index/fate.py": "seeks from one offset to the next, and fails at the first that holds no record",
    "consumers/replay/batches.py": "seeks back to samples that left its cache",
}
"""File -> why it compares the position of a reader itself."""


def compared(path: Path) -> Iterator[int]:
    """Return the lines that compare `position(...)` of something, as a loop that reads up to an end does."""
    for node in ast.walk(ast.parse(path.read_text())):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        calls = [side.func for side in sides if isinstance(side, ast.Call)]
        if any(isinstance(call, ast.Attribute) and call.attr == "position" for call in calls):
            yield node.lineno


def test_only_one_module_decides_when_a_reader_has_caught_up() -> None:
    """Use `infra.history`. A file that leaves the list stays out of it."""
    paths = {str(path.relative_to(ROOT)): path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found = {name for name, path in paths.items() if not name.startswith(HOME) and any(compared(path))}
    assert found == set(ALLOWED)
