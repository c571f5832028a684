"""A settled and supplied group becomes samples and its GroupScored: validity, status, advantages, the last books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnlog.processors.core.assembly import SessionTree
from turnlog.processors.core.books import Ledger
from turnlog.processors.core.estimators import ESTIMATORS, Advantages
from turnlog.processors.core.fold_rules import FOLD_VERSION, FoldRules
from turnlog.processors.core.samples import samples
from turnlog.processors.core.spine import Spine
from turnlog.processors.core.supply import Supply, output_tokens
from turnlog.schemas.events import (
    Event,
    GroupScored,
    GroupStatus,
    MaskReason,
    Outcome,
    Purpose,
    RolloutScore,
    TreeBooks,
)
from turnlog.schemas.ids import digest

VALID = frozenset({Outcome.completed, Outcome.truncated, Outcome.agent_error})
"""Outcomes of an agent that lived to its end; every other one is a failure of ours and no reward 0."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What was decided of a group."""

    status: GroupStatus
    reason: str
    advantages: Advantages | None
    """Of the valid members, in canonical order."""


def excluded(tree: SessionTree, rules: FoldRules) -> str | None:
    """Why a member is no valid trajectory; None if it is one."""
    finish, reward = tree.session.finish, tree.session.reward
    assert finish is not None
    if tree.refused:
        return MaskReason.refused.value
    if finish.outcome not in VALID or (finish.outcome is Outcome.truncated and rules.truncated == "exclude"):
        return finish.outcome.value
    return "verifier_failure" if reward is None else None


def settle(purpose: Purpose, rewards: Sequence[float], rules: FoldRules) -> Settlement:
    """Decide on the rewards of the valid members, in order of rollout_index."""
    if purpose is not Purpose.train:
        return Settlement(GroupStatus.not_training, "purpose", None)
    if len(rewards) < max(rules.min_valid, 1):
        return Settlement(GroupStatus.discarded, "too_few_valid", None)
    advantages = ESTIMATORS[rules.estimator].estimate(rewards, rules.std_ddof)
    if rules.zero_variance == "discard" and min(rewards) == max(rewards):
        return Settlement(GroupStatus.discarded, "zero_variance", advantages)
    return Settlement(GroupStatus.trained, "", advantages)


def score(
    group_id: str,
    floor: int,
    spine: Spine,
    supplies: Mapping[str, Supply],
    trees: Mapping[str, SessionTree],
    rules: FoldRules,
) -> list[Event]:
    """SegmentSamples in order of (rollout_index, segment_index), then GroupScored.

    `trees`: of every session that settled before the group did. Raises BooksDoNotBalance.
    """
    assert spine.members is not None
    members = sorted((trees[member] for member in spine.members), key=_rollout)
    reasons = [excluded(tree, rules) for tree in members]
    valid = [tree for tree, reason in zip(members, reasons, strict=True) if reason is None]
    purpose = spine.task.purpose if spine.task else Purpose.other
    settlement = settle(purpose, [tree.session.reward or 0.0 for tree in valid], rules)
    advantages = dict(
        zip((tree.session.session_id for tree in valid), settlement.advantages.values, strict=True)
        if settlement.status is GroupStatus.trained and settlement.advantages
        else ()
    )
    outputs: list[Event] = []
    for tree in valid:
        if tree.session.session_id in advantages:
            outputs.extend(samples(group_id, tree, advantages[tree.session.session_id], rules))
    scored = GroupScored(
        event_id=digest("GroupScored", group_id),
        run_id=rules.run_id,
        group_id=group_id,
        floor=floor,
        task_id=spine.task.task_id if spine.task else "",
        purpose=purpose,
        rollouts=tuple(_rollout_score(tree, reason, advantages) for tree, reason in zip(members, reasons, strict=True)),
        baseline=settlement.advantages.baseline if settlement.advantages else None,
        std=settlement.advantages.std if settlement.advantages else None,
        estimator=ESTIMATORS[rules.estimator].label,
        status=settlement.status,
        reason=settlement.reason,
        samples=len(outputs),
        books=_books(group_id, supplies, trees, set(advantages), settlement.status),
        fold_version=FOLD_VERSION,
        settings_sha256=rules.settings_sha256,
    )
    return [*outputs, scored]


def _rollout(tree: SessionTree) -> tuple[int, str]:
    started = tree.session.started
    assert started is not None
    return started.rollout_index, started.rollout_id


def _rollout_score(tree: SessionTree, reason: str | None, advantages: Mapping[str, float]) -> RolloutScore:
    session = tree.session
    assert session.started is not None
    assert session.finish is not None
    return RolloutScore(
        rollout_id=session.started.rollout_id,
        session_id=session.session_id,
        outcome=session.finish.outcome,
        reward=session.reward,
        advantage=advantages.get(session.session_id),
        excluded_reason=reason,
    )


def _books(
    group_id: str,
    supplies: Mapping[str, Supply],
    trees: Mapping[str, SessionTree],
    trained: set[str],
    status: GroupStatus,
) -> TreeBooks:
    """Every snapshot of the group up to the last one that a settled session needs, once.

    That end does not depend on the order in which topics are read; what stands behind it is late, as is a session that
    had not settled when its group did.
    """
    end = max((tree.end for tree in trees.values()), default=-1)
    ledger, sampled = Ledger(), 0
    for session_id, supply in supplies.items():
        sampled += sum(output_tokens(snapshot) for snapshot in supply.snapshots.values() if snapshot.offset <= end)
        if session_id not in trees:
            late = sum(output_tokens(snapshot) for snapshot in supply.snapshots.values() if snapshot.offset <= end)
            ledger.enter(late, MaskReason.discarded_group if status is not GroupStatus.trained else MaskReason.late)
            continue
        for count, reason in trees[session_id].entries(end):
            ledger.enter(count, _final(trees[session_id], reason, session_id in trained, status))
    return ledger.close(f"group {group_id}", sampled)


def _final(tree: SessionTree, reason: MaskReason | None, trained: bool, status: GroupStatus) -> MaskReason | None:
    """The last word about one turn's tokens."""
    if status is not GroupStatus.trained:
        return MaskReason.discarded_group
    if tree.refused:
        return MaskReason.refused
    return reason if trained else MaskReason.excluded_outcome
