"""Admission of groups: which to request and when, as arithmetic over facts of the log, without clock or I/O; and
whether the weights that new rollouts must be sampled with are published.

    groups open + draws formed x prompts_per_draw
        <= min(max_lag x publish_every + draws trained + 1, draws) x prompts_per_draw

A draw is a rollout batch. A group is open from its first request until a rollout batch takes it or it fails: its score
discards it, or a manifest drops it whole (stale). So the group that was admitted last is in rollout batch number
`draws trained + max_lag x publish_every` at the latest if none is slow, and is no more than `max_lag` versions old
there. Fresh tasks come from the run's datasets in proportion to their weights. The task of a failed group is drawn
again as a new group. A group that was dropped, or that lost too many of its rollouts, has taught nothing yet, so its
task comes before any fresh one. A group that a filter discarded has been seen, and the next one of its task is likely
to end the same way. So its task waits until every fresh task of the epoch was requested, and is drawn again a bounded
number of times: tasks that are always solved or always failed cannot stall a run. A group that a rollout batch was
trained without had its slot in that batch. The slot is not freed, or every drop would let one more group run ahead for
good. Facts may arrive in any order between topics, and more than once.

A task whose last group was passed by too few or too many of its rollouts teaches little (Foster and Foerster 2025,
"Learning to reason at the frontier of learnability": its gradient is proportional to p (1 - p)). It is not drawn again
when such a group fails, and is skipped for some epochs.
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

from turnlog.processors.core.fold.settlement import PASS, TOO_FEW
from turnlog.processors.core.views.fleet import Fleet
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import (
    BatchSkipped,
    Event,
    GroupEmitted,
    GroupRequested,
    GroupScored,
    GroupStatus,
    Purpose,
    SampleBatchFormed,
    StepCompleted,
)


class RowVisit(NamedTuple):
    """A visit of a row. A task is drawn once per epoch, and again at the same place if its group fails."""

    epoch: int
    row: int
    source: int = 0
    """Index of the dataset among the run's datasets."""


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """A dataset to draw tasks from."""

    dataset: str
    """Name of the dataset in GroupRequested."""
    count: int
    weight: float = 1.0
    """Weight of the dataset: its share of the fresh tasks is this weight over the sum of all weights."""
    passed: int = 0
    """Number of places before the checkpoint that the run was forked from."""
    left: frozenset[RowVisit] = frozenset()
    """Places among those that the parent run has not seen."""


@dataclass(frozen=True, slots=True)
class PassRates:
    """Range of pass rates in which a task is worth a visit: the share of its last group that passed."""

    low: float = 0.0
    high: float = 1.0
    epochs: int = 1
    """Number of epochs for which a task outside the range is skipped."""

    def __contains__(self, rate: float) -> bool:
        return self.low <= rate <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Settings that admission depends on."""

    prompts_per_draw: int
    draws: int
    """Rollout batches to train in the whole run."""
    max_lag: int
    publish_every: int
    sources: tuple[TaskDataset, ...]
    """Datasets, indexed by Place.source."""
    seed: int
    """Seed of the order of rows after the first epoch."""
    pass_rates: PassRates = PassRates()
    discarded_repeats: int = 1
    """Maximum number of times that a place is requested again because its group was discarded."""


@dataclass(frozen=True, slots=True)
class DueGroup:
    """A group to request."""

    place: RowVisit
    draw: int
    """Number of times that the task was drawn before."""
    versions_ahead: int = field(default=0, compare=False)
    """Number of weight versions that are published before the rollout batch in which the group has a slot."""


@dataclass(slots=True)
class _Parts:
    """A rollout batch, with its batches as far as they are known."""

    wanted: int
    batches: set[int] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    """Groups that the rollout batch consumed."""
    live: set[str] = field(default_factory=set)
    """Consumed groups that have a row in a batch."""


@dataclass(slots=True)
class _Repeats:
    """Places whose latest group failed."""

    dropped: set[RowVisit]
    """Places due before any fresh one."""
    waiting: set[RowVisit] = field(default_factory=set)
    """Places due after the fresh ones of their epoch."""
    given_up: set[RowVisit] = field(default_factory=set)
    """Places discarded too often to be due."""

    def forget(self, place: RowVisit) -> None:
        for places in (self.dropped, self.waiting, self.given_up):
            places.discard(place)


class Admission:
    """Fold of group-requests, group-scores, manifests and steps."""

    def __init__(self, rules: AdmissionRules) -> None:
        self._rules = rules
        self._source = {rows.dataset: number for number, rows in enumerate(rules.sources)}
        self._fresh = [rows.passed for rows in rules.sources]
        """Number of fresh places that were requested, by source."""
        self._positions = list(self._fresh)
        """Position of the next fresh place, by source; they are requested in order."""
        self._drawn: dict[tuple[int, int], int] = {}
        """(source, row index) -> number of times that the task was drawn."""
        self._latest: dict[RowVisit, tuple[int, str]] = {}
        """Place -> (draw, group) of its latest group."""
        self._visited: dict[tuple[int, int], RowVisit] = {}
        """(source, row index) -> its place in the latest epoch."""
        self._rates: dict[str, float] = {}
        """Scored group -> the share of its rewards that passed."""
        self._places: dict[str, RowVisit] = {}
        """Requested group -> its place."""
        self._open: set[str] = set()
        self._taken: set[str] = set()
        self._failed: set[str] = set()
        self._discarded: dict[str, bool] = {}
        """Failed group that was discarded by its score -> whether that is evidence about its task. The other failed
        groups were dropped by rollout batches."""
        self._discards: Counter[RowVisit] = Counter()
        """Place -> number of its groups in `_discarded`."""
        self._left = frozenset(place for rows in rules.sources for place in rows.left)
        self._repeats = _Repeats(set(self._left))
        self._draws: dict[int, _Parts] = {}
        """Rollout batches that were formed and not trained yet."""
        self._stepped: set[int] = set()
        self._trained: list[tuple[int, int]] = []
        """(draw index, its last batch index) of every trained rollout batch, ascending."""

    @property
    def open(self) -> int:
        """Number of requested groups that did not fail and that no rollout batch has taken."""
        return len(self._open)

    @property
    def draws_formed(self) -> int:
        """Number of rollout batches that have a batch."""
        return len(self._draws) + len(self._trained)

    @property
    def slots(self) -> int:
        """Number of slots in use: one per open group, and those of every rollout batch."""
        return self.open + self.draws_formed * self._rules.prompts_per_draw

    @property
    def passed_over(self) -> int:
        """Number of places that were not requested, because their task would teach little."""
        return sum(self._positions) - sum(self._fresh)

    @property
    def given_up(self) -> int:
        """Number of places all of whose groups were discarded, as often as they may be requested again."""
        return len(self._repeats.given_up)

    @property
    def requested_count(self) -> int:
        """Number of training groups requested so far."""
        return len(self._places)

    def knows(self, group_id: str) -> bool:
        """Return whether the group was requested."""
        return group_id in self._places

    @property
    def draws_trained(self) -> int:
        """Number of rollout batches whose every batch has a StepCompleted."""
        return len(self._trained)

    def publications_after(self, batch: int) -> int:
        """Return how many publications, one after every publish_every-th trained rollout batch, hold weights trained on
        more than batch `batch`."""
        held = bisect_right(self._trained, batch, key=itemgetter(1))
        return self.draws_trained // self._rules.publish_every - held // self._rules.publish_every

    @property
    def limit(self) -> int:
        """Number of slots that exist now."""
        rules = self._rules
        draws = min(rules.max_lag * rules.publish_every + self.draws_trained + 1, rules.draws)
        return draws * rules.prompts_per_draw

    @property
    def is_finished(self) -> bool:
        """True if every rollout batch of the run is trained."""
        return self.draws_trained >= self._rules.draws

    def apply(self, event: Event) -> None:
        """Fold one record. Repeats change nothing; records of other kinds and purposes are ignored."""
        if isinstance(event, GroupEmitted) and event.rewards:
            self._rates[event.group_id] = sum(reward >= PASS for reward in event.rewards) / len(event.rewards)
        match event:
            case GroupRequested(purpose=Purpose.train):
                self._apply_requested(event)
            case GroupEmitted(status=GroupStatus.discarded) | GroupScored(status=GroupStatus.discarded):
                self._fail(event.group_id, discarded=True, seen=event.reason != TOO_FEW)
            case SampleBatchFormed():
                self._apply_formed(event)
            case BatchSkipped():
                for group_id in event.groups:
                    self._fail(group_id)
            case StepCompleted():
                self._stepped.add(event.batch_index)
                self._settle(event.draw_index)

    def due(self) -> list[DueGroup]:
        """Return the groups to request now, in order: dropped ones again (oldest place first), then fresh rows, and
        after those of each epoch its discarded ones again."""
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

    def _candidates(self) -> Iterator[RowVisit]:
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

    def _ahead(self, source: int) -> Iterator[RowVisit]:
        for position in itertools.count(self._positions[source]):
            yield nth_place(position, self._rules.sources[source].count, self._rules.seed, source)

    def _teaches(self, place: RowVisit) -> bool:
        visited = self._visited.get((place.source, place.row))
        rate = None if visited is None else self._rates.get(self._latest[visited][1])
        if visited is None or rate is None or rate in self._rules.pass_rates:
            return True
        return place.epoch > visited.epoch + self._rules.pass_rates.epochs

    def _apply_requested(self, event: GroupRequested) -> None:
        if event.group_id in self._places:
            return
        source = self._source[event.dataset]
        place = self._places[event.group_id] = RowVisit(event.dataset_epoch, event.index, source)
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
        """Mark a group as failed. `discarded`: by its score; `seen`: its rollouts were judged, which is evidence about
        its task."""
        place = self._places.get(group_id)
        if discarded and group_id not in self._discarded:
            self._discarded[group_id] = seen
            if place is not None:
                self._discards[place] += 1
        self._failed.add(group_id)
        self._open.discard(group_id)
        if place is not None:
            self._mark(place)

    def _mark(self, place: RowVisit) -> None:
        """Make a place due again iff the latest group drawn there failed, its task would still teach, and it was not
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

    def _apply_formed(self, event: SampleBatchFormed) -> None:
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
    """Return the source that would be furthest behind its share if one more task were drawn from it; ties go to the
    first."""
    return min(range(len(weights)), key=lambda source: ((positions[source] + 1) / weights[source], source))


def nth_place(position: int, rows: int, seed: int, source: int = 0) -> RowVisit:
    """Return the position-th fresh place. The first epoch is in file order; later ones are shuffled by (seed,
    epoch)."""
    epoch, rank = divmod(position, rows)
    return RowVisit(epoch, _order(epoch, rows, seed)[rank], source)


def position_of(place: RowVisit, rows: int, seed: int) -> int:
    """Return the position for which nth_place returns `place`."""
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
    """Fold that determines whether the weights for new rollouts are published and loaded. Repeats change nothing; each
    topic is read in its own order."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._chain = WeightChain()

    def apply(self, event: Event) -> None:
        """Fold one record; other kinds are ignored."""
        self._fleet.apply(event)
        self._chain.apply(event)

    @property
    def version(self) -> int:
        """Newest published weight version; -1 before the first."""
        return self._chain.version

    @property
    def batch(self) -> int:
        """Last batch on which the newest published weights were trained; -1 before the first."""
        return self._chain.batch

    def waits_for(self, *, first: bool) -> str:
        """Return what prevents requesting groups; empty if nothing does. `first`: nothing was requested yet."""
        if self.version < 0:
            return "no weights are published yet: is the trainer running?"
        return self._first_acknowledgements() if first else ""

    def version_for(self, *, versions_ahead: int, max_lag: int) -> int:
        """Return the oldest version with which a group may be sampled so that it is at most `max_lag` versions behind
        in the rollout batch in which it has a slot, `versions_ahead` versions from now. If the result is above
        `version`, those weights are not published yet.

        A step is on the log before its weights are, and a trainer that went back to a checkpoint publishes older
        weights under new numbers until it has caught up. Both count as versions ahead. Versions are counted along the
        chain of publications, in which weights that were published twice have one place."""
        return max(self._chain.oldest(ahead=versions_ahead, max_lag=max_lag), 0)

    def _first_acknowledgements(self) -> str:
        """Return which engines do not serve the first weights yet; the very first task waits until every registered one
        does."""
        engines = self._fleet.serving_versions()
        if not engines:
            return "no engine is registered yet: is a weight loader running?"
        behind = sorted(engine for engine, version in engines.items() if version < self.version)
        return f"weight version {self.version} is not loaded yet by {', '.join(behind)}" if behind else ""
