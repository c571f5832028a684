"""`turnlog env build`: a source's images are pulled and built by a container engine, or the error says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.docker_engine import DockerServer
from tests.fakes.offers import offering
from tests.harbor_tasks import TASK, write_task
from turnlog import cli
from turnlog.infra.environments.sources import join_source, task_source
from turnlog.infra.sandbox_root import cache_directory

PULLED = {**TASK, "task.toml": TASK["task.toml"].replace("memory", 'docker_image = "made:1"\nmemory')}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerServer]:
    """A container engine whose registry has one image, where the SDK looks for it, and the source `tasks`."""
    monkeypatch.chdir(tmp_path)
    with (
        DockerServer(tmp_path / "docker.sock", cache_directory(), {}) as server,
        offering(tmp_path, monkeypatch, "tasks", {"tasks": "turnlog.plugins.harbor.source:source"}),
    ):
        server.boxes.registry.add("made:1")
        monkeypatch.setenv("DOCKER_HOST", server.url)
        yield server
    task_source.cache_clear()


def source(folder: Path, *tasks: dict[str, str], **options: str) -> str:
    """The text of a source over task folders with these files."""
    for number, files in enumerate(tasks):
        write_task(folder / "tasks" / f"t{number}", files)
    return join_source("tasks", {"path": str(folder / "tasks"), **options})


def test_every_image_is_pulled_or_built_once(
    engine: DockerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = source(tmp_path, TASK, PULLED)
    assert cli.main(["env", "build", text, "--network", "host"]) == 0
    out, progress = capsys.readouterr()
    [(name, network)] = engine.boxes.built
    assert (name.partition(":")[0], network) == ("turnlog-harbor/t0", "host")
    assert progress.splitlines() == [f"build {name} from {tmp_path}/tasks/t0/environment", "pull made:1"]
    assert "2 images are there" in out
    assert cli.main(["env", "build", text]) == 0
    assert capsys.readouterr().err == ""
    assert len(engine.boxes.built) == 1


def test_an_image_that_does_not_exist_or_build_is_named_with_the_engines_answer(
    engine: DockerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.boxes.registry.clear()
    assert cli.main(["env", "build", source(tmp_path, PULLED)]) == 2
    assert "image 'made:1' cannot be pulled" in (said := capsys.readouterr().err)
    assert "manifest unknown" in said
    broken = {**TASK, "environment/Dockerfile": "FROM python:3.11-slim\nRUN false\n"}
    assert cli.main(["env", "build", source(tmp_path / "more", broken)]) == 2
    assert "returned a non-zero code: 1" in capsys.readouterr().err


def test_no_engine_and_no_folder_for_roots_are_errors_that_name_the_setting(
    engine: DockerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = source(tmp_path, PULLED, backend="bubblewrap", workdir="/app")
    assert cli.main(["env", "build", made]) == 2
    assert "[sandbox] image_folder" in capsys.readouterr().err
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert cli.main(["env", "build", made]) == 2
    assert "no Docker daemon answers" in (said := capsys.readouterr().err)
    assert "set DOCKER_HOST" in said


def test_a_source_without_images_needs_no_engine(
    engine: DockerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    for text in ("calc", source(tmp_path, TASK, backend="bubblewrap")):
        assert cli.main(["env", "build", text]) == 0
        assert capsys.readouterr().out == f"{text}: nothing to build\n"
