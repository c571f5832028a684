"""From scored groups to batches: length cut, version masks, lag, drops, and books and weights that add up (I3, I5)."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.batches.draws import (
    DrawRules,
    FormedBatch,
    FormedDraw,
    PlacedSample,
    ReadableGroup,
    form_draw,
    overtaken,
    reform_batch,
)
from turnlog.processors.core.batches.rows import ENGINE_KINDS, rows_sha256
from turnlog.processors.core.batches.weighting import Whitening, whitening
from turnlog.processors.core.views.progress import HeldVersion
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
from turnlog.settings import EngineKind

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


def spanned(
    group: str,
    session: str,
    *spans: tuple[int, int, bool],
    segment: int = 0,
    advantages: tuple[float | None, ...] = (),
    advantage: float = 0.5,
) -> SegmentSample:
    """One context token, then spans of (tokens, version, trained), one context token between them."""
    placed: list[SampleSpan] = []
    start = 1
    for index, (length, version, trained) in enumerate(spans):
        own = advantages[index] if advantages else None
        placed.append(SampleSpan(start, length, TurnId("e", index), version, trained, own))
        start += length + 1
    outputs = sum(length for length, _, _ in spans)
    return replace(
        sample(group, session, 1, segment=segment),
        token_ids=pack_int32s(range(start - 1)),
        spans=tuple(placed),
        logprobs=pack_float32s([-0.5] * outputs),
        advantage=advantage,
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
    return form_draw(groups, HeldVersion(version), DrawRules(**{**RULES, **changes}))


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


@pytest.mark.parametrize(("temperature", "trains"), [(0.7, False), (1.0, True), (0.0, True)])
def test_raw_logprobs_of_another_temperature_never_train(temperature: float, trains: bool) -> None:
    """Of temperature 0 the step masks them."""
    raw = replace(sample("a", "s0", 2), logprob_kind="raw", temperature=temperature)
    formed = draw(group("a", raw, sample("a", "s1", 2)))
    assert [row.sample_id for row in formed.batches[0].samples] == ["s0/0", "s1/0"][not trains :]
    assert [(row.sample_id, row.reason, row.sampled_tokens) for row in formed.dropped] == [("s0/0", "raw_logprobs", 2)][
        trains:
    ]
    assert len(draw(group("a", raw, sample("a", "s1", 2)), min_valid=2).batches) == trains


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
    again = reform_batch(batch.samples, samples, HeldVersion(3), DrawRules(**RULES))
    assert again.samples == batch.samples
    assert rows_sha256(again.rows) == rows_sha256(batch.rows)


def test_a_manifest_names_what_rows_share_and_an_older_one_is_formed_again_without() -> None:
    groups = (group("a", sample("a", "s0", 3), sample("a", "s1", 2)), group("b", sample("b", "s2", 4)))
    batch = draw(*groups).batches[0]
    assert [(row.parent_row, row.shared_tokens) for row in batch.samples] == [(-1, 0), (0, 4), (0, 5)]
    samples = {placed.sample.sample_id: placed for one in groups for placed in one.samples}
    older = [replace(row, parent_row=None, shared_tokens=0) for row in batch.samples]
    assert reform_batch(older, samples, HeldVersion(3), DrawRules(**RULES)).samples == tuple(older)


def test_rows_mark_tokens_on_an_old_cache_and_without_one_are_those_of_the_first_version() -> None:
    told = sample("a", "s0", 2, versions=(3, 4))
    first, second = told.spans
    mixed = replace(told, spans=(first, replace(second, kv_version=3)))
    marked, plain = (draw(group("a", one)).batches[0].rows for one in (mixed, told))
    assert marked.old_cache is not None
    assert marked.old_cache.tolist() == [0, 0, 0, 0, 1, 1]
    assert (marked.version, plain.version, plain.old_cache) == (2, 1, None)
    assert rows_sha256(marked) != rows_sha256(marked, 1) == rows_sha256(plain)


def test_rows_name_the_kind_of_engine_of_each_token_and_without_one_are_those_of_the_first_version() -> None:
    told = sample("a", "s0", 2, versions=(3, 4))
    first, second = (replace(span, engine_kind=kind) for span, kind in zip(told.spans, ("vllm", "sglang"), strict=True))
    unknown = replace(second, engine_kind="of a newer release")
    named, partly, plain = (
        draw(group("a", replace(told, spans=spans))).batches[0].rows
        for spans in ((first, second), (first, unknown), told.spans)
    )
    assert [ENGINE_KINDS[number] for number in named.engine_kind] == ["", "", "vllm", "vllm", "sglang", "sglang"]
    assert partly.engine_kind.tolist() == [0, 0, 2, 2, 0, 0]
    assert (named.version, named.old_cache, plain.version, plain.engine_kind) == (3, None, 1, None)
    assert rows_sha256(named) != rows_sha256(named, 1) == rows_sha256(plain)


def test_every_kind_of_engine_has_a_number_in_rows() -> None:
    assert ("", *get_args(EngineKind)) == ENGINE_KINDS, "numbers are in recorded hashes: append a new kind"


@pytest.mark.parametrize(("groups", "updates", "sizes"), [(4, 2, [2, 2]), (3, 2, [1, 2]), (1, 3, [1])])
def test_a_draw_is_cut_by_whole_groups(groups: int, updates: int, sizes: list[int]) -> None:
    formed = draw(*(group(f"g{i}", sample(f"g{i}", f"s{i}", 2)) for i in range(groups)), updates_per_draw=updates)
    assert [batch.weights.prompts for batch in formed.batches] == sizes


def trained_flags(formed: FormedDraw) -> list[int]:
    (batch,) = formed.batches
    return [int(flag) for flag in batch.rows.trained]


@pytest.mark.parametrize(
    ("versions", "flags", "bounds"),
    [
        ((7, 8), (0, 1), (8, 8)),  # v0 v1 -> only v1 trains
        ((8, 7, 8), (1, 0, 1), (8, 8)),
        ((7, 7, 8), (0, 0, 1), (8, 8)),
        ((7, 7), (1, 1), (7, 7)),  # a single version is unchanged
    ],
)
def test_latest_only_trains_the_tokens_of_the_highest_version(
    versions: tuple[int, ...], flags: tuple[int, ...], bounds: tuple[int, int]
) -> None:
    one = spanned("a", "s0", *((1, version, True) for version in versions))
    formed = draw(group("a", one), version_mask="latest_only", version=8)
    assert tuple(trained_flags(formed)[1::2]) == flags
    assert (formed.batches[0].rows.version_min[0], formed.batches[0].rows.version_max[0]) == bounds
    assert formed.batches[0].masked == ({"version_mask": flags.count(0)} if 0 in flags else {})


def test_latest_only_looks_at_what_the_length_cut_and_the_tree_left() -> None:
    # version 9 is cut off, version 8 was masked by the tree: what is left trains at its own highest, 7
    one = spanned("a", "s0", (2, 7, True), (2, 8, False), (2, 9, True))
    formed = draw(group("a", one), version_mask="latest_only", version=7, max_tokens=7)
    assert formed.batches[0].masked == {"length_cut": 2}
    assert trained_flags(formed) == [0, 1, 1, 0, 0, 0, 0]


def test_the_lag_mask_takes_tokens_and_makes_nobody_stale() -> None:
    one = spanned("a", "s0", (2, 1, True), (1, 2, True), (1, 3, True))
    formed = draw(group("a", one), version_mask="max_lag", version=3, max_lag=1)
    assert (formed.batches[0].masked, formed.batches[0].max_lag, formed.dropped) == ({"version_mask": 2}, 1, ())
    assert draw(group("a", one), version_mask="none", version=3, max_lag=1).batches == ()


def test_a_trajectory_may_lose_some_of_its_segments_to_the_mask_alone() -> None:
    old = spanned("a", "s0", (3, 1, True))
    new = spanned("a", "s0", (2, 3, True), segment=1)
    formed = draw(group("a", old, new), version_mask="max_lag", version=3, max_lag=0)
    assert [(row.sample_id, row.reason, row.sampled_tokens) for row in formed.dropped] == [("s0/0", "version_mask", 0)]
    assert [row.sample_id for row in formed.batches[0].samples] == ["s0/1"]
    assert formed.masked == {"version_mask": 3}
    assert formed.batches[0].weights.trajectories == 1


def test_a_segment_whose_trained_tokens_were_all_cut_is_dropped_for_its_length() -> None:
    short, long = spanned("a", "s0", (2, 3, True)), spanned("a", "s0", (4, 3, False), (2, 3, True), segment=1)
    formed = draw(group("a", short, long), max_tokens=5)
    assert [(row.sample_id, row.reason) for row in formed.dropped] == [("s0/1", "length_cut")]
    assert formed.masked == {"length_cut": 2}


def test_lag_counts_from_the_oldest_version_that_is_still_trained() -> None:
    one = spanned("a", "s0", (1, 1, False), (1, 2, True), (1, 3, True))
    assert draw(group("a", one), version=3, max_lag=1).batches[0].max_lag == 1
    cut = spanned("a", "s0", (1, 3, True), (1, 1, True))
    assert draw(group("a", cut), version=3, max_lag=0, max_tokens=3).batches[0].max_lag == 0


def test_at_lag_zero_only_the_version_that_trains_is_admitted() -> None:
    fresh, old = group("a", sample("a", "s0", 2)), group("b", sample("b", "s1", 2, versions=(2,)))
    formed = draw(fresh, old, max_lag=0)
    assert formed.batches[0].groups == ("a",)
    assert [(row.group_id, row.reason) for row in formed.dropped] == [("b", "stale")]


def test_a_group_without_samples_is_overtaken_by_no_version() -> None:
    rules = DrawRules(**{**RULES, "max_lag": 0})
    assert not overtaken(group("a"), HeldVersion(3), rules)
    assert overtaken(group("a", sample("a", "s0", 2, versions=(2,))), HeldVersion(3), rules)


def test_dropping_a_sibling_does_not_recompute_the_advantages_of_the_others() -> None:
    old = replace(sample("a", "s0", 2, versions=(1,)), advantage=0.75)
    kept = [replace(sample("a", f"s{index}", 2), advantage=-0.25) for index in (1, 2, 3)]
    rows = draw(group("a", old, *kept), min_valid=2).batches[0].rows
    assert set(rows.advantages[rows.trained == 1]) == {-0.25}


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (group("a"),),
        (group("a", spanned("a", "s0", (3, 3, False))),),
        (group("a", spanned("a", "s0", (3, 1, True))),),
    ],
    ids=["no group", "no sample", "all masked by the tree", "all stale"],
)
def test_a_draw_that_leaves_nothing_has_no_batch(groups: tuple[ReadableGroup, ...]) -> None:
    formed = draw(*groups, max_lag=0)
    assert formed.batches == ()
    assert len(formed.dropped) == sum(len(one.samples) for one in groups)


def test_every_turns_own_advantage_lands_on_its_tokens() -> None:
    one = spanned("a", "s0", (2, 3, True), (1, 3, False), (1, 3, True), advantages=(2.0, 9.0, None))
    rows = draw(group("a", one)).batches[0].rows
    assert list(rows.advantages) == [0, 2, 2, 0, 0, 0, 0.5]


def test_advantages_beyond_what_a_row_can_hold_saturate() -> None:
    rows = draw(group("a", replace(sample("a", "s0", 1), advantage=1e60, reward=-1e60))).batches[0].rows
    assert rows.advantages.max() == np.finfo(np.float32).max == -rows.rewards[0]


def test_whitening_is_over_the_trained_tokens_of_each_batch() -> None:
    groups = [
        group("a", spanned("a", "s0", (3, 3, True), (5, 3, False), advantage=1.0)),
        group("b", spanned("b", "s1", (1, 3, True), (9, 3, True), advantage=5.0)),
        group("c", spanned("c", "s2", (2, 3, True), advantage=7.0)),
    ]
    formed = draw(*groups, whiten=True, updates_per_draw=2, max_tokens=11)
    first, second = formed.batches
    assert (first.groups, second.groups) == (("a",), ("b", "c"))
    assert (first.whitening, second.whitening) == (Whitening(1.0, 0.0), whitening([np.array([5.0] * 9 + [7.0] * 2)]))
    assert not first.rows.advantages.any()
    tokens = second.rows.advantages[second.rows.trained == 1].astype(float)
    assert (tokens.mean(), tokens.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))
    assert not second.rows.advantages[second.rows.trained == 0].any()


def test_cutting_a_trajectory_otherwise_changes_no_bit_of_its_whitened_advantage() -> None:
    def whitened(*segments: int) -> set[float]:
        rows = (spanned("a", "s0", (n, 3, True), segment=k, advantage=0.1) for k, n in enumerate(segments))
        formed = draw(group("a", *rows), group("b", spanned("b", "s1", (5, 3, True), advantage=0.7)), whiten=True)
        (batch,) = formed.batches
        return {float(value) for value in batch.rows.advantages[batch.rows.trained == 1]}

    assert whitened(7) == whitened(3, 4) == whitened(1, 5, 1)


def test_without_whitening_a_manifest_has_no_mean() -> None:
    assert draw(group("a", sample("a", "s0", 2))).batches[0].whitening is None


@st.composite
def draws(strategy: st.DrawFn) -> tuple[list[ReadableGroup], int, dict[str, object]]:
    """Groups of trajectories of segments of spans, whatever the tree masked, and the rules to draw them by."""
    groups = []
    span = st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans())
    for g in range(strategy(st.integers(1, 4))):
        rows = [
            spanned(f"g{g}", f"g{g}s{i}", *strategy(st.lists(span, min_size=1, max_size=4)), segment=k, advantage=a)
            for i in range(strategy(st.integers(1, 3)))
            for a in [strategy(st.sampled_from([-1.0, 0.1, 0.5]))]
            for k in range(strategy(st.integers(1, 2)))
        ]
        groups.append(group(f"g{g}", *rows))
    rules = {
        "updates_per_draw": strategy(st.integers(1, 3)),
        "max_lag": strategy(st.integers(0, 3)),
        "max_tokens": strategy(st.integers(1, 20)),
        "weighting": strategy(st.sampled_from([one for one in Weighting if one is not Weighting.unknown])),
        "version_mask": strategy(st.sampled_from(["none", "latest_only", "max_lag"])),
        "min_valid": strategy(st.integers(1, 3)),
        "whiten": strategy(st.booleans()),
    }
    return groups, strategy(st.integers(1, 5)), rules


def shares(batch: FormedBatch) -> dict[str, Fraction]:
    """Loss weight of each prompt, from the columns that are written."""
    found: dict[str, Fraction] = {}
    for owner, start, length, divisor in zip(
        batch.rows.group_ids, batch.rows.starts, batch.rows.lengths, batch.rows.weight_divisor, strict=True
    ):
        trained = int(batch.rows.trained[start : start + length].sum())
        found[owner] = found.get(owner, Fraction(0)) + Fraction(trained, int(divisor))
    return found


@given(drawing=draws())
def test_whatever_is_cut_masked_or_dropped_books_and_weights_add_up(
    drawing: tuple[list[ReadableGroup], int, dict[str, object]],
) -> None:
    groups, version, rules = drawing
    formed = draw(*groups, version=version, **rules)
    placed = {one.sample.sample_id: one for each in groups for one in each.samples}
    sampled = sum(span.length for one in placed.values() for span in one.sample.spans if span.trained)
    trained = sum(int(batch.rows.trained.sum()) for batch in formed.batches)
    masked = sum(sum(batch.masked.values()) for batch in formed.batches) + sum(formed.masked.values())
    assert sampled == trained + masked + sum(row.sampled_tokens for row in formed.dropped)
    found = [row.sample_id for batch in formed.batches for row in batch.samples]
    assert sorted(found + [row.sample_id for row in formed.dropped]) == sorted(placed)
    for batch in formed.batches:
        per_prompt, weights = shares(batch), batch.weights
        wanted = Fraction(1)
        if rules["weighting"] is Weighting.constant:
            wanted = Fraction(weights.trained_tokens, weights.trajectories * 16)
        assert sum(per_prompt.values()) == wanted
        assert rules["weighting"] is not Weighting.prompt or set(per_prompt.values()) == {Fraction(1, len(per_prompt))}
        assert batch.max_lag <= rules["max_lag"]  # type: ignore[operator]


@given(drawing=draws(), rng=st.randoms(use_true_random=False))
def test_every_batch_is_formed_again_from_its_manifest_bit_by_bit(
    drawing: tuple[list[ReadableGroup], int, dict[str, object]], rng: random.Random
) -> None:
    groups, version, rules = drawing
    placed = {one.sample.sample_id: one for each in groups for one in each.samples}
    for batch in draw(*groups, version=version, **rules).batches:
        manifest = rng.sample(batch.samples, len(batch.samples))
        again = reform_batch(manifest, placed, HeldVersion(version), DrawRules(**{**RULES, **rules}))
        assert (again.samples, again.whitening, again.weights) == (batch.samples, batch.whitening, batch.weights)
        assert rows_sha256(again.rows) == rows_sha256(batch.rows)
