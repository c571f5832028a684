"""The house keeps its own rules."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = ("schemas", "producers", "processors", "consumers", "sandbox_workers", "trainer", "infra")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
LONGEST = 700
"""Lines of a module: up to about 500 where they hide one idea."""
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "impl"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "src/turnlog" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_its_bare_name(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"import turnlog.{room}" in done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_has_an_end_and_says_what_it_is(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= LONGEST
    assert ast.get_docstring(ast.parse(source))
    assert path.stem not in BANNED_NAMES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_and_classes_say_what_they_promise(path: Path) -> None:
    """A property need not, nor a method that a protocol of ours has said it for."""
    if "engine_shim" in path.parts:
        return
    undocumented = []
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node) if isinstance(node, ast.Module | ast.ClassDef) else ():
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            private_class = isinstance(node, ast.ClassDef) and node.name.startswith("_")
            said = isinstance(node, ast.ClassDef) and (child.name in promised() or is_property(child))
            if not child.name.startswith("_") and not private_class and not said and not ast.get_docstring(child):
                undocumented.append(f"{child.name}:{child.lineno}")
    assert not undocumented


@functools.cache
def promised() -> set[str]:
    """Methods that protocols of ours have documented."""
    classes = [
        node for path in MODULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    return {
        child.name
        for node in classes
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(child)
    }


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) in {"property", "functools.cached_property"} for decorator in node.decorator_list)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_swallowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and len(node.body) == 1:
            broad = ast.unparse(node.type) in {"Exception", "BaseException"}
            assert not (broad and isinstance(node.body[0], ast.Pass | ast.Continue)), f"line {node.lineno}"


def test_no_module_has_a_twin() -> None:
    bare = {name for name, module in sys.modules.items() if name in ROOMS and getattr(module, "__file__", None)}
    assert not bare


def test_the_repository_names_no_registry_host_and_no_machine(repository: list[Path]) -> None:
    hosts = re.compile(r"(pypi|pythonhosted|npmjs|debian|maven|crates|sonatype)\.(org|com|io|apache)")
    machine = re.compile(r"(?<![\w.])/(work|farm|root|home)/\w")
    said = []
    for path in filter(Path.is_file, repository):
        if path.suffix in {".png", ".bin", ".lock"} or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if hosts.search(line) or machine.search(line):
                said.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not said


def test_the_cpu_lock_holds_no_cuda_kernels_and_the_others_follow_it() -> None:
    pins = {}
    for lock in ("all", "base", "demo", "processors"):
        text = (ROOT / f"locks/{lock}.lock").read_text()
        pins[lock] = dict(re.findall(r"^([A-Za-z0-9_.\[\]-]+)==(\S+)", text, re.MULTILINE))
        assert "sglang-kernel" not in pins[lock]
        assert "://" not in text
        assert text.count("--hash=sha256:") >= len(pins[lock])
    for lock, pinned in pins.items():
        for package, version in pinned.items():
            assert pins["all"].get(package.partition("[")[0], pins["all"].get(package)) == version, (lock, package)


@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check .", "mypy", "lint-imports"])
def test_the_checks_pass(command: str) -> None:
    program, *arguments = command.split()
    call = [Path(sys.executable).parent / program, *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_help_starts_without_any_room() -> None:
    """Every verb is listed, and the interpreter loads nothing heavy to say so."""
    program = "import sys, turnlog.cli\ntry: turnlog.cli.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(shown.splitlines()[-1].split())
    heavy = {"numpy", "torch", "aiokafka", "fastapi", "rich", "pyarrow", "transformers", "turnlog.infra.log"}
    assert not loaded & heavy
    for verb in ("demo", "up", "down", "status", "run", "replay", "topics", "books"):
        assert f"\n    {verb} " in shown


def test_help_costs_a_fraction_of_importing_the_clients() -> None:
    def seconds(program: str) -> float:
        runs = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ})
            runs.append(time.perf_counter() - began)
        return min(runs)

    assert seconds("import turnlog.cli") < seconds("import aiokafka, fastapi, pyarrow, rich.live, turnlog.infra.role")
