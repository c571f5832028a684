"""A session's calls, recorded by a worker and run again: the same, or where they differ."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog import cli
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.console.recorded import (
    AmbiguousSession,
    BadPattern,
    NoSuchCall,
    NoSuchSession,
    load_session,
    session_body,
)
from turnlog.sandbox_workers.console.rerun import RerunOptions, RerunReport, exit_status, patterns, rerun
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.worker import SandboxWorker
from turnlog.schemas.events import SandboxSpec, ToolCallCompleted, ToolCallRequested, ToolStatus
from turnlog.schemas.ids import digest
from turnlog.settings import EgressSettings, KafkaSettings, RunSettings, Settings
from turnlog.verbs.session import print_report, print_session

SETTINGS = Settings(
    run=RunSettings(id="run"),
    kafka=KafkaSettings(rollouts=2),
    sandbox=SandboxSettings(backend="subprocess", slots=2, prewarm=1, first_uid=284_000, cgroups="off"),
)
LOG_EPOCH = 1_700_000_001.0
"""Seconds; the log in memory counts its milliseconds from just before."""
DURABLE = SandboxSpec(backend="subprocess", durable_workspace=True)
Call = tuple[str, dict[str, object]]

UNCHANGED = RerunOptions()


class House:
    """A log, a store, and a worker's answers on it."""

    def __init__(self, log: MemoryLog, events: EventLog, registry: MemoryRegistry) -> None:
        self.log, self.events, self.registry, self.blobs = log, events, registry, MemoryBlobs()
        self.settings = SETTINGS

    @asynccontextmanager
    async def role(self, name: str) -> AsyncIterator[Role]:
        """A role on this log."""
        log = MemoryLog(self.log.broker)
        async with EventLog.open(log, self.registry, writer=name) as events:
            yield Role(name, f"{name}-0", self.settings, log, events, self.blobs, Health(name))

    async def record(self, session: str, *calls: Call, spec: SandboxSpec = DURABLE) -> list[ToolCallCompleted]:
        """Have a worker run the calls one after the other, each on what the last one left."""
        answers: list[ToolCallCompleted] = []
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.chmod(0o755)  # noqa: ASYNC240 - sandboxes of other users read what is in it
            role = await stack.enter_async_context(self.role("sandbox"))
            egress = await stack.enter_async_context(Egress.open(role.settings.egress, self.blobs, folder))
            pools = await stack.enter_async_context(SandboxPools.open(role.settings, ca=egress.ca))
            running = asyncio.create_task(SandboxWorker(role, pools, egress=egress, clock=lambda: LOG_EPOCH).run())
            try:
                for seq, (tool, arguments) in enumerate(calls):
                    workspace = answers[-1].workspace if answers else None
                    request = requested(session, seq, tool, arguments)
                    await self.events.append(dataclasses.replace(request, sandbox=spec, workspace=workspace))
                    answers.append(await self._answer(role, session, seq))
            finally:
                role.stopping.set()
                await running
        return answers

    async def _answer(self, role: Role, session: str, seq: int) -> ToolCallCompleted:
        while True:
            found = [call for call in (await load_session(role, session)).calls if call.request.call_seq == seq]
            if found and found[0].completed is not None:
                return found[0].completed
            await self.log.broker.changed(0.05)

    async def again(self, session: str, options: RerunOptions = UNCHANGED) -> list[RerunReport]:
        """Run them again."""
        async with self.role("session") as role:
            return await rerun(role, await load_session(role, session), options)


def requested(session: str, seq: int, tool: str, arguments: dict[str, object]) -> ToolCallRequested:
    """A call of a session."""
    name = f"{session}/{seq}"
    return ToolCallRequested(
        event_id=digest(name), run_id="run", group_id="g", session_id=session, floor=0, rollout_id=session,
        call_id=name, call_seq=seq, tool=tool, arguments=json.dumps(arguments).encode(), sandbox=DURABLE,
        workspace=None, deadline_s=3600.0,
    )  # fmt: skip


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """An empty log."""
    log, registry = MemoryLog(), MemoryRegistry()
    await apply(log, SETTINGS)
    async with EventLog.open(log, registry, writer="test") as events:
        yield House(log, events, registry)


async def test_a_session_that_depends_on_nothing_else_comes_out_the_same(house: House) -> None:
    await house.record(
        "steady",
        ("write_file", {"path": "a.txt", "content": "one\ntwo\n"}),
        ("python_session", {"code": "lines = open('a.txt').read().split()"}),
        ("edit_file", {"path": "a.txt", "old": "two", "new": "three"}),
        ("python_session", {"code": "lines"}),
        ("shell", {"command": "cat a.txt; exit 3"}),
        ("shell", {"command": "ls", "timeout_s": 99}),
    )
    held = dict(house.blobs.objects)
    reports = await house.again("st")
    assert [(report.verdict, report.differences) for report in reports[:5]] == [("same", [])] * 5, reports
    assert (reports[5].verdict, reports[5].notes) == ("not_run", ["it was recorded as refused (arguments)"])
    assert exit_status(reports) == 0
    assert house.blobs.objects == held
    (alone,) = await house.again("steady", RerunOptions(call=4))
    assert (alone.verdict, alone.notes) == ("same", [])
    (kept,) = await house.again("steady", RerunOptions(call=3))
    assert kept.verdict == "same"


async def test_where_an_output_differs_is_shown_and_may_be_ignored(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = "import time; print('it is', time.time_ns(), 'now')"
    spec = SandboxSpec(backend="subprocess")
    await house.record("clock", ("python", {"code": clock}), ("python", {"code": "print(2)"}), spec=spec)
    reports = await house.again("clock")
    assert [report.verdict for report in reports] == ["differs", "same"]
    (difference,) = reports[0].differences
    assert difference.what == "output"
    assert difference.at is not None
    assert difference.at > 6
    assert difference.recorded.startswith("it is 1")
    assert difference.recorded != difference.now
    assert exit_status(reports) == 1
    assert len(await house.again("clock", RerunOptions(keep_going=False))) == 1
    print_report("clock", [report.body() for report in reports])
    shown = capsys.readouterr().out
    assert f"output from byte {difference.at}" in shown
    assert "1 same, 1 differs" in shown
    masked = await house.again("clock", RerunOptions(ignored=patterns([r"\d{19}"])))
    assert exit_status(masked) == 0


async def test_files_that_differ_are_named_and_later_calls_run_on_the_recorded_ones(house: House) -> None:
    await house.record(
        "files",
        ("shell", {"command": "date +%N > stamp; echo x > kept; head -c 8 /dev/urandom | od -An -tx1 > $(date +%s%N)"}),
        ("shell", {"command": "cat stamp kept; ls"}),
    )
    first, second = await house.again("files")
    (difference,) = first.differences
    assert difference.what == "workspace"
    assert "different content or mode: stamp" in difference.recorded
    assert "only then: 1" in difference.recorded
    assert "only now: 1" in difference.now
    assert (second.verdict, second.notes) == ("same", ["its files were restored from the recorded workspace"])


async def test_files_are_not_restored_where_that_would_end_an_interpreter_that_is_needed(house: House) -> None:
    await house.record(
        "held",
        ("python_session", {"code": "import time; x = 4; open('stamp', 'w').write(str(time.time_ns())); 1"}),
        ("shell", {"command": "true"}),
        ("python_session", {"code": "x"}),
        ("shell", {"command": "cat stamp"}),
    )
    reports = await house.again("held")
    assert [one.what for report in reports for one in report.differences] == ["workspace"] * 3
    assert [bool(report.notes) for report in reports] == [False, True, True, True]
    assert "would end the interpreter" in reports[1].notes[0]
    assert (reports[3].verdict, reports[3].notes) == ("same", ["its files were restored from the recorded workspace"])


async def test_status_and_exit_code_that_differ_are_named(house: House) -> None:
    answers = await house.record("ends", ("shell", {"command": "test -e f; code=$?; touch f; exit $code"}))
    assert answers[0].exit_code == 1
    forged = dataclasses.replace(answers[0], event_id=digest("forged"), exit_code=0, session_id="forged", call_id="c")
    request = requested("forged", 0, "shell", {"command": "exit 1"})
    async with house.role("sandbox") as role:
        begun = (await load_session(role, "ends")).calls[0].started[0]
        await role.events.append(dataclasses.replace(request, call_id="c"))
        await role.events.append(
            dataclasses.replace(begun, session_id="forged", call_id="c", environment_sha256="0" * 64)
        )
        await role.events.append(dataclasses.replace(forged, status=ToolStatus.ok, workspace=None))
    (report,) = await house.again("forged")
    assert [(one.what, one.recorded, one.now) for one in report.differences[:2]] == [
        ("status", "ok", "tool_error"), ("exit_code", "0", "1"),
    ]  # fmt: skip
    assert report.differences[-1].what == "environment"


async def test_other_surroundings_are_said_and_count_when_asked_to(house: House) -> None:
    (answer,) = await house.record("moved", ("python", {"code": "print(1)"}))
    async with house.role("sandbox") as role:
        begun = (await load_session(role, "moved")).calls[0].started[0]
        name = {"session_id": "elsewhere", "call_id": "c"}
        request = requested("elsewhere", 0, "python", {"code": "print(1)"})
        await role.events.append(dataclasses.replace(request, call_id="c"))
        await role.events.append(dataclasses.replace(begun, **name, environment_sha256="0" * 64))  # type: ignore[arg-type]
        await role.events.append(dataclasses.replace(answer, **name))  # type: ignore[arg-type]
    (report,) = await house.again("elsewhere")
    assert (report.verdict, [one.what for one in report.differences]) == ("same", ["environment"])
    (report,) = await house.again("elsewhere", RerunOptions(strict=True))
    assert report.verdict == "differs"


async def test_the_network_answers_as_it_did_though_nobody_is_there_any_more(house: House) -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n%02d" % asked)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    egress = EgressSettings(mode="record", allow=(f"GET http://{host}/open*",), private_hosts=(host,), tls="refuse")
    sandbox = dataclasses.replace(SETTINGS.sandbox, backend="bubblewrap", first_uid=285_000)
    house.settings = dataclasses.replace(SETTINGS, egress=egress, sandbox=sandbox)
    get = f"""import http.client
for path in ("open", "open", "closed"):
    proxy = http.client.HTTPConnection("127.0.0.1", 3128)
    proxy.request("GET", "http://{host}/" + path)
    answer = proxy.getresponse()
    print(answer.read() if answer.status == 200 else answer.status)
"""
    spec = SandboxSpec(network="allowlist")
    (answer,) = await house.record("network", ("python", {"code": get}), spec=spec)
    server.close()
    assert (answer.output, asked) == (b"b'01'\nb'02'\n403\n", 2)
    assert [(one.status, one.source) for one in answer.requests] == [
        (200, "recorded"), (200, "recorded"), (403, "refused"),
    ]  # fmt: skip
    (report,) = await house.again("network")
    assert (report.verdict, report.differences, report.notes) == ("same", [], [])
    assert asked == 2


async def test_calls_that_never_ran_are_listed(house: House) -> None:
    await house.events.append(requested("lost", 0, "python", {"code": "1"}))
    (report,) = await house.again("lost")
    assert (report.verdict, report.notes) == ("not_run", ["it was never answered"])
    assert exit_status([report]) == 2


async def test_a_session_is_named_by_any_beginning_that_only_it_has(house: House) -> None:
    for name in ("abc1", "abd2", "ab"):
        await house.events.append(requested(name, 0, "python", {"code": "1"}))
    async with house.role("session") as role:
        assert (await load_session(role, "abc")).session_id == "abc1"
        assert (await load_session(role, "ab")).session_id == "ab"
        with pytest.raises(AmbiguousSession, match="3 sessions begin with 'a': ab, abc1, abd2"):
            await load_session(role, "a")
        with pytest.raises(NoSuchSession, match="see also --from archive"):
            await load_session(role, "zz")
        with pytest.raises(NoSuchCall, match="has no call 7; it has 0"):
            await rerun(role, await load_session(role, "abc"), RerunOptions(call=7))
    with pytest.raises(BadPattern, match=r"--ignore .*\[0-9"):
        patterns(["[0-9"])


async def test_show_lists_what_is_recorded(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    await house.record("shown", ("shell", {"command": "echo hi > f; cat f"}), ("shell", {"command": "exit 4"}))
    async with house.role("session") as role:
        session = await load_session(role, "shown")
    first, second = session_body(session)["calls"]
    assert (first["call_seq"], first["tool"], first["status"], first["attempts"]) == (0, "shell", "ok", 1)
    assert (len(first["workspace"]), len(first["environment_sha256"]), first["output_bytes"]) == (64, 64, 3)
    assert (second["status"], second["exit_code"], second["requests"]) == ("tool_error", 4, [])
    print_session(session_body(session))
    assert "tool calls of session shown" in capsys.readouterr().out


def test_the_verbs_options() -> None:
    line = [
        "log",
        "session",
        "rerun",
        "4f1c",
        "--call",
        "3",
        "--ignore",
        "a",
        "--ignore",
        "b",
        "--no-keep-going",
        "--strict",
    ]
    arguments = cli.parser().parse_args(line)
    assert (arguments.id, arguments.call_seq, arguments.ignore, arguments.keep_going) == ("4f1c", 3, ["a", "b"], False)
    assert callable(arguments.entry.call), "no option may take the place of what the verb does"
    assert (
        cli.parser().parse_args(["log", "session", "show", "4f1c", "--from", "archive", "--json"]).source == "archive"
    )
