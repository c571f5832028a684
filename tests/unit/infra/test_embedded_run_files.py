"""The files of a run: settings that read back, a key for its owner alone, one supervisor, five runs kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnlog.infra.embedded.errors import AlreadyUp
from turnlog.infra.embedded.run_files import is_live, locked, prune, write_key, write_settings, write_state
from turnlog.settings import EngineSettings, RunSettings, Settings, StoreSettings, TrainerSettings, load


def test_written_settings_read_back_equal(tmp_path: Path) -> None:
    settings = Settings(
        run=RunSettings(id='quo"ted\\ \n', directory="r/ü"),
        engine=EngineSettings(urls=("http://a", "http://b"), extra_args=("--flag",)),
        store=StoreSettings(secret_key="s'ecret"),
        trainer=TrainerSettings(learning_rate=3e-7, dtype="float32"),
    )
    path = write_settings(tmp_path, settings)
    assert load(path, {}) == settings
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_default_survives_the_file(tmp_path: Path) -> None:
    assert load(write_settings(tmp_path, Settings()), {}) == Settings()


def test_the_signing_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    write_key(tmp_path)
    key = (tmp_path / "gateway.key").read_text()
    write_key(tmp_path)
    assert (tmp_path / "gateway.key").read_text() == key
    assert len(key) > 40
    assert (tmp_path / "gateway.key").stat().st_mode & 0o777 == 0o600


def test_a_run_has_one_supervisor(tmp_path: Path) -> None:
    assert not is_live(tmp_path)
    with locked(tmp_path):
        assert is_live(tmp_path)
        with pytest.raises(AlreadyUp, match="turnlog down"), locked(tmp_path):
            pass
    assert not is_live(tmp_path)


def test_the_youngest_runs_are_kept_and_a_live_one_always(tmp_path: Path) -> None:
    for number in range(8):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        write_state(run, {"pid": 0})
        os.utime(run / "supervisor.json", (number, number))
    (tmp_path / "notes").mkdir()
    with locked(tmp_path / "run-0"):
        removed = prune(tmp_path, tmp_path / "run-1", kept=5)
    assert sorted(path.name for path in removed) == ["run-2", "run-3"]
    assert (tmp_path / "notes").exists()
    assert (tmp_path / "run-0").exists()
