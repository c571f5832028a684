"""Tools of other packages: found by entry point, validated and run like our own, and named when they are broken."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.memory_backend import Memory
from turnlog.infra.environments.tools import AmbiguousTool, BrokenTool, UnknownTool, versions
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.placements import Scheduler
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.protocol import SandboxDied, Shape
from turnlog.sandbox_workers.tools import Prepared, Refusal, prepared, tools
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

SPEC, LIMITS = SandboxSpec(backend="subprocess"), SandboxLimits(wall_s=20.0, output_bytes=4096)
MODULE = """
from turnlog.sandbox_workers.protocol import Command, Kind, SandboxDied
from turnlog.sandbox_workers.tools import Call, Tool, ToolFailed


async def count(call: Call):
    path = call.arguments["path"]
    done = await call.exec(Command(kind=Kind.program, argv=("wc", "-w", path), env={"LC_ALL": "C"}))
    if done.exit_code:
        raise ToolFailed(f"wc cannot count {path}")
    return call.answer(f"{done.output.split()[0].decode()} words in {call.env['WHERE']}")


async def odd(call: Call):
    match call.arguments["how"]:
        case "raises":
            raise LookupError("no such luck")
        case "returns":
            return "a string"
        case "long":
            return call.answer("x" * 100_000)
        case "dies":
            raise SandboxDied("gone")


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
KINDS = frozenset({Kind.program})
COUNT = Tool(name="count_words", version="3", about="Count words.", schema=SCHEMA, run=count, kinds=KINDS)
ODD = Tool(name="odd", version="1", about="Odd.", schema={"type": "object", "required": ["how"]}, run=odd)
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs packages that offer tools: offer(package, entry points, modules)."""

    def install(package: str, points: str, **modules: str) -> None:
        for name, text in modules.items():
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[turnlog.tools]\n{points}")
        tools.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    tools.cache_clear()
    yield install
    tools.cache_clear()


async def test_a_tool_of_a_package_is_validated_and_run_like_our_own(offer: Callable[..., None]) -> None:
    offer("own", "count_words = own_tools_of_a_user:COUNT\n", own_tools_of_a_user=MODULE)
    assert versions(["count_words", "python"]) == {"count_words": "3", "python": "1"}
    refused = prepared("count_words", b'{"path": 3}', SPEC, LIMITS)
    assert isinstance(refused, Refusal)
    assert '"path" must be a string, got 3; count_words takes {"path": "..."}' in refused.text
    provider = await Subprocess.open(SandboxSettings(backend="subprocess", first_uid=283_000, cgroups="off"))
    sandbox = await provider.start(0, Shape(disk_bytes=8 << 20))
    try:
        await sandbox.write("a.txt", b"one two three\n")
        good = prepared("count_words", b'{"path": "a.txt"}', SPEC, LIMITS)
        bad = prepared("count_words", b'{"path": "none"}', SPEC, LIMITS)
        assert isinstance(good, Prepared)
        assert isinstance(bad, Prepared)
        done = await good.run(sandbox, LIMITS, {"WHERE": "here"})
        assert (done.status, done.output) == (ToolStatus.ok, b"3 words in here")
        done = await bad.run(sandbox, LIMITS, {"WHERE": "here"})
        assert (done.status, done.output) == (ToolStatus.tool_error, b"wc cannot count none\n")
    finally:
        await sandbox.close()
        await provider.close()


@pytest.mark.parametrize(
    ("how", "status", "reason", "text"),
    [
        ("raises", ToolStatus.infra_error, "tool_broken", b"tool odd broke: LookupError: no such luck"),
        ("returns", ToolStatus.infra_error, "tool_broken", b"it returned 'a string'"),
        ("long", ToolStatus.resource_limit, "output_bytes", b"x" * 4096),
    ],
)
async def test_what_a_packages_tool_does_wrong_ends_its_call_not_the_worker(
    offer: Callable[..., None], how: str, status: ToolStatus, reason: str, text: bytes
) -> None:
    offer("own", "odd = own_tools_of_a_user:ODD\n", own_tools_of_a_user=MODULE)
    call = prepared("odd", json.dumps({"how": how}).encode(), SPEC, LIMITS)
    assert isinstance(call, Prepared)
    done = await call.run(await Memory().start(0, Shape(disk_bytes=1 << 20)), LIMITS, {})
    assert (done.status, done.reason, text in done.output) == (status, reason, True)


async def test_a_sandbox_that_dies_under_a_packages_tool_is_the_workers_business(offer: Callable[..., None]) -> None:
    offer("own", "odd = own_tools_of_a_user:ODD\n", own_tools_of_a_user=MODULE)
    call = prepared("odd", b'{"how": "dies"}', SPEC, LIMITS)
    assert isinstance(call, Prepared)
    with pytest.raises(SandboxDied, match="gone"):
        await call.run(await Memory().start(0, Shape(disk_bytes=1 << 20)), LIMITS, {})


async def test_a_cancelled_call_of_a_packages_tool_is_cancelled(offer: Callable[..., None]) -> None:
    text = MODULE.replace(
        'case "raises":', 'case "waits":\n            await call.exec(Command(kind=Kind.shell, source="sleep 9"))'
    )
    offer("own", "odd = own_tools_of_a_user:ODD\n", own_tools_of_a_user=text)
    call = prepared("odd", b'{"how": "waits"}', SPEC, LIMITS)
    assert isinstance(call, Prepared)
    sandbox = await Memory().start(0, Shape(disk_bytes=1 << 20))
    running = asyncio.create_task(call.run(sandbox, LIMITS, {}))
    while sandbox.running is None:  # noqa: ASYNC110 - the sandbox offers no event for this
        await asyncio.sleep(0)
    await sandbox.cancel()
    assert (await running).status is ToolStatus.cancelled


async def test_a_packages_tool_that_does_not_end_is_ended(offer: Callable[..., None]) -> None:
    loop = 'case "waits":\n            while True:\n                await call.sandbox.exec('
    loop += 'Command(kind=Kind.shell, source="sleep 9"), call.limits)'
    offer("own", "odd = own_tools_of_a_user:ODD\n", own_tools_of_a_user=MODULE.replace('case "raises":', loop))
    call = prepared("odd", b'{"how": "waits"}', SPEC, LIMITS)
    assert isinstance(call, Prepared)
    done = await dataclasses.replace(call, grace_s=0.1).run(
        await Memory().start(0, Shape(disk_bytes=1 << 20)), dataclasses.replace(LIMITS, wall_s=0.2), {}
    )
    assert (done.status, done.reason) == (ToolStatus.timeout, "wall_s")


@pytest.mark.parametrize(
    ("points", "text", "error", "said"),
    [
        (
            "gone = no_such_module:TOOL",
            "",
            BrokenTool,
            "entry point no_such_module:TOOL .* does not import: ModuleNotF",
        ),
        (
            "lost = own_tools_of_a_user:NONE",
            "",
            BrokenTool,
            "own_tools_of_a_user:NONE .* does not import: AttributeError",
        ),
        ("bad = own_tools_of_a_user:X", "X = (", BrokenTool, "tool 'bad', .* does not import: SyntaxError"),
        ("half = json:dumps", "", BrokenTool, "tool 'half', .* must be the Tool named 'half'"),
        ("other = own_tools_of_a_user:ODD", MODULE, BrokenTool, "must be the Tool named 'other'"),
        (
            "odd = own_tools_of_a_user:ODD",
            MODULE.replace('"required": ["how"]', '"required": "how"'),
            BrokenTool,
            "tool 'odd', .* does not import: ValueError: no JSON schema",
        ),
        ("shell = own_tools_of_a_user:ODD", MODULE, AmbiguousTool, "shell is a built-in tool"),
    ],
)
def test_a_broken_tool_is_named_with_its_entry_point(
    offer: Callable[..., None], points: str, text: str, error: type[Exception], said: str
) -> None:
    offer("own", points + "\n", own_tools_of_a_user=text)
    with pytest.raises(error, match=said):
        tools()
    with pytest.raises(error, match=said):  # a worker ends at its start
        Scheduler(SandboxSettings(), SandboxPools({}, fallback=False), egress=False)


def test_two_packages_that_offer_one_name_are_named(offer: Callable[..., None]) -> None:
    offer("own", "odd = own_tools_of_a_user:ODD\n", own_tools_of_a_user=MODULE)
    offer("rival", "odd = rival_tools:ODD\n")
    with pytest.raises(AmbiguousTool, match=r"own_tools_of_a_user:ODD.*rival_tools:ODD|rival_tools:ODD.*own_tools"):
        tools()


def test_versions_of_a_tool_that_nobody_offers_cannot_be_had() -> None:
    with pytest.raises(UnknownTool, match=r"no tool 'browser': built in or offered .*turnlog.tools are python, shell"):
        versions(["python", "browser"])
