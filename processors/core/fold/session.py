"""The tree of a settled session, built from its records: turns, lineages, segments, and why each turn is masked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType

from turnlog.processors.core.books import Ledger
from turnlog.processors.core.errors import ContentErased, FoldError
from turnlog.processors.core.fold.erasure import Erasures, lineages_of, segments_of
from turnlog.processors.core.fold.spine import SessionFoldState
from turnlog.processors.core.lineages import COMPACTION, SIDE_CALL, SUB_AGENT, Lineages, Turn, lineages
from turnlog.processors.core.messages import Dialogues
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.methods.segments import Segments, split_by_player
from turnlog.processors.core.turns import (
    Kinship,
    RefusedTokens,
    TurnKey,
    TurnTokenDelta,
    key_of,
    kinship,
    refused_tokens,
    tokens,
)
from turnlog.schemas.binary import constructor
from turnlog.schemas.content import is_erased
from turnlog.schemas.events import (
    MaskReason,
    Outcome,
    TokenSnapshot,
    TreeBooks,
    TreeLineage,
    TreeNode,
    TreeSegment,
    TurnCompleted,
    TurnTreeAssembled,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.types import TurnId

make_turn, make_node, make_tree = constructor(Turn), constructor(TreeNode), constructor(TurnTreeAssembled)
NO_VERSION = (-1,)
"""Versions of a turn without output."""
WHOLE: tuple[str, ...] = ("",)
"""Roles of a session that is one trajectory."""


@dataclass(frozen=True, slots=True)
class SessionTree:
    """An assembled session. A rejected session has no turns and no segments."""

    session: SessionFoldState
    records: SessionRecords
    turns: tuple[Turn, ...]
    """Turns in order of (epoch, index)."""
    orders: dict[TurnKey, int]
    """Turn -> its place in `turns`."""
    lineages: Lineages
    segments: Segments
    masked: dict[int, MaskReason]
    """Turn order -> reason. The other turns are trained if their group is."""
    refused: bool
    """Whether it has no turns, because a record of it was rejected or because it was erased before it settled."""
    end: int
    """Highest offset of a snapshot that the session's token accounting includes."""
    trained: tuple[int, ...]
    """Number of output tokens of each segment that the tree does not mask."""
    anchor: int | None
    """Index of the segment that holds the last turn of the main lineage; None if there is none."""
    roles: tuple[str, ...]
    """Roles that the session plays, by name: each is a trajectory with a reward and an advantage of its own. ("",) if
    the session is one trajectory.
    """
    flags: tuple[str, ...] = ()
    """Names of the detectors of cheating that flagged the session, sorted. A flagged session does not train."""

    def role_of(self, order: int) -> str:
        """Return the role to which a turn belongs; one that is not in `roles` trains nowhere."""
        return "" if self.roles == WHOLE else self.lineages.player_of(order)

    def entries(self, end: int) -> Iterator[tuple[int, MaskReason | None, str | None]]:
        """Yield (output tokens, mask reason or None, role) of every turn of the session whose snapshot lies at or below
        `end`. The role is None for a turn that the tree does not contain.
        """
        assert self.session.finish is not None
        undelivered = {key_of(turn) for turn in self.session.finish.undelivered}
        for turn, snapshot in self.records.snapshots.items():
            if snapshot.offset > end:
                continue
            reason: MaskReason | None
            role = None
            if self.session.erased_unsettled:
                reason = MaskReason.erased
            elif self.refused or isinstance(snapshot, RefusedTokens):
                reason = MaskReason.refused
            elif turn in self.orders:
                reason, role = self.masked.get(self.orders[turn]), self.role_of(self.orders[turn])
            else:
                reason = MaskReason.undelivered if turn in undelivered else MaskReason.not_named
            yield output_tokens(snapshot), reason, role


def named_turns(session: SessionFoldState) -> tuple[TurnId, ...]:
    """Return the turns of the effective finish, once each, in order of (epoch, index)."""
    assert session.finish is not None
    rank = {epoch: order for order, epoch in enumerate(session.epochs)}
    named = {(rank[turn.epoch], turn.index): turn for turn in session.finish.turns}
    return tuple(named[key] for key in sorted(named))


def assemble(
    session: SessionFoldState,
    records: SessionRecords,
    rules: FoldRules,
    dialogues: Dialogues | None = None,
    erasures: Erasures = MappingProxyType({}),
) -> SessionTree:
    """Build the tree of a settled session whose named turns have both records, by the trajectory rule of `rules`. If
    its content was erased, what depends on that is taken from `erasures`. Raises ContentErased if it is not there."""
    named = named_turns(session)
    keys = [key_of(turn) for turn in named]
    recorded = erasures.get(session.session_id) if records.erased else None
    refused = session.refused or session.erased_unsettled or records.has_rejected(keys)
    refused = refused or (recorded is not None and recorded.refused)
    dialogues = None if records.erased else dialogues
    turns = () if refused else tuple(map(partial(_turn, records, dialogues), named, keys))
    orders = {} if refused else {key: order for order, key in enumerate(keys)}
    if refused:
        recorded = None
    elif records.erased and (recorded is None or len(recorded.turns) != len(turns)):
        raise ContentErased(
            f"session {session.session_id}: its content was erased, and no SessionErased records the structure of its "
            "tree; restore topic agent.sessions from the archive"
        )
    tree = lineages(turns, rules.version) if recorded is None else lineages_of(recorded)
    assert session.finish is not None
    undelivered = {key_of(turn) for turn in session.finish.undelivered}
    segments = rules.cutting.cut(turns, tree, undelivered, rules) if recorded is None else segments_of(recorded)
    roles = WHOLE
    if session.players:
        shared = session.finish.expects.reward and "" in map(tree.player_of, range(len(turns)))
        roles = tuple(sorted(session.players | ({""} if shared else set())))
        segments = split_by_player(turns, segments, tree) if recorded is None else segments
    masked = dict(segments.masked) | _masked_turns(session.finish.outcome, turns, tree, segments, rules)
    if roles != WHOLE:
        kept = (order for run in segments.runs for order in run)
        masked = {o: MaskReason.untrained_player for o in kept if tree.player_of(o) not in roles} | masked
    trained = tuple(
        [sum([len(turns[order].tokens.output) for order in run if order not in masked]) for run in segments.runs]
    )
    end, anchor = records.end(keys), _anchor(tree, segments)
    return SessionTree(session, records, turns, orders, tree, segments, masked, refused, end, trained, anchor, roles)


def _anchor(tree: Lineages, segments: Segments) -> int | None:
    main, of = tree.main, tree.of
    held = [(turn, index) for index, run in enumerate(segments.runs) for turn in run if of[turn] == main]
    return max(held, default=(0, None))[1]


def tree_event(group_id: str, tree: SessionTree, rules: FoldRules) -> TurnTreeAssembled:
    """Return the record of a tree: structure and token accounting, no tokens. Raises BooksDoNotBalance if the
    accounting does not balance.
    """
    session = tree.session
    assert session.started is not None
    assert session.finish is not None
    return make_tree(
        event_id=digest("TurnTreeAssembled", session.session_id),
        run_id=rules.run_id,
        group_id=group_id,
        session_id=session.session_id,
        rollout_id=session.started.rollout_id,
        nodes=tuple([_node(tree, order) for order in range(len(tree.turns))]),
        lineages=tuple(map(TreeLineage, count(), tree.lineages.kinds, tree.lineages.players)),
        segments=tuple(_segment(tree, index) for index in range(len(tree.segments.runs))),
        anchor_segment=tree.anchor,
        books=_books(tree),
        outcome=session.finish.outcome,
        reward=session.reward,
        duplicated_prefix_tokens=tree.segments.duplicated,
        fold_version=rules.version.name,
        settings_sha256=rules.settings_sha256,
        player_rewards=player_rewards(session),
    )


def player_rewards(session: SessionFoldState) -> dict[str, float]:
    """Return the rewards of the players that have one of their own, by name."""
    found = ((player, session.reward_of(player)) for player in sorted(session.players))
    return {player: reward for player, reward in found if reward is not None}


def _turn(records: SessionRecords, dialogues: Dialogues | None, turn: TurnId, key: TurnKey) -> Turn:
    tokens, kinship = records.snapshots[key], records.kinships[key]
    assert isinstance(tokens, TurnTokenDelta)
    assert kinship is not None
    return make_turn(turn, tokens, kinship, None if dialogues is None else dialogues[key])


def _masked_turns(
    outcome: Outcome, turns: Sequence[Turn], tree: Lineages, segments: Segments, rules: FoldRules
) -> dict[int, MaskReason]:
    """Return the turns of segments that the settings keep as context, whose log-probs are not those of the sampling
    distribution, or that share a row with withheld tokens.
    """
    trains = {SUB_AGENT: rules.train_sub_agents, SIDE_CALL: rules.train_side_calls}
    reasons: dict[int, MaskReason] = {}
    for lineage, (kind, agent) in enumerate(zip(tree.kinds, tree.agents, strict=True)):
        if agent == SIDE_CALL and tree.players[lineage]:
            reasons[lineage] = MaskReason.untrained_player
        elif not trains.get(agent, True):
            reasons[lineage] = MaskReason.side_call
        elif kind == COMPACTION and not rules.train_compactions:
            reasons[lineage] = MaskReason.compaction
    kept = [order for run in segments.runs for order in run]
    masked = {order: reasons[tree.of[order]] for order in kept if tree.of[order] in reasons} if reasons else {}
    for run in segments.runs:
        if any(turns[order].tokens.redacted for order in run):  # no row holds ids that no engine saw
            masked |= dict.fromkeys(run, MaskReason.redacted)
    if kept and outcome is Outcome.truncated and rules.truncated == "mask_last_turn":
        masked.setdefault(max(kept), MaskReason.excluded_outcome)
    return masked | {order: MaskReason.constrained for order in kept if turns[order].tokens.constrained}


def _node(tree: SessionTree, order: int) -> TreeNode:
    turn, base = tree.turns[order], tree.lineages.bases[order]
    tokens = turn.tokens
    spans = tokens.versions
    if len(spans) == 1 and spans[0].length:  # as for most turns
        oldest = newest = spans[0].version
    else:
        versions = [span.version for span in spans if span.length] or NO_VERSION
        oldest, newest = min(versions), max(versions)
    return make_node(
        turn.id, None if base is None else tree.turns[base].id, tree.lineages.of[order],
        tokens.prompt_len, tokens.length - tokens.prompt_len, oldest, newest, turn.kinship.finish_reason,
    )  # fmt: skip


def _segment(tree: SessionTree, index: int) -> TreeSegment:
    run = tree.segments.runs[index]
    turns = [tree.turns[order] for order in run]
    length = turns[-1].tokens.length
    sampled = sum(len(turn.tokens.output) for turn in turns)
    return TreeSegment(index, tuple(turn.id for turn in turns), length, tree.trained[index], length - sampled)


def _books(tree: SessionTree) -> TreeBooks:
    """Count trained tokens over segments, sampled tokens over snapshots and masked tokens over turns: three independent
    counts reveal a lost token.
    """
    ledger = Ledger()
    ledger.enter(sum(tree.trained), None)
    sampled = 0
    for number, reason, _ in tree.entries(tree.end):
        sampled += number
        if reason is not None:
            ledger.enter(number, reason)
    return ledger.close(f"session {tree.session.session_id}", sampled)


class SessionRecords:
    """The records of one session. Each topic alone, in its own order, decides what is stored here."""

    def __init__(self, refused: Set[TurnKey] = frozenset()) -> None:
        """`refused` names the turns whose snapshots were rejected before the content of the session was erased."""
        self._refused = refused
        self.kinships: dict[TurnKey, Kinship | None] = {}
        """Turn -> its conversation data; None if the record was rejected."""
        self.snapshots: dict[TurnKey, TurnTokenDelta | RefusedTokens] = {}
        self._epochs: dict[str, str] = {}
        self.erased = False
        """Whether content of a record was erased: its tokens have the right number and no meaning. One record suffices,
        since a field that was empty is not marked as erased."""

    def add_turn(self, event: TurnCompleted) -> None:
        """Store the first record of a turn. Raises BaseNotBefore after storing the record as rejected."""
        turn = self._key(event.turn)
        self.erased = self.erased or is_erased(event.response)
        if turn not in self.kinships:
            self.kinships[turn] = None
            self.kinships[turn] = kinship(event)

    def add_snapshot(self, offset: int, event: TokenSnapshot) -> None:
        """Store the first record of a turn. Raises SnapshotError after storing the record as rejected."""
        turn = self._key(event.turn)
        if turn in self.snapshots:
            return
        self.erased = self.erased or is_erased(event.delta_ids) or is_erased(event.output_ids)
        if self.erased and turn in self._refused:  # dead-lettered when its content could be checked
            self.snapshots[turn] = refused_tokens(event, offset)
            return
        parent = self.snapshots.get(key_of(event.parent_turn)) if event.parent_turn is not None else None
        parent = parent if isinstance(parent, TurnTokenDelta) else None
        try:
            self.snapshots[turn] = tokens(event, offset, parent, erased=self.erased)
        except FoldError:
            self.snapshots[turn] = refused_tokens(event, offset)
            raise

    def refused_turns(self) -> tuple[TurnId, ...]:
        """Return the turns whose snapshot was rejected, in the order of their records."""
        refused = (turn for turn, snapshot in self.snapshots.items() if isinstance(snapshot, RefusedTokens))
        return tuple(TurnId(*turn) for turn in refused)

    def has_rejected(self, named: Iterable[TurnKey]) -> bool:
        """Whether a record of a named turn was rejected."""
        return any(self.kinships[turn] is None or isinstance(self.snapshots[turn], RefusedTokens) for turn in named)

    def end(self, named: Iterable[TurnKey]) -> int:
        """Return the highest snapshot offset of the named turns, -1 if there are none.

        Everything at or below it has been read once the records of the named turns are complete, whatever the order of
        topics.
        """
        return max((self.snapshots[turn].offset for turn in named), default=-1)

    def key(self) -> object:
        """Return a canonical, comparable value."""
        return (
            tuple(sorted((turn, repr(kin)) for turn, kin in self.kinships.items())),
            tuple(sorted(_snapshot_key(turn, snapshot) for turn, snapshot in self.snapshots.items())),
        )

    def _key(self, turn: TurnId) -> TurnKey:
        """Return a key that shares one copy of the ownership term's name, because thousands of turns have the same."""
        return self._epochs.setdefault(turn.epoch, turn.epoch), turn.index


def output_tokens(snapshot: TurnTokenDelta | RefusedTokens) -> int:
    """Return the number of tokens that the turn sampled."""
    return len(snapshot.output) if isinstance(snapshot, TurnTokenDelta) else snapshot.output_tokens


def _snapshot_key(turn: TurnKey, snapshot: TurnTokenDelta | RefusedTokens) -> tuple[TurnKey, int, int, str]:
    about = snapshot.prompt_sha256 if isinstance(snapshot, TurnTokenDelta) else "refused"
    return turn, snapshot.offset, output_tokens(snapshot), about
