"""Two releases on one run: this one and the one before the last schema release, built from its commit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.addresses import variables
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configuration
from turnlog.schemas.events import Event
from turnlog.settings import Settings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1000)]
CHAOS = Path(__file__).resolve().parents[2] / "benchmarks/chaos"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def previous() -> Path:
    """The folder with the previous release's package."""
    ran = subprocess.run([sys.executable, CHAOS / "previous.py"], capture_output=True, text=True, check=False)
    if ran.returncode == 2:
        print(ran.stderr)
        pytest.skip("the history has no commit of the previous release")
    assert ran.returncode == 0, ran.stderr
    return Path(ran.stdout.strip())


def upgraded(*arguments: str, swaps: int) -> dict[str, Any]:
    """What came of a run that lost nothing on its way up and back."""
    command = [sys.executable, CHAOS / "upgrades.py", "--kills", "1", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.stdout, ran.stderr[-4000:]
    line = json.loads(ran.stdout)
    found = {name: line[name] for name in ("kills", "lost", "twice", "skipped", "identical", "ok")}
    sound = {"kills": swaps, "lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}
    assert found == sound, ran.stderr[-4000:]
    detail: dict[str, Any] = line["detail"]
    assert min(detail["wrote"].values()) > 0
    assert detail["batches"] > swaps / 2
    return detail


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.usefixtures("previous")
def test_the_folds_of_a_run_go_through_an_upgrade_and_back_without_loss() -> None:
    """The suite folds histories of every release (test_earlier_releases.py), and kills folds between two commits
    (test_exactly_once.py)."""
    upgraded("--processors", swaps=4)


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.usefixtures("previous")
def test_a_run_goes_through_an_upgrade_and_back_without_loss() -> None:
    """One order of six, with one gateway and one runner; `make chaos ONLY=upgrades KILLS=6` has the others."""
    detail = upgraded("--lean", swaps=18)
    assert detail["archived"] > detail["input_records"]
    assert detail["rows"] > detail["rollouts"]
    assert detail["calls"] >= detail["rollouts"] > 0


@pytest.mark.chaos
@pytest.mark.long
def test_trainer_and_loader_go_through_an_upgrade_and_back(previous: Path, live_settings: Settings) -> None:
    """Each of the four pairs of releases, once."""
    command = [sys.executable, CHAOS / "upgrades_trainer.py", "--kills", "1"]
    env = os.environ | variables(live_settings)
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=900)
    assert ran.stdout, ran.stderr[-4000:]
    line = json.loads(ran.stdout)
    found = {name: line[name] for name in ("kills", "lost", "twice", "skipped", "identical", "ok")}
    sound = {"kills": 4, "lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}
    assert found == sound, ran.stderr[-4000:]
    assert len(line["detail"]["pairs"]) == 4
    assert line["detail"]["steps"] == line["detail"]["batches"] == 20


def role(settings: Settings, *verb: str, release: Path | None = None) -> tuple[int, str]:
    """Run a role that is to refuse: its exit status, and the last line of what it said."""
    env = {
        **os.environ,
        **variables(settings),
        **({} if release is None else {"PYTHONPATH": str(release)}),
    }  # fmt: skip
    command = [sys.executable, "-m", "turnlog.cli", *verb]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return ran.returncode, ran.stderr.strip().rpartition("\n")[2]


def append(settings: Settings, event: Event) -> None:
    """To the run's log."""

    async def appended() -> None:
        async with open_role("test", settings) as tool:
            await tool.events.append(event)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, appended()).result()


def test_a_run_of_a_later_fold_version_is_refused_by_name(live_settings: Settings) -> None:
    append(live_settings, dataclasses.replace(configuration(live_settings), fold_version="99"))
    for name in ("assembler", "batcher", "gateway"):
        status, why = role(live_settings, name)
        assert status == 2, why
        assert "UnknownFoldVersion: fold version '99' is unknown here (1, 2, 3, 4, 5 are known)" in why


def test_a_run_that_recorded_a_later_setting_is_refused_by_name(live_settings: Settings) -> None:
    recorded = configuration(live_settings)
    settings = json.loads(recorded.settings)
    settings["fold"]["later"] = 1
    append(live_settings, dataclasses.replace(recorded, settings=json.dumps(settings).encode()))
    status, why = role(live_settings, "assembler")
    assert status == 2, why
    assert "RecordedSettingsError" in why
    assert "later" in why


def test_the_previous_release_refuses_a_run_of_folds_that_came_after_it(
    live_settings: Settings, previous: Path
) -> None:
    append(live_settings, dataclasses.replace(configuration(live_settings), fold_version="99"))
    status, why = role(live_settings, "assembler", release=previous)
    assert status == 2, why
    assert "fold version '99' is unknown here (1, 2" in why


def test_the_previous_release_refuses_what_it_cannot_go_on_with(
    live_settings: Settings, previous: Path, tmp_path: Path
) -> None:
    recorded = configuration(live_settings)
    later = json.loads(recorded.settings) | {"later": {"key": 1}}
    append(live_settings, dataclasses.replace(recorded, settings=json.dumps(later).encode(), fold_version="2"))
    status, why = role(live_settings, "assembler", release=previous)
    assert status != 0
    assert "RecordedSettingsError" in why
    file = tmp_path / "new.toml"
    file.write_text("[assembler]\nlater = 1\n")
    status, why = role(live_settings, "--settings", str(file), "assembler", release=previous)
    assert status != 0
    assert "unknown key assembler.later" in why
