"""Calls of sessions that are erased: they end without an answer, and the worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.sandbox.conftest import House, housed


@pytest.fixture
async def sealed(tmp_path: Path) -> AsyncIterator[House]:
    """An empty log of a run that encrypts content."""
    async with housed(tmp_path, "0123456789abcdef") as house:
        yield house


async def erase(house: House, session: str) -> None:
    assert house.events.keys is not None
    await house.events.keys.erase(session, "an operator")


async def all_calls_committed(house: House, calls: int) -> None:
    async with asyncio.timeout(30):
        while sum((await house.committed()).values()) < calls:
            await house.log.broker.changed(0.1)  # a commit is no record


async def test_a_call_whose_session_is_erased_while_it_runs_gets_no_answer(sealed: House, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # noqa: ASYNC240 - each call runs under a user of its own
    meet = tmp_path / "meet"
    async with sealed.worker() as role:
        command = f"until [ -e {meet} ]; do sleep 0.02; done; echo seen"
        await sealed.ask(sealed.shell("straggler", command, session="gone"))
        await sealed.until(1, sealed.starts)
        await erase(sealed, "gone")
        assert role.events.keys is not None
        await role.events.keys.refresh()
        meet.touch()
        await all_calls_committed(sealed, 1)
        answer = await sealed.answer(sealed.call("other", session="kept"))
    assert [one.call_id for one in await sealed.completed(1)] == ["other"]
    assert answer.output == b"other\n"


async def test_calls_of_an_erased_session_that_are_read_again_do_not_run(sealed: House) -> None:
    await sealed.ask(sealed.call("a", session="gone"), sealed.call("b", 1, session="gone"))
    await erase(sealed, "gone")
    async with sealed.worker():
        await all_calls_committed(sealed, 2)
        await sealed.answer(sealed.call("other", session="kept"))
    assert [one.call_id for one in await sealed.starts()] == ["other"]
    assert [one.call_id for one in await sealed.completed(1)] == ["other"]
