"""Which groups to ask for, and when: arithmetic over facts of the log, without clock or I/O; and whether the weights
that new rollouts must be sampled with are there.

    groups open + draws formed x prompts_per_draw
        <= min(max_lag x publish_every + draws trained + 1, draws) x prompts_per_draw

A group is open from its first request until a draw takes it or it fails: discarded by its score, or dropped whole by a
manifest (stale). So the group that was admitted last is in draw number `draws trained + max_lag x publish_every` at the
latest if none is slow, and no more than `max_lag` versions old there. Fresh tasks come from the run's datasets by their
weights. The task of a failed group is drawn again as a new group. A group that was dropped, or that lost too many of
its rollouts, taught nothing yet: its task comes before any fresh one. A group that a filter discarded has been seen,
and the next one of its task is likely to end alike: its task waits until every fresh task of the epoch was asked for,
and is drawn again a bounded number of times, so that tasks that are always solved or always failed cannot hold a run. A
group that a draw trained without had its slot in that draw: it gives none back, or every drop would let one more group
run ahead for ever. Facts may come in any order between topics, and more than once.

A task whose last group was passed by too few or too many of its rollouts teaches little (Foster and Foerster 2025,
"Learning to reason at the frontier of learnability": p (1 - p) is what a gradient has of it): it is not drawn again
when such a group fails, and passed over for some epochs.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from turnlog.processors.core.batches.progress import WeightChain
from turnlog.processors.core.fold.settlement import PASS, TOO_FEW
from turnlog.schemas.events import (
    BatchSkipped,
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    GroupEmitted,
    GroupRequested,
    GroupScored,
    GroupStatus,
    Purpose,
    SampleBatchFormed,
    StepCompleted,
    WeightVersionPublished,
)


class Place(NamedTuple):
    """One visit of one row: a task is drawn once per epoch, and again at the same place if its group fails."""

    epoch: int
    row: int
    source: int = 0
    """Which of the run's datasets."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset to draw from."""

    dataset: str
    """As on GroupRequested."""
    count: int
    weight: float = 1.0
    """Of the fresh tasks it has a share of its weight over the sum of all weights."""
    passed: int = 0
    """Places that lie behind the checkpoint that the run was forked from."""
    left: frozenset[Place] = frozenset()
    """Of them, those that it has not seen."""


@dataclass(frozen=True, slots=True)
class PassRates:
    """Which tasks are worth a visit, by the share of their last group that passed."""

    low: float = 0.0
    high: float = 1.0
    epochs: int = 1
    """For how many epochs a task outside of them is passed over."""

    def __contains__(self, rate: float) -> bool:
        return self.low <= rate <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Settings that admission depends on."""

    prompts_per_draw: int
    draws: int
    """Draws to train in the whole run."""
    max_lag: int
    publish_every: int
    sources: tuple[Rows, ...]
    """By Place.source."""
    seed: int
    """Of the order of rows after the first epoch."""
    pass_rates: PassRates = PassRates()
    discarded_repeats: int = 1
    """How often a place is asked for again because its group was discarded."""


@dataclass(frozen=True, slots=True)
class DueGroup:
    """A group to ask for."""

    place: Place
    draw: int
    """How often the task was drawn before."""
    versions_ahead: int = field(default=0, compare=False)
    """Weight versions that go out before the draw that it has a slot in."""


@dataclass(slots=True)
class _Parts:
    """One draw of the batcher: its batches as far as they are known."""

    wanted: int
    batches: set[int] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    """Groups that the draw consumed."""
    live: set[str] = field(default_factory=set)
    """Those of them that have a row in a batch."""


@dataclass(slots=True)
class _Repeats:
    """Places whose latest group failed."""

    dropped: set[Place]
    """Due before any fresh one."""
    waiting: set[Place] = field(default_factory=set)
    """Due behind the fresh ones of their epoch."""
    given_up: set[Place] = field(default_factory=set)
    """Discarded too often to be due."""

    def forget(self, place: Place) -> None:
        for places in (self.dropped, self.waiting, self.given_up):
            places.discard(place)


class Admission:
    """The fold of group-requests, group-scores, manifests and steps."""

    def __init__(self, rules: AdmissionRules) -> None:
        self._rules = rules
        self._source = {rows.dataset: number for number, rows in enumerate(rules.sources)}
        self._fresh = [rows.passed for rows in rules.sources]
        """Fresh places asked for, by source."""
        self._positions = list(self._fresh)
        """Of the next one: they are asked for in order."""
        self._drawn: dict[tuple[int, int], int] = {}
        """(source, row index) -> times drawn."""
        self._latest: dict[Place, tuple[int, str]] = {}
        """Place -> (draw, group) of its latest group."""
        self._visited: dict[tuple[int, int], Place] = {}
        """(source, row index) -> its place of the latest epoch."""
        self._rates: dict[str, float] = {}
        """Scored group -> the share of its rewards that passed."""
        self._places: dict[str, Place] = {}
        """Group asked for -> its place."""
        self._open: set[str] = set()
        self._taken: set[str] = set()
        self._failed: set[str] = set()
        self._discarded: dict[str, bool] = {}
        """Those of the failed ones that were discarded by their score, and whether that says something of the task;
        draws dropped the others."""
        self._discards: Counter[Place] = Counter()
        """Place -> its groups among those."""
        self._left = frozenset(place for rows in rules.sources for place in rows.left)
        self._repeats = _Repeats(set(self._left))
        self._draws: dict[int, _Parts] = {}
        """Draws that were formed and not yet trained."""
        self._stepped: set[int] = set()
        self._trained: list[tuple[int, int]] = []
        """(draw index, its last batch index) of every trained draw, ascending."""

    @property
    def open(self) -> int:
        """Groups asked for that did not fail and that no draw has taken."""
        return len(self._open)

    @property
    def draws_formed(self) -> int:
        """Draws that have a batch."""
        return len(self._draws) + len(self._trained)

    @property
    def slots(self) -> int:
        """Slots in use: one per open group, and those of every draw."""
        return self.open + self.draws_formed * self._rules.prompts_per_draw

    @property
    def passed_over(self) -> int:
        """Places that were not asked for, because their task would teach little."""
        return sum(self._positions) - sum(self._fresh)

    @property
    def given_up(self) -> int:
        """Places whose every group was discarded, as often as they may be asked for again."""
        return len(self._repeats.given_up)

    @property
    def asked(self) -> int:
        """Train groups asked for so far."""
        return len(self._places)

    def knows(self, group_id: str) -> bool:
        """Whether it was asked for."""
        return group_id in self._places

    @property
    def draws_trained(self) -> int:
        """Draws whose every batch has a StepCompleted."""
        return len(self._trained)

    def publications_after(self, batch: int) -> int:
        """Of the weights after every publish_every-th trained draw, how many hold more than that batch."""
        held = bisect_right(self._trained, batch, key=itemgetter(1))
        return self.draws_trained // self._rules.publish_every - held // self._rules.publish_every

    @property
    def limit(self) -> int:
        """How many slots there are now."""
        rules = self._rules
        draws = min(rules.max_lag * rules.publish_every + self.draws_trained + 1, rules.draws)
        return draws * rules.prompts_per_draw

    @property
    def finished(self) -> bool:
        """Every draw of the run is trained."""
        return self.draws_trained >= self._rules.draws

    def apply(self, event: Event) -> None:
        """Fold one record; repeats change nothing, records of other kinds and purposes are passed over."""
        if isinstance(event, GroupEmitted) and event.rewards:
            self._rates[event.group_id] = sum(reward >= PASS for reward in event.rewards) / len(event.rewards)
        match event:
            case GroupRequested(purpose=Purpose.train):
                self._requested(event)
            case GroupEmitted(status=GroupStatus.discarded) | GroupScored(status=GroupStatus.discarded):
                self._fail(event.group_id, discarded=True, seen=event.reason != TOO_FEW)
            case SampleBatchFormed():
                self._formed(event)
            case BatchSkipped():
                for group_id in event.groups:
                    self._fail(group_id)
            case StepCompleted():
                self._stepped.add(event.batch_index)
                self._settle(event.draw_index)

    def due(self) -> list[DueGroup]:
        """The groups to ask for now, in order: dropped ones again (oldest place first), then fresh rows, and behind
        those of each epoch its discarded ones again."""
        if self.slots >= self.limit:
            return []
        rules, drawn = self._rules, ChainMap({}, self._drawn)
        published = self.draws_trained // rules.publish_every
        groups: list[DueGroup] = []
        for slot, place in zip(range(self.slots, self.limit), self._candidates(), strict=False):
            ahead = slot // rules.prompts_per_draw // rules.publish_every - published
            task = place.source, place.row
            groups.append(DueGroup(place, drawn.get(task, 0), ahead))
            drawn[task] = drawn.get(task, 0) + 1
        return groups

    def _candidates(self) -> Iterator[Place]:
        yield from sorted(self._repeats.dropped)
        fresh, weights = list(self._fresh), [rows.weight for rows in self._rules.sources]
        ahead = [self._ahead(source) for source in range(len(weights))]
        waiting = sorted(self._repeats.waiting, reverse=True)
        again = [[place for place in waiting if place.source == source] for source in range(len(weights))]
        while True:
            source = next_source(fresh, weights)
            following = next(place for place in ahead[source] if self._teaches(place))
            while again[source] and again[source][-1].epoch < following.epoch:
                yield again[source].pop()
            yield following
            fresh[source] += 1

    def _ahead(self, source: int) -> Iterator[Place]:
        for position in itertools.count(self._positions[source]):
            yield nth_place(position, self._rules.sources[source].count, self._rules.seed, source)

    def _teaches(self, place: Place) -> bool:
        visited = self._visited.get((place.source, place.row))
        rate = None if visited is None else self._rates.get(self._latest[visited][1])
        if visited is None or rate is None or rate in self._rules.pass_rates:
            return True
        return place.epoch > visited.epoch + self._rules.pass_rates.epochs

    def _requested(self, event: GroupRequested) -> None:
        if event.group_id in self._places:
            return
        source = self._source[event.dataset]
        place = self._places[event.group_id] = Place(event.dataset_epoch, event.index, source)
        task = source, event.index
        self._drawn[task] = max(self._drawn.get(task, 0), event.draw + 1)
        self._visited[task] = max(self._visited.get(task, place), place)
        if place not in self._latest and place not in self._left:
            self._fresh[source] += 1
            position = position_of(place, self._rules.sources[source].count, self._rules.seed)
            self._positions[source] = max(self._positions[source], position + 1)
        self._latest[place] = max(self._latest.get(place, (-1, "")), (event.draw, event.group_id))
        if event.group_id not in self._failed and event.group_id not in self._taken:
            self._open.add(event.group_id)
        self._discards[place] += event.group_id in self._discarded
        self._mark(place)

    def _fail(self, group_id: str, *, discarded: bool = False, seen: bool = True) -> None:
        """`discarded`: by its score; `seen`: its rollouts were judged, and say something of the task."""
        place = self._places.get(group_id)
        if discarded and group_id not in self._discarded:
            self._discarded[group_id] = seen
            if place is not None:
                self._discards[place] += 1
        self._failed.add(group_id)
        self._open.discard(group_id)
        if place is not None:
            self._mark(place)

    def _mark(self, place: Place) -> None:
        """A place is due again iff the latest group drawn there failed, though the task would teach, and was not
        discarded too often."""
        self._repeats.forget(place)
        rules, latest = self._rules, self._latest[place][1]
        if latest not in self._failed or self._rates.get(latest, rules.pass_rates.low) not in rules.pass_rates:
            return
        if latest not in self._discarded:
            self._repeats.dropped.add(place)
        elif self._discards[place] <= rules.discarded_repeats:
            (self._repeats.waiting if self._discarded[latest] else self._repeats.dropped).add(place)
        else:
            self._repeats.given_up.add(place)

    def _formed(self, event: SampleBatchFormed) -> None:
        if self._is_trained(event.draw_index):
            return
        draw = self._draws.setdefault(event.draw_index, _Parts(event.parts))
        draw.batches.add(event.batch_index)
        draw.taken.update(event.groups)
        draw.live.update(sample.group_id for sample in event.samples)
        self._taken.update(event.groups)
        self._open.difference_update(event.groups)
        if len(draw.batches) == draw.wanted:  # part 0 also names groups that fell out; a later part may hold others
            for group_id in draw.taken - draw.live:
                self._fail(group_id)
        self._settle(event.draw_index)

    def _settle(self, draw_index: int) -> None:
        draw = self._draws.get(draw_index)
        if draw is not None and len(draw.batches) == draw.wanted and draw.batches <= self._stepped:
            del self._draws[draw_index]
            insort(self._trained, (draw_index, max(draw.batches)))

    def _is_trained(self, draw_index: int) -> bool:
        place = bisect_left(self._trained, (draw_index,))
        return place < len(self._trained) and self._trained[place][0] == draw_index


def next_source(positions: Sequence[int], weights: Sequence[float]) -> int:
    """The source that is furthest behind its share when one more is drawn from it; of several, the first."""
    return min(range(len(weights)), key=lambda source: ((positions[source] + 1) / weights[source], source))


def nth_place(position: int, rows: int, seed: int, source: int = 0) -> Place:
    """The position-th fresh place: the first epoch in file order, later ones shuffled by (seed, epoch)."""
    epoch, rank = divmod(position, rows)
    return Place(epoch, _order(epoch, rows, seed)[rank], source)


def position_of(place: Place, rows: int, seed: int) -> int:
    """Of which nth_place is the place."""
    return place.epoch * rows + _ranks(place.epoch, rows, seed)[place.row]


@lru_cache(maxsize=16)
def _ranks(epoch: int, rows: int, seed: int) -> tuple[int, ...] | range:
    order = _order(epoch, rows, seed)
    return order if epoch == 0 else tuple(sorted(range(rows), key=order.__getitem__))


@lru_cache(maxsize=16)
def _order(epoch: int, rows: int, seed: int) -> tuple[int, ...] | range:
    if epoch == 0:
        return range(rows)
    order = list(range(rows))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return tuple(order)


class Readiness:
    """Repeats change nothing; each topic is read in its own order."""

    def __init__(self) -> None:
        self.batch = -1
        """The last one that its weights have been stepped on."""
        self._engines: dict[str, int] = {}
        """Live engine -> weight version it serves."""
        self._chain = WeightChain()

    def apply(self, event: Event) -> None:
        """Fold one record; others are passed over."""
        match event:
            case WeightVersionPublished() if event.version > self.version:
                self._chain.apply(event)
                self.batch = event.batch_index
            case EngineRegistered() | EngineWeightsLoaded() | EngineWeightsRefused():
                self._engines[event.engine_id] = event.version
            case EngineDraining() | EngineGone():
                self._engines.pop(event.engine_id, None)

    @property
    def version(self) -> int:
        """The newest published weight version; -1 before the first."""
        return -1 if self._chain.newest is None else self._chain.newest

    def waits_for(self, *, first: bool) -> str:
        """What stands in the way of asking for groups; empty when nothing does. `first`: nothing was asked for yet."""
        if self.version < 0:
            return "no weights are published yet: is the trainer running?"
        return self._first_acknowledgements() if first else ""

    def version_for(self, *, versions_ahead: int, max_lag: int) -> int:
        """The oldest version that a group may be sampled with to be at most `max_lag` behind in the draw that it has a
        slot in, `versions_ahead` versions from now; where it is above `version`, those weights are not out yet.

        A step is on the log before its weights are, and a trainer that went back to a checkpoint publishes older
        weights under a new number until it has caught up: both count as versions ahead. Versions are counted along the
        chain of publications, where weights that went out twice have one place.
        """
        return max(self._chain.oldest(ahead=versions_ahead, max_lag=max_lag), 0)

    def _first_acknowledgements(self) -> str:
        """Before the very first task every registered engine serves the first weights."""
        if not self._engines:
            return "no engine is registered yet: is a weight loader running?"
        behind = sorted(engine for engine, version in self._engines.items() if version < self.version)
        return f"weight version {self.version} is not loaded yet by {', '.join(behind)}" if behind else ""
