"""Verbs that read a run which is down start its log, store and registry for themselves alone, and stop them again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnlog.infra import run_folder
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import find_marked_pids, wait_readable
from turnlog.infra.embedded.up import down, up
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.names import ExitStatus
from turnlog.settings import EngineSettings, RunSettings, Settings

pytestmark = pytest.mark.kafka


def turnlog(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A verb in that folder."""
    argv = [sys.executable, "-m", "turnlog.cli", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run `r` that was configured and is down."""
    monkeypatch.chdir(tmp_path)
    engine = EngineSettings(urls=(f"http://{HOST}:{free_ports(1)[0]}",))
    settings = Settings(run=RunSettings(id="r", directory="runs/r"), engine=engine)
    up(settings, (), say=lambda _: None)

    async def configured() -> None:
        async with open_role("test", settings) as role:
            await configure(role)

    try:
        asyncio.run(configured())
    finally:
        down(settings, say=lambda _: None)
    return tmp_path


def test_reading_starts_no_role_and_leaves_the_run_as_it_was(folder: Path) -> None:
    directory = folder / "runs" / "r"
    before = (directory / run_folder.SETTINGS).read_bytes()
    done = turnlog(folder, "log", "books", "--json")
    assert done.returncode == ExitStatus.DIFFERS, done.stderr
    assert "has not sampled a token yet" in json.loads(done.stdout)["why"]
    assert "starting the servers of runs/r to read it" in done.stderr
    state = run_folder.read_state(directory)
    assert {child["name"] for child in state["children"]} == {"kafka", "store", "registry", "topics"}
    assert find_marked_pids(state["scope"]) == []
    assert not run_folder.is_live(directory)
    assert (directory / run_folder.SETTINGS).read_bytes() == before
    listed = turnlog(folder, "log", "dead-letters", "list", "--run", "r")
    assert (listed.returncode, listed.stdout) == (0, "run 'r' has no dead letters\n"), listed.stderr


@pytest.mark.long
def test_a_reader_that_is_killed_leaves_no_server(folder: Path) -> None:
    """The suite kills the owner of an attached run, which a reader is (test_embedded_up.py)."""
    directory = folder / "runs" / "r"
    for number in (signal.SIGINT, signal.SIGKILL):
        argv = [sys.executable, "-m", "turnlog.cli", "log", "tail", "--all", "--until-end", "--run", "r"]
        with subprocess.Popen(argv, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
            assert reader.stderr is not None
            assert b"starting the servers" in reader.stderr.readline()
            pidfd = os.pidfd_open(reader.pid)
            while not (directory / run_folder.FILE).exists():
                assert not wait_readable(pidfd, 0.05), reader.stderr.read()
            os.close(pidfd)
            reader.send_signal(number)
            reader.wait(60)
        with run_folder.lock_file(directory / run_folder.LOCK):  # its supervisor has ended
            assert find_marked_pids(run_folder.read_state(directory)["scope"]) == []
