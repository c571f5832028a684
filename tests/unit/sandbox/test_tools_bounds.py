"""What a call's files and arguments may cost the worker: memory of the size of an answer, and never the loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, Sandbox, Shape
from turnlog.sandbox_workers.tools import Prepared, Refusal, prepared
from turnlog.sandbox_workers.tools.built_in import EDITED, PART, Lines
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

SIZE = 60 * 10**6
LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60.0, disk_bytes=64 << 20)
SPEC = SandboxSpec(backend="subprocess", durable_workspace=True)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A new one."""
    provider = await Subprocess.open(SandboxSettings(backend="subprocess", first_uid=288_000, cgroups="off"))
    sandbox = await provider.start(0, Shape(disk_bytes=LIMITS.disk_bytes))
    yield sandbox
    await sandbox.close()
    await provider.close()


async def run(sandbox: Sandbox, tool: str, **arguments: object) -> Execution:
    """One call."""
    call = prepared(tool, json.dumps(arguments).encode(), SPEC, LIMITS)
    assert isinstance(call, Prepared), call
    return await call.run(sandbox, LIMITS, {})


async def made(sandbox: Sandbox, source: str) -> None:
    """Files, by code inside."""
    answer = await sandbox.exec(Command(kind=Kind.python, source=source), LIMITS)
    assert answer.status is ToolStatus.ok, answer


@contextmanager
def peak() -> Iterator[list[int]]:
    """Bytes that Python held at most beyond what it held before."""
    found: list[int] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield found
        found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('\\n' * SIZE, end='', file=open('f', 'w'))", f"[f: lines 1 to {64 * 1024 - 300} of {SIZE};"),
        ("open('f', 'wb').write(bytes(SIZE))", f"f is no UTF-8 text: {SIZE} bytes that begin with 00 00"),
        ("open('f', 'w').write('x' * SIZE)", "line 1 of f is longer than an answer may be"),
        ("open('f', 'w').write('né' * (SIZE // 3) + chr(0xe9))", "line 1 of f is longer than an answer may be"),
    ],
    ids=["lines", "zeros", "one line", "no ASCII"],
)
async def test_reading_a_large_file_takes_no_memory_of_its_size_and_leaves_the_loop_to_others(
    sandbox: Sandbox, source: str, said: str
) -> None:
    await made(sandbox, f"SIZE = {SIZE}\n{source}")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with peak() as used:
        answer = await run(sandbox, "read_file", path="f")
    ticking.cancel()
    assert said in answer.output.decode()
    assert used[0] < 8 * PART + 64 * LIMITS.output_bytes, used
    assert ticks >= SIZE // PART, "the loop comes round with every part"


async def test_the_end_of_a_large_file_is_read_as_that_of_a_small_one(sandbox: Sandbox) -> None:
    await made(sandbox, "open('f', 'w').writelines(f'line {n}\\n' for n in range(1, 2_000_001))")
    answer = await run(sandbox, "read_file", path="f", offset=1_999_999)
    assert answer.output == b"line 1999999\nline 2000000\n"
    beyond = await run(sandbox, "read_file", path="f", offset=2_000_001)
    assert b"has 2000000 lines, none is number 2000001" in beyond.output


async def test_an_edit_that_would_not_fit_is_refused_by_its_size_before_it_is_made(sandbox: Sandbox) -> None:
    await made(sandbox, "open('f', 'w').write('a' * 1_000_000)")
    with peak() as used:
        answer = await run(sandbox, "edit_file", path="f", old="a", new="b" * 1_000_000, all=True)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "disk_bytes")
    assert b"1000000000000 bytes do not fit" in answer.output
    assert used[0] < 16 * 10**6
    assert (await run(sandbox, "read_file", path="f", lines=1)).status is ToolStatus.tool_error, "nothing was changed"


async def test_a_file_that_is_too_large_to_be_held_is_not_edited(sandbox: Sandbox) -> None:
    await made(sandbox, f"open('f', 'w').write('a\\n' * {EDITED // 2 + 1})")
    with peak() as used:
        answer = await run(sandbox, "edit_file", path="f", old="b", new="c")
    assert answer.status is ToolStatus.tool_error
    assert f"more than the {EDITED} that can be read" in answer.output.decode()
    assert used[0] < EDITED


def parts_of(text: bytes, cuts: list[int]) -> list[bytes]:
    """The text, cut at these places."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[first:last] for first, last in itertools.pairwise(places)]


@settings(deadline=None, database=None, derandomize=True)
@given(
    text=st.binary(max_size=40).map(lambda raw: bytes(b"ab\n\n"[byte % 4] for byte in raw)),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    first=st.integers(1, 12),
    most=st.none() | st.integers(1, 5),
    room=st.integers(1, 40),
)
def test_lines_of_a_text_in_parts_are_those_of_the_whole_text(
    text: bytes, cuts: list[int], first: int, most: int | None, room: int
) -> None:
    lines = Lines(first, most, room)
    for part in parts_of(text, cuts):
        lines.feed(part)
    lines.finish()
    whole = text.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    wanted, left = [], room
    for line in whole[first - 1 :][:most]:
        left -= len(line) + 1
        if left < 0:
            break
        wanted.append(line)
    assert (lines.taken, lines.count, lines.has_final_newline) == (wanted, len(whole), text.endswith(b"\n"))


@pytest.mark.parametrize("value", ["[],", '{"a":[1.5]},', '"a",', "1,", "[" * 60 + "]" * 60 + ","])
def test_arguments_of_very_many_values_are_refused_before_they_are_made(value: str) -> None:
    raw = f'{{"path": "a", "content": [{value * ((4 << 20) // len(value) - 20)}1]}}'.encode()
    assert 4_000_000 < len(raw) <= 4 << 20
    with peak() as used:
        refused = prepared("write_file", raw, SPEC, LIMITS)
    assert isinstance(refused, Refusal)
    assert (refused.reason, "values" in refused.text) == ("arguments", True)
    assert used[0] < 10 * len(raw), used


def test_arguments_of_one_long_text_are_taken() -> None:
    raw = json.dumps({"path": "a", "content": '[{",' * 500_000}).encode()
    assert isinstance(prepared("write_file", raw, SPEC, LIMITS), Prepared)
