"""What a test changes about turnlog it hands in: nothing of a module, a class or a table of ours is replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).parents[3]
REPLACES = {"setattr", "delattr", "__setattr__", "__delattr__"}
EXCEPTIONS = {
    "tests/unit/consumers/test_earlier_releases.py": "FOLD_SECTIONS of a release to come, as every role reads them",
    "tests/unit/infra/test_clocks.py": "time.time, the machine's clock: what jumps is what nobody of ours may ask",
    "tests/unit/infra/test_probe.py": "socket.AF_INET6, by a family that this kernel lacks, as if it had no IPv6",
    "tests/unit/infra/test_runs.py": "FOLD_SECTIONS, as a role that starts compares them",
}
"""File -> what it replaces, and for want of which seam."""


def replaced(source: str) -> Iterator[tuple[int, str]]:
    """(line, code) of each place where an attribute of whatever, or an item of what `turnlog` has, is replaced."""
    tree = ast.parse(source)
    ours = set(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found = "mock" in f"{getattr(node, 'module', '')}.{'.'.join(names)}".split(".")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            item = name in {"setitem", "delitem"} and bool(node.args) and bool(ours & set(named(node.args[0])))
            found = name in REPLACES or item
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            found = any(of_ours(target, ours) for target in targets(node))
        else:
            continue
        if found:
            yield node.lineno, ast.unparse(node)


def imported(tree: ast.Module) -> Iterator[str]:
    """Names that stand for modules of turnlog, or for what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "turnlog":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.asname or "turnlog" for alias in node.names if alias.name.partition(".")[0] == "turnlog")


def targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> Iterator[ast.expr]:
    whole = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    for target in whole:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def of_ours(target: ast.expr, ours: set[str]) -> bool:
    return isinstance(target, ast.Attribute | ast.Subscript) and bool(ours & set(named(target.value)))


def named(expression: ast.expr) -> Iterator[str]:
    """Names that an expression begins with: `a` of `a.b`, of `a["b"].c`, of `type(a).b`."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
    if isinstance(expression, ast.Name):
        yield expression.id
    elif isinstance(expression, ast.Call) and getattr(expression.func, "id", "") == "type":
        yield from (name for argument in expression.args for name in named(argument))


def test_no_test_replaces_what_it_could_hand_in() -> None:
    """Where there is no seam to hand it in by, make one: a parameter with a default, a fake of a protocol."""
    found = {
        str(path.relative_to(ROOT)): [f"{line}: {code}" for line, code in replaced(path.read_text())]
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    faults = [f"{name}:{each}" for name, places in found.items() if name not in EXCEPTIONS for each in places]
    assert not faults
    assert [name for name in EXCEPTIONS if not found.get(name)] == [], "it replaces nothing any more"


@each(
    "line",
    [
        'monkeypatch.setattr(worker, "DRAIN_S", 0.1)',
        'monkeypatch.setattr("turnlog.sandbox_workers.worker.DRAIN_S", 0.1)',
        'patch.delattr(worker, "DRAIN_S")',
        'setattr(worker, "DRAIN_S", 0.1)',
        "worker.DRAIN_S = 0.1",
        "other.x, worker.Worker.run = 1, None",
        "del worker.DRAIN_S",
        "type(worker.THE_ONE).run = None",
        'worker.TABLE["a"] = 1',
        'monkeypatch.setitem(worker.TABLE, "a", 1)',
        "from unittest.mock import patch",
        "from unittest import mock",
    ],
)
def test_a_replacement_is_seen_however_it_is_written(line: str) -> None:
    assert len(list(replaced(f"from turnlog.sandbox_workers import worker\n{line}"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setenv("A", "b")',
        'monkeypatch.setitem(sys.modules, "e2b", None)',
        "made.settings = worker.X",
        "x = 1",
    ],
)
def test_what_is_no_replacement_of_ours_is_let_be(line: str) -> None:
    assert list(replaced(f"from turnlog.sandbox_workers import worker\n{line}")) == []
