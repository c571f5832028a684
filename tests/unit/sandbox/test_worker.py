"""The worker on the log in memory: order of effects, repeats, restarts, commits, poison."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from turnlog.infra.log import Commit, CommitsExpired, OtherInputs, Partition
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers import calls
from turnlog.sandbox_workers.calls import Answered
from turnlog.schemas.events import EgressSource, SandboxLimits, SandboxSpec, ToolCallCompleted, ToolStatus
from turnlog.schemas.topics import BY_NAME, TOOL_CALLS, TOOL_RESULTS

RANDOM = json.dumps({"code": "import os; print(os.urandom(8).hex())"}).encode()


async def test_a_call_is_announced_run_and_answered(house: Any) -> None:
    async with house.worker():
        answer = await house.answer(house.call("a"))
    (started,) = await house.starts()
    assert (started.call_id, started.attempt, started.worker) == ("a", 1, "sandbox-0")
    assert (answer.status, answer.reason, answer.exit_code, answer.output) == (ToolStatus.ok, "", 0, b"a\n")
    assert (answer.call_id, answer.group_id, answer.floor, answer.attempt, answer.cached) == ("a", "g", 3, 1, False)
    order = [type(event).__name__ for event in await house.read(TOOL_RESULTS.name, object)]
    assert order == ["ToolCallStarted", "ToolCallCompleted"]


async def test_what_a_call_runs_in_is_named_before_it_runs_and_is_the_same_in_every_worker(house: Any) -> None:
    async with house.worker():
        await house.answer(house.call("a"))
        await house.answer(house.call("b", session="t"))
    async with house.worker():
        await house.answer(house.call("c"))
    names = {started.environment_sha256 for started in await house.starts()}
    assert [len(name) for name in names] == [64]


async def test_the_calls_of_a_session_run_in_call_seq_order(house: Any) -> None:
    await house.ask(*(house.call(f"c{seq}", seq) for seq in (2, 0, 1, 3)))
    async with house.worker():
        answers = await house.completed(4)
    assert [answer.call_seq for answer in answers] == [0, 1, 2, 3]


async def test_sessions_run_at_once_up_to_the_slots(house: Any, tmp_path: Path) -> None:
    """Each of two calls waits for the other's file: they end only if both run."""
    meet = "import pathlib, time\nd = pathlib.Path('{0}')\n(d / '{1}').touch()\n"
    meet += "while not (d / '{2}').exists(): time.sleep(0.01)\n"
    tmp_path.chmod(0o777)  # noqa: ASYNC240 - each call runs under a user of its own
    async with house.worker():
        for me, other in (("x", "y"), ("y", "x")):
            code = json.dumps({"code": meet.format(tmp_path, me, other)}).encode()
            await house.ask(house.call(me, session=me, arguments=code))
        answers = await house.completed(2)
    assert [answer.status for answer in answers] == [ToolStatus.ok, ToolStatus.ok]


async def test_a_repeated_answered_call_gets_the_stored_answer_and_does_not_run(house: Any) -> None:
    call = house.call("a", arguments=RANDOM)
    async with house.worker():
        await house.answer(call)
        await house.ask(call)
        first, again = await house.completed(2)
    assert again == dataclasses.replace(first, cached=True)
    async with house.worker():  # also after a restart
        await house.ask(call)
        *_, after = await house.completed(3)
    assert after == again
    assert len(await house.starts()) == 1


async def test_answers_are_read_back_from_the_log_however_many_came_between(house: Any) -> None:
    """The worker keeps none of them in memory."""
    first = house.call("first", arguments=RANDOM)
    async with house.worker():
        whole = await house.answer(first)
        others = [house.call(f"c{number}", arguments=b"not json") for number in range(300)]
        await house.ask(*others)
        await house.completed(301)
        await house.ask(first)
        *_, again = await house.completed(302)
    assert again == dataclasses.replace(whole, cached=True)


def test_the_bounds_of_what_is_remembered() -> None:
    """The oldest answer is forgotten first; a successor reads back what the shorter of the two bounds says."""
    known = Answered(kept=4, recalled=2)
    for position, name in enumerate("abcde"):
        known.add(name, position)
    known.add("e", 9)
    assert [known.find(name) for name in "abcde"] == [None, 1, 2, 3, 4]
    assert known.recalled_from(10) == 3
    assert Answered().recalled_from(7) == 7
    assert (calls.KEPT, calls.RECALLED) == (65_536, 8_192)  # as docs/sandbox.md says


async def test_an_answer_that_is_not_on_the_log_any_more_is_said_to_be_gone(house: Any) -> None:
    call = house.call("a")
    async with house.worker():
        await house.answer(call)
        for place, end in (await _ends(house)).items():
            house.log.broker.truncate(place, end)
        await house.ask(call)
        (again,) = await house.completed(1)
    assert (again.status, again.reason, again.cached) == (ToolStatus.infra_error, "answer_gone", True)


async def _ends(house: Any) -> Any:
    places = [place for place in house.log.broker.logs if place.topic == TOOL_RESULTS.name]
    return await house.log.end_offsets(places)


async def test_a_call_repeated_while_it_runs_is_answered_once(house: Any) -> None:
    slow = house.shell("a", "sleep 0.3; echo done")
    async with house.worker():
        await house.ask(slow, slow, house.call("b", 1))
        answers = await house.completed(2)
    assert [answer.call_id for answer in answers] == ["a", "b"]
    assert sum((await house.committed()).values()) == 3


async def test_everything_answered_is_committed_and_not_read_again(house: Any) -> None:
    async with house.worker():
        await house.ask(*(house.call(f"c{number}", session=f"s{number}") for number in range(6)))
        await house.completed(6)
    assert sum((await house.committed()).values()) == 6
    async with house.worker():
        await house.answer(house.call("last", session="s0"))
    assert len(await house.starts()) == 7


async def test_a_commit_keeps_what_a_newer_release_says_and_one_that_expired_is_told_from_none(house: Any) -> None:
    commits = house.log.broker.group("run.sandbox").commits
    for number in range(2):
        async with house.worker() as role:
            await house.answer(house.call(f"c{number}"))
        said = [json.loads(commit.metadata) for commit in commits.values()]
        assert max(each["high"] for each in said) == number + 1
        assert {each.get("later") for each in said} == {"kept" if number else None}
        for place, commit in commits.items():
            commits[place] = Commit(commit.offset, json.dumps({**json.loads(commit.metadata), "later": "kept"}))
    commits[Partition("agent.more", 0)] = Commit(1)
    with pytest.raises(OtherInputs, match=r"run\.sandbox has commits for agent\.more"):
        await calls.PartitionRecovery(role, "run.sandbox").units([0, 1])
    commits.clear()
    for number in range(2):
        house.log.broker.truncate(Partition(TOOL_CALLS.name, number), 1)
    with pytest.raises(CommitsExpired, match=r"agent\.tool-calls\[\d\] begins at 1: .*offsets\.retention\.minutes"):
        await calls.PartitionRecovery(role, "run.sandbox").units([0, 1])


async def test_the_committed_offset_waits_for_the_oldest_unanswered_call(house: Any) -> None:
    async with house.worker():
        await house.ask(house.shell("slow", "sleep 60"))
        await house.answer(house.call("quick", session="s2", rollout_id="s"))
        while not await house.committed():
            await house.log.broker.changed(0.05)
        assert sum((await house.committed()).values()) == 0
        await house.ask(house.cancelled("slow"))
        await house.completed(2)
    assert sum((await house.committed()).values()) == 3


async def test_a_call_whose_worker_died_runs_again_as_the_next_attempt(house: Any) -> None:
    await house.ask(house.call("a"), house.started("a", 1))
    async with house.worker():
        (answer,) = await house.completed(1)
    assert (answer.status, answer.attempt) == (ToolStatus.ok, 2)
    assert [event.attempt for event in await house.starts()] == [1, 2]


async def test_a_call_that_kills_every_worker_is_given_up_and_parked(house: Any) -> None:
    await house.ask(house.call("a"), *(house.started("a", attempt) for attempt in (1, 2, 3)))
    async with house.worker():
        (answer,) = await house.completed(1)
        (letter,) = await house.parked(1)
    assert (answer.status, answer.reason, answer.attempt) == (ToolStatus.infra_error, "attempts", 3)
    assert (letter.cause, letter.topic, letter.offset) == ("AttemptsExhausted", TOOL_CALLS.name, 0)
    assert "max_attempts" in letter.message


async def test_a_sandbox_that_dies_costs_an_attempt_not_the_call(house: Any) -> None:
    house.deaths = 2
    async with house.worker():
        answer = await house.answer(house.call("a"))
    assert (answer.status, answer.attempt, answer.output) == (ToolStatus.ok, 3, b"a\n")


async def test_a_call_under_which_two_new_sandboxes_die_has_done_it_itself(house: Any) -> None:
    house.deaths = 3
    async with house.worker():
        answer = await house.answer(house.call("a"))
    assert (answer.status, answer.reason, answer.attempt) == (ToolStatus.tool_error, "sandbox_ended", 3)


async def test_poison_is_parked_and_the_work_goes_on(house: Any) -> None:
    stray = house.events.codec.encode(house.started("a", 1))
    async with house.log.appender() as appender:
        await appender.append(TOOL_CALLS.name, b"s", b"poison")
        await appender.append(TOOL_CALLS.name, b"s", stray)
    async with house.worker():
        answer = await house.answer(house.call("a"))
        letters = await house.parked(2)
    assert answer.output == b"a\n"
    assert {(letter.cause, letter.value) for letter in letters} == {
        ("UndecodableRecord", b"poison"),
        ("UnexpectedRecord", stray),
    }
    assert sum((await house.committed()).values()) == 3


async def test_a_call_of_another_run_is_parked_once_and_never_run(house: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    await house.ask(house.shell("theirs", f"touch {ran}", run_id="theirs"), house.call("ours"))
    for count in (1, 2):  # and again after a restart
        async with house.worker():
            assert (await house.answer(house.call("ours"))).output == b"ours\n"
            await house.completed(count)
            (letter,) = await house.parked(1)
    assert (letter.cause, letter.run_id) == ("ForeignRun", "run")
    assert "is of run 'theirs', this log is of 'run'" in letter.message
    assert {event.call_id for event in await house.starts()} == {"ours"}
    assert not ran.exists()


async def test_a_sandbox_is_made_ready_for_the_call_that_comes_next(house: Any) -> None:
    """While the call before it still runs."""
    small = SandboxSpec(backend="subprocess", limits=SandboxLimits(disk_bytes=2**20))

    async def ready() -> list[Any]:
        return [shape for shape in house.shapes if shape.disk_bytes == 2**20]

    async with house.worker(slots=2, prewarm=2):
        await house.ask(house.shell("runs", "sleep 60"), house.call("next", 1, sandbox=small))
        await house.until(1, ready)
        assert len(await house.starts()) == 1
        await house.ask(house.cancelled("runs"))
        await house.completed(2)
        assert len(await ready()) == 1


async def test_calls_are_counted_by_tool_status_and_backend_and_names_that_are_not_ours_make_no_series(
    house: Any,
) -> None:
    def count(tool: str, status: str, backend: str) -> float:
        labels = {"tool": tool, "status": status, "backend": backend}
        return REGISTRY.get_sample_value("turnlog_sandbox_calls_total", labels) or 0.0

    before = count("python", "ok", "subprocess"), count("", "refused", "")
    async with house.worker():
        await house.answer(house.call("a"))
        await house.answer(house.call("b", 1, tool="made-up"))
    assert (count("python", "ok", "subprocess"), count("", "refused", "")) == (before[0] + 1, before[1] + 1)
    assert count("made-up", "refused", "") == 0


async def test_a_fallback_is_named_in_every_answer(house: Any) -> None:
    async with house.worker(fallback=True):
        answer = await house.answer(house.call("a"))
    assert answer.worker == "sandbox-0+subprocess"


async def test_a_call_finds_the_environment_that_its_recipe_gives_it(house: Any) -> None:
    spec = SandboxSpec(backend="subprocess", env={"GREETING": "hello"})
    async with house.worker():
        answer = await house.answer(house.shell("a", "echo $GREETING", sandbox=spec))
    assert answer.output == b"hello\n"


async def test_what_a_call_asks_of_the_network_stands_in_its_answer(house: Any) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n")
        writer.close()

    origin = await asyncio.start_server(answer, "127.0.0.1", 0)
    place = f"origin.test:{origin.sockets[0].getsockname()[1]}"
    egress = EgressSettings(allow=(f"GET http://{place}/a*",), private_hosts=(place,), mode="record")
    house.settings = dataclasses.replace(house.settings, egress=egress)
    fetch = "import urllib.request as r; print(r.urlopen('http://{}/{}').read())"
    async with origin, house.worker():
        answers = []
        for seq, path in enumerate(("abc", "b")):
            code = json.dumps({"code": fetch.format(place, path)}).encode()
            spec = SandboxSpec(backend="subprocess", network="allowlist")
            answers.append(await house.answer(house.call(path, seq, arguments=code, sandbox=spec)))
        spec = SandboxSpec(backend="subprocess", network="allowlist", allow=("nonsense",))
        nonsense = await house.answer(house.call("c", 2, sandbox=spec))
    (granted,), (refused,) = (answer.requests for answer in answers)
    assert answers[0].output == b"b'hello\\n'\n"
    assert (granted.url, granted.status, granted.source) == (f"http://{place}/abc", 200, EgressSource.recorded)
    assert await house.blobs.get(granted.response) == b"hello\n"
    assert (refused.status, refused.source, refused.reason) == (403, EgressSource.refused, "rule")
    assert (nonsense.status, nonsense.reason) == (ToolStatus.refused, "network")


def test_calls_and_results_are_copartitioned() -> None:
    assert BY_NAME[TOOL_CALLS.name].partitions == BY_NAME[TOOL_RESULTS.name].partitions
    assert TOOL_CALLS.key == TOOL_RESULTS.key


async def test_a_second_answer_changes_nothing(house: Any) -> None:
    """The first in the log is the effective one, whoever wrote it and whenever this worker hears of it."""
    call = house.call("a", arguments=RANDOM)
    async with house.worker():
        first = await house.answer(call)
        later = dataclasses.replace(first, output=b"a zombie's", worker="zombie")
        await house.ask(later, call)
        found = await house.until(3, lambda: house.read(TOOL_RESULTS.name, ToolCallCompleted))
    assert found[2] == dataclasses.replace(first, cached=True)
