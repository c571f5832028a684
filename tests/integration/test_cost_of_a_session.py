"""What a session makes gateway and runner do, counted in calls of functions, which no other process can slow down."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.conftest import Stage

SESSIONS, TURNS = 8, 2


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Calls and resumptions of Python functions in this thread, by FILE:FUNCTION, and asyncio tasks by the name of
    their coroutine."""
    calls: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    creation = asyncio.BaseEventLoop.create_task.__code__

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
            if frame.f_code is creation:
                tasks[frame.f_locals["coro"].__qualname__] += 1

    sys.setprofile(note)
    try:
        yield calls, tasks
    finally:
        sys.setprofile(None)


@pytest.fixture
async def played(stage: Stage) -> tuple[Counter[str], Counter[str]]:
    """What SESSIONS sessions of TURNS turns and one tool call were counted to do. See `counted`."""
    async with stage.gateway(), stage.running():
        await stage.request("first")  # which finds out what holds for all
        await stage.finished(1)
        with counted() as found:
            for number in range(SESSIONS):
                await stage.request(f"group-{number}")
            await stage.finished(1 + SESSIONS)
    return found


def of(calls: Counter[str], part: str) -> int:
    """Calls of functions whose FILE:FUNCTION contains a text."""
    return sum(count for name, count in calls.items() if part in name)


async def test_a_session_is_played_without_an_http_parser_in_python_and_without_a_copy_of_its_records(
    played: tuple[Counter[str], Counter[str]],
) -> None:
    calls, _ = played
    assert of(calls, "/httptools_impl.py:run_asgi")
    assert of(calls, "/aiohttp/client.py:_request")
    packages = ("/h11/", "/httpcore/", "/httpx/", "/anyio/", "/proxy_headers.py")
    assert {part: of(calls, part) for part in (*packages, ":_asdict_inner", ":_astuple_inner")} == dict.fromkeys(
        (*packages, ":_asdict_inner", ":_astuple_inner"), 0
    )


async def test_a_turn_is_tokenised_once(played: tuple[Counter[str], Counter[str]]) -> None:
    calls, _ = played
    by_the_scripted_policy = SESSIONS * TURNS
    assert of(calls, "/gateway/prompts.py:encode") - by_the_scripted_policy == SESSIONS * TURNS


async def test_a_session_takes_few_tasks_and_no_shared_thread(played: tuple[Counter[str], Counter[str]]) -> None:
    calls, tasks = played
    once = ("Runner._rollout", "Rollout._run_actor", "ToolLoop.act", "Sessions._once.<locals>.run", "Sessions._finish")
    expected = dict.fromkeys(once, SESSIONS) | {
        "Turns._run": SESSIONS * TURNS, "TurnResponse._watch": SESSIONS * TURNS,
    }  # fmt: skip
    not_of_sessions = ("RequestResponseCycle", "ClientRequest", "_accept", "LiveEngine", "follow_scores")
    assert {name: count for name, count in tasks.items() if not any(one in name for one in not_of_sessions)} == expected
    assert not of(calls, "/asyncio/threads.py:to_thread")
