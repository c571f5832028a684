"""Settings: values, loud mistakes, and the hash that derived records carry."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from turnlog.settings import Settings, SettingsError, fold_settings_json, from_tables, load, settings_sha256

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[kafka]\nbootstrap = "a:1"\ngroups = 8\n')
    settings = load(path, {"TURNLOG_KAFKA_GROUPS": "2", "TURNLOG_ENGINE_URLS": "http://a,http://b"})
    assert settings.kafka.bootstrap == "a:1"
    assert settings.kafka.groups == 2
    assert settings.engine.urls == ("http://a", "http://b")


def test_a_list_whose_parts_hold_commas_is_json_in_the_environment() -> None:
    rules = '["GET,HEAD https://a.example/*", "POST https://b.example/x"]'
    settings = load(None, {"TURNLOG_EGRESS_ALLOW": rules})
    assert settings.egress.allow == ("GET,HEAD https://a.example/*", "POST https://b.example/x")
    with pytest.raises(SettingsError, match=r"egress\.allow must be a list of strings"):
        load(None, {"TURNLOG_EGRESS_ALLOW": '["GET'})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"kafak": {}}, r"unknown section \[kafak\]; sections are .*kafka"),
        ({"kafka": {"botstrap": "x"}}, r"unknown key kafka.botstrap; \[kafka\] takes .*bootstrap"),
        ({"kafka": {"groups": "four"}}, r"kafka.groups must be int, got 'four'"),
        ({"kafka": {"groups": True}}, r"kafka.groups must be int, got True"),
        ({"fold": {"estimator": "gpro"}}, r"fold.estimator must be one of grpo, dr_grpo, .*got 'gpro'"),
        ({"engine": {"urls": "http://a"}}, r"engine.urls must be a list of strings"),
        ({"run": 3}, r"\[run\] must be a table"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_legal(tables: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        from_tables(tables, {}, source="settings.toml")


@pytest.mark.parametrize(("text", "said"), [("[kafka\n", "not TOML"), (None, "no such settings file")])
def test_a_broken_or_missing_file_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=said) as caught:
        load(path, {})
    assert str(path) in str(caught.value)


def test_a_broken_key_ends_the_command_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[trainer]\nlearning_rat = 1.0\n")
    command = [sys.executable, "-m", "turnlog.cli", "--settings", str(path), "topics", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "unknown key trainer.learning_rat" in done.stderr


def test_secrets_are_not_shown() -> None:
    assert "turnlog-embedded" not in repr(Settings())


def test_the_hash_covers_what_folds_depend_on_and_nothing_else() -> None:
    base = Settings()
    other_fold = dataclasses.replace(base, fold=dataclasses.replace(base.fold, estimator="dr_grpo"))
    other_port = dataclasses.replace(base, gateway=dataclasses.replace(base.gateway, port=1))
    hashes = [settings_sha256(fold_settings_json(settings)) for settings in (base, other_fold, other_port)]
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_in_the_repository_loads(path: Path) -> None:
    assert load(path, {}).run.id
