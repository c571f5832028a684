"""The package that `turnlog recipe new` writes: its own tests pass where it is installed, and the runner judges its
sessions."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Stage
from turnlog.infra.environments import sources
from turnlog.infra.environments.tasks import TaskSource
from turnlog.plugins.recipes.new import create
from turnlog.schemas.events import Outcome, RewardAssigned, SessionStarted

NAME = "offered-by-a-test"
ROOT = Path(__file__).parents[2]
SOURCE, UV = ROOT / "src", ROOT / ".cache/bootstrap/bin/uv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(NAME, tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a fresh environment has it installed; that environment has turnlog and what it needs from this one."""
    fresh = tmp_path_factory.mktemp("fresh")
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", sys.executable, fresh], check=True)
    site = next((fresh / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{SOURCE}\n{sysconfig.get_path('purelib')}\n")
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", fresh]
    done = subprocess.run([*install, "--editable", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return site


@pytest.fixture
def installed(folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskSource]:
    """In this process."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(folder / "src"))
    sources.task_source.cache_clear()
    yield sources.task_source(NAME)
    sources.task_source.cache_clear()


def test_its_own_tests_pass_where_it_is_installed(folder: Path, site: Path) -> None:
    python = site.parents[2] / "bin/python"
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_the_commands_that_are_printed_work_on_a_machine_with_nothing_on_path(site: Path, tmp_path: Path) -> None:
    own = "printed-by-a-test"
    for metadata in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        shutil.copytree(metadata, site / metadata.name, dirs_exist_ok=True)  # installed, as uv sees it
    python = site.parents[2] / "bin/python"
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    offline = bare | {"UV_OFFLINE": "1", "UV_NO_BUILD_ISOLATION": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    words = [str(python), "-m", "turnlog.cli", "recipe", "new", own, "--into", str(tmp_path)]
    said = subprocess.run(words, env=bare, capture_output=True, text=True, check=True).stdout.splitlines()
    install, test, demo = (line.strip() for line in said[1:])
    for line in (install, f"{test} -p no:cacheprovider -q"):
        done = subprocess.run(line, shell=True, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-1000:], done.stderr[-3000:])
    program, *arguments = shlex.split(demo)
    assert (Path(program), arguments[-1]) == (python.parent / "turnlog", "demo")
    listed = [str(python), "-m", "turnlog.cli", *arguments[:-1], "run", "list"]
    assert subprocess.run(listed, env=bare, cwd=tmp_path, capture_output=True).returncode == 0
    told = (tmp_path / own / "README.md").read_text()
    assert all(line in told for line in (install, test, demo))


def halves(prompt: str) -> str:
    """The policy: the middle of what the answers leave."""
    low, high = 1, 15
    for guess, told in re.findall(r'"number":\s*(\d+).*?(higher|lower)', prompt, re.DOTALL):
        low, high = (int(guess) + 1, high) if told == "higher" else (low, int(guess) - 1)
    return f'<tool_call>{{"name":"guess","arguments":{{"number":{(low + high) // 2}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("turns", "outcome", "value", "guesses"), [(4, Outcome.completed, 1.0, 4.0), (3, Outcome.truncated, 0.0, 3.0)]
)
async def test_the_runner_plays_it_and_its_verifier_judges(
    stage: Stage, installed: TaskSource, turns: int, outcome: Outcome, value: float, guesses: float
) -> None:
    stage.policy = halves
    task = {"prompt": "guess a number from 1 to 15", "number": 11}
    await stage.request(recipe=NAME, task=task, max_turns=turns, new_tokens=200)
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, finish.final) == (outcome, True)
    [reward], [started] = await stage.said(RewardAssigned), await stage.said(SessionStarted)
    assert (reward.value, reward.components) == (value, {"found": value, "guesses": guesses})
    assert (started.environment.name, reward.verifier.name) == (NAME, "found")
