"""`turnlog recipe new NAME`: create a package with an environment (`Recipe`) to start from; it works as it is.

NotCreated
├── BadEnvironmentName      not a valid name of a recipe and its package; the message gives the rule
├── EnvironmentNameTaken    a recipe or a module of this name is installed
└── FolderExists something exists at the package's path
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import shlex
import shutil
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import turnlog
from turnlog.environments import AmbiguousRecipe
from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup

FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "settings.toml": "settings.toml",
    "init.py": "src/$package/__init__.py",
    "game.py": "src/$package/game.py",
    "recipe.py": "src/$package/recipe.py",
    "test_recipe.py": "tests/test_recipe.py",
}
"""Template in the folder `template`, without its suffix -> path in the package."""
NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST: Final = 40


class NotCreated(Exception):
    """Base class of the tree in this module's docstring."""


class BadEnvironmentName(NotCreated):
    """Remedy: words of lower-case letters and digits with `-` between them."""


class EnvironmentNameTaken(NotCreated):
    """Remedy: another name."""


class FolderExists(NotCreated):
    """Nothing is overwritten."""


def create(name: str, parent: Path) -> Path:
    """Create the folder `parent`/`name` with the package, whole or not at all. Raises NotCreated, AmbiguousRecipe."""
    package = name.replace("-", "_")
    _check(name, package)
    folder = parent / name
    if folder.exists() or folder.is_symlink():
        raise FolderExists(f"{folder} already exists: nothing is overwritten")
    if not parent.is_dir():
        raise NotCreated(f"{parent} is not a folder")
    part = parent / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    steps = "\n".join(next_steps(folder.absolute()))
    values = {"steps": steps, "name": name, "package": package, "title": "".join(map(str.capitalize, name.split("-")))}
    try:
        for template, path in FILES.items():
            target = part / Template(path).substitute(values)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = resources.files(__package__).joinpath("template", f"{template}.txt").read_text()
            target.write_text(Template(text).substitute(values))
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _check(name: str, package: str) -> None:
    """Raise BadEnvironmentName or EnvironmentNameTaken if the name cannot be used."""
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        raise BadEnvironmentName(
            f"{name!r}: a recipe name consists of words of lower-case letters and digits joined by -, at most "
            f"{LONGEST} characters, such as my-game"
        )
    if keyword.iskeyword(package) or keyword.issoftkeyword(package) or package in sys.stdlib_module_names:
        raise BadEnvironmentName(
            f"{name!r}: Python has a module or keyword of this name; choose another, such as my-{name}"
        )
    if name in find_plugins(EntryPointGroup.RECIPES, "recipe", AmbiguousRecipe):
        raise EnvironmentNameTaken(f"{name!r}: an installed package offers a recipe of this name; choose another")
    if importlib.util.find_spec(package) is not None:
        raise EnvironmentNameTaken(f"{name!r}: a module {package} exists here, which it would hide; choose another")


def next_steps(folder: Path) -> list[str]:
    """Return commands that install the package beside the running turnlog, test it and train it, without relying on
    PATH: the environment that `make` builds has no pip, and its uv lies beside the source."""
    python, quoted = shlex.quote(sys.executable), shlex.quote(str(folder))
    wanted = f"--editable {quoted}" + ("" if importlib.util.find_spec("pytest") else " pytest")
    bootstrapped = Path(turnlog.__file__).parents[2] / ".cache/bootstrap/bin/uv"
    uv = shutil.which("uv") or (str(bootstrapped) if bootstrapped.exists() else "")
    install = [f"{python} -m pip install {wanted}"]
    if not any(importlib.metadata.distributions(name="pip")):
        install = (
            [f"{shlex.quote(uv)} pip install --python {python} {wanted}"]
            if uv
            else [f"{python} -m ensurepip", *install]
        )
    program = shlex.quote(str(Path(sys.executable).parent / "turnlog"))
    settings = shlex.quote(str(folder / "settings.toml"))
    return [*install, f"{python} -m pytest {quoted}", f"{program} --settings {settings} demo"]
