"""Bad input: every request is answered with a typed result that says what is wrong, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus
from turnlog.schemas.topics import INLINE_LIMIT_BYTES


def spec(**changes: Any) -> dict[str, Any]:
    """Fields of a request."""
    return {"sandbox": SandboxSpec(backend="subprocess", **changes)}


def limits(**changes: Any) -> dict[str, Any]:
    """Fields of a request."""
    return spec(limits=SandboxLimits(**changes))


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"tool": "browser"}, "tool", "python, shell"),
        ({"tool": "python\0; rm -rf /"}, "tool", "there is no tool"),
        ({"arguments": b"{"}, "arguments", "JSON"),
        ({"arguments": b'{"command": "ls"}'}, "arguments", "code"),
        ({"arguments": b'{"code": 3}'}, "arguments", "code"),
        ({"arguments": b"[]"}, "arguments", "object"),
        ({"arguments": b"\xff"}, "arguments", "JSON"),
        ({"arguments": b"[" * 100_000}, "arguments", ""),
        ({"arguments": json.dumps({"code": "#" * 5_000_000}).encode()}, "argument_bytes", "argument_bytes"),
        ({"sandbox": SandboxSpec(backend="docker")}, "backend", "it serves bubblewrap, subprocess"),
        ({"sandbox": SandboxSpec(backend="")}, "backend", "it serves bubblewrap, subprocess"),
        (spec(network="internet"), "network", "it serves"),
        (spec(network="allowlist"), "network", "allowlist"),
        (spec(image="no/such/image"), "image", "no/such/image"),
        (spec(env={"A=B": "1"}), "sandbox", "A=B"),
        (spec(env={"A": "1\0"}), "sandbox", "environment"),
        (spec(env={"A": "1" * 70_000}), "sandbox", "65536"),
        (spec(folders=("/app",)), "sandbox", "backend subprocess serves no `folders`"),
        (spec(folders=("app",)), "sandbox", "'app' is no absolute path"),
        (spec(folders=("/",)), "sandbox", "'/' is no absolute path"),
        (spec(folders=("/app/../etc",)), "sandbox", "no absolute path"),
        (spec(folders=("/app", ".")), "sandbox", "'.' is no absolute path"),
        (spec(folders=("/proc/self",)), "sandbox", "belongs to the sandbox itself"),
        (spec(folders=tuple(f"/{number}" for number in range(33))), "sandbox", "32 are allowed"),
        (limits(wall_s=float("nan")), "sandbox", "wall_s must be above 0, got nan"),
        (limits(cpu_s=0.0), "sandbox", "cpu_s must be above 0"),
        (limits(memory_bytes=-1), "sandbox", "memory_bytes must be above 0"),
        (limits(pids=0), "sandbox", "pids must be above 0"),
        (limits(output_bytes=-(2**40)), "sandbox", "output_bytes must be above 0"),
        ({"deadline_s": float("nan")}, "sandbox", "deadline_s"),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "",
)
async def test_what_cannot_be_run_is_refused_with_a_reason(
    house: Any, changes: dict[str, Any], reason: str, text: str
) -> None:
    async with house.worker():
        answer = await house.answer(house.call("a", **changes))
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.refused, reason, None)
    assert text in answer.output.decode()
    assert await house.starts() == []
    assert len(answer.output) < 2000


async def test_any_bytes_may_be_output(house: Any) -> None:
    every = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 2)"
    async with house.worker():
        answer = await house.answer(house.call("a", arguments=json.dumps({"code": every}).encode()))
    assert (answer.status, answer.output) == (ToolStatus.ok, bytes(range(256)) * 2)


async def test_a_nul_in_a_command_is_an_answer(house: Any) -> None:
    async with house.worker():
        answer = await house.answer(house.shell("a", "echo a\0b"))
        python = await house.answer(house.call("b", 1, arguments=json.dumps({"code": "print('a\0b')"}).encode()))
        after = await house.answer(house.call("c", 2))
    assert answer.status in (ToolStatus.refused, ToolStatus.tool_error)
    assert python.status in (ToolStatus.refused, ToolStatus.tool_error)
    assert after.output == b"c\n"


async def test_a_gigabyte_of_output_ends_the_call_at_its_limit(house: Any) -> None:
    async with house.worker():
        answer = await house.answer(house.shell("a", "yes | head -c 1G"))
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.resource_limit, "output_bytes", None)
    assert len(answer.output) == 64 * 2**10
    assert answer.full_output is None


async def test_output_beyond_what_a_record_takes_is_cut_and_kept_whole_in_the_store(house: Any) -> None:
    large = 4 * INLINE_LIMIT_BYTES
    settings = dataclasses.replace(house.settings.sandbox, output_bytes=large)
    house.settings = dataclasses.replace(house.settings, sandbox=settings)
    async with house.worker():
        call = house.shell("a", "head -c 3000000 /dev/zero", **limits(output_bytes=large))
        answer = await house.answer(call)
    assert (answer.status, answer.output) == (ToolStatus.ok, bytes(INLINE_LIMIT_BYTES))
    assert await house.blobs.get(answer.full_output) == bytes(3_000_000)
