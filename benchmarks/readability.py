"""Count what makes the code hard to read: `python benchmarks/readability.py [--list KIND] [FOLDER ...]`.

Prints one JSON line for each package folder and one for all of them. `--list docstrings` prints the place and the first
line of each docstring that begins with a pronoun, a genitive or another fragment word; `--list participles` the
functions whose name is a bare participle; `--list classes` class names that occur more than once; `--list inits` the
packages whose `__init__.py` holds more than 40 lines of code; `--list exceptions` the exception classes that no code
tells apart: it raises them, and neither catches nor compares them or a subclass of theirs by name.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "schemas", "producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins", "src/turnlog",
)  # fmt: skip
GENITIVES = frozenset({"of"})
PRONOUNS_WORDS = """
    another anybody both either he her his it its itself neither nobody none one ones others she somebody such
    that their them these they this those what whatever which whichever who whoever whom whose
"""
PRONOUNS = frozenset(PRONOUNS_WORDS.split())
FRAGMENTS_WORDS = """
    above after also and as at because before behind below beneath beside between beyond but by during else for
    from how if in into more most nor on or out over since so than then though till to too under until up upon
    where wherever why with within without yet
"""
FRAGMENTS = frozenset(FRAGMENTS_WORDS.split())
"""`When`, `Whether` and `While` are not here: they begin ordinary descriptions of conditions and booleans."""
PARTICIPLE = re.compile(r"_?[a-z]+ed")
IRREGULAR_WORDS = """
    asleep begun born bought bound broken brought built chosen come done drawn driven fallen felt fetched found
    frozen given gone grown heard held hidden kept known laid lain left lent lost made meant met paid said sent
    shown spent spoken spun stood stuck sunk swept taken taught thought thrown told torn understood won worn
    written
"""
IRREGULAR = frozenset(IRREGULAR_WORDS.split())
NOT_PARTICIPLES = frozenset({"embed", "feed", "need", "proceed", "red", "seed", "speed", "succeed"})


EXCEPTION = re.compile(r"\w+(Error|Exception)")
"""Names of bases from libraries; turnlog's own exceptions are found by their bases."""


@functools.cache
def modules(folder: str) -> list[tuple[Path, str, ast.Module]]:
    """(path, source, tree) of each module in a folder of the repository, without the links to others."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT / folder).parts
        if not any((ROOT / folder).joinpath(*inside[:depth]).is_symlink() for depth in range(1, len(inside))):
            source = path.read_text()
            found.append((path, source, ast.parse(source)))
    return found


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            for statement in statements if isinstance(statements, list) else ():
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value.strip()


def opening(text: str) -> str:
    """The first word of a docstring, in lower case; "" where it begins with something else."""
    found = re.match(r"[A-Za-z]+", text)
    return found.group().lower() if found else ""


def is_participle(name: str) -> bool:
    """Whether the name of a function is one past participle and nothing else."""
    bare = name.strip("_")
    return bare in IRREGULAR or bool(PARTICIPLE.fullmatch(name) and bare not in NOT_PARTICIPLES)


def lines_of_code(tree: ast.Module) -> int:
    """Lines of code in a module: those that a statement other than a docstring covers."""
    lines = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            lines.update(
                range(node.lineno, (node.end_lineno or node.lineno) + 1) if not hasattr(node, "body") else [node.lineno]
            )
    return len(lines)


def comments(source: str) -> int:
    """Comments that speak to readers; directives to tools are none."""
    found = (
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    return sum(not re.match(r"#\s*(noqa|type:|fmt:|pragma|!)", text) for text in found)


def settings(tree: ast.Module) -> int:
    """Number of settings that a module declares: the fields of its classes named ...Settings, apart from the one of all
    sections."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Settings")]
    return sum(isinstance(line, ast.AnnAssign) for node in classes if node.name != "Settings" for line in node.body)


@functools.cache
def exceptions() -> dict[str, ast.ClassDef]:
    """The exception classes of all folders by name."""
    classes = [node for tree in trees(*FOLDERS) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: dict[str, ast.ClassDef] = {}
    size = -1
    while size < len(found):
        size = len(found)
        found |= {node.name: node for node in classes if any(is_exception(base, found) for base in base_names(node))}
    return found


def trees(*folders: str) -> list[ast.Module]:
    """The syntax trees of all modules in the folders."""
    return [tree for folder in folders for _, _, tree in modules(folder)]


def base_names(node: ast.ClassDef) -> list[str]:
    """The names of the bases of a class, without their modules and parameters."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def is_exception(name: str, found: dict[str, ast.ClassDef]) -> bool:
    """Whether a base is an exception: turnlog's, Python's or a library's."""
    builtin = getattr(builtins, name, None)
    return (
        name in found
        or bool(EXCEPTION.fullmatch(name))
        or (isinstance(builtin, type) and issubclass(builtin, BaseException))
    )


@functools.cache
def undistinguished() -> frozenset[str]:
    """The exceptions without subclasses that products and benchmarks name only to raise, build or annotate them."""
    bases = {base for node in exceptions().values() for base in base_names(node)}
    told = {name for tree in trees(*FOLDERS, "benchmarks") for name in compared(tree)}
    return frozenset(exceptions().keys() - bases - told)


def compared(tree: ast.Module) -> Iterator[str]:
    """The names that a module uses as values or writes as strings: in `except`, `isinstance`, a table, an argument."""
    ignored = set[ast.AST]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func):
                ignored.add(func)
            case ast.Raise(exc=ast.Name() | ast.Attribute() as raised):
                ignored.add(raised)
            case ast.ClassDef(bases=bases):
                ignored.update(bases)
            case ast.FunctionDef(returns=ast.expr() as kind) | ast.AsyncFunctionDef(returns=ast.expr() as kind):
                ignored.update(ast.walk(kind))
            case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
                ignored.update(ast.walk(kind))
    for node in ast.walk(tree):
        if node not in ignored and isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as an attribute, which may be named by a participle."""
    return any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)


def counts(folders: list[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Totals over folders, and the places of what is listed."""
    total, places, classes = Counter[str](), defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for folder in folders:
        for path, source, tree in modules(folder):
            where = path.relative_to(ROOT)
            total["modules"] += 1
            total["lines"] += source.count("\n")
            total["comments"] += comments(source)
            total["settings"] += settings(tree)
            if path.name == "__init__.py" and (code := lines_of_code(tree)) > 40:
                total["init_over_40"] += 1
                places["inits"].append(f"{where.parent}: {code}")
            for line, text in docstrings(tree):
                word = opening(text)
                total["docstrings"] += 1
                total["of"] += word in GENITIVES
                total["pronouns"] += word in PRONOUNS
                total["fragments"] += word in FRAGMENTS
                if word in GENITIVES | PRONOUNS | FRAGMENTS:
                    places["docstrings"].append(f"{where}:{line}: {text.splitlines()[0]}")
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    total["classes"] += 1
                    classes[node.name].append(f"{where}:{node.lineno}")
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    total["functions"] += 1
                    if is_participle(node.name) and not is_property(node):
                        total["participles"] += 1
                        places["participles"].append(f"{where}:{node.lineno}: {node.name}")
    repeated = {name: found for name, found in classes.items() if len(found) > 1}
    total.update(repeated_class_names=len(repeated), exceptions=len(exceptions().keys() & classes.keys()))
    places["exceptions"] = [f"{classes[name][0]}: {name}" for name in sorted(undistinguished() & classes.keys())]
    total["undistinguished_exceptions"] = len(places["exceptions"])
    places["classes"] = [f"{name}: {', '.join(found)}" for name, found in sorted(repeated.items())]
    return dict(total), places


def main() -> int:
    """Print the counts, or the places."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list",
        choices=("docstrings", "participles", "classes", "inits", "exceptions"),
        help="print places, not counts",
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"default: {' '.join(FOLDERS)}")
    arguments = parser.parse_args()
    folders = arguments.folders or list(FOLDERS)
    if arguments.list:
        print("\n".join(counts(folders)[1][arguments.list]))
        return 0
    for folder in (*([folder] for folder in folders), folders):
        print(json.dumps({"folder": " ".join(folder), **counts(folder)[0]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
