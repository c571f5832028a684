"""The supervisor's rules, on small real children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.contract.test_https import served
from turnlog.infra.embedded import BrokerDied, DiskFull, Hung, LacksServer, NotReady
from turnlog.infra.embedded.liveness import Liveness, Loops, answering, generates, http_answers
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Launch, find_marked_pids, scope
from turnlog.infra.embedded.supervisor import ChildState, Failure, Member, Supervisor, Watched
from turnlog.infra.embedded.up import Bookkeeping
from turnlog.infra.run_folder import read_state, write_state

SLEEPER = "import time; time.sleep(600)"
Seen = asyncio.Queue[tuple[str, ChildState]]


def _member(tmp_path: Path, name: str, code: str = SLEEPER, **changes: object) -> Member:
    launch_fields = {
        key: changes.pop(key) for key in ("ready", "ready_timeout_s", "died", "liveness") if key in changes
    }
    launch = Launch(
        name=name,
        argv=(sys.executable, "-S", "-c", code),
        log=tmp_path / f"{name}.log",
        **launch_fields,  # type: ignore[arg-type]
    )
    return Member(launch=launch, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def _running(*members: Member, **more: Any) -> AsyncIterator[tuple[Supervisor, Seen]]:
    """A supervisor at work; stopped at the end."""
    seen: Seen = asyncio.Queue()

    def changed(watched: Watched) -> None:
        seen.put_nowait((watched.name, watched.state))

    supervisor = Supervisor(members, changed, **more)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, seen
    finally:
        supervisor.stopping.set()
        await task


async def _until(seen: Seen, wanted: tuple[str, ChildState]) -> list[tuple[str, ChildState]]:
    """Everything seen up to and with `wanted`."""
    found = []
    while not found or found[-1] != wanted:
        found.append(await asyncio.wait_for(seen.get(), 60))
    return found


def _drained(seen: Seen) -> list[tuple[str, ChildState]]:
    return [seen.get_nowait() for _ in range(seen.qsize())]


async def test_a_member_starts_after_what_it_needs_and_is_stopped_before_it(tmp_path: Path) -> None:
    before = find_marked_pids(scope())
    needs = _member(tmp_path, "role", after=("log",), tier=3)
    async with _running(needs, _member(tmp_path, "log", tier=0)) as (_, seen):
        order = await _until(seen, ("role", ChildState.READY))
        assert order.index(("log", ChildState.READY)) < order.index(("role", ChildState.STARTING))
    assert _drained(seen) == [("role", ChildState.STOPPED), ("log", ChildState.STOPPED)]
    assert find_marked_pids(scope()) == before


async def test_members_come_and_go_while_the_others_run(tmp_path: Path) -> None:
    async with _running(_member(tmp_path, "log")) as (supervisor, seen):
        await _until(seen, ("log", ChildState.READY))
        supervisor.add(_member(tmp_path, "engine", tier=1), _member(tmp_path, "loader", after=("engine",), tier=2))
        await _until(seen, ("loader", ChildState.READY))
        children = [supervisor.watched[name].child for name in ("engine", "loader")]
        await supervisor.remove("loader", "engine", "nobody")
        assert _drained(seen)[:2] == [("loader", ChildState.STOPPED), ("engine", ChildState.STOPPED)]
        assert [child.returncode for child in children if child] == [-signal.SIGTERM, -signal.SIGTERM]
        assert set(supervisor.watched) == {"log"}
        assert supervisor.watched["log"].state is ChildState.READY


async def test_a_killed_member_is_started_again(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"import os\nopen({str(told)!r}, 'a').write(os.environ['TURNLOG_RESTARTS'])\n{SLEEPER}"
    ready = lambda: told.exists() and len(told.read_text()) > supervisor.watched["role"].restarts  # noqa: E731
    async with _running(_member(tmp_path, "role", code, ready=ready)) as (supervisor, seen):
        await _until(seen, ("role", ChildState.READY))
        first = supervisor.watched["role"].child
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        order = await _until(seen, ("role", ChildState.READY))
        assert order == [("role", ChildState.RESTARTING), ("role", ChildState.STARTING), ("role", ChildState.READY)]
        assert supervisor.watched["role"].restarts == 1
        assert told.read_text() == "01"
        assert "status -9" in str(supervisor.watched["role"].error)


async def test_a_member_that_ends_well_is_done_and_lets_others_start(tmp_path: Path) -> None:
    once = _member(tmp_path, "topics", "pass", ready=lambda: False)
    async with _running(once, _member(tmp_path, "role", after=("topics",))) as (_, seen):
        order = await _until(seen, ("role", ChildState.READY))
        assert ("topics", ChildState.DONE) in order


async def test_a_role_that_dies_again_and_again_fails_and_the_others_go_on(tmp_path: Path) -> None:
    bad = _member(tmp_path, "bad", "raise SystemExit('wrong setting')", ready=lambda: False, deaths=2)
    async with _running(bad, _member(tmp_path, "good")) as (supervisor, seen):
        await _until(seen, ("bad", ChildState.FAILED))
        assert "wrong setting" in str(supervisor.watched["bad"].error)
        good = supervisor.watched["good"].child
        assert good is not None
        assert good.returncode is None


async def test_a_role_whose_restarts_do_not_help_starts_the_run_again_so_often_and_no_server_of_it(
    tmp_path: Path,
) -> None:
    broken, told = tmp_path / "broken", list[Failure]()
    code = f"import os, time\nif os.path.exists({str(broken)!r}): raise SystemExit('no weights')\n{SLEEPER}"
    role = _member(tmp_path, "role", code, tier=3, deaths=2, ready=lambda: not broken.exists())
    server, other = _member(tmp_path, "log", essential=True), _member(tmp_path, "other", tier=3)
    async with _running(server, other, role, run_restarts=1, on_failure=told.append) as (supervisor, seen):
        await _until(seen, ("role", ChildState.READY))
        children = [supervisor.watched[name].child for name in ("role", "other", "log")]
        broken.touch()
        assert children[0] is not None
        os.kill(children[0].pid, signal.SIGKILL)
        order = await _until(seen, ("role", ChildState.FAILED))
        assert [one for one in order if one[0] != "role"] == [
            ("other", ChildState.STOPPED), ("other", ChildState.STARTING), ("other", ChildState.READY)
        ]  # fmt: skip
        assert [(one.name, one.restart, one.restarts_run) for one in told] == [("role", 1, True), ("role", 1, False)]
        assert "no weights" in told[0].cause
        assert supervisor.watched["log"].child is children[2]
        assert supervisor.watched["other"].restarts == 1


async def test_a_role_that_dies_so_often_in_a_while_fails_however_long_it_was_ready(tmp_path: Path) -> None:
    role, told = _member(tmp_path, "role", quick_s=0.0, often=3), list[Failure]()
    async with _running(role, on_failure=told.append) as (supervisor, seen):
        for _ in range(3):
            await _until(seen, ("role", ChildState.READY))
            child = supervisor.watched["role"].child
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
        assert ("role", ChildState.READY) not in await _until(seen, ("role", ChildState.FAILED))
    assert [(one.name, one.restarts_run) for one in told] == [("role", False)]
    assert "status -9" in told[0].cause


async def test_an_optional_member_never_fails_is_reported_once_and_comes_back(tmp_path: Path) -> None:
    """However often it dies, no other member is stopped for it."""
    broken, told = tmp_path / "broken", list[Failure]()
    broken.touch()
    code = f"import os, time\nif os.path.exists({str(broken)!r}): raise SystemExit('damaged index')\n{SLEEPER}"
    index = _member(
        tmp_path, "index", code, tier=3, deaths=2, often=3, optional=True, ready=lambda: not broken.exists()
    )
    trainer = _member(tmp_path, "trainer", tier=3)
    async with _running(index, trainer, run_restarts=2, on_failure=told.append) as (supervisor, seen):
        order = [change for _ in range(4) for change in await _until(seen, ("index", ChildState.RESTARTING))]
        watched = supervisor.watched["index"]
        assert watched.is_past_start
        assert [(one.name, one.remedy) for one in told] == [("index", "retried")]
        broken.unlink()
        order += await _until(seen, ("index", ChildState.READY))
        assert ChildState.FAILED not in {state for _, state in order}
        assert {state for name, state in order if name == "trainer"} == {ChildState.STARTING, ChildState.READY}
        assert supervisor.watched["trainer"].restarts == 0
    assert len(told) == 1


async def test_a_full_disk_is_waited_for_however_often_an_essential_member_dies_of_it(tmp_path: Path) -> None:
    full, told = tmp_path / "full", list[Failure]()
    full.touch()
    code = (
        "import os, time\n"
        f"if os.path.exists({str(full)!r}):\n    with open('/dev/full', 'w') as file:\n        file.write('record')\n"
        f"{SLEEPER}"
    )
    server = _member(tmp_path, "log", code, deaths=2, often=2, essential=True, ready=lambda: not full.exists())
    async with _running(server, on_failure=told.append) as (supervisor, seen):
        for _ in range(3):
            await _until(seen, ("log", ChildState.RESTARTING))
        error = supervisor.watched["log"].error
        assert isinstance(error, DiskFull)
        assert "free space there, and it continues" in str(error)
        full.unlink()
        await _until(seen, ("log", ChildState.READY))
    assert told == []


async def test_what_a_supervisor_writes_of_itself_costs_the_run_nothing_and_is_written_later(tmp_path: Path) -> None:
    part, written = tmp_path / "supervisor.json.part", asyncio.Event()
    part.symlink_to("/dev/full")

    def write() -> None:
        write_state(tmp_path, {"pid": 1})
        written.set()

    books = Bookkeeping(write, again_s=0.01)
    with pytest.raises(OSError, match="No space left"):
        write()
    books.keep()
    assert read_state(tmp_path) == {}
    part.unlink()
    await asyncio.wait_for(written.wait(), 10)
    assert read_state(tmp_path) == {"pid": 1}


async def test_one_quick_death_after_a_long_life_is_the_first(tmp_path: Path) -> None:
    """The life that was long ended by no fault of the start; the next start fails once."""
    lives, working = tmp_path / "lives", tmp_path / "working"
    code = (
        f"import os, time\nwith open({str(lives)!r}, 'a+') as file:\n"
        "    file.write('x')\n    file.seek(0)\n    lives = len(file.read())\n"
        "if lives == 2: os._exit(1)\n"
        f"with open({str(working)!r}, 'w') as file: file.write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )

    def ready() -> bool:
        return working.exists() and psutil.pid_exists(int(working.read_text() or "0"))

    async with _running(_member(tmp_path, "role", code, ready=ready, deaths=2, quick_s=0.0)) as (supervisor, seen):
        await _until(seen, ("role", ChildState.READY))
        first = supervisor.watched["role"].child
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        order = await _until(seen, ("role", ChildState.READY))
        assert order.count(("role", ChildState.RESTARTING)) == 2


async def test_when_an_essential_member_fails_everything_ends_with_its_error(tmp_path: Path) -> None:
    before = find_marked_pids(scope())
    bad = _member(
        tmp_path,
        "kafka",
        "raise SystemExit('bad disk')",
        ready=lambda: False,
        deaths=1,
        essential=True,
        died=BrokerDied,
    )
    supervisor = Supervisor([bad, _member(tmp_path, "store")], lambda _: None)
    with pytest.raises(BrokerDied, match="bad disk"):
        await supervisor.run()
    assert find_marked_pids(scope()) == before


@pytest.mark.parametrize("must_be_ready", [True, False])
async def test_only_a_server_dies_of_not_being_ready(tmp_path: Path, must_be_ready: bool) -> None:
    looks = 0

    def third_look() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    member = _member(
        tmp_path, "one", ready=third_look, ready_timeout_s=0.05, deaths=1, must_be_ready=must_be_ready, essential=True
    )
    never: Callable[[Watched], None] = lambda _: None  # noqa: E731
    supervisor = Supervisor([member], never)
    if must_be_ready:
        with pytest.raises(NotReady):
            await supervisor.run()
        return
    async with _running(member) as (_, seen):
        await _until(seen, ("one", ChildState.READY))


async def test_a_child_that_is_alive_and_silent_is_killed_with_its_family_and_started_again(
    tmp_path: Path,
) -> None:
    port = free_ports(1)[0]
    url = f"http://{HOST}:{port}"
    server = (
        "import http.server, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(404)\n"
        "        self.end_headers()\n"
        f"http.server.HTTPServer(({HOST!r}, {port}), Answer).serve_forever()\n"
    )
    liveness = Liveness(look=answering(lambda: http_answers(url)), within_s=1.0)
    member = _member(tmp_path, "server", server, ready=lambda: http_answers(url), liveness=liveness)
    async with _running(member) as (supervisor, seen):
        await _until(seen, ("server", ChildState.READY))
        first = supervisor.watched["server"].child
        assert first is not None
        family = find_marked_pids(first.mark)
        assert len(family) == 2
        os.kill(first.pid, signal.SIGSTOP)
        await _until(seen, ("server", ChildState.READY))
        assert isinstance(supervisor.watched["server"].error, Hung)
        assert "server gave no answer for" in str(supervisor.watched["server"].error)
        assert find_marked_pids(first.mark) == []
        assert first.returncode == -signal.SIGKILL


async def test_a_child_that_was_silent_in_a_long_start_is_not_killed_when_it_is_ready(tmp_path: Path) -> None:
    started, ready, answered = threading.Event(), threading.Event(), threading.Event()
    looks = 0

    def look() -> Loops | None:
        """The third begins in the start, and ends, without an answer, when the child is ready."""
        nonlocal looks
        looks += 1
        if looks == 3:
            started.set()
            assert ready.wait(30)
        elif looks > 3:
            answered.set()
        return {} if looks > 3 else None

    liveness = Liveness(look=look, within_s=0.3)
    member = _member(tmp_path, "slow", ready=started.is_set, ready_timeout_s=60.0, liveness=liveness)
    async with _running(member) as (supervisor, seen):
        await _until(seen, ("slow", ChildState.READY))
        ready.set()
        assert await asyncio.to_thread(answered.wait, 30)
        assert supervisor.watched["slow"].restarts == 0


async def test_who_lacks_a_server_is_started_again_as_long_as_it_takes(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = (
        f"import os, time\nwith open({str(lives)!r}, 'a+') as file:\n"
        "    file.write('x')\n    file.seek(0)\n    lives = len(file.read())\n"
        "if lives < 5: os._exit(75)\n"
        "time.sleep(600)\n"
    )
    member = _member(tmp_path, "role", code, ready=lambda: lives.exists() and len(lives.read_text()) >= 5, deaths=2)
    async with _running(member) as (supervisor, seen):
        order = await _until(seen, ("role", ChildState.READY))
        assert order.count(("role", ChildState.RESTARTING)) == 4
        assert isinstance(supervisor.watched["role"].error, LacksServer)


@pytest.mark.parametrize(("label", "alive"), [("released", True), ("7", False)])
async def test_an_engine_that_gave_its_memory_back_is_alive_though_it_is_not_well(label: str, alive: bool) -> None:
    async def answer(request: Request) -> Response:
        if request.url.path == "/model_info":
            return JSONResponse({"weight_version": label, "model_path": "/m"})
        return Response(status_code=503)

    async with served(answer) as url:
        assert await asyncio.to_thread(generates, url) is alive
