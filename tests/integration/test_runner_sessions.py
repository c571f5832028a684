"""The runner against the real gateway over HTTP, with the log and the engine in memory.

The policy is scripted on the text of its prompt; a stand-in answers tool calls on the log as a sandbox worker does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import types
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.offers import offering
from tests.integration.conftest import CALL, Policy, Stage
from turnlog.infra.environments.episodes import SandboxCall
from turnlog.infra.log import Commit, CommitsExpired, OtherInputs, Partition
from turnlog.plugins.recipes.calc import RECIPE, Calc
from turnlog.processors.core.fold.group import FoldRules, GroupFold
from turnlog.producers import runner
from turnlog.schemas import ids, topics
from turnlog.schemas.events import (
    DeadLetter,
    FinishReason,
    GroupEmitted,
    GroupStatus,
    Outcome,
    Purpose,
    RewardAssigned,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    ToolCallCancelled,
    ToolCallRequested,
    ToolStatus,
    TreeBooks,
    TurnCompleted,
    TurnTreeAssembled,
)
from turnlog.schemas.types import TurnId


class LateAborts(MemoryEngine):
    """Ends what it has begun before it hears of an abort."""

    def __init__(self, other: MemoryEngine) -> None:
        super().__init__(vocabulary=other.vocabulary, context=other.context, script=other.script)
        self.asked_to_abort = asyncio.Event()

    async def abort(self, rid: str) -> None:
        """See Engine."""
        self.asked_to_abort.set()
        await self.released.wait()


async def rewards(stage: Stage) -> list[float]:
    return [reward.value for reward in await stage.said(RewardAssigned)]


async def test_a_rollout_uses_its_tool_through_the_log_and_is_rewarded_before_it_is_finished(stage: Stage) -> None:
    rollout = await stage.request()
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, finish.final, len(finish.turns)) == (Outcome.completed, True, 2)
    assert finish.expects.reward
    [called] = await stage.said(ToolCallRequested)
    session = ids.session_id(rollout, 0)
    assert called.call_id == ids.call_id(session, finish.turns[0].epoch, 0, 0, "agent")
    assert (called.tool, json.loads(called.arguments), called.call_seq) == ("python", {"code": "print(3+5)"}, 0)
    assert called.sandbox == RECIPE.sandbox
    spine = [type(event) for event in await stage.said(RewardAssigned, SessionFinished)]
    assert spine == [RewardAssigned, SessionFinished]
    assert await rewards(stage) == [1.0]


async def test_tokens_of_a_live_rollout_are_a_row_of_the_warm_start(stage: Stage, calc_model: Path) -> None:
    await stage.request()
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    snapshots = {snapshot.turn: snapshot for snapshot in await stage.said(TokenSnapshot)}
    first, second = (snapshots[turn] for turn in finish.turns)
    assert (second.parent_turn, second.base_len) == (
        first.turn,
        (len(first.delta_ids) + len(first.output_ids)) // 4,
    )
    lived = first.delta_ids + first.output_ids + second.delta_ids + second.output_ids
    rows = RECIPE.warm_start.rows(calc_model, 0)
    assert any(
        b"".join(token.to_bytes(4, "little") for token in row.token_ids) == lived
        for row, _ in zip(rows, range(4000), strict=False)
    )


async def test_a_guess_without_the_tool_gets_nothing(stage: Stage) -> None:
    stage.policy = lambda prompt: "8"
    await stage.request()
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, await rewards(stage)) == (Outcome.completed, [0.0])


async def test_a_call_that_fails_in_the_sandbox_is_answered_with_error_and_the_agent_goes_on(stage: Stage) -> None:
    stage.answers = lambda request, count: ToolStatus.tool_error
    stage.policy = lambda prompt: "sorry" if "tool\nerror" in prompt else CALL
    await stage.request()
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, len(finish.turns), await rewards(stage)) == (Outcome.completed, 2, [0.0])


@pytest.mark.parametrize(
    ("policy", "limits", "reason", "turns"),
    [
        (lambda prompt: CALL, {"max_turns": 2}, "max_turns", 2),
        (lambda prompt: "x" * 60, {}, "max_new_tokens", 1),
        (lambda prompt: CALL, {"max_turns": 50, "max_context_tokens": 100}, "context", 2),
    ],
)
async def test_a_live_agent_that_hits_a_limit_is_truncated_and_still_judged(
    stage: Stage, policy: Policy, limits: dict[str, int], reason: str, turns: int
) -> None:
    stage.policy = policy
    await stage.request(**limits)
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, finish.reason, finish.final) == (Outcome.truncated, reason, True)
    assert len(finish.turns) >= turns
    assert await rewards(stage) == [0.0]


async def test_a_deadline_truncates_the_session_and_cancels_the_call_that_it_waited_for(stage: Stage) -> None:
    stage.answers, stage.begins = lambda request, count: None, True
    await stage.request(deadline_s=0.5)
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, finish.reason) == (Outcome.truncated, "deadline")
    [called], [cancelled] = await stage.said(ToolCallRequested), await stage.said(ToolCallCancelled)
    assert (cancelled.call_id, cancelled.reason) == (called.call_id, "deadline")


async def test_a_broken_sandbox_fails_the_attempt_without_a_verdict_and_the_rollout_is_tried_again(
    stage: Stage,
) -> None:
    stage.answers = lambda request, count: ToolStatus.infra_error if count == 0 else ToolStatus.ok
    await stage.request()
    async with stage.gateway(), stage.running():
        first, second = await stage.finished(2)
    assert (first.outcome, first.final, first.expects.reward) == (Outcome.infra_failure, False, False)
    assert (second.outcome, second.final) == (Outcome.completed, True)
    assert [reward.session_id for reward in await stage.said(RewardAssigned)] == [second.session_id]


OFFERED = types.SimpleNamespace()
"""`recipe`: what the installed package offers."""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Install a package that offers a recipe."""
    with offering(tmp_path, monkeypatch, "broken", {"broken": f"{__name__}:OFFERED.recipe"}):
        yield OFFERED


class FallsOver(Calc):
    """Raises in one method, twice."""

    name = "broken"

    def __init__(self, method: str) -> None:
        self.method = method
        self.left = [RecursionError("too deep"), MemoryError()]

    def messages(self, *arguments: Any) -> Any:
        self.falls("messages")
        return super().messages(*arguments)

    def tool_call(self, *arguments: Any) -> Any:
        self.falls("tool_call")
        return super().tool_call(*arguments)

    def tool_answer(self, *arguments: Any) -> Any:
        self.falls("tool_answer")
        return super().tool_answer(*arguments)

    def falls(self, method: str) -> None:
        if method == self.method and self.left:
            raise self.left.pop(0)


@pytest.mark.parametrize("method", ["messages", "tool_call", "tool_answer"])
async def test_a_recipe_that_falls_over_fails_the_attempt_by_name_and_the_runner_goes_on(
    stage: Stage, offered: types.SimpleNamespace, method: str
) -> None:
    offered.recipe = FallsOver(method)
    await stage.request(recipe="broken")
    async with stage.gateway(), stage.running():
        await stage.finished(2)
        await stage.request(recipe="broken", index=1)
        first, second, third = await stage.finished(3)
    assert {first.outcome, second.outcome} == {Outcome.infra_failure}
    assert (third.outcome, third.final) == (Outcome.completed, True)
    assert first.reason.startswith("BrokenRecipe: recipe 'broken': ")
    assert " (falls, test_runner_sessions.py:" in first.reason
    assert first.reason.endswith(" raises RecursionError: too deep")
    assert offered.recipe.left == []
    assert await rewards(stage) == [1.0]


class NoJson(Calc):
    name = "broken"

    def tool_call(self, *_: Any) -> SandboxCall:
        return SandboxCall("python", {"code": {1, 2}})


async def test_a_recipe_whose_call_is_no_json_fails_the_attempt_by_name(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe = NoJson()
    await stage.request(recipe="broken")
    async with stage.gateway(), stage.running():
        first, last = await stage.finished(2)
    assert (first.outcome, last.outcome, last.final) == (Outcome.infra_failure, Outcome.infra_failure, True)
    assert "a call of 'python' are no JSON: Object of type set" in first.reason


async def test_the_last_attempt_of_a_rollout_is_final_even_when_it_fails(stage: Stage) -> None:
    stage.answers = lambda request, count: ToolStatus.infra_error
    await stage.request()
    async with stage.gateway(), stage.running():
        finishes = await stage.finished(2)
    assert [(finish.outcome, finish.final) for finish in finishes] == [
        (Outcome.infra_failure, False),
        (Outcome.infra_failure, True),
    ]
    assert await rewards(stage) == []


async def test_a_call_that_nobody_answers_is_an_infrastructure_failure_and_is_cancelled(stage: Stage) -> None:
    stage.answers = lambda request, count: None
    impatient = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=0.2, max_attempts=1)
    )
    await stage.request()
    async with stage.gateway(), stage.running(impatient):
        [finish] = await stage.finished(1)
    assert finish.outcome is Outcome.infra_failure
    assert "tool_deadline_s" in finish.reason
    assert [cancelled.reason for cancelled in await stage.said(ToolCallCancelled)] == ["unanswered"]


@pytest.mark.parametrize("point", range(1, 9))
async def test_a_runner_killed_at_any_point_is_followed_by_one_that_runs_nothing_twice(
    stage: Stage, point: int
) -> None:
    """Points: before and after each of two tool calls, two verdicts."""
    for index in range(2):
        await stage.request(index=index)
    async with stage.gateway():
        async with stage.running() as (task, log):
            log.dies_at = log.points + point
            await asyncio.wait([task], timeout=20)
            assert task.done()
            with pytest.raises(Died):
                await task
        async with stage.running():
            finishes = await stage.finished(2)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}
    assert len({finish.session_id for finish in finishes}) == len(finishes) == 2
    assert set(stage.executed.values()) == {1}
    assert len({called.call_id for called in await stage.said(ToolCallRequested)}) == 2
    assert len(await stage.said(TurnCompleted)) == len(stage.engine.requests) == 4
    assert {reward.event_id: reward.value for reward in await stage.said(RewardAssigned)} == {
        ids.digest("RewardAssigned", finish.session_id, "calc", "1"): 1.0 for finish in finishes
    }


async def test_a_turn_that_died_with_its_runner_is_sampled_again_in_the_same_session(stage: Stage) -> None:
    stage.engine.holds_after = 3
    await stage.request()
    async with stage.gateway():
        async with stage.running() as (task, _):
            await asyncio.wait_for(stage.engine.reached.wait(), 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(20):
            while not await stage.said(TurnCompleted):
                await stage.broker.changed(1)
        stage.engine.holds_after = None
        async with stage.running():
            [finish] = await stage.finished(1)
    assert (finish.outcome, len(finish.turns), await rewards(stage)) == (Outcome.completed, 2, [1.0])
    [cut] = [turn for turn in await stage.said(TurnCompleted) if turn.aborted]
    assert cut.finish_reason is FinishReason.abort
    assert finish.undelivered == (cut.turn,)


async def ended_alone(stage: Stage, engine: LateAborts) -> None:
    """A rollout whose runner died while its last turn was sampled; the engine ended it all the same."""
    called = asyncio.Event()
    stage.answers = lambda request, count: called.set() or ToolStatus.ok
    await stage.request()
    async with stage.running() as (task, _):
        await asyncio.wait_for(called.wait(), 20)
        engine.holds_after = 0
        await asyncio.wait_for(engine.reached.wait(), 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(engine.asked_to_abort.wait(), 20)
    engine.released.set()
    async with asyncio.timeout(20):
        while len(await stage.said(TurnCompleted)) < 2:
            await stage.broker.changed(1)


@pytest.mark.parametrize("gateways", [1, 2], ids=["the same gateway", "another gateway"])
async def test_the_answer_that_was_judged_is_named_though_nobody_waited_for_its_end(
    stage: Stage, gateways: int
) -> None:
    """A second runner judges it and dies before the finish; a third one finishes, at a gateway that may know the turn
    from the log alone."""
    stage.engine = engine = LateAborts(stage.engine)
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(AsyncExitStack())
        await serving.enter_async_context(stage.gateway())
        await ended_alone(stage, engine)
        async with stage.running() as (task, log):
            log.dies_at = log.points + 2  # right after the verdict
            await asyncio.wait([task], timeout=20)
            with pytest.raises(Died):
                await task
        if gateways > 1:
            await serving.aclose()
            await stack.enter_async_context(stage.gateway())
        async with stage.running():
            [finish] = await stage.finished(1)
    answer = (await stage.said(TurnCompleted))[-1]
    assert (answer.aborted, answer.finish_reason) == (True, FinishReason.stop)
    assert (finish.outcome, set(await rewards(stage))) == (Outcome.completed, {1.0})
    assert (finish.turns[-1], finish.undelivered) == (answer.turn, ())
    assert await trained(stage) == [turn.turn for turn in await stage.said(TurnCompleted)]


async def trained(stage: Stage) -> list[TurnId]:
    """Turns of the one session that train, by today's fold."""
    group, trees = GroupFold("g", 0, FoldRules(run_id="r", settings_sha256="s" * 64)), list[TurnTreeAssembled]()
    kinds = (SessionStarted, SessionAdopted, RewardAssigned, SessionFinished, TurnCompleted, TokenSnapshot)
    for offset, event in enumerate(await stage.said(*kinds)):
        outputs = group.apply(topics.TOPIC_OF[type(event).__name__].name, offset, event)
        trees += [output for output in outputs if isinstance(output, TurnTreeAssembled)]
    [tree] = trees
    assert tree.books.sampled == tree.books.trained
    return [turn for segment in tree.segments for turn in segment.turns]


async def test_a_session_goes_on_at_a_gateway_that_was_restarted(stage: Stage) -> None:
    called = asyncio.Event()

    def held(request: ToolCallRequested, count: int) -> ToolStatus | None:
        called.set()
        return None if count == 0 else ToolStatus.ok

    stage.answers = held
    await stage.request()
    async with stage.running():
        async with stage.gateway():
            await asyncio.wait_for(called.wait(), 20)
        [waiting] = await stage.said(ToolCallRequested)
        await stage.events.append(stage.completed(waiting, ToolStatus.ok))
        async with stage.gateway():
            [finish] = await stage.finished(1)
    assert (finish.outcome, len(finish.turns), await rewards(stage)) == (Outcome.completed, 2, [1.0])
    assert len(await stage.said(SessionAdopted)) == 1
    assert len({turn.epoch for turn in finish.turns}) == 2


async def test_units_that_move_to_a_second_runner_lose_and_repeat_nothing(stage: Stage) -> None:
    for index in range(12):
        await stage.request(index=index)
    async with stage.gateway(), stage.running(), stage.running(instance="r-2"):
        finishes = await stage.finished(12)
    assert len({finish.session_id for finish in finishes}) == len(finishes) == 12
    assert {finish.outcome for finish in finishes} == {Outcome.completed}
    assert set(stage.executed.values()) == {1}


async def test_commits_are_low_water_marks_and_reach_the_end_when_everything_is_over(stage: Stage) -> None:
    for index in range(4):
        await stage.request(index=index)
    names = [Partition(topic, number) for topic in runner.TOPICS for number in range(2)]
    log = MemoryLog(stage.broker)
    async with stage.gateway(), stage.running(), asyncio.timeout(20):
        await stage.finished(4)
        ends = await log.end_offsets(names)
        while {name: commit.offset for name, commit in (await log.commits("r.runner", names)).items()} != ends:
            await stage.broker.changed(0.1)


async def test_a_commit_keeps_what_a_newer_release_says_and_one_that_expired_is_told_from_none(stage: Stage) -> None:
    commits = stage.broker.group("r.runner").commits
    for rounds in (1, 2):
        await stage.request(index=rounds)
        async with stage.gateway(), stage.running():
            await stage.finished(rounds)
        said = [json.loads(commit.metadata) for commit in commits.values()]
        assert sum(each["high"] for each in said) > 0
        assert {each.get("later") for each in said} == {None if rounds == 1 else "kept"}
        for place, commit in commits.items():
            commits[place] = Commit(commit.offset, json.dumps({**json.loads(commit.metadata), "later": "kept"}))
    commits[Partition("agent.more", 0)] = Commit(1)
    async with stage.running() as (task, _):
        with pytest.raises(OtherInputs, match=r"r\.runner has commits for agent\.more"):
            await asyncio.wait_for(task, 20)
    commits.clear()
    for number in range(2):
        stage.broker.truncate(Partition(topics.TASKS.name, number), 1)
    async with stage.running() as (task, _):
        with pytest.raises(CommitsExpired, match=r"tasks\[\d\] begins at 1: .*offsets\.retention\.minutes"):
            await asyncio.wait_for(task, 20)


async def test_an_open_rollout_holds_the_commit_back(stage: Stage) -> None:
    stage.answers = lambda request, count: None
    await stage.request()
    async with stage.gateway(), stage.running():
        async with asyncio.timeout(20):
            while not await stage.said(ToolCallRequested):
                await stage.broker.changed(1)
    names = [Partition(topics.TASKS.name, number) for number in range(2)]
    commits = await MemoryLog(stage.broker).commits("r.runner", names)
    assert {commit.offset for commit in commits.values()} == {0}


async def test_a_poison_task_is_parked_and_the_others_run(stage: Stage) -> None:
    for number in range(2):
        stage.broker.write(Partition(topics.TASKS.name, number), b"k", b"\x00garbage", ())
    await stage.request()
    async with stage.gateway(), stage.running():
        await stage.finished(1)
    records, _ = stage.broker.read(Partition(topics.DEAD_LETTERS.name, 0), 0, 10)
    letters = [await stage.events.decode(record) for record in records]
    assert {(letter.topic, letter.partition, letter.role) for letter in letters} == {
        ("tasks", 0, "runner"),
        ("tasks", 1, "runner"),
    }


async def test_a_task_that_the_gateway_opens_no_session_for_is_parked_and_the_others_run(stage: Stage) -> None:
    await stage.request("alone", size=1)  # GRPO compares the rollouts of a group
    await stage.request()
    async with stage.gateway(), stage.running():
        await stage.finished(1)
    [letter] = await stage.said(DeadLetter)
    assert (letter.topic, letter.role, letter.cause) == ("tasks", "runner", "RequestRejected")
    assert "compares at least 2 rollouts" in letter.message


async def test_a_gateway_that_never_answers_ends_the_process_and_nothing_is_lost(stage: Stage) -> None:
    from turnlog.producers.gateway_client import GatewayUnavailable

    impatient = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, gateway_patience_s=0.1)
    )
    await stage.request()
    async with stage.running(impatient) as (task, _):
        with pytest.raises(GatewayUnavailable, match="gateway_patience_s"):
            await task
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert finish.outcome is Outcome.completed


async def test_a_runner_with_another_signing_key_ends_with_the_setting_to_check(stage: Stage, tmp_path: Path) -> None:
    from turnlog.producers.gateway_client import GatewayRefused

    stranger = dataclasses.replace(
        stage.settings, gateway=dataclasses.replace(stage.settings.gateway, signing_key="another-than-the-stage's")
    )
    await stage.request()
    async with stage.gateway(), stage.running(stranger) as (task, _):
        with pytest.raises(GatewayRefused, match="signing_key"):
            await task
    assert await stage.said(SessionFinished) == []


async def scored(stage: Stage, group: str) -> None:
    """As an assembler says it."""
    await stage.events.append(
        GroupEmitted(
            event_id=f"scored {group}", run_id="r", group_id=group, floor=0, purpose=Purpose.train,
            status=GroupStatus.trained, reason="", samples=1, books=TreeBooks(1, 1, {}), fold_version="2",
            settings_sha256="",
        )
    )  # fmt: skip


async def test_a_rollout_whose_group_was_scored_without_it_is_cut_and_frees_its_slot(stage: Stage) -> None:
    stage.answers = lambda request, count: None if request.group_id == "slow" else ToolStatus.ok
    settings = dataclasses.replace(stage.settings, runner=dataclasses.replace(stage.settings.runner, concurrency=1))
    acting = await stage.request("slow")
    waiting = await stage.request("slow", index=1)
    async with stage.gateway(), stage.running(settings):
        async with asyncio.timeout(30):
            while not await stage.said(ToolCallRequested):
                await stage.broker.changed(1)
        other = await stage.request("quick")
        await scored(stage, "slow")
        finishes = {finish.session_id: finish for finish in await stage.finished(2)}
    began = {ids.session_id(rollout, 0) for rollout in (acting, waiting)} & finishes.keys()
    (cut,) = began
    assert (finishes[cut].outcome, finishes[cut].final) == (Outcome.cancelled, True)
    assert finishes[cut].reason == "its group was scored without it"
    assert not finishes[cut].expects.reward
    assert finishes[ids.session_id(other, 0)].outcome is Outcome.completed
    [cancelled] = await stage.said(ToolCallCancelled)
    assert cancelled.session_id == cut
    assert len(await stage.said(SessionStarted)) == 2, "the one that waited for a slot never began"


async def test_a_new_owner_cuts_what_was_scored_while_nobody_ran(stage: Stage) -> None:
    stage.answers = lambda request, count: None if request.group_id == "slow" else ToolStatus.ok
    settings = dataclasses.replace(stage.settings, runner=dataclasses.replace(stage.settings.runner, concurrency=1))
    slow = await stage.request("slow")
    async with stage.gateway():
        async with stage.running(settings):
            async with asyncio.timeout(30):
                while not await stage.said(ToolCallRequested):
                    await stage.broker.changed(1)
        await scored(stage, "slow")
        quick = await stage.request("quick")
        async with stage.running(settings, instance="r-2"):
            async with asyncio.timeout(30):
                while ids.session_id(quick, 0) not in {one.session_id for one in await stage.said(SessionFinished)}:
                    await stage.broker.changed(1)
    ends = {finish.session_id: finish.outcome for finish in await stage.said(SessionFinished)}
    assert ends.get(ids.session_id(slow, 0), Outcome.cancelled) is Outcome.cancelled, "or it was not begun again at all"
