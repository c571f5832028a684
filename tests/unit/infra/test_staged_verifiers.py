"""Verifiers that judge one after the other: each decides whether the next one does."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from turnlog.environments import Episode, FunctionVerifier, StagedVerifier, Verdict
from turnlog.infra.environments.verifiers.judges import Means, NoVerdict, judge
from turnlog.schemas.events import Outcome

EPISODE = Episode(task={}, messages=(), outcome=Outcome.completed, reason="")


def staged(*functions: Callable[[Episode], Verdict]) -> StagedVerifier:
    """A verifier of these parts; the next one judges if the reward is above 0."""
    parts = tuple(FunctionVerifier(f"part {number}", "1", function) for number, function in enumerate(functions))
    return StagedVerifier(
        name="stages", version="1", parts=parts, proceed=lambda place, verdict: verdict.value > 0,
        combine=lambda verdicts: Verdict(sum(one.value for one in verdicts), {"judged": float(len(verdicts))}),
    )  # fmt: skip


def fails(episode: Episode) -> Verdict:
    raise RuntimeError("broken")


@pytest.fixture
async def means() -> Means:
    return Means(http=httpx.AsyncClient(), session_id="s")


async def test_parts_judge_until_one_says_no(means: Means) -> None:
    found = await judge(staged(lambda _: Verdict(1.0), lambda _: Verdict(0.0), fails), EPISODE, means)
    assert (found.value, found.components) == (1.0, {"judged": 2.0})


async def test_a_part_that_cannot_judge_leaves_no_reward(means: Means) -> None:
    with pytest.raises(NoVerdict, match="crashed: part part 1: crashed: RuntimeError: broken"):
        await judge(staged(lambda _: Verdict(1.0), fails), EPISODE, means)
