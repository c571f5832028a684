"""Other people's trainers on turnlog's batches (docs/trainers.md), each where its packages are: verl and prime-rl in an
environment of trainers.lock, slime in this one. slime and prime-rl are on no registry, so a checkout is needed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.addresses import variables
from tests.fakes.batches import append_batches
from tests.integration.test_trainer_loop import steps_of, tables, versions_of
from tests.upstream_environments import locked_python
from turnlog.infra.roles.role import Role, open_role
from turnlog.settings import Settings

ROOT = Path(__file__).parents[2]
DRAWS = 4
OWN = ("src", "examples", "tests")
"""Folders that the tests import from. They cannot import `tests.fakes`: verl installs a package named tests."""


def passes(python: Path, file: str, *checkout: Path, **named: str) -> None:
    """Run a file of tests/trainers by an interpreter, with folders of a checkout in its path and more variables."""
    path = os.pathsep.join(map(str, (*(ROOT / name for name in OWN), *checkout)))
    # torch.compile would take longer than the tests, and changes no result.
    env = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"} | named
    # The settings of pytest in pyproject.toml are for plugins that are not there, and conftest.py has servers in mind.
    options = ("-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider", "-q")
    command = [python, "-m", "pytest", *options, ROOT / "tests/trainers" / file]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout


def checkout(variable: str) -> Path:
    """The folder that an environment variable names. Skips the test if it is not set."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    return Path(os.environ[variable])


def verl_python() -> Path:
    if sys.version_info >= (3, 13):
        pytest.skip("verl does not support this Python")
    return locked_python("trainers", "no registry gives verl")


def prime_rl() -> tuple[Path, Path]:
    """The folders of a checkout that prime-rl is imported from."""
    folder = checkout("TURNLOG_TEST_PRIME_RL")
    return folder / "src", folder / "packages/prime-rl-configs/src"


def test_verl_computes_the_loss_of_turnlogs_trainer() -> None:
    passes(verl_python(), "test_verl.py")


def test_prime_rl_computes_the_loss_of_turnlogs_trainer() -> None:
    folders = prime_rl()
    passes(verl_python(), "test_prime_rl.py", *folders)


def test_slime_computes_the_loss_of_turnlogs_trainer() -> None:
    passes(Path(sys.executable), "test_slime.py", checkout("TURNLOG_TEST_SLIME"))


@pytest.fixture
def settings(live_settings: Settings) -> Settings:
    return dataclasses.replace(
        live_settings,
        feeder=dataclasses.replace(live_settings.feeder, draws=DRAWS),
        trainer=dataclasses.replace(live_settings.trainer, kind="external"),
    )


@pytest.fixture
async def role(settings: Settings) -> AsyncIterator[Role]:
    """The run, with batches on its log."""
    async with open_role("test", settings) as role:
        await append_batches(role.events, role.blobs, settings.run.id, DRAWS, temperature=1.0)
        yield role


def losses_in(folder: Path) -> list[float]:
    """The losses that the trainer computed."""
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


async def check_history(role: Role, losses: list[float]) -> None:
    """Two generations trained every batch once, with the losses that the trainer computed, and published versions that
    differ after each step."""
    steps = await steps_of(role)
    assert [(step.batch_index, step.incarnation) for step in steps] == [(n, int(n >= 2)) for n in range(DRAWS)]
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-6)
    versions = await versions_of(role)
    assert {version.step for version in versions} >= set(range(DRAWS))
    assert [version.incarnation for version in versions] == sorted(version.incarnation for version in versions)


@pytest.mark.kafka
async def test_verl_trains_a_run_and_continues_behind_its_checkpoint(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(tables(settings)))
    await asyncio.to_thread(passes, verl_python(), "test_verl_fit.py", SETTINGS=str(file))
    await check_history(role, losses_in(tmp_path))


@pytest.mark.kafka
async def test_prime_rl_trains_a_run_and_continues_behind_its_checkpoint(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    folders, file = prime_rl(), tmp_path / "settings.json"
    file.write_text(json.dumps(tables(settings)))
    await asyncio.to_thread(passes, verl_python(), "test_prime_rl_run.py", *folders, SETTINGS=str(file))
    await check_history(role, losses_in(tmp_path))


@pytest.mark.kafka
async def test_slime_trains_a_run_and_continues_behind_its_checkpoint(
    settings: Settings, role: Role, tmp_path: Path
) -> None:
    named = variables(settings) | {
        "TURNLOG_TRAINER_KIND": "external",
        "TURNLOG_FEEDER_DRAWS": str(DRAWS),
        "TENSORBOARD_DIR": str(tmp_path / "board"),
        "LOSSES": str(tmp_path / "losses.json"),
    }
    folder = checkout("TURNLOG_TEST_SLIME")
    await asyncio.to_thread(passes, Path(sys.executable), "test_slime_run.py", folder, **named)
    await check_history(role, losses_in(tmp_path))
