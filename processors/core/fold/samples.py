"""Segments become samples: token ids, spans by (turn, version), log-probs, one advantage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from turnlog.processors.core.experts import LAYOUTS_DIFFER, WITHOUT_ROWS, own_rows
from turnlog.processors.core.fold.session import SessionTree
from turnlog.processors.core.lineages import Turn
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import Tokens
from turnlog.schemas.events import ExpertRows, SampleSpan, SegmentSample
from turnlog.schemas.ids import digest, sample_id


@dataclass(frozen=True, slots=True)
class Credit:
    """What a valid trajectory is worth, as its samples say it."""

    reward: float
    """As the verifiers said it, before any transform."""
    advantage: float
    per_turn: Mapping[int, float] = field(default_factory=dict)
    """By turn order; the others carry `advantage`."""


def samples(group_id: str, tree: SessionTree, credit: Credit, rules: FoldRules) -> Iterator[SegmentSample]:
    """The samples of a valid session's segments that train anything, in order of segment."""
    anchor = tree.anchor
    for index, run in enumerate(tree.segments.runs):
        if tree.trained(run):
            yield _sample(group_id, tree, index, index == anchor, credit, rules)


def _sample(
    group_id: str, tree: SessionTree, index: int, is_anchor: bool, credit: Credit, rules: FoldRules
) -> SegmentSample:
    session, run = tree.session, tree.segments.runs[index]
    started, finish = session.started, session.finish
    assert started is not None
    assert finish is not None
    last = tree.turns[run[-1]].tokens
    spans = tuple(
        span
        for order in run
        for span in _spans(tree.turns[order], order not in tree.masked, credit.per_turn.get(order))
    )
    versions = [span.version for span in spans if span.trained]
    sample = sample_id(session.session_id, index)
    experts, gap = segment_rows([tree.turns[order].tokens for order in run])
    return SegmentSample(
        event_id=digest("SegmentSample", sample),
        run_id=rules.run_id,
        group_id=group_id,
        session_id=session.session_id,
        rollout_id=started.rollout_id,
        rollout_index=started.rollout_index,
        task_id=started.task_id,
        sample_id=sample,
        purpose=started.purpose,
        segment_index=index,
        segment_count=len(tree.segments.runs),
        is_anchor=is_anchor,
        token_ids=b"".join([piece.data for piece in last.prefix(last.length)]),  # views of packed bytes: one copy
        spans=spans,
        logprobs=b"".join([tree.turns[order].tokens.logprobs.data for order in run]),
        temperature=last.temperature,
        logprob_kind=last.logprob_kind,
        advantage=credit.advantage,
        reward=credit.reward,
        outcome=finish.outcome,
        recipe=started.recipe,
        weight_version_min=min(versions),
        weight_version_max=max(versions),
        experts=experts,
        experts_gap=gap,
        images=last.images,
    )


def _spans(turn: Turn, trained: bool, advantage: float | None) -> Iterator[SampleSpan]:
    """Runs of one version: adjacent spans of the record that differ in kv_version alone are one."""
    start, length, version = turn.tokens.prompt_len, 0, -1
    for span in turn.tokens.versions:
        if span.version != version and length:
            yield SampleSpan(start, length, turn.id, version, trained, advantage)
            start, length = start + length, 0
        length += span.length
        version = span.version if span.length or not length else version
    if length:
        yield SampleSpan(start, length, turn.id, version, trained, advantage)


def segment_rows(run: Sequence[Tokens]) -> tuple[tuple[ExpertRows, ...], str]:
    """References that cover a segment, or none and the reason ("" where no turn of it has rows).

    `run`: the segment's turns in order, each the beginning of the next (policies.check). Every turn of storage is
    visited about once.
    """
    if all(turn.experts is None for turn in run):
        return (), ""
    pieces: list[ExpertRows] = []
    shapes: set[tuple[int, int]] = set()
    done = 0
    for turn in run:
        for owner, start, stop in _stored(turn, done):
            if owner.experts is None:
                return (), WITHOUT_ROWS
            if owner.experts_layout is not None:
                shapes.add((owner.experts_layout.layers, owner.experts_layout.top_k))
            first, _ = own_rows(owner.base_len, owner.length)
            pieces.append(ExpertRows(owner.experts, start - first, stop - start, start))
        done = max(done, turn.length - 1)
    return (tuple(pieces), "") if len(shapes) <= 1 else ((), LAYOUTS_DIFFER)


def _stored(turn: Tokens, done: int) -> list[tuple[Tokens, int, int]]:
    """(owner, first, end) of positions `done` to len - 2, first position first."""
    found: list[tuple[Tokens, int, int]] = []
    owner: Tokens | None = turn
    stop = turn.length - 1
    while owner is not None and stop > done:
        start = max(owner.base_len - 1, 0, done)
        if start < stop:
            found.append((owner, start, stop))
            stop = start
        owner = owner.parent
    return found[::-1]
