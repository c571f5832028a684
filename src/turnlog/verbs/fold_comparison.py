"""`turnlog log fold`: fold recorded sessions by two trajectory rules, and show what each trains, masks and duplicates.

Nothing is written. Figures are of turn trees, and so of settled sessions. What their group decides later (excluded,
discarded, late) is the same under every rule and is left out. Memory holds the open groups and the sessions that are
shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from turnlog.consumers.replay.progress import ProgressReceiver, TerminalProgress
from turnlog.consumers.replay.source import Inputs, Merge, recorded_run
from turnlog.infra.history import events, partitions, recorded_erasures
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import Configured, nothing_recorded
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.names import ExitStatus
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.render import render, sizes
from turnlog.processors.core.fold_versions import INPUTS, SPINE
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas import topics
from turnlog.schemas.events import Event, SegmentSample, SessionStarted, TurnTreeAssembled
from turnlog.settings import Settings


class NoUniqueSession(Exception):
    """No session or group of the run begins with the given id, or several do. Remedy: check the id and [run] id."""


@dataclass(slots=True)
class Tally:
    """Tokens of one session or of all sessions under one trajectory rule."""

    segments: int = 0
    sampled: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Reason -> tokens; sampled = trained + masked."""
    duplicated: int = 0
    """Context tokens of segments that another segment already holds in an earlier turn, and that are therefore computed
    again."""
    tokens: int = 0
    """Tokens of all segments, which a trainer computes."""

    def add(self, tree: TurnTreeAssembled) -> None:
        """Count a tree."""
        self.segments += len(tree.segments)
        self.sampled += tree.books.sampled
        self.trained += tree.books.trained
        self.masked.update(tree.books.masked)
        self.duplicated += tree.duplicated_prefix_tokens
        self.tokens += sum(segment.tokens for segment in tree.segments)

    def body(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**dataclasses.asdict(self), "masked": dict(sorted(self.masked.items()))}


@dataclass(slots=True)
class SessionComparison:
    """A session under every compared trajectory rule."""

    session_id: str
    group_id: str
    turns: int
    by_policy: list[Tally]

    @property
    def weight(self) -> tuple[int, int, str]:
        """Size of the difference between the rules: trained tokens first, then duplicated ones."""
        first, last = self.by_policy[0], self.by_policy[-1]
        return abs(first.trained - last.trained), abs(first.duplicated - last.duplicated), self.session_id


@dataclass(slots=True)
class Comparison:
    """Result of a comparison."""

    policies: tuple[str, ...]
    totals: list[Tally]
    sessions: int = 0
    rows: list[SessionComparison] = field(default_factory=list)
    """Sessions with the largest differences, in descending order."""
    open_groups: int = 0
    """Number of groups that have not settled or lack records; some of their sessions may be missing."""
    refused: int = 0
    """Number of records that at least one rule does not fold."""
    outputs: list[list[Event]] = field(default_factory=list)
    """Trees and samples of the sessions to draw, one list per rule."""

    def body(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "policies": list(self.policies),
            "sessions": self.sessions,
            "totals": [tally.body() for tally in self.totals],
            "rows": [
                {"session_id": row.session_id, "group_id": row.group_id, "turns": row.turns,
                 "by_policy": [tally.body() for tally in row.by_policy]}
                for row in self.rows
            ],
            "open_groups": self.open_groups,
            "refused": self.refused,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Selection of sessions by an id or its beginning; empty selects all. `top` is the number of sessions to show;
    `draw` keeps what a drawing needs."""

    group: str = ""
    session: str = ""
    top: int = 20
    draw: bool = False


async def compare(
    role: Role, policies: Sequence[str], scope: Scope = Scope(), *, threshold: int | None = None,
    progress: ProgressReceiver | None = None,
) -> Comparison:  # fmt: skip
    """Fold the run of `role` by each of `policies`, with its other settings as recorded. "" is the run's own trajectory
    rule.

    `threshold` replaces the recorded fork_threshold_tokens. Raises SettingsError for an unknown rule, NoUniqueSession,
    NothingToReplay, FoldDefect, LogError, BlobError.
    """
    run = await recorded_run(role)
    names = tuple(name or run.fold.policy for name in policies or ("",))
    found = Comparison(names, [Tally() for _ in names], outputs=[[] for _ in names])
    scope = await _in_full(role, scope)
    rules = [_rules(run, name, threshold) for name in names]
    progress = progress or ProgressReceiver()
    for unit in _units(role, scope):
        await _UnitComparison(role, unit, rules, scope, found).run(progress)
    found.rows = heapq.nlargest(scope.top, found.rows, key=lambda row: row.weight)
    return found


def _rules(run: Configured, policy: str, threshold: int | None) -> FoldRules:
    fold = dataclasses.replace(run.fold, policy=policy)
    if threshold is not None:
        fold = dataclasses.replace(fold, fork_threshold_tokens=threshold)
    return dataclasses.replace(run, fold=fold).rules()


async def _in_full(role: Role, scope: Scope) -> Scope:
    """Replace beginnings of ids by whole ids."""
    if not scope.session and not scope.group:
        return scope
    found: set[tuple[str, str]] = set()
    async for _, event in events(role, topics.SESSIONS):
        if (
            isinstance(event, SessionStarted)
            and event.session_id.startswith(scope.session)
            and event.group_id.startswith(scope.group)
        ):
            found.add((event.group_id, event.session_id if scope.session else ""))
    exact = {each for each in found if (each[1] or each[0]) == (scope.session or scope.group)}
    found = exact or found
    asked = " of group ".join(repr(each) for each in (scope.session, scope.group) if each)
    if len(found) != 1:
        what = "no session or group" if not found else f"{len(found)} sessions or groups"
        raise NoUniqueSession(f"run {role.settings.run.id!r} has {what} {asked}; check the id and [run] id")
    ((group, session),) = found
    return dataclasses.replace(scope, group=group, session=session)


def _units(role: Role, scope: Scope) -> list[int]:
    count = len(partitions(role, topics.SESSIONS))
    return [partition_of(scope.group.encode(), count)] if scope.group else list(range(count))


class _UnitComparison:
    """Folds every group of one partition task once per rule."""

    def __init__(self, role: Role, unit: int, rules: Sequence[FoldRules], scope: Scope, found: Comparison) -> None:
        self._role = role
        self._unit = unit
        self._rules = rules
        self._scope = scope
        self._found = found
        listening = next((one for one in rules if one.needs_messages), rules[0])
        self._inputs = Inputs(role, listening, unit)
        self._open: dict[str, list[GroupFold]] = {}
        self._done: set[str] = set()
        self._trees: dict[str, list[TurnTreeAssembled | None]] = {}
        self._erasures: Erasures = {}

    async def run(self, progress: ProgressReceiver) -> None:
        """Read the partitions of the task to their present ends. Erased sessions have the structure that was recorded,
        by every rule."""
        role = self._role
        spine = Partition(SPINE, self._unit)
        self._erasures = await recorded_erasures(role.log, role.events, spine, role.settings.run.id)
        places = [Partition(topic, self._unit) for topic in INPUTS]
        starts, ends = await self._role.log.start_offsets(places), await self._role.log.end_offsets(places)
        progress.begin(f"folding partition {self._unit}", sum(ends[place] - starts[place] for place in places))
        async with Merge(self._role.log, starts, ends) as merge:
            while chunk := await merge.chunk():
                for record in chunk:
                    if self._scope.group and record.key != self._scope.group.encode():
                        continue
                    event = await self._inputs.event(record)
                    if event is not None and event.group_id not in self._done:
                        self._fold(record.topic, record.offset, event)
                progress.advance(len(chunk))
        self._found.open_groups += len(self._open)

    def _fold(self, topic: str, offset: int, event: Event) -> None:
        folds = self._open.get(event.group_id)
        if folds is None:
            folds = [GroupFold(event.group_id, event.floor, rules, self._erasures) for rules in self._rules]
            self._open[event.group_id] = folds
        refused = False
        for index, fold in enumerate(folds):
            try:
                outputs = fold.apply(topic, offset, event)
            except FoldError as refusal:
                outputs, refused = refusal.outputs, True
            self._take(index, outputs)
        self._found.refused += refused
        if all(fold.complete for fold in folds):
            self._done.add(event.group_id)
            del self._open[event.group_id]

    def _take(self, index: int, outputs: Sequence[Event]) -> None:
        for output in outputs:
            if self._scope.session and getattr(output, "session_id", None) != self._scope.session:
                continue
            if self._scope.draw and isinstance(output, TurnTreeAssembled | SegmentSample):
                self._found.outputs[index].append(output)
            if isinstance(output, TurnTreeAssembled):
                trees = self._trees.setdefault(output.session_id, [None] * len(self._rules))
                trees[index] = output
                if None not in trees:
                    self._count([tree for tree in self._trees.pop(output.session_id) if tree is not None])

    def _count(self, trees: Sequence[TurnTreeAssembled]) -> None:
        """Count a session that every rule has folded."""
        found, first = self._found, trees[0]
        row = SessionComparison(
            first.session_id, first.group_id, max(len(tree.nodes) for tree in trees), [Tally() for _ in trees]
        )
        for tree, total, tally in zip(trees, found.totals, row.by_policy, strict=True):
            total.add(tree)
            tally.add(tree)
        found.sessions += 1
        found.rows.append(row)
        if len(found.rows) >= 2 * self._scope.top + 64:
            found.rows = heapq.nlargest(self._scope.top, found.rows, key=lambda row: row.weight)


def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the comparison. Return 0, or 1 if nothing is recorded. Raises what `compare` raises."""
    return run_verb(print_comparison(settings, arguments, Terminal()))


async def print_comparison(settings: Settings, arguments: argparse.Namespace, console: Terminal) -> int:
    """See `show`."""
    names = [arguments.policy, arguments.against] if arguments.against else [arguments.policy]
    session = arguments.show or arguments.session
    scope = Scope(group=arguments.group, session=session, top=max(arguments.top, 0), draw=bool(arguments.show))
    async with open_role("fold", settings, archive=arguments.source == "archive") as role:
        with TerminalProgress(Terminal(stderr=True)) as progress:
            found = await compare(role, names, scope, threshold=arguments.fork_threshold, progress=progress)
        empty = "" if found.sessions or found.open_groups else await nothing_recorded(role)
    if arguments.json:
        say_json(found.body(), indent=1)
        return ExitStatus.DIFFERS if empty else ExitStatus.DONE
    if empty:
        console.print(empty, soft_wrap=True)
        return ExitStatus.DIFFERS
    if arguments.show:
        console.print(*drawings(found).split("\n"), sep="\n", highlight=False, soft_wrap=True)
    console.print(totals(found))
    if not arguments.show and (rows := rows_to_show(found)):
        console.print(sessions(found, rows))
    elif not arguments.show and arguments.against and found.sessions:
        console.print("all sessions have the same result")
    if found.open_groups:
        console.print(f"{found.open_groups:,} groups are not settled or lack records; not every session is counted")
    if found.refused:
        console.print(f"{found.refused:,} records were refused; sessions that refer to them are not trained")
    return 0


def totals(found: Comparison) -> Table:
    """Return a table with a line per figure and a column per rule, and a column for the difference of two."""
    shown = Table(title=f"{found.sessions:,} session{'' if found.sessions == 1 else 's'}")
    shown.add_column("tokens")
    for name in found.policies:
        shown.add_column(name, justify="right")
    two = len(found.policies) == 2
    if two:
        shown.add_column("difference", justify="right")
    reasons = sorted({reason for tally in found.totals for reason in tally.masked})
    lines = [
        ("segments (rows)", [tally.segments for tally in found.totals]),
        ("sampled", [tally.sampled for tally in found.totals]),
        ("trained", [tally.trained for tally in found.totals]),
        *((f"masked: {reason}", [tally.masked[reason] for tally in found.totals]) for reason in reasons),
        ("context computed again", [tally.duplicated for tally in found.totals]),
        ("in all rows", [tally.tokens for tally in found.totals]),
    ]
    for label, counts in lines:
        change = [f"{counts[1] - counts[0]:+,}" if counts[1] != counts[0] else "="] if two else []
        shown.add_row(label, *(f"{count:,}" for count in counts), *change)
    return shown


def rows_to_show(found: Comparison) -> list[SessionComparison]:
    """Return the sessions worth a line: all under one rule, under two rules those with different results."""
    return [row for row in found.rows if len(row.by_policy) < 2 or row.by_policy[0] != row.by_policy[1]]


def sessions(found: Comparison, rows: Sequence[SessionComparison]) -> Table:
    """Return a table of the sessions with the largest differences, with a line per rule."""
    shown = Table(title="sessions that differ most" if len(found.policies) == 2 else "sessions")
    for name in ("session", "turns", "policy", "segments", "trained", "masked", "context again"):
        shown.add_column(name, justify="left" if name in ("session", "policy", "masked") else "right")
    for row in rows:
        for index, (policy, tally) in enumerate(zip(found.policies, row.by_policy, strict=True)):
            about = (row.session_id, str(row.turns)) if index == 0 else ("", "")
            shown.add_row(
                *about, policy, str(tally.segments), f"{tally.trained:,}", _format_masked(tally),
                f"{tally.duplicated:,}",
                end_section=index == len(row.by_policy) - 1,
            )  # fmt: skip
    return shown


def drawings(found: Comparison) -> str:
    """Draw one picture per rule (processors/core/fold/render.py), with numbers of tokens."""
    pictures = []
    for policy, outputs in zip(found.policies, found.outputs, strict=True):
        trees = [output for output in outputs if isinstance(output, TurnTreeAssembled)]
        samples = [output for output in outputs if isinstance(output, SegmentSample)]
        pictures.append(f"{policy}\n{render(trees, samples, sizes, gap=' ')}\n")
    return "\n".join(pictures)


def _format_masked(tally: Tally) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.masked.items()))
