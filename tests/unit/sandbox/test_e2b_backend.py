"""The e2b backend against the real SDK and a local server: what a machine costs, what a hostile one can do, the key."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator

import pytest
from e2b import AsyncSandbox, SandboxException
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

from tests.fakes import e2b_server
from tests.fakes.e2b_server import ProcessEvent, event
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.plugins.e2b import E2b
from turnlog.plugins.e2b.service import describe_error, template_missing
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.inside.frames import HEADER
from turnlog.sandbox_workers.protocol import BackendUnavailable, Command, ImageMissing, Kind, SandboxUnavailable, Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus

KEY = "e2b_0123456789abcdef-the-key"
FIRST_UID = 276_000
SETTINGS = SandboxSettings()
SHAPE = Shape(disk_bytes=8 << 20)
LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=128 << 20, disk_bytes=8 << 20)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[e2b_server.LocalE2b]:
    """One that knows KEY; the SDK's environment leads to it."""
    async with e2b_server.serving(first_uid=FIRST_UID, key=KEY) as server:
        for name, value in (("API_KEY", KEY), ("API_URL", server.url), ("SANDBOX_URL", server.url)):
            monkeypatch.setenv(f"E2B_{name}", value)
        yield server


@pytest.fixture
async def provider(server: e2b_server.LocalE2b) -> AsyncIterator[E2b]:
    """Of that server."""
    provider = await E2b.open(SETTINGS)
    yield provider
    await provider.close()


def python(source: str) -> Command:
    """A call of Python."""
    return Command(kind=Kind.python, source=source)


async def test_a_machine_is_ended_with_its_sandbox(server: e2b_server.LocalE2b, provider: E2b) -> None:
    sandbox = await provider.start(0, SHAPE)
    assert list(server.machines) == [sandbox.machine.sandbox_id]
    await asyncio.gather(sandbox.close(), sandbox.close())
    assert server.machines == {}
    assert not await sandbox.healthy()


async def test_a_start_that_is_cancelled_leaves_no_machine(server: e2b_server.LocalE2b, provider: E2b) -> None:
    server.proceed.clear()
    starting = asyncio.create_task(provider.start(0, SHAPE))
    await server.arrived.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    server.proceed.set()
    await provider.close()
    assert (server.created, server.machines) == (1, {})


async def test_a_closing_that_is_cancelled_still_ends_the_machine(server: e2b_server.LocalE2b, provider: E2b) -> None:
    sandbox = await provider.start(0, SHAPE)
    machine = server.machines[sandbox.machine.sandbox_id]
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.wait_for(machine.ended.wait(), 20)
    await sandbox.close()


async def test_a_machine_lives_as_long_as_its_worker_is_heard_of(
    server: e2b_server.LocalE2b, provider: E2b, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.ttl_s = 3
    sandbox = await provider.start(0, SHAPE)
    machine = server.machines[sandbox.machine.sandbox_id]
    assert [await asyncio.wait_for(server.renewals.get(), 20) for _ in range(3)] == [machine.identity] * 3
    assert (await sandbox.exec(python("print(1)"), LIMITS)).output == b"1\n"
    await sandbox.machine.set_timeout(1)
    monkeypatch.setenv("E2B_API_KEY", "another")
    server.key = "another"  # as if the worker were cut off: its renewals are refused from now on
    await asyncio.wait_for(machine.ended.wait(), 20)
    assert not await sandbox.healthy()
    server.key = KEY
    await sandbox.close()


async def test_a_reset_is_believed_when_nothing_is_left_anywhere(provider: E2b) -> None:
    sandbox = await provider.start(0, SHAPE)
    try:
        inside = "import os\nfor name in ('a', os.environ['TMPDIR'] + '/a'): os.makedirs(name); open(name + '/b', 'w')"
        assert (await sandbox.exec(python(inside), LIMITS)).status is ToolStatus.ok
        assert await sandbox.reset()
        assert (await sandbox.exec(python("open('/tmp/left', 'w')"), LIMITS)).status is ToolStatus.ok
        assert not await sandbox.reset()
    finally:
        await sandbox.close()


async def test_a_call_can_become_nobody_else_and_sees_no_key(provider: E2b) -> None:
    sandbox = await provider.start(0, SHAPE)
    try:
        source = "import os; print(open('/proc/self/status').read(), dict(os.environ))"
        said = (await sandbox.exec(python(source), LIMITS)).output.decode()
        assert "NoNewPrivs:\t1" in said
        assert KEY not in said
    finally:
        await sandbox.close()


@pytest.mark.parametrize(
    ("status", "text", "missing"),
    [
        (404, "404: nothing of that name", True),
        (403, "403: Template 'x' belongs to another team", True),
        (403, "403: this team is blocked", False),
        (500, "404: no template", False),
        (None, "404: template gone", False),
    ],
)
def test_the_status_says_that_a_template_is_not_there(status: int | None, text: str, missing: bool) -> None:
    error = SandboxUnavailable("E2B")
    error.__cause__ = SandboxException(text, status_code=status)
    assert isinstance(template_missing(error, "x"), ImageMissing) == missing


async def test_a_template_that_is_not_there_is_an_image_that_is_missing(provider: E2b) -> None:
    with pytest.raises(ImageMissing, match=r"no template 'absent'.*build it"):
        await provider.start(0, Shape(image="absent", disk_bytes=1))
    with pytest.raises(ImageMissing):
        await provider.environment(Shape(image="absent", disk_bytes=1))
    with pytest.raises(SandboxUnavailable, match="the e2b backend serves allowlist, none"):
        await provider.start(0, Shape(network="host", disk_bytes=1))


async def test_surroundings_are_asked_for_once(server: e2b_server.LocalE2b, provider: E2b) -> None:
    about = await provider.environment(SHAPE)
    assert about == await provider.environment(SHAPE)
    assert {"template", "envd", "init", "sdk"} <= set(about)
    assert (server.created, server.machines) == (1, {})


async def test_without_the_right_key_nothing_starts_and_it_is_in_no_text(
    server: e2b_server.LocalE2b, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    provider = await E2b.open(SETTINGS)
    texts = []
    server.key = "another"
    for attempt in (E2b.open(SETTINGS), provider.start(0, SHAPE)):
        with pytest.raises((BackendUnavailable, SandboxUnavailable)) as refused:
            await attempt
        texts += [str(refused.value), repr(refused.value.__cause__)]
    assert "E2B_API_KEY" in texts[0]
    assert KEY not in caplog.text + "".join(texts)
    assert describe_error(ValueError(f"the service says {KEY} is wrong")) == "the service says <key> is wrong"
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(BackendUnavailable, match="E2B_API_KEY"):
        await E2b.open(SETTINGS)


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, None])
async def test_a_start_that_fails_says_of_what_and_of_the_key_only_where_it_was_refused(
    server: e2b_server.LocalE2b, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    if status is None:
        monkeypatch.setenv("E2B_API_URL", f"http://{HOST}:{free_ports(1)[0]}")
    server.failing = status or 0
    with pytest.raises(BackendUnavailable) as refused:
        await E2b.open(SETTINGS)
    assert ("E2B_API_KEY" in str(refused.value)) is (status in (401, 403))
    assert str(status or "") in str(refused.value)
    assert ("connect" in str(refused.value).lower()) is (status is None), str(refused.value)


async def test_a_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)  # type: ignore[arg-type]  # what an absent package is to `import`
    with pytest.raises(BackendUnavailable, match=r"pip install turnlog\[e2b\]"):
        await E2b.open(SETTINGS)


TIMES = 400


class Lies(process_connect.Process):
    """An envd whose commands print whatever they are told to; the last of it `TIMES` over, whoever still listens."""

    def __init__(self, *parts: bytes, again: bytes = b"") -> None:
        self.parts = parts
        self.again = again

    async def start(self, request: process_pb.StartRequest, ctx: object, /) -> AsyncIterator[process_pb.StartResponse]:
        """See Process."""
        yield event(Oneof("start", ProcessEvent.StartEvent(pid=7)))
        for part in self.parts:
            yield event(Oneof("data", ProcessEvent.DataEvent(output=Oneof("stdout", part))))
        for _ in range(TIMES if self.again else 0):
            yield event(Oneof("data", ProcessEvent.DataEvent(output=Oneof("stdout", self.again))))

    async def send_input(self, request: process_pb.SendInputRequest, ctx: object, /) -> process_pb.SendInputResponse:
        """See Process."""
        return process_pb.SendInputResponse()


def line(head: dict[str, object], body: bytes = b"", *, claims: int | None = None) -> bytes:
    """A frame as the relay sends it; `claims` is what it says of its body's length."""
    text = json.dumps(head).encode()
    return base64.b64encode(HEADER.pack(len(text), len(body) if claims is None else claims) + text + body) + b"\n"


READY = line({"ready": True, "pid": 1})


@pytest.mark.parametrize(
    "lies",
    [
        Lies(),
        Lies(b"\xff\xfe no base64\n"),
        Lies(again=b"A" * 65536),
        Lies(READY, again=b"A" * 65536),
        Lies(READY, line({"output": "stdout"}, claims=2**32 - 1)),
        Lies(READY, again=line({"output": "stdout"}, b"x" * 60000)),
        Lies(READY, line({"status": "ok", "reason": "", "exit_code": 0, "duration_s": "nan", "cpu_s": 0})),
        Lies(READY, base64.b64encode(HEADER.pack(2**32 - 1, 0)) + b"\n"),
        Lies(b"\n" * 100000, READY[:8]),
    ],
    ids=["silence", "noise", "one line", "then one line", "a length", "output", "nonsense", "a head", "empty lines"],
)
async def test_a_machine_that_lies_is_given_up_and_ended(lies: Lies) -> None:
    async with e2b_server.serving(first_uid=FIRST_UID, key=KEY, processes=lies) as server:
        provider = E2b(SETTINGS, server.connection)
        with pytest.raises(SandboxUnavailable):
            await provider.start(0, SHAPE)
        await provider.close()
        assert (server.created, server.machines) == (1, {})


async def test_a_local_machine_that_nobody_prolongs_ends_by_itself(server: e2b_server.LocalE2b) -> None:
    machine = await AsyncSandbox.create(template="base", allow_internet_access=False, timeout=1)
    await asyncio.wait_for(server.machines[machine.sandbox_id].ended.wait(), 20)
    assert not await machine.is_running()
    assert not await machine.kill()
