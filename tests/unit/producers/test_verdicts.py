"""Verdicts: a judgement becomes a record; whatever a verifier does wrong becomes another, never a reward of 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from turnlog.infra.recipes import Episode, FunctionVerifier, Verdict
from turnlog.infra.verifiers.judges import Means, client
from turnlog.producers.verdicts import verdict
from turnlog.schemas.events import Limits, Outcome, Purpose, RewardAssigned, RewardFailed, RolloutRequested, Sampling

REQUEST = RolloutRequested(
    event_id="e", run_id="r", group_id="g", floor=7, task_id="t", rollout_id="ro", rollout_index=0, group_size=2,
    draw=0, dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
    sampling=Sampling(), limits=Limits(), min_weight_version=0,
)  # fmt: skip
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
