"""`turnlog sandbox pool | check | exec`."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from tests.fakes.memory_backend import Memory
from turnlog import cli
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.roles.health import Health, QuietServer, application
from turnlog.infra.run_folder import Endpoints, write_endpoints
from turnlog.sandbox_settings import LOCAL, SandboxSettings
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import Kind, Shape
from turnlog.verbs.old_spellings import modern_words
from turnlog.verbs.sandbox_actions import NotText, command_of, findings

SHAPE = Shape(disk_bytes=1000)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder without a run, where tools run as plain processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNLOG_SANDBOX_BACKEND", "subprocess")
    monkeypatch.setenv("TURNLOG_SANDBOX_FIRST_UID", "232000")
    monkeypatch.setenv("TURNLOG_RUN_DIRECTORY", str(tmp_path))
    return tmp_path


def test_without_an_action_it_was_the_role_and_still_is() -> None:
    assert modern_words(["sandbox"], cli.VERBS)[0] == ["role", "sandbox"]
    assert cli.parser().parse_args(["role", "sandbox"]).entry.under == "role"


@pytest.mark.usefixtures("here")
def test_exec_prints_what_the_command_prints_and_ends_as_it_does(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["sandbox", "exec", "--shell", "--", "echo out; echo err >&2; exit 3"]) == 3
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"out\n", b"err\n")
    assert cli.main(["sandbox", "exec", "--python", "--", "print(3 + 5)"]) == 0
    assert capfdbinary.readouterr().out == b"8\n"


@pytest.mark.usefixtures("here")
def test_exec_says_which_limit_ended_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sandbox", "exec", "--wall-s", "0.2", "--", "sleep", "60"]) == 124
    assert "timeout: wall_s (0.2), after 0." in capfd.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "NothingToRun"),
        (["--backend", "nonsense", "--", "true"], "there is no backend 'nonsense'"),
        (["--image", "nothing-like-it", "--", "true"], "ImageMissing"),
    ],
)
def test_exec_refuses_by_name_what_cannot_run(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sandbox", "exec", *words]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_exec_and_everything_in_its_sandbox(here: Path, number: int, status: int) -> None:
    words = [sys.executable, "-m", "turnlog.cli", "sandbox", "exec", "--shell", "--", "sleep 60 & echo begun; sleep 60"]
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=here, env=dict(os.environ), preexec_fn=heard) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        inside = psutil.Process(process.pid).children(recursive=True)
        assert inside
        process.send_signal(number)
        assert process.wait(timeout=30) == status
    assert psutil.wait_procs(inside, timeout=5)[1] == []


async def test_pool_shows_the_slots_of_every_worker_that_answers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Pool(Memory(), slots=3, prewarm=1)
    await pool.prefill(SHAPE)
    health = Health("sandbox")
    health.expose("pools", SandboxPools(dict.fromkeys(LOCAL, pool), fallback=False).snapshot)
    port, dead = free_ports(2)
    config = uvicorn.Config(application(health), host="127.0.0.1", port=port, log_level="warning", lifespan="off")
    workers = {"sandbox-0": f"http://127.0.0.1:{port}", "sandbox-1": f"http://127.0.0.1:{dead}"}
    write_endpoints(
        here, Endpoints(kafka="", registry="", store="", health={**workers, "runner-0": "http://127.0.0.1:1"})
    )
    async with QuietServer(config).running(), pool.lease(SHAPE):
        assert await asyncio.to_thread(cli.main, ["sandbox", "pool", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert await asyncio.to_thread(cli.main, ["sandbox", "pool", "--url", workers["sandbox-0"]]) == 0
        table = capsys.readouterr().out
    await pool.close()
    (shown,) = found["sandbox-0"]["pools"]
    assert (shown["backend"], shown["slots"]["leased"], shown["hits"], shown["leaks"]) == ("memory", 1, 1, 0)
    assert list(found) == ["sandbox-0", "sandbox-1"]
    assert "unreachable" in found["sandbox-1"]
    assert "sandbox pools of run" in table


@pytest.mark.usefixtures("here")
def test_pool_says_when_there_is_no_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sandbox", "pool"]) == 3
    assert "turnlog up" in capsys.readouterr().out


async def test_check_names_every_layer_and_what_is_missing() -> None:
    settings = SandboxSettings(cgroups="off", first_uid=232_100)
    found = {finding.name: finding for finding in await findings(settings, LOCAL)}
    assert list(found) == [
        "bwrap", "a user per slot", "seccomp filter", "control groups", "backend bubblewrap", "backend subprocess",
    ]  # fmt: skip
    assert (found["control groups"].ok, found["control groups"].needed) == (False, True)
    assert '[sandbox] cgroups = "off"' in found["control groups"].says
    assert found["backend subprocess"].needed is False
    assert all(finding.says and "\n" not in finding.says for finding in found.values())


@pytest.mark.usefixtures("here")
def test_check_ends_with_1_where_the_configured_backend_is_no_boundary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["sandbox", "check"]) == 1
    assert "subprocess is not fully isolated here" in capsys.readouterr().err


@pytest.mark.parametrize("language", ["shell", "python"])
def test_exec_refuses_source_that_is_no_text_and_takes_any_bytes_for_a_program(language: str) -> None:
    """Arguments that are no UTF-8 come as halves of surrogate pairs."""
    given = {"command": ["--", "ls", os.fsdecode(b"\xff")], "stdin": False, "shell": False, "python": False}
    with pytest.raises(NotText, match="not UTF-8"):
        command_of(argparse.Namespace(**given | {language: True}))
    command = command_of(argparse.Namespace(**given))
    assert (command.kind, command.argv[1]) == (Kind.program, "\udcff")
