"""Verdicts: a judgement becomes a record; whatever a verifier does wrong becomes another, never a reward of 0."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, TaskRow, Verdict
from turnlog.infra.environments.verifiers import Grading, PatchVerifier
from turnlog.infra.environments.verifiers.judges import Means, client
from turnlog.infra.environments.workspaces import store_files
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import all_events
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.recipes.calc import Calc
from turnlog.producers.gateway_client import GatewayClient, OpenSession
from turnlog.producers.tool_calls import ToolResults
from turnlog.producers.verdicts import Bench, verdict
from turnlog.schemas.events import (
    Limits,
    Outcome,
    Purpose,
    RewardAssigned,
    RewardFailed,
    RolloutRequested,
    Sampling,
    SandboxSpec,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
)
from turnlog.schemas.topics import TOOL_CALLS
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

REQUEST = RolloutRequested(
    event_id="e", run_id="r", group_id="g", floor=7, task_id="t", rollout_id="ro", rollout_index=0, group_size=2,
    draw=0, dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
    sampling=Sampling(), limits=Limits(), min_weight_version=0,
)  # fmt: skip
LEFT = ToolCallCompleted(
    event_id="l", run_id="r", group_id="g", session_id="s", floor=7, rollout_id="ro", call_id="l", call_seq=0,
    status=ToolStatus.ok, reason="", exit_code=0, output=b"", full_output=None, duration_s=0.0, queue_s=0.0,
    workspace=None, attempt=1, worker="w", cached=False,
)  # fmt: skip
"""The session's one call."""
EPISODE = Episode(task={}, messages=(), outcome=Outcome.completed, reason="")


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def recursive() -> Any:
    return recursive()


async def judged(judge: Callable[[Episode], Any]) -> RewardAssigned | RewardFailed:
    async with client() as http:
        return await verdict(FunctionVerifier("v", "1", judge), EPISODE, REQUEST, Means(http=http, session_id="s"))


async def test_a_verdict_is_assigned_with_its_evidence() -> None:
    record = await judged(lambda _: Verdict(1, {"exact": True}, {"said": "8"}))
    assert isinstance(record, RewardAssigned)
    assert (record.value, record.components, json.loads(record.evidence)) == (1.0, {"exact": 1.0}, {"said": "8"})
    assert (record.group_id, record.session_id, record.floor) == ("g", "s", 7)


async def test_judging_again_repeats_the_same_record() -> None:
    assert await judged(lambda _: Verdict(0.5)) == await judged(lambda _: Verdict(0.5))


@pytest.mark.parametrize(
    ("judge", "cause"),
    [
        (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda _: Verdict(float("nan")), "not finite"),
        (lambda _: Verdict(0.0, {"x": float("inf")}), "not finite"),
        (lambda _: Verdict(0.0, {}, {"x": object()}), "no JSON"),
        (lambda _: 1.0, "returned float, not a Verdict"),
        (lambda _: Verdict(0.0, {}, {"x": deep(100_000)}), "no JSON: maximum recursion depth"),
        (lambda _: Verdict(0.0, {}, {"x": 1, 2: 3}), "no JSON"),
        (lambda _: deep(0)(), "TypeError"),
        (lambda _: recursive(), "RecursionError: maximum recursion depth"),
        (lambda _: [0] * 10**15, "MemoryError"),
        (lambda _: sys.exit(3), "SystemExit: 3"),
        (lambda _: next(iter(())), "StopIteration"),
        (lambda _: Verdict("much"), "cannot be read: ValueError"),  # type: ignore[arg-type]
        (lambda _: Verdict(10**400), "cannot be read: OverflowError"),
        (lambda _: Verdict(0.0, None), "cannot be read: AttributeError"),  # type: ignore[arg-type]
    ],
)
async def test_what_a_verifier_does_wrong_is_recorded_as_its_failure(judge: Any, cause: str) -> None:
    record = await judged(judge)
    assert isinstance(record, RewardFailed)
    assert cause in record.cause


class Mending(Calc):
    """Begins with a file, and is judged by its diff."""

    name = "mending"
    sandbox = SandboxSpec(durable_workspace=True)

    def files(self, task: TaskRow) -> dict[str, str]:
        return {"calc.py": "x = 1\n"}


async def answered(
    log: MemoryLog, events: EventLog, results: ToolResults, statuses: list[ToolStatus], left: BlobRef
) -> None:
    """As a worker and the runner's reader do: captures leave `left`, gradings end as they are told, the last passes."""
    role = Role("runner", "runner-0", Settings(), log, events, MemoryBlobs(), Health("runner"))
    seen = 0
    while True:
        for call in (await all_events(role, TOOL_CALLS))[seen:]:
            seen += 1
            assert isinstance(call, ToolCallRequested)
            capture = b"'capture'" in call.arguments
            status = ToolStatus.ok if capture or not statuses else statuses.pop(0)
            said = {"bytes": 9, "files": 1, "binary": [], "diff": "--- a"} if capture else {
                "exit": 0, "late": False, "tests": "", "log": "fine", "restored": []
            }  # fmt: skip
            answer = dataclasses.replace(LEFT, call_id=call.call_id, session_id=call.session_id, status=status)
            results.feed(dataclasses.replace(answer, output=json.dumps(said).encode(), workspace=left))
        await log.broker.changed(0.05)


@pytest.mark.parametrize(
    ("statuses", "kind", "calls"),
    [
        ([], RewardAssigned, 2),
        ([ToolStatus.infra_error], RewardAssigned, 4),
        ([ToolStatus.infra_error] * 2, RewardFailed, 4),
        ([ToolStatus.refused], RewardFailed, 2),
    ],
)
async def test_a_diff_is_graded_again_while_the_sandbox_fails_and_then_has_no_verdict(
    statuses: list[ToolStatus], kind: type, calls: int
) -> None:
    log, results, blobs = MemoryLog(), ToolResults(), MemoryBlobs()
    await apply(log, Settings())
    left = await store_files({"calc.py": "x = 2\n", "patch.diff": "--- a\n"}, blobs)
    verifier = PatchVerifier(name="patch", version="1", grading=lambda _: Grading(command="true"))
    results.expect("ro")
    results.feed(dataclasses.replace(LEFT, workspace=left))
    async with EventLog.open(log, MemoryRegistry(), writer="runner") as events, client() as http:
        bench = Bench(
            http=http, events=events, gateway=GatewayClient(Settings()), results=results, blobs=blobs,
            request=dataclasses.replace(REQUEST, run_id="local"), task=Mending().task({"prompt": "?"}),
            session=OpenSession("s", "", "", ""), asked={},
        )  # fmt: skip
        working = asyncio.create_task(answered(log, events, results, list(statuses), left))
        judging = asyncio.create_task(bench.verdict(verifier, EPISODE))
        await asyncio.wait({working, judging}, return_when=asyncio.FIRST_COMPLETED)
        assert not working.done() or working.exception() is None, working.exception()
        record = await judging
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        role = Role("runner", "runner-0", Settings(), log, events, blobs, Health("runner"))
        asked = await all_events(role, TOOL_CALLS)
    assert type(record) is kind
    assert len({call.session_id for call in asked}) == len(asked) == calls  # type: ignore[attr-defined]
    if isinstance(record, RewardFailed):
        assert record.cause.startswith("sandbox: call" if calls == 4 else "refused: call")
    else:
        assert json.loads(record.evidence)["outcome"] == "resolved"
