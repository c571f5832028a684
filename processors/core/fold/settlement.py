"""Samples and GroupScored of a settled group: validity, status, advantages and the final token accounting.

A sample holds, for one segment, its token ids, spans by (turn, version), log-probs and one advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from numpy.typing import NDArray

from turnlog.processors.core.books import Ledger
from turnlog.processors.core.experts import LAYOUTS_DIFFER, WITHOUT_ROWS, own_rows
from turnlog.processors.core.fold.session import WHOLE, SessionRecords, SessionTree, output_tokens
from turnlog.processors.core.fold.spine import ControlStreamFold
from turnlog.processors.core.fold.trajectories import (
    acted_on,
    exclusion_reason,
    own_reward,
    session_exclusion,
    trajectory,
)
from turnlog.processors.core.fold_versions import fold_version
from turnlog.processors.core.lineages import Turn
from turnlog.processors.core.methods.estimators import Advantages, Trajectory, mean_of
from turnlog.processors.core.methods.rules import FoldRules, estimate
from turnlog.processors.core.turns import TurnTokenDelta
from turnlog.schemas.binary import constructor
from turnlog.schemas.events import (
    Event,
    ExpertRows,
    GroupEmitted,
    GroupScored,
    GroupStatus,
    MaskReason,
    PlayerScore,
    Purpose,
    RoleScore,
    RolloutScore,
    SampleSpan,
    SegmentSample,
    TreeBooks,
)
from turnlog.schemas.ids import digest, sample_id

make_span, make_sample = constructor(SampleSpan), constructor(SegmentSample)


@dataclass(frozen=True, slots=True)
class Credit:
    """Reward and advantage of a valid trajectory, as its samples carry them."""

    reward: float
    """The verifiers' reward, before any transform."""
    advantage: float
    per_turn: Mapping[int, float] = field(default_factory=dict)
    """Turn order -> advantage; the other turns carry `advantage`."""


Worth = dict[tuple[str, str], Credit]
"""(Session, role) -> credit of each trajectory that trains."""


def samples(group_id: str, tree: SessionTree, worth: Worth, rules: FoldRules) -> Iterator[SegmentSample]:
    """Yield the samples of a session's trajectories that train, in order of segment; segments that train nothing are
    left out.
    """
    for index, trained in enumerate(tree.trained):
        credit = worth.get((tree.session.session_id, tree.role_of(tree.segments.runs[index][0])))
        if trained and credit is not None:
            yield _sample(group_id, tree, index, index == tree.anchor, credit, rules)


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
        for span in _spans(tree.turns[order], order not in tree.masked, credit.per_turn.get(order), rules)
    )
    versions = [span.version for span in spans if span.trained]
    sample = sample_id(session.session_id, index)
    experts, gap = segment_rows([tree.turns[order].tokens for order in run])
    return make_sample(
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
        token_ids=_join_arrays(last.prefix(last.length)),
        spans=spans,
        logprobs=_join_arrays([tree.turns[order].tokens.logprobs for order in run]),
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
        player=tree.role_of(run[0]),
    )


def _join_arrays(arrays: Sequence[NDArray[Any]]) -> bytes:
    """Join views of packed bytes. They are copied once; a memoryview of each would cost more than the copy."""
    return b"".join(arrays)  # type: ignore[arg-type] # NumPy declares its arrays as buffers from Python 3.12 on


def _spans(turn: Turn, trained: bool, advantage: float | None, rules: FoldRules) -> Iterator[SampleSpan]:
    """Yield spans of one version and, if the fold version distinguishes them, of one KV cache and one kind of
    engine.
    """
    start, length, version, cache, kind = turn.tokens.prompt_len, 0, -1, None, ""
    for span in turn.tokens.versions:
        its_cache = span.kv_version if rules.version.spans_by_cache else None
        its_kind = span.engine_kind if rules.version.spans_by_engine else ""
        if (span.version, its_cache, its_kind) != (version, cache, kind) and length:
            yield make_span(start, length, turn.id, version, trained, advantage, cache, kind)
            start, length = start + length, 0
        length += span.length
        if span.length or not length:
            version, cache, kind = span.version, its_cache, its_kind
    if length:
        yield make_span(start, length, turn.id, version, trained, advantage, cache, kind)


def segment_rows(run: Sequence[TurnTokenDelta]) -> tuple[tuple[ExpertRows, ...], str]:
    """Return the references that cover a segment, or none and the reason ("" if no turn of it has rows).

    `run` holds the segment's turns in order, each a prefix of the next (see `policies.check`). Every stored turn is
    visited about once.
    """
    if all(turn.experts is None for turn in run):
        return (), ""
    pieces: list[ExpertRows] = []
    shapes: set[tuple[int, int]] = set()
    done = 0
    for turn in run:
        for owner, start, stop in _stored_ranges(turn, done):
            if owner.experts is None:
                return (), WITHOUT_ROWS
            if owner.experts_layout is not None:
                shapes.add((owner.experts_layout.layers, owner.experts_layout.top_k))
            first, _ = own_rows(owner.base_len, owner.length)
            pieces.append(ExpertRows(owner.experts, start - first, stop - start, start))
        done = max(done, turn.length - 1)
    return (tuple(pieces), "") if len(shapes) <= 1 else ((), LAYOUTS_DIFFER)


def _stored_ranges(turn: TurnTokenDelta, done: int) -> list[tuple[TurnTokenDelta, int, int]]:
    """Return (owner, first, end) of positions `done` to len - 2, first position first."""
    found: list[tuple[TurnTokenDelta, int, int]] = []
    owner: TurnTokenDelta | None = turn
    stop = turn.length - 1
    while owner is not None and stop > done:
        start = max(owner.base_len - 1, 0, done)
        if start < stop:
            found.append((owner, start, stop))
            stop = start
        owner = owner.parent
    return found[::-1]


TOO_FEW = "too_few_valid"
"""Reason of a group that was discarded because too few of its rollouts were valid."""
PASS = 1.0
"""Lowest reward of a rollout that passed."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """The decision about a group."""

    status: GroupStatus
    reason: str
    advantages: Advantages | None
    """Advantages of the valid members, in canonical order."""

    def without_tokens(self) -> Settlement:
        """Return the settlement for a group whose samples would all be empty: it is discarded, so that it takes no
        place in a rollout batch.
        """
        if self.status is not GroupStatus.trained:
            return self
        return Settlement(GroupStatus.discarded, "nothing_to_train", self.advantages)


def settle(purpose: Purpose, trajectories: Sequence[Trajectory], rules: FoldRules) -> Settlement:
    """Decide about the valid members, given in order of rollout_index. Raises BrokenMethod, SettingsError."""
    if purpose is not Purpose.train:
        return Settlement(GroupStatus.not_training, "purpose", None)
    if len(trajectories) < rules.least_valid:
        return Settlement(GroupStatus.discarded, TOO_FEW, None)
    advantages = estimate(rules.formula, trajectories, rules.options)
    for chosen in rules.filters:
        if chosen.discards(trajectories, advantages):
            return Settlement(GroupStatus.discarded, chosen.filter.name, advantages)
    return Settlement(GroupStatus.trained, "", advantages)


def score(
    group_id: str,
    floor: int,
    spine: ControlStreamFold,
    records: Mapping[str, SessionRecords],
    trees: Mapping[str, SessionTree],
    rules: FoldRules,
) -> list[Event]:
    """Return the SegmentSamples in order of (rollout_index, segment_index), then GroupScored.

    `trees` holds every session that settled before the group did. Raises BooksDoNotBalance, BrokenMethod,
    SettingsError.
    """
    assert spine.members is not None
    members = sorted((trees[member] for member in spine.members), key=_rollout)
    purpose = spine.task.purpose if spine.task else Purpose.other
    roles = {role: _settle_role(role, members, purpose, rules) for role in _roles(members, rules)}
    worth = {key: credit for role in roles.values() for key, credit in role.credits(rules).items()}
    status, reason = _decide([role.settlement for role in roles.values()])
    outputs: list[Event] = [sample for tree in members for sample in samples(group_id, tree, worth, rules)]
    shared = roles[""].settlement.advantages if list(roles) == [""] else None
    flagged = {tree.session.session_id for tree in members if session_exclusion(tree, rules) == MaskReason.flagged}
    scored = GroupScored(
        event_id=digest("GroupScored", group_id),
        run_id=rules.run_id,
        group_id=group_id,
        floor=floor,
        task_id=spine.task.task_id if spine.task else "",
        purpose=purpose,
        rollouts=tuple(_rollout_score(tree, worth, rules) for tree in members),
        baseline=shared.baseline if shared else None,
        std=shared.std if shared else None,
        estimator=rules.formula.label,
        status=status,
        reason=reason,
        samples=len(outputs),
        books=_books(group_id, spine, records, trees, partial(_final, worth, flagged, status, rules), status),
        fold_version=rules.version.name,
        settings_sha256=rules.settings_sha256,
        group_filters=tuple(chosen.label for chosen in rules.filters),
        reward_transforms=tuple(chosen.label for chosen in rules.transforms),
        roles=() if list(roles) == [""] else tuple(role.score() for role in roles.values()),
        detectors=tuple(one.label for one in rules.detectors),
    )
    return [*outputs, scored]


@dataclass(frozen=True, slots=True)
class SettledRole:
    """The trajectories of one role in all rollouts of a group, which are compared with each other."""

    role: str
    valid: tuple[SessionTree, ...]
    """Sessions whose trajectory in this role is valid, in order of rollout_index."""
    settlement: Settlement

    def credits(self, rules: FoldRules) -> Worth:
        """Return the credit of each trajectory; empty unless they train."""
        advantages = self.settlement.advantages
        if self.settlement.status is not GroupStatus.trained or advantages is None:
            return {}
        worth: Worth = {}
        for index, tree in enumerate(self.valid):
            reward = own_reward(tree, rules, self.role)
            assert reward is not None
            turns = advantages.per_turn
            per_turn = {} if turns is None else dict(zip(acted_on(tree, self.role), turns[index], strict=True))
            worth[tree.session.session_id, self.role] = Credit(reward, advantages.values[index], per_turn)
        return worth

    def score(self) -> RoleScore:
        """Return the part of GroupScored about this role."""
        found, numbers = self.settlement, self.settlement.advantages
        baseline, std = (None, None) if numbers is None else (numbers.baseline, numbers.std)
        return RoleScore(self.role, found.status, found.reason, baseline, std)


def _roles(members: Sequence[SessionTree], rules: FoldRules) -> list[str]:
    """Return the roles of a group, by name. A session that is excluded as a whole adds none: nobody knows its own."""
    judged = (tree for tree in members if session_exclusion(tree, rules) is None)
    return sorted({role for tree in judged for role in tree.roles}) or [*WHOLE]


def _settle_role(role: str, members: Sequence[SessionTree], purpose: Purpose, rules: FoldRules) -> SettledRole:
    """Decide about the trajectories of one role. Raises BrokenMethod, SettingsError."""
    valid = tuple(tree for tree in members if role in tree.roles and exclusion_reason(tree, rules, role) is None)
    transforms = rules.transforms
    settlement = settle(purpose, [trajectory(tree, transforms, role) for tree in valid], rules)
    if rules.version.empty_groups_fail and not any(_tokens_of(tree, role) for tree in valid):
        settlement = settlement.without_tokens()
    return SettledRole(role, valid, settlement)


def _decide(settlements: Sequence[Settlement]) -> tuple[GroupStatus, str]:
    """Return status and reason of a group: it trains if one of its roles does."""
    trained = (found for found in settlements if found.status is GroupStatus.trained)
    found = next(trained, settlements[0])
    return found.status, found.reason


def _tokens_of(tree: SessionTree, role: str) -> int:
    """Return the number of tokens of a role that the tree lets train."""
    runs = tree.segments.runs
    return sum(trained for run, trained in zip(runs, tree.trained, strict=True) if tree.role_of(run[0]) == role)


def _rollout(tree: SessionTree) -> tuple[int, str]:
    started = tree.session.started
    assert started is not None
    return started.rollout_index, started.rollout_id


def _rollout_score(tree: SessionTree, worth: Worth, rules: FoldRules) -> RolloutScore:
    session = tree.session
    assert session.started is not None
    assert session.finish is not None
    found = [_player_score(tree, role, worth, rules) for role in tree.roles]
    own = session.finish.expects.reward or tree.roles == WHOLE
    reasons = [one.excluded_reason for one in found]
    return RolloutScore(
        rollout_id=session.started.rollout_id,
        session_id=session.session_id,
        outcome=session.finish.outcome,
        reward=own_reward(tree, rules, "") if own else _mean(one.reward for one in found),
        advantage=_mean(one.advantage for one in found),
        excluded_reason=None if None in reasons else reasons[0],
        players=() if tree.roles == WHOLE else tuple(found),
        flags=tree.flags,
    )


def _player_score(tree: SessionTree, role: str, worth: Worth, rules: FoldRules) -> PlayerScore:
    credit = worth.get((tree.session.session_id, role))
    return PlayerScore(
        player=role,
        reward=own_reward(tree, rules, role),
        advantage=None if credit is None else credit.advantage,
        excluded_reason=exclusion_reason(tree, rules, role),
        tokens=_tokens_of(tree, role),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, None without any."""
    found = [value for value in values if value is not None]
    return mean_of(found) if found else None


Final = Callable[[SessionTree, MaskReason | None, str | None], MaskReason | None]


def _books(
    group_id: str,
    spine: ControlStreamFold,
    records: Mapping[str, SessionRecords],
    trees: Mapping[str, SessionTree],
    final: Final,
    status: GroupStatus,
) -> TreeBooks:
    """Count every snapshot of the group, up to the last one that a settled session needs, once.

    That end does not depend on the order in which topics are read. Later snapshots are `late`, and so are those of a
    session that had not settled when its group did.
    """
    end = max((tree.end for tree in trees.values()), default=-1)
    ledger, sampled = Ledger(), 0
    for session_id, own in records.items():
        sampled += sum(output_tokens(snapshot) for snapshot in own.snapshots.values() if snapshot.offset <= end)
        if session_id not in trees:
            late = sum(output_tokens(snapshot) for snapshot in own.snapshots.values() if snapshot.offset <= end)
            session = spine.sessions.get(session_id)
            if session is not None and session.erased:
                ledger.enter(late, MaskReason.erased)
            else:
                ledger.enter(late, MaskReason.discarded_group if status is not GroupStatus.trained else MaskReason.late)
            continue
        for count, reason, role in trees[session_id].entries(end):
            ledger.enter(count, final(trees[session_id], reason, role))
    return ledger.close(f"group {group_id}", sampled)


def _final(
    worth: Worth, flagged: Set[str], status: GroupStatus, rules: FoldRules, tree: SessionTree,
    reason: MaskReason | None, role: str | None,
) -> MaskReason | None:  # fmt: skip
    """Return the final mask reason of one turn's tokens; None if they are trained. `flagged` are the members that are
    excluded because a detector of cheating flagged them.
    """
    session_id = tree.session.session_id
    if tree.session.erased:
        return MaskReason.erased
    if status is not GroupStatus.trained:
        return MaskReason.discarded_group
    if tree.refused:
        return MaskReason.refused
    if not any((session_id, played) in worth for played in tree.roles):
        return MaskReason.flagged if session_id in flagged else MaskReason.excluded_outcome
    if reason is not None or role is None or (session_id, role) in worth:
        return reason
    return untrained_reason(exclusion_reason(tree, rules, role))


def untrained_reason(excluded: str | None) -> MaskReason:
    """Return why a player of a session does not train although another one of that session does."""
    return MaskReason.discarded_group if excluded is None else MaskReason.excluded_outcome


def with_figures(outputs: Iterable[Event]) -> Iterator[Event]:
    """Yield the outputs of a group, with the GroupEmitted after each score if its fold version has one."""
    for output in outputs:
        yield output
        if isinstance(output, GroupScored):
            yield from figures(output)


def figures(scored: GroupScored) -> tuple[GroupEmitted, ...]:
    """Return the records that are written with a score, in the same transaction; none if its fold version has none."""
    version = fold_version(scored.fold_version)
    if not version.group_scores:
        return ()
    valid = (rollout.reward for rollout in scored.rollouts if rollout.excluded_reason is None)
    return (
        GroupEmitted(
            event_id=digest("GroupEmitted", scored.group_id),
            run_id=scored.run_id,
            group_id=scored.group_id,
            floor=scored.floor,
            purpose=scored.purpose,
            status=scored.status,
            reason=scored.reason,
            samples=scored.samples,
            books=scored.books,
            fold_version=scored.fold_version,
            settings_sha256=scored.settings_sha256,
            rewards=tuple(reward for reward in valid if reward is not None) if version.group_rewards else (),
        ),
    )
