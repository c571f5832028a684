"""From scored groups to batches: masks, lag, drops, and weights that add up (I5)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.draws import FormedDraw, ReadableGroup, form_draw, reform_batch
from turnlog.processors.core.rows import rows_sha256
from turnlog.processors.core.trimmed import DrawRules, PlacedSample
from turnlog.schemas.events import (
    GroupScored,
    GroupStatus,
    Outcome,
    Purpose,
    SampleSpan,
    SegmentSample,
    TreeBooks,
    Weighting,
)
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s

RULES = dict(
    prompts_per_draw=2,
    updates_per_draw=1,
    max_lag=1,
    max_tokens=64,
    weighting=Weighting.prompt,
    constant_length=16,
    version_mask="none",
    min_valid=1,
)


def sample(
    group: str, session: str, trained: int, *, versions: tuple[int, ...] = (3,), segment: int = 0
) -> SegmentSample:
    """Two context tokens, then `trained` output tokens per version."""
    spans = tuple(
        SampleSpan(2 + index * trained, trained, TurnId("e", index), version, True)
        for index, version in enumerate(versions)
    )
    outputs = trained * len(versions)
    return SegmentSample(
        event_id=f"{session}/{segment}",
        run_id="r",
        group_id=group,
        session_id=session,
        rollout_id=session,
        rollout_index=int(session[-1]),
        task_id="t",
        sample_id=f"{session}/{segment}",
        purpose=Purpose.train,
        segment_index=segment,
        segment_count=1,
        is_anchor=True,
        token_ids=pack_int32s(range(2 + outputs)),
        spans=spans,
        logprobs=pack_float32s([-0.5] * outputs),
        temperature=1.0,
        logprob_kind="at_temperature",
        advantage=0.5,
        reward=1.0,
        outcome=Outcome.completed,
        recipe="calc",
        weight_version_min=min(versions),
        weight_version_max=max(versions),
    )


def group(name: str, *samples: SegmentSample) -> ReadableGroup:
    score = GroupScored(
        event_id=name,
        run_id="r",
        group_id=name,
        floor=0,
        task_id="t",
        purpose=Purpose.train,
        rollouts=(),
        baseline=0.5,
        std=None,
        estimator="grpo/1",
        status=GroupStatus.trained,
        reason="",
        samples=len(samples),
        books=TreeBooks(0, 0, {}),
        fold_version="1",
        settings_sha256="",
    )
    return ReadableGroup(score, tuple(PlacedSample(row, 0, offset) for offset, row in enumerate(samples)))


def draw(*groups: ReadableGroup, version: int = 3, **changes: object) -> FormedDraw:
    return form_draw(groups, version, DrawRules(**{**RULES, **changes}))


def test_prompt_equal_weights_are_those_of_the_worked_example() -> None:
    first = group("a", sample("a", "s0", 3), sample("a", "s0", 2, segment=1), sample("a", "s1", 2))
    batch = draw(first, group("b", sample("b", "s2", 4))).batches[0]
    assert [row.weight_divisor for row in batch.samples] == [14, 14, 14, 8]
    assert (batch.weights.prompts, batch.weights.trajectories, batch.weights.trained_tokens) == (2, 3, 11)


@given(
    counts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    weighting=st.sampled_from([Weighting.prompt, Weighting.trajectory, Weighting.token, Weighting.constant]),
    updates=st.integers(1, 3),
    limit=st.integers(1, 12),
)
def test_weights_add_up_whatever_was_cut(
    counts: list[list[int]], weighting: Weighting, updates: int, limit: int
) -> None:
    groups = [
        group(f"g{g}", *(sample(f"g{g}", f"g{g}s{i}", tokens) for i, tokens in enumerate(sizes)))
        for g, sizes in enumerate(counts)
    ]
    formed = draw(*groups, weighting=weighting, updates_per_draw=updates, max_tokens=limit)
    sampled = sum(map(sum, counts))
    trained = masked = 0
    for batch in formed.batches:
        total = sum(Fraction(row.trained_tokens, row.weight_divisor) for row in batch.samples)
        weights = batch.weights
        assert total == (
            1 if weighting is not Weighting.constant else Fraction(weights.trained_tokens, weights.trajectories * 16)
        )
        assert list(batch.rows.trained_per_row()) == [row.trained_tokens for row in batch.samples]
        trained += weights.trained_tokens
        masked += sum(batch.masked.values())
    dropped = sum(row.sampled_tokens for row in formed.dropped) + sum(formed.masked.values())
    assert sampled == trained + masked + dropped


def test_a_stale_trajectory_is_dropped_with_all_its_segments() -> None:
    old = (sample("a", "s0", 2, versions=(1,)), sample("a", "s0", 2, versions=(3,), segment=1))
    formed = draw(group("a", *old, sample("a", "s1", 2)))
    assert [(row.sample_id, row.reason) for row in formed.dropped] == [("s0/0", "stale"), ("s0/1", "stale")]
    assert formed.batches[0].max_lag == 0


def test_a_group_left_with_too_few_trajectories_is_dropped_whole() -> None:
    formed = draw(group("a", sample("a", "s0", 2, versions=(1,)), sample("a", "s1", 2)), min_valid=2)
    assert not formed.batches
    assert {row.reason for row in formed.dropped} == {"stale", "discarded_group"}


def test_masking_old_versions_keeps_the_tokens_as_context() -> None:
    formed = draw(
        group("a", sample("a", "s0", 2, versions=(1, 3)), sample("a", "s1", 2)), version_mask="latest_only", max_lag=0
    )
    batch = formed.batches[0]
    assert batch.masked == {"version_mask": 2}
    assert list(batch.rows.trained[: batch.samples[0].tokens]) == [0, 0, 0, 0, 1, 1]
    assert np.count_nonzero(batch.rows.logprobs[: batch.samples[0].tokens]) == 4


def test_a_batch_is_a_function_of_its_manifest() -> None:
    groups = (group("b", sample("b", "s1", 4)), group("a", sample("a", "s0", 3)))
    batch = draw(*groups).batches[0]
    assert [row.group_id for row in batch.samples] == ["a", "b"]
    samples = {placed.sample.sample_id: placed for one in groups for placed in one.samples}
    again = reform_batch(batch.samples, samples, 3, DrawRules(**RULES))
    assert again.samples == batch.samples
    assert rows_sha256(again.rows) == rows_sha256(batch.rows)


@pytest.mark.parametrize(("groups", "updates", "sizes"), [(4, 2, [2, 2]), (3, 2, [1, 2]), (1, 3, [1])])
def test_a_draw_is_cut_by_whole_groups(groups: int, updates: int, sizes: list[int]) -> None:
    formed = draw(*(group(f"g{i}", sample(f"g{i}", f"s{i}", 2)) for i in range(groups)), updates_per_draw=updates)
    assert [batch.weights.prompts for batch in formed.batches] == sizes
