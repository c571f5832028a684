"""Two workers: partitions move, a paused one comes back as a zombie, and no session sees two histories."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.memory_readers import MemoryGroupReader
from turnlog.infra.log import Assigned, Record
from turnlog.schemas.events import ToolCallCompleted, ToolCallStarted, ToolStatus
from turnlog.schemas.topics import TOOL_RESULTS


class PausableLog(MemoryLog):
    """A connection whose process can be stopped and continued: its group gives it up, and it does not know."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log.broker)
        self.runs = asyncio.Event()
        self.runs.set()

    def pause(self) -> None:
        """SIGSTOP, for longer than a session lasts."""
        self.runs.clear()
        self.expire()

    @asynccontextmanager
    async def group_reader(
        self, group: str, topics: Any, *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AsyncIterator[MemoryGroupReader]:  # fmt: skip
        """See Log."""
        async with super().group_reader(group, topics, assigned=assigned, revoked=revoked) as reader:
            polled = reader.poll

            async def poll(*, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
                await self.runs.wait()
                return await polled(max_records=max_records, timeout_s=timeout_s)

            reader.poll = poll  # type: ignore[method-assign]
            yield reader


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A folder that commands of every user may meet in, with two pipes."""
    tmp_path.chmod(0o777)
    for name in ("began", "go"):
        os.mkfifo(tmp_path / name)
        (tmp_path / name).chmod(0o666)
    return tmp_path


@pytest.fixture(autouse=True)
def _commits_at_every_chance(house: Any) -> None:
    """What a commit passes is not read again: the more of them, the sooner one that passes too much is found."""
    house.pace = {"commit_s": 0.0}


async def test_a_zombies_late_answer_counts_for_nothing_and_its_files_are_not_used(house: Any, gate: Path) -> None:
    """A stands still in the middle of call 0; B takes over and answers it; A wakes up, ends its run, answers too, and
    gets the partition back: call 1 finds B's files, in A."""
    first_waits = f"mkdir {gate}/first 2>/dev/null && {{ echo > {gate}/began; cat {gate}/go; }}; "
    call = house.durable("a", first_waits + "head -c 8 /dev/urandom | od -An -tx1 > f; cat f", 0, None)
    log_a = PausableLog(house.log)
    async with house.worker(instance="A", log=log_a):
        await house.ask(call)
        await asyncio.to_thread((gate / "began").read_text)
        log_a.pause()
        async with house.worker(instance="B"):
            (effective,) = await house.completed(1)
        await asyncio.to_thread((gate / "go").write_text, "")
        _, late = await house.completed(2)
        log_a.runs.set()
        second = await house.answer(house.durable("b", "cat f", 1, effective.workspace))
    assert [effective.worker, late.worker, second.worker] == ["B", "A", "A"]
    assert effective.attempt == 2
    assert late.output != effective.output
    assert second.output == effective.output


async def test_a_call_that_another_worker_answered_before_its_start_is_neither_run_nor_answered_otherwise(
    house: Any,
) -> None:
    """The zombie's answer comes after this worker's look at the results, and before its ToolCallStarted."""
    async with house.worker(slots=1):
        await house.ask(house.shell("holds", "sleep 1", session="t", rollout_id="s"))
        await house.until(1, house.starts)
        await house.ask(house.shell("a", "echo run"))
        theirs = answered_by_a_zombie(house)
        await house.ask(theirs)
        await house.answer(house.call("b", 1))
        await house.ask(house.shell("a", "echo run"))
        answers = [answer for answer in await house.completed(4) if answer.call_id == "a"]
    assert [(answer.worker, answer.output, answer.cached) for answer in answers] == [
        ("zombie", b"theirs\n", False),
        ("zombie", b"theirs\n", True),
    ]
    assert sum((await house.committed()).values()) == 4


def answered_by_a_zombie(house: Any) -> ToolCallCompleted:
    """What a worker that lost the partition writes."""
    return ToolCallCompleted(
        event_id="zombie",
        run_id="run",
        group_id="g",
        session_id="s",
        floor=3,
        rollout_id="s",
        call_id="a",
        call_seq=0,
        status=ToolStatus.ok,
        reason="",
        exit_code=0,
        output=b"theirs\n",
        full_output=None,
        duration_s=0.1,
        queue_s=0.0,
        workspace=None,
        attempt=1,
        worker="zombie",
        cached=False,
    )


class HastyLog(MemoryLog):
    """A connection whose group takes everything away and gives it back, once, in the poll after one that found
    something (`due` from the start) or after it was made `due`: before anything else in the process has its turn."""

    due = False

    @asynccontextmanager
    async def group_reader(
        self, group: str, topics: Any, *, assigned: Assigned, revoked: Assigned, instance: str | None = None,
        pause_s: float = 0.0,
    ) -> AsyncIterator[MemoryGroupReader]:  # fmt: skip
        """See Log."""
        async with super().group_reader(group, topics, assigned=assigned, revoked=revoked) as reader:
            polled, found = reader.poll, False
            everything = frozenset(range(2))

            async def poll(*, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
                nonlocal found
                if self.due and found:
                    self.due = False
                    await revoked(everything)
                    await assigned(everything)
                records = await polled(max_records=max_records, timeout_s=timeout_s)
                found = found or bool(records)
                return records

            reader.poll = poll  # type: ignore[method-assign]
            yield reader


async def test_a_call_that_is_taken_away_before_its_first_step_runs_when_it_comes_back(house: Any) -> None:
    log = HastyLog(house.log.broker)
    log.due = True
    await house.ask(house.call("a"))
    async with house.worker(log=log):
        (answer,) = await house.completed(1)
    assert (answer.status, answer.attempt, log.due) == (ToolStatus.ok, 1, False)


async def test_a_partition_that_comes_back_finds_its_sessions_sandboxes_as_they_were(house: Any) -> None:
    """Other workers come and go; an interpreter of a session that stays is not lost to that."""

    def step(seq: int, code: str, workspace: object) -> Any:
        changes = {"tool": "python_session", "arguments": json.dumps({"code": code}).encode()}
        return dataclasses.replace(house.durable(f"c{seq}", "", seq, workspace), **changes)

    log = HastyLog(house.log.broker)
    async with house.worker(log=log):
        first = await house.answer(step(0, "x = 41", None))
        log.due = True
        while log.due:
            await house.log.broker.changed(0.05)
        second = await house.answer(step(1, "print(x + 1)", first.workspace))
    assert (second.status, second.output) == (ToolStatus.ok, b"42\n")


async def test_two_workers_share_the_sessions_and_repeat_no_answered_call(house: Any) -> None:
    """A second worker comes and goes while sessions run: every call has one start and one answer, in order."""
    refs: dict[str, Any] = dict.fromkeys(f"s{number}" for number in range(6))

    async def session(name: str) -> None:
        for seq in range(4):
            call = house.durable(f"{name}.{seq}", f"echo {seq} >> f; cat f", seq, refs[name], session=name)
            answer = await house.answer(call)
            assert answer.output.split() == [b"%d" % number for number in range(seq + 1)], answer
            refs[name] = answer.workspace

    async with house.worker(instance="A", slots=4):
        sessions = [asyncio.create_task(session(name)) for name in refs]
        await house.completed(6)
        async with house.worker(instance="B", slots=4):
            await house.completed(16)
        await asyncio.gather(*sessions)
    starts = await house.read(TOOL_RESULTS.name, ToolCallStarted)
    answers = await house.read(TOOL_RESULTS.name, ToolCallCompleted)
    answers = [answer for answer in answers if not answer.cached]  # what was read again is answered again
    assert {answer.worker for answer in answers} == {"A", "B"}
    assert len(starts) == len(answers) == len({answer.call_id for answer in answers}) == 24
    assert sum((await house.committed()).values()) == 24
