"""sdist and wheel hold the whole package: installed into a fresh environment, every module imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, pkgutil, sys, turnlog
assert "site-packages" in turnlog.__file__, turnlog.__file__
foreign = {"engine_shim", "verifiers_guest"}  # they run in environments of their own
found = pkgutil.walk_packages(turnlog.__path__, "turnlog.")
names = [m.name for m in found if not foreign & {*m.name.split(".")}]
for name in names:
    importlib.import_module(name)
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.events import ALL
for record in ALL:
    stored_schema(record)
print(len(names))
"""

READ = ("plugins/dashboard/pages", "plugins/dashboard/static", "plugins/recipes/template", "schemas/avro")
"""Files that modules read."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory, repository: list[Path]) -> Path:
    """sdist from a copy of what git would clone, wheel from the sdist; no network: the build tools are installed."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in repository:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy, follow_symlinks=False)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("kind", ["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.long)])
def test_a_fresh_environment_imports_every_module(distributions: Path, tmp_path: Path, kind: str) -> None:
    archive = next(distributions.glob(kind))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    site = next((tmp_path / "fresh/lib").glob("python*/site-packages"))
    for bundled in site.glob("setuptools*"):  # older than what the project builds with
        shutil.rmtree(bundled)
    # Dependencies come from the environment that runs the tests. A folder named in a .pth is not searched for further
    # .pth files, so the editable turnlog of that environment stays invisible.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = tmp_path / "fresh/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", archive]
    done = subprocess.run(install, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([python, "-W", "ignore", "-c", IMPORT_ALL], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 60
    for folder in READ:
        shipped = {file.name for file in (site / "turnlog" / folder).iterdir()}
        assert {file.name for file in (ROOT / folder).iterdir() if file.suffix != ".py"} <= shipped
