"""Sessions: opened once, retried, taken over, finished, and what a client that goes away leaves behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.unit.gateway.conftest import PARTITIONS, until
from turnlog.producers.gateway.conversation import MessageNode, RecordedTurn, Strand
from turnlog.producers.gateway.recovery import SessionTail
from turnlog.producers.gateway.requests import traceparent
from turnlog.producers.gateway.sessions import KEPT
from turnlog.schemas.events import Boundary, Outcome
from turnlog.settings import load

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
OLD, NEW = "the-old-signing-key", "the-new-signing-key"


async def test_opening_is_idempotent_also_when_many_ask_at_once(rig: Any) -> None:
    answers = await asyncio.gather(*(rig.open("rollout-7") for _ in range(8)))
    assert len({answer["session_id"] for answer in answers}) == 1
    assert len({answer["epoch"] for answer in answers}) == 1
    [started] = await rig.written("SessionStarted")
    assert started.event_id == answers[0]["epoch"]
    assert started.writer_url == rig.url
    other = await rig.open("rollout-7", attempt=1)
    assert other["session_id"] != answers[0]["session_id"]


async def test_a_session_that_begins_reads_no_start_offset(rig: Any) -> None:
    before = rig.held.start_reads
    for number in range(3):
        await rig.open(f"rollout-{number}")
    assert rig.held.start_reads == before, "the tail has read everything since the floor of these sessions"


async def test_someone_who_tries_the_gateway_needs_no_task(rig: Any) -> None:
    answer = await rig.http.post("/sessions", json={}, headers={"authorization": "Bearer test-key"})
    session = answer.json()
    assert (await rig.chat(session, [QUESTION])).status_code == 200
    [started] = await rig.written("SessionStarted")
    assert started.group_id == started.session_id
    assert started.purpose == "other"


async def test_finish_names_the_delivered_turns_and_is_idempotent(rig: Any) -> None:
    session = await rig.open()
    one = (await rig.chat(session, [QUESTION])).json()
    first = await rig.finish(session)
    again = await rig.finish(session, outcome="agent_error")
    assert first.json() == again.json()
    assert first.json()["turns"] == [{"epoch": session["epoch"], "index": one["turnlog"]["index"]}]
    [finished] = await rig.written("SessionFinished")
    assert (finished.outcome, finished.epoch, finished.undelivered) == (Outcome.completed, session["epoch"], ())
    late = await rig.chat(session, [QUESTION])
    assert (late.status_code, late.json()["error"]["code"]) == (400, "session_finished")
    assert (await rig.describe(session))["finished"] is True


async def test_an_idempotency_key_gives_the_recorded_turn(rig: Any) -> None:
    session = await rig.open()
    answers = [await rig.chat(session, [QUESTION], key="s:0") for _ in range(2)]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    other = await rig.chat(session, [{"role": "user", "content": "else"}], key="s:0")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert len(await rig.written("TurnCompleted")) == 1


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@each(
    ("headers", "kept"),
    [
        ([f"00-{TRACE}-{SPAN}-01"], True), ([f" 00-{TRACE}-{SPAN}-00 "], True), ([f"cc-{TRACE}-{SPAN}-01"], True),
        ([f"cc-{TRACE}-{SPAN}-01-what-may-come"], True), ([], False), ([""], False), ([f"00-{TRACE}-{SPAN}"], False),
        ([f"00-{TRACE}-{SPAN}-01"] * 2, False), ([f"00-{TRACE}-{SPAN}-01-more"], False),
        ([f"cc-{TRACE}-{SPAN}-01.more"], False), ([f"ff-{TRACE}-{SPAN}-01"], False),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], False), ([f"00-{'0' * 32}-{SPAN}-01"], False),
        ([f"00-{TRACE}-{'0' * 16}-01"], False), ([f"00-{TRACE}-{SPAN}-0g"], False), (["<script>"], False),
    ],
)  # fmt: skip
def test_a_traceparent_is_read_as_its_standard_says_and_its_flags_are_not(headers: list[str], kept: bool) -> None:
    assert traceparent(headers) == (f"00-{TRACE}-{SPAN}-00" if kept else "")


async def test_the_agents_span_that_asked_stands_in_the_turns_record(rig: Any) -> None:
    session = await rig.open()
    for header in (f"00-{TRACE}-{SPAN}-01", "broken", None):
        headers = {"authorization": f"Bearer {session['token']}"} | ({"traceparent": header} if header else {})
        body = {"messages": [QUESTION | {"content": str(header)}]}
        assert (await rig.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    turns = await rig.written("TurnCompleted")
    assert [turn.traceparent for turn in turns] == [f"00-{TRACE}-{SPAN}-00", "", ""]


async def test_concurrent_repeats_under_one_key_share_one_turn(rig: Any) -> None:
    session = await rig.open()
    rig.engines["e0"].holds_after = 0
    asks = [asyncio.create_task(rig.chat(session, [QUESTION], key="k", stream=True)) for _ in range(3)]
    await rig.engines["e0"].reached.wait()
    rig.engines["e0"].released.set()
    answers = await asyncio.gather(*asks)
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert len(rig.engines["e0"].requests) == 1
    assert len(await rig.written("TokenSnapshot")) == 1


async def test_concurrent_turns_have_distinct_indexes(rig: Any) -> None:
    session = await rig.open()
    answers = await asyncio.gather(
        *(rig.chat(session, [{"role": "user", "content": f"question {number}"}]) for number in range(6))
    )
    assert {answer.json()["turnlog"]["index"] for answer in answers} == set(range(6))


async def test_after_a_kill_another_gateway_continues_with_the_same_tokens(rig: Any) -> None:
    session = await rig.open()
    first = rig.script.says("1+1")
    one = (await rig.chat(session, [QUESTION])).json()["choices"][0]["message"]
    asked = rig.engines["e0"].requests[0].input_ids
    await rig.start("gateway-1")
    described = await rig.describe(session)
    assert described["messages"] == [QUESTION, one]
    assert described["epoch"] != session["epoch"]
    assert described["call_seq"] == 0
    await rig.chat(session, [QUESTION, one, {"role": "tool", "content": "2"}])
    assert rig.engines["e0"].requests[1].input_ids[: len(asked) + len(first)] == asked + first
    snapshots = await rig.written("TokenSnapshot")
    assert snapshots[1].boundary is Boundary.append
    assert snapshots[1].parent_turn == snapshots[0].turn
    assert snapshots[1].turn.epoch == described["epoch"]
    assert snapshots[1].turn.index == 0
    [adopted] = await rig.written("SessionAdopted")
    assert adopted.event_id == described["epoch"]
    finished = (await rig.finish(session)).json()
    assert [turn["epoch"] for turn in finished["turns"]] == [session["epoch"], described["epoch"]]


async def test_opening_and_adopting_take_a_scan_a_partition_and_not_one_a_session(rig: Any) -> None:
    before = rig.held.readers
    sessions = await asyncio.gather(*(rig.open(f"rollout-{n}", group_id=f"group-{n}") for n in range(40)))
    assert rig.held.readers == before
    await asyncio.gather(*(rig.chat(session, [QUESTION]) for session in sessions))
    await rig.start("gateway-1")
    before = rig.held.readers
    await asyncio.gather(*(rig.describe(session) for session in sessions))
    scans = rig.held.readers - before
    assert len(await rig.written("SessionAdopted")) == 40
    assert scans < 40, "back to the floor once for each partition, then turns and snapshots of all who wait at a time"


async def test_a_runner_that_opens_again_after_a_kill_gets_the_session_in_a_new_epoch(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("5")
    body = [QUESTION]
    first = (await rig.chat(session, body)).json()
    await rig.start("gateway-1")
    again = await rig.open()
    assert again["session_id"] == session["session_id"]
    assert again["epoch"] != session["epoch"]
    repeat = (await rig.chat(again, body)).json()
    assert repeat["choices"] == first["choices"]
    assert repeat["turnlog"] == first["turnlog"]
    assert len(rig.engines["e0"].requests) == 1
    assert len(await rig.written("SessionStarted")) == 1


async def test_a_gateway_that_lost_its_session_does_not_end_it(rig: Any) -> None:
    session = await rig.open()
    await rig.chat(session, [QUESTION])
    zombie, http = rig.gateway, rig.http
    await rig.start("gateway-1")
    await rig.describe(session)
    headers = {"authorization": f"Bearer {session['token']}"}
    held = zombie.sessions.held[session["session_id"]]
    await until(lambda: zombie.sessions.find_owned(session["session_id"]) is not held)
    assert (await http.get(f"/sessions/{session['session_id']}", headers=headers)).status_code == 200
    assert len(await rig.written("SessionAdopted")) == 2


async def test_a_session_is_found_by_a_gateway_that_came_between_its_start_and_its_adoption(rig: Any) -> None:
    session = await rig.open()
    await rig.start("gateway-1")
    between = rig.http
    await rig.start("gateway-2")
    await rig.describe(session)
    headers = {"authorization": f"Bearer {session['token']}"}
    assert (await between.get(f"/sessions/{session['session_id']}", headers=headers)).status_code == 200
    assert len(await rig.written("SessionStarted")) == 1


async def test_a_finished_session_is_described_by_another_gateway_without_an_adoption(rig: Any) -> None:
    session = await rig.open()
    one = (await rig.chat(session, [QUESTION])).json()["choices"][0]["message"]
    await rig.finish(session, outcome="truncated", reason="turns")
    await rig.start("gateway-1")
    described = await rig.describe(session)
    assert (described["finished"], described["outcome"], described["reason"]) == (True, "truncated", "turns")
    assert described["messages"] == [QUESTION, one]
    assert await rig.written("SessionAdopted") == []
    assert (await rig.finish(session)).json()["turns"] == [{"epoch": session["epoch"], "index": 0}]


async def test_finished_sessions_are_forgotten_and_read_again_when_somebody_asks(rig: Any) -> None:
    tail = SessionTail(rig.memory, rig.events, PARTITIONS, finished_kept=2)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(tail.run())
        await tail.ready.wait()
        open_still = await rig.open("rollout-open")
        done = [await rig.open(f"rollout-{number}") for number in range(5)]
        for session in done:
            await rig.finish(session)
        ids = [session["session_id"] for session in done]
        await until(lambda: [tail.find_records(each) is not None for each in ids] == [False, False, False, True, True])
        assert tail.find_records(open_still["session_id"]) is not None, "what is not finished is kept"
        spine = await tail.session(ids[0], "group-0", 0)
        assert spine is not None
        assert spine.started is not None
        assert spine.effective_finish is not None
        await until(lambda: sum(tail.find_records(each) is not None for each in ids) == 2)
        assert tail.find_records(ids[0]) is spine, "it was asked for last"
        reading.cancel()


async def test_a_session_that_is_let_go_leaves_nothing_for_the_collector_of_garbage(rig: Any) -> None:
    first = await rig.open("rollout-first")
    said = (await rig.chat(first, [QUESTION])).json()["choices"][0]["message"]
    await rig.chat(first, [QUESTION, said, {"role": "user", "content": "and one more"}])
    await rig.chat(first, [{"role": "user", "content": "another conversation"}])
    await rig.finish(first)
    gc.collect()
    gc.disable()
    try:
        for number in range(KEPT):
            await rig.open(f"rollout-{number}")
        left = Counter(type(each) for each in gc.get_objects())
        assert (left[RecordedTurn], left[MessageNode], left[Strand]) == (0, KEPT, KEPT), (
            "a session without a turn has one of each"
        )
    finally:
        gc.enable()
    assert len((await rig.describe(first))["turns"]) == 3, "it is read again when somebody asks"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_waits_for_both_acknowledgements(rig: Any, stream: bool) -> None:
    session = await rig.open()
    rig.held.acknowledging.clear()
    ask = asyncio.create_task(rig.chat(session, [QUESTION], stream=stream))
    await until(lambda: rig.held.handed_over == ["agent.turns", "agent.token-snapshots"])
    done, _ = await asyncio.wait([ask], timeout=0.3)
    assert not done
    rig.held.acknowledging.set()
    assert (await ask).status_code == 200


async def test_a_turn_that_the_log_does_not_take_is_not_answered(rig: Any) -> None:
    session = await rig.open()
    rig.held.down = True
    answer = await rig.chat(session, [QUESTION])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "log_unavailable")
    rig.held.down = False
    assert (await rig.chat(session, [QUESTION])).status_code == 200
    assert len(await rig.written("TurnCompleted")) == 1


async def test_a_session_goes_on_under_the_key_that_signed_it_while_keys_are_rotated(rig: Any, tmp_path: Path) -> None:
    """The gateway is not started again."""
    signs, accepted = tmp_path / "signs", tmp_path / "accepted"

    def hold(first: str, others: str) -> None:
        for file, text in ((signs, first), (accepted, others)):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(file)

    hold(OLD, OLD)
    files = {"SIGNING_KEY": signs, "ACCEPTED_SIGNING_KEYS": accepted}
    env = {f"TURNLOG_GATEWAY_{name}_FILE": str(file) for name, file in files.items()}
    rig.settings = dataclasses.replace(rig.settings, gateway=load(None, env).gateway)
    await rig.start("gateway-1")
    before = await rig.open("before")
    hold(NEW, OLD)
    after = await rig.open("after")
    for session in (before, after):
        assert (await rig.chat(session, [QUESTION])).status_code == 200
    hold(NEW, NEW)
    assert (await rig.chat(before, [QUESTION])).status_code == 401
    assert (await rig.chat(after, [QUESTION])).status_code == 200
