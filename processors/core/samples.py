"""Segments become samples: token ids, spans by (turn, version), log-probs, one advantage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turnlog.processors.core.assembly import SessionTree
from turnlog.processors.core.fold_rules import FoldRules
from turnlog.processors.core.lineages import Turn
from turnlog.processors.core.turns import Tokens
from turnlog.schemas.events import ExpertRows, ImageRef, SampleSpan, SegmentSample
from turnlog.schemas.ids import digest, sample_id


def samples(group_id: str, tree: SessionTree, advantage: float, rules: FoldRules) -> Iterator[SegmentSample]:
    """The samples of a valid session's segments that train anything, in order of segment."""
    anchor = tree.anchor
    for index, run in enumerate(tree.segments.runs):
        if tree.trained(run):
            yield _sample(group_id, tree, index, index == anchor, advantage, rules)


def _sample(
    group_id: str, tree: SessionTree, index: int, is_anchor: bool, advantage: float, rules: FoldRules
) -> SegmentSample:
    session, run = tree.session, tree.segments.runs[index]
    started, finish, reward = session.started, session.finish, session.reward
    assert started is not None
    assert finish is not None
    assert reward is not None
    last = tree.turns[run[-1]].tokens
    spans = tuple(span for order in run for span in _spans(tree.turns[order], order not in tree.masked))
    versions = [span.version for span in spans if span.trained]
    sample = sample_id(session.session_id, index)
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
        token_ids=np.concatenate(last.prefix(last.length)).astype("<i4", copy=False).tobytes(),
        spans=spans,
        logprobs=np.concatenate([tree.turns[order].tokens.logprobs for order in run])
        .astype("<f4", copy=False)
        .tobytes(),
        temperature=last.temperature,
        logprob_kind=last.logprob_kind,
        advantage=advantage,
        reward=reward,
        outcome=finish.outcome,
        recipe=started.recipe,
        weight_version_min=min(versions),
        weight_version_max=max(versions),
        experts=_experts(last),
        images=_images(last),
    )


def _spans(turn: Turn, trained: bool) -> Iterator[SampleSpan]:
    """Runs of one version: adjacent spans of the record that differ in kv_version alone are one."""
    start, length, version = turn.tokens.prompt_len, 0, -1
    for span in turn.tokens.versions:
        if span.version != version and length:
            yield SampleSpan(start, length, turn.id, version, trained)
            start, length = start + length, 0
        length += span.length
        version = span.version if span.length or not length else version
    if length:
        yield SampleSpan(start, length, turn.id, version, trained)


def _experts(last: Tokens) -> tuple[ExpertRows, ...]:
    """Each turn of the storage chain gives its own rows, from position max(base_len - 1, 0) up to the next one's first.

    They sum to tokens - 1: the last position routes nothing that is trained on.
    """
    owners = last.chain(last.length)
    starts = [max(owner.base_len - 1, 0) for owner, _ in owners] + [last.length - 1]
    return tuple(
        ExpertRows(owner.experts, 0, end - start, start)
        for (owner, _), start, end in zip(owners, starts, starts[1:], strict=False)
        if owner.experts is not None and end > start
    )


def _images(last: Tokens) -> tuple[ImageRef, ...]:
    """Images that lie wholly in what each turn of the storage chain gives, by position in the segment."""
    return tuple(
        image
        for owner, end in last.chain(last.length)
        for image in owner.images
        if image.position >= owner.base_len and image.position + image.tokens <= end
    )
