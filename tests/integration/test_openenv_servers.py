"""OpenEnv servers that a worker starts: in sandboxes, shared as far as they allow, and gone with their worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.environments.openenv_servers import GUESS, guessing, image_folder, sandboxed_command
from tests.unit.sandbox.conftest import House, house
from tests.unit.sandbox.test_openenv_tool import SPEC, ask, how
from turnlog.infra.environments.sources import join_source
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
from turnlog.schemas.events import SandboxLimits, ToolCallCompleted, ToolStatus
from turnlog.schemas.events.tools import SESSION_OVER
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import TOOL_RESULTS
from turnlog.settings import RunnerSettings, Settings
from turnlog.verbs.env_check import CheckOptions, check

__all__ = ["house"]
KILLED = Path(__file__).parents[1] / "environments/killed_worker.py"
PATIENT = dataclasses.replace(SPEC, limits=SandboxLimits(wall_s=140.0))


def plan(sessions: int = 8, **more: Any) -> dict[str, Any]:
    """A server of the guessing game."""
    return {"command": sandboxed_command(sessions), "ready_s": 130.0, **more}


def patiently(house: House) -> None:
    """Calls of the house may take as long as a server's start."""
    house.settings = dataclasses.replace(house.settings, sandbox=SandboxSettings(backend="subprocess", wall_s=150.0))


async def reset(house: House, session: str, server: dict[str, Any], **more: Any) -> ToolCallCompleted:
    """The answer to a session's first call."""
    request = ask(house, 0, session, spec=PATIENT, reset=True, server=server, seed=1, **more)
    await house.ask(request)
    async with asyncio.timeout(200):  # a server's imports take 2 s of a core, and longer on one that is shared
        while True:
            for event in await house.read(TOOL_RESULTS.name, ToolCallCompleted):
                if event.call_id == request.call_id:
                    return event
            await house.log.broker.changed(10.0)


async def step(house: House, session: str, seq: int, **action: Any) -> ToolCallCompleted:
    """The answer to a step."""
    return await house.answer(ask(house, seq, session, spec=PATIENT, action=action))


async def over(house: House, session: str) -> None:
    """The session makes no more calls."""
    cancelled = house.cancelled(f"{session}0", session=session)
    await house.ask(dataclasses.replace(cancelled, event_id=digest("over", session), reason=SESSION_OVER))


def servers() -> list[psutil.Process]:
    """Processes of the game's server below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if GUESS.name in words and KILLED.name not in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def test_sessions_share_a_server_and_it_ends_with_its_worker(house: House) -> None:
    patiently(house)
    async with house.worker():
        await reset(house, "a", plan())
        await reset(house, "b", plan())
        steps = [await step(house, "a", 1, number=3), await step(house, "b", 1, number=3)]
        [server] = servers()
        printed = await step(house, "a", 2, harm="print")
        died = await step(house, "a", 3, harm="exit")
        other = await step(house, "b", 2, number=3)
        again = await reset(house, "c", plan())
        [second] = servers()
    assert [json.loads(each.output)["observation"]["guesses"] for each in steps] == [1, 1]
    assert printed.status is ToolStatus.ok
    assert how(died) == how(other) == (ToolStatus.infra_error, "environment_lost")
    assert "a line of the server" in died.output.decode()
    assert again.status is ToolStatus.ok
    assert second.pid != server.pid
    assert servers() == []


async def test_a_server_with_one_place_serves_one_session_at_a_time(house: House) -> None:
    """Another session gets another server; what is free again is used again."""
    patiently(house)
    async with house.worker():
        first = await reset(house, "a", plan(sessions=1))
        second = await reset(house, "b", plan(sessions=1))
        count = len(servers())
        await over(house, "a")
        third = await reset(house, "c", plan(sessions=1))
        assert len(servers()) == count == 2
    assert [each.status for each in (first, second, third)] == [ToolStatus.ok] * 3
    assert servers() == []


@pytest.mark.parametrize("given", ["by url", "by command"])
async def test_env_check_gives_back_the_one_place_of_a_server_and_leaves_no_server(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = SandboxSettings(backend="subprocess", wall_s=150.0, slots=1)
    async with contextlib.AsyncExitStack() as stack:
        if given == "by url":
            server = await stack.enter_async_context(guessing(sessions=1))
            egress = EgressSettings(
                allow=(f"GET {server.url}/*",), tls="refuse", private_hosts=(server.url.removeprefix("http://"),)
            )
            source = f"openenv url={server.url} wall_s=20"
        else:
            egress = EgressSettings()
            source = join_source("openenv", {"command": shlex.join(sandboxed_command(1)), "wall_s": "140"})
        options = CheckOptions(source=source, dataset=None, tasks=3, at_once=1, empty_only=True, as_json=True)
        count = len(servers())
        settings = Settings(sandbox=sandbox, egress=egress, runner=RunnerSettings(tool_deadline_s=150.0))
        status = await check(settings, options)
        assert len(servers()) == count
    found = json.loads(capsys.readouterr().out)
    assert (status, [task["ok"] for task in found]) == (0, [True] * 3), found


async def test_a_server_that_does_not_start_says_why(house: House) -> None:
    patiently(house)
    failing = {"command": ["python3", "-c", "print('no such game'); raise SystemExit(4)"]}
    mute = {"command": ["python3", "-c", "import time; time.sleep(60)"], "ready_s": 1.0}
    async with house.worker():
        ended = await reset(house, "a", failing)
        silent = await reset(house, "b", mute)
        missing = await reset(house, "c", {"command": ["/no/such/server"]})
    for answer in (ended, silent, missing):
        assert how(answer) == (ToolStatus.infra_error, "environment_not_started")
    assert "exit status 4" in ended.output.decode()
    assert "no such game" in ended.output.decode()
    assert "not healthy after 1 s" in silent.output.decode()
    assert "cannot be started" in missing.output.decode()


async def test_a_worker_that_is_killed_leaves_no_server_of_an_image() -> None:
    """Under bubblewrap: the server has a network of its own, without a port of the machine."""
    if await find_isolation_failure(SandboxSettings()):
        pytest.skip("user namespaces are off")
    env = {"LD_LIBRARY_PATH": "/opt/python/lib"}
    server = {"command": sandboxed_command(8, image=True), "image": "guess", "env": env, "ready_s": 130.0}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, KILLED, "bubblewrap", str(image_folder()), json.dumps(server), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(KILLED.parents[2])},
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        played = json.loads(await worker.stdout.readline())
        [process] = servers()
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        gone, _ = await asyncio.to_thread(psutil.wait_procs, [process], timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
    assert played["hint"] == "higher"
    assert gone == [process]
