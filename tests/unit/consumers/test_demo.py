"""What the demo does on a machine whose sandboxes cannot isolate, and what a report says of such a run."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

from turnlog.consumers.replay.verify import ReplayResult
from turnlog.infra.roles.terminal import Terminal
from turnlog.processors.core.books import TokenAccount
from turnlog.sandbox_settings import SandboxSettings
from turnlog.schemas.events import StepCompleted, ToolCallCompleted, ToolStatus
from turnlog.schemas.events.tools import UNISOLATED
from turnlog.settings import FeederSettings, Settings
from turnlog.verbs.demo import runnable_here
from turnlog.verbs.report import Measured, failures, gaps, gather, summary, wanted_rise


def answer(number: int, worker: str) -> ToolCallCompleted:
    """Of call `number`."""
    return ToolCallCompleted(
        event_id=str(number),
        run_id="run",
        group_id="g",
        session_id="s",
        floor=0,
        rollout_id="r",
        call_id=str(number),
        call_seq=number,
        status=ToolStatus.ok,
        reason="",
        exit_code=0,
        output=b"",
        full_output=None,
        duration_s=0.0,
        queue_s=0.0,
        workspace=None,
        attempt=1,
        worker=worker,
        cached=False,
    )


async def test_the_demo_runs_without_isolation_only_where_there_is_none_and_says_so() -> None:
    said: list[str] = []
    for why in ("", "user namespaces [off]"):

        async def unisolated(settings: SandboxSettings, why: str = why) -> str:
            return why

        console = Terminal(file=io.StringIO(), width=200)
        settings = await runnable_here(Settings(), unisolated, console)
        assert settings.sandbox == dataclasses.replace(Settings().sandbox, allow_unisolated=bool(why))
        said.append(console.file.getvalue())
    assert said[0] == ""
    for part in ("TOOLS RUN WITHOUT ISOLATION", "[sandbox] allow_unisolated = true", "user namespaces [off]"):
        assert part in said[1]


async def test_a_report_counts_the_calls_that_ran_without_isolation(trained_run: Callable[..., Any]) -> None:
    made = trained_run()
    await made.append(
        [answer(1, "sandbox-0"), answer(2, f"sandbox-1{UNISOLATED}"), answer(3, f"sandbox-1{UNISOLATED}")]
    )
    report = await gather(made.role(), ReplayResult(), Measured())
    assert (report.body["tool_calls"], report.body["tool_calls_without_isolation"]) == ({"ok": 3}, 2)
    console = Terminal(file=io.StringIO(), width=200)
    console.print(summary(report))
    assert "TOOLS RAN WITHOUT ISOLATION" in console.file.getvalue()


def test_the_reward_is_judged_by_what_its_recipe_wants() -> None:
    body = {
        "steps": 15, "reward_first_2": 0.5, "reward_last_5": 0.6, "weight_versions_unanswered": {},
        "weight_versions_acknowledged": 1,
    }  # fmt: skip
    books, replayed = TokenAccount(), ReplayResult(records_compared=1)
    assert failures(body | {"reward_rise_wanted": 0.0}, books, replayed) == []
    (said,) = failures(body | {"reward_rise_wanted": 0.25}, books, replayed)
    assert "rose by 0.100, the recipe requires at least 0.25 (its demo_rise)" in said
    assert failures(body | {"reward_rise_wanted": 0.25, "steps": 14}, books, replayed) == []
    wanted = {name: wanted_rise(Settings(feeder=FeederSettings(recipe=name))) for name in ("calc", "household", "none")}
    assert wanted == {"calc": 0.25, "household": 0.0, "none": 0.0}


def step(
    batch: int, own: tuple[int, float], old: tuple[int, float] = (0, 0.0), *, lag: int = 0, **metrics: float
) -> StepCompleted:
    """(tokens, largest gap) on a cache of their own weights, and on one of older weights."""
    return StepCompleted(
        event_id=str(batch), run_id="run", batch_index=batch, draw_index=batch, incarnation=0, step=batch + 1, loss=0.0,
        grad_norm=0.0, learning_rate=0.0, lag_max=lag, tokens=9, trained_tokens=own[0] + old[0], masked={},
        skipped=False, reward_mean=0.0, logprob_gap_max=own[1], logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0,
        seconds={}, world_size=1, old_cache_tokens=old[0], old_cache_gap_max=old[1], metrics=metrics,
    )  # fmt: skip


def test_tokens_on_a_cache_of_older_weights_are_no_gap_at_lag_0_and_are_told_apart() -> None:
    steps = [step(0, (4, 1e-6)), step(1, (3, 2e-6), (1, 0.5)), step(2, (0, 0.0), (4, 0.25)), step(3, (4, 2.0), lag=1)]
    assert gaps(steps) == {
        "logprob_gap_max": 2e-6, "logprob_gap_steps": {}, "logprob_gap_old_cache_max": 0.5,
        "logprob_gap_by_kind": {},
    }  # fmt: skip
    assert gaps([step(0, (4, 1e-3)), *steps[1:]])["logprob_gap_steps"] == {0: 1e-3}
    assert gaps(steps[2:])["logprob_gap_max"] is None


def test_gaps_of_a_mixed_fleet_are_also_by_kind_of_engine() -> None:
    of_kinds = {"logprob_gap_max/sglang": 1e-6, "logprob_gap_max/vllm": 5e-6, "held_gap_max/vllm": 4e-6}
    late = {"logprob_gap_max/sglang": 2.0, "logprob_gap_max/vllm": 3.0, "held_gap_max/vllm": 6e-6}
    steps = [step(0, (4, 5e-6), **of_kinds), step(1, (4, 3.0), lag=1, held_gap_max=6e-6, **late)]
    found = gaps(steps)["logprob_gap_by_kind"]
    assert found == {"sglang": 1e-6, "vllm": 6e-6}, "tokens of other weights than the trainer's are left out"


def test_a_step_with_a_lag_is_compared_by_the_tokens_of_its_own_weights() -> None:
    late = step(4, (4, 2.0), (4, 1.0), lag=1, held_gap_max=1e-3, held_old_cache_gap_max=0.75)
    assert gaps([step(3, (4, 2.0), lag=1), late]) == {
        "logprob_gap_max": 1e-3, "logprob_gap_steps": {4: 1e-3}, "logprob_gap_old_cache_max": 0.75,
        "logprob_gap_by_kind": {},
    }  # fmt: skip
