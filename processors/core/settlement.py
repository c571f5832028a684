"""A settled and supplied group becomes samples and its GroupScored: validity, status, advantages, the last books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnlog.processors.core.assembly import SessionTree
from turnlog.processors.core.books import Ledger
from turnlog.processors.core.methods.catalogue import estimate
from turnlog.processors.core.methods.estimators import Advantages, Trajectory
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.samples import samples
from turnlog.processors.core.spine import Spine
from turnlog.processors.core.supply import Supply, output_tokens
from turnlog.processors.core.trajectories import Credit, acted_on, own_reward, trajectory
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

    def without_tokens(self) -> Settlement:
        """Of a group whose samples would all be empty: nothing to draw, so it gives its place back."""
        if self.status is not GroupStatus.trained:
            return self
        return Settlement(GroupStatus.discarded, "nothing_to_train", self.advantages)


def excluded(tree: SessionTree, rules: FoldRules) -> str | None:
    """Why a member is no valid trajectory; None if it is one."""
    finish = tree.session.finish
    assert finish is not None
    if tree.refused:
        return MaskReason.refused.value
    if finish.outcome not in VALID or (finish.outcome is Outcome.truncated and rules.truncated == "exclude"):
        return finish.outcome.value
    return "verifier_failure" if _reward(tree, rules) is None else None


def settle(purpose: Purpose, trajectories: Sequence[Trajectory], rules: FoldRules) -> Settlement:
    """Decide on the valid members, in order of rollout_index. Raises BrokenMethod, SettingsError."""
    if purpose is not Purpose.train:
        return Settlement(GroupStatus.not_training, "purpose", None)
    if len(trajectories) < rules.least_valid:
        return Settlement(GroupStatus.discarded, "too_few_valid", None)
    advantages = estimate(rules.formula, trajectories, rules.options)
    for chosen in rules.filters:
        if chosen.discards(trajectories, advantages):
            return Settlement(GroupStatus.discarded, chosen.filter.name, advantages)
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

    `trees`: of every session that settled before the group did. Raises BooksDoNotBalance, BrokenMethod, SettingsError.
    """
    assert spine.members is not None
    members = sorted((trees[member] for member in spine.members), key=_rollout)
    reasons = [excluded(tree, rules) for tree in members]
    valid = [tree for tree, reason in zip(members, reasons, strict=True) if reason is None]
    purpose = spine.task.purpose if spine.task else Purpose.other
    transforms = rules.transforms
    settlement = settle(purpose, [trajectory(tree, transforms) for tree in valid], rules)
    if rules.version.empty_groups_fail and not any(tree.trained(run) for tree in valid for run in tree.segments.runs):
        settlement = settlement.without_tokens()
    worth = _credits(valid, settlement, rules)
    outputs: list[Event] = []
    for tree in valid:
        if tree.session.session_id in worth:
            outputs.extend(samples(group_id, tree, worth[tree.session.session_id], rules))
    scored = GroupScored(
        event_id=digest("GroupScored", group_id),
        run_id=rules.run_id,
        group_id=group_id,
        floor=floor,
        task_id=spine.task.task_id if spine.task else "",
        purpose=purpose,
        rollouts=tuple(
            _rollout_score(tree, reason, worth, rules) for tree, reason in zip(members, reasons, strict=True)
        ),
        baseline=settlement.advantages.baseline if settlement.advantages else None,
        std=settlement.advantages.std if settlement.advantages else None,
        estimator=rules.formula.label,
        status=settlement.status,
        reason=settlement.reason,
        samples=len(outputs),
        books=_books(group_id, supplies, trees, set(worth), settlement.status),
        fold_version=rules.version.name,
        settings_sha256=rules.settings_sha256,
        group_filters=tuple(chosen.label for chosen in rules.filters),
        reward_transforms=tuple(chosen.label for chosen in transforms),
    )
    return [*outputs, scored]


def _reward(tree: SessionTree, rules: FoldRules) -> float | None:
    return own_reward(tree, rules)


def _credits(valid: Sequence[SessionTree], settlement: Settlement, rules: FoldRules) -> dict[str, Credit]:
    """By session; none unless the group is trained."""
    advantages = settlement.advantages
    if settlement.status is not GroupStatus.trained or advantages is None:
        return {}
    worth: dict[str, Credit] = {}
    for index, tree in enumerate(valid):
        reward = _reward(tree, rules)
        assert reward is not None
        turns = advantages.per_turn
        per_turn = {} if turns is None else dict(zip(acted_on(tree), turns[index], strict=True))
        worth[tree.session.session_id] = Credit(reward, advantages.values[index], per_turn)
    return worth


def _rollout(tree: SessionTree) -> tuple[int, str]:
    started = tree.session.started
    assert started is not None
    return started.rollout_index, started.rollout_id


def _rollout_score(
    tree: SessionTree, reason: str | None, worth: Mapping[str, Credit], rules: FoldRules
) -> RolloutScore:
    session = tree.session
    assert session.started is not None
    assert session.finish is not None
    credit = worth.get(session.session_id)
    return RolloutScore(
        rollout_id=session.started.rollout_id,
        session_id=session.session_id,
        outcome=session.finish.outcome,
        reward=_reward(tree, rules),
        advantage=credit.advantage if credit is not None else None,
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
