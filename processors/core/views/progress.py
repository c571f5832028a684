"""Progress of a run: weight versions published and how far others lag behind them, rollout batches formed, batches
trained, who may use a shared device, evaluation rounds, and the state that is displayed.

Lag is measured along the chain of publications that the current generation of the trainer builds on. Version numbers
are never reused, so a trainer that was killed publishes the weights of its checkpoint, and those of the steps that it
repeats, again under new numbers. The lag between two sets of weights does not change by that (ADR 24).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from turnlog.processors.core.views.fleet import Fleet
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    Event,
    GroupEmitted,
    GroupRequested,
    Purpose,
    RunPlanned,
    SampleBatchFormed,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.ids import environment_digest

ANNOUNCED: Final = "announced"
"""State of a weight version of which no record names files."""
DURABLE: Final = "durable"
OFF_CHAIN = 2**31 - 1
"""Lag of weights of a dead trainer generation that the current one has not reproduced: no limit lets them train."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version that the trainer holds when it trains a rollout batch, and the lags of other versions behind it."""

    number: int
    lags: Mapping[int, int] = field(default_factory=dict)
    """Version -> lag, for versions whose lag differs from the difference of the numbers."""

    def lag(self, version: int) -> int:
        """Return the number of publications between the weights of `version` and those held."""
        return self.lags.get(version, self.number - version)

    def recorded_lags(self, versions: Iterable[int]) -> dict[str, int]:
        """Return version -> lag for the manifest, so that its reader needs no other record to find the same lags."""
        return {str(version): self.lag(version) for version in sorted(set(versions))}


def recorded_version(number: int, lags: Mapping[str, int]) -> HeldVersion:
    """Return the inverse of `HeldVersion.recorded_lags`."""
    return HeldVersion(number, {int(version): lag for version, lag in lags.items()})


@dataclass(slots=True)
class WeightLink:
    """Versions that have the same weights after the same number of optimizer steps."""

    step: int
    """Optimizer steps up to the weights."""
    names: set[str]
    """Hashes by which the weights are known: of the tensors' checksums, of their digests, or both. The records of a
    version may have either; weights are equal if they have a hash in common."""
    versions: list[int]
    """Never empty."""

    @property
    def newest(self) -> int:
        """The highest version."""
        return max(self.versions)

    def is_same(self, other: WeightLink) -> bool:
        """Whether both are known to be the same weights."""
        return self.step == other.step and not self.names.isdisjoint(other.names)

    def join(self, other: WeightLink) -> None:
        """Take in versions that have the same weights."""
        self.names |= other.names
        self.versions += other.versions


class WeightChain:
    """The fold of weight-versions. It stores three integers and one or two hashes per version; repeated records change
    nothing. The second record of a version, which names its files, adds the hash of the checksums.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest version; None before the first."""
        self.batch = -1
        """Last batch that the newest weights include; lower than before after a trainer went back to a checkpoint."""
        self.incarnation = -1
        self.unstored: set[int] = set()
        """Versions that are only announced: no file holds them, at least not yet."""
        self._places: dict[int, int] = {}
        """Version -> its place on the chain."""
        self._links: list[WeightLink] = []
        self._lost: dict[int, list[WeightLink]] = {}
        """Optimizer steps -> links that are off the chain."""
        self._steps: dict[int, int] = {}
        """Version -> optimizer steps taken up to its weights, whether it is on the chain or not."""

    @property
    def version(self) -> int:
        """`newest`, or -1 before the first version."""
        return -1 if self.newest is None else self.newest

    @property
    def newest_state(self) -> str | None:
        """announced or durable; None before the first version."""
        if self.newest is None:
            return None
        return ANNOUNCED if self.newest in self.unstored else DURABLE

    def apply(self, event: Event) -> None:
        """Fold one publication; ignore other records."""
        if not isinstance(event, WeightVersionPublished):
            return
        link = WeightLink(event.step, _weight_names(event), [event.version])
        if self.newest is not None and event.version <= self.newest:
            self._apply_repeated(link, durable=event.state != ANNOUNCED)
            return
        if event.incarnation > self.incarnation:
            self._go_back(event.step)
        self.newest, self.batch, self.incarnation = event.version, event.batch_index, event.incarnation
        self._steps[event.version] = event.step
        if event.state == ANNOUNCED:
            self.unstored.add(event.version)
        if self._links and self._links[-1].is_same(link):
            self._links[-1].join(link)
        else:
            self._links.append(link)
        self._find_lost(len(self._links) - 1)

    def _apply_repeated(self, link: WeightLink, *, durable: bool) -> None:
        """Fold a further record of a version."""
        (version,) = link.versions
        if durable:
            self.unstored.discard(version)
        place = self._places.get(version)
        if place is not None:
            self._links[place].names |= link.names
            self._find_lost(place)
            return
        for lost in self._lost.get(link.step, ()):
            if version in lost.versions:
                lost.names |= link.names

    def _find_lost(self, place: int) -> None:
        """Take versions back onto the chain whose weights are those at `place`."""
        link = self._links[place]
        lost = self._lost.get(link.step, [])
        while (found := next(filter(link.is_same, lost), None)) is not None:
            lost.remove(found)
            link.join(found)
        self._places.update(dict.fromkeys(link.versions, place))

    def expected_version(self, ahead: int, versions: Iterable[int]) -> HeldVersion:
        """Return the version that the trainer will hold `ahead` publications from now, with the lags of `versions`.

        Raises ValueError before the first version.
        """
        if self.newest is None:
            raise ValueError("no weight version is published yet")
        number, end = self.newest + ahead, len(self._links) - 1 + ahead
        lags = {version: end - self._places[version] if version in self._places else OFF_CHAIN
                for version in versions if 0 <= version <= self.newest}  # fmt: skip
        return HeldVersion(number, {version: lag for version, lag in lags.items() if lag != number - version})

    def largest_lag(self, versions: Iterable[int]) -> int:
        """Return the largest lag of `versions` behind the newest version; 0 if there are none.

        For versions that the current trainer generation has not produced, the lag is the difference of the numbers.
        """
        wanted = set(versions)
        if not wanted:
            return 0
        held = self.expected_version(0, wanted)
        return max(held.number - version if held.lag(version) == OFF_CHAIN else held.lag(version) for version in wanted)

    def step_of(self, version: int) -> int | None:
        """Return the optimizer steps taken up to a version's weights; None if the current trainer generation has not
        produced them.
        """
        place = self._places.get(version)
        return None if place is None else self._links[place].step

    def is_older(self, version: int, than: int) -> bool:
        """Whether the weights of `version` are older than those of `than`, which means that fewer optimizer steps led
        to them.

        A trainer that went back to a checkpoint publishes old weights under new numbers. The numbers are compared if
        the steps of either version are not known.
        """
        steps = self._steps
        return steps[version] < steps[than] if version in steps and than in steps else version < than

    def is_news(self, version: int, served: int) -> bool:
        """Whether an engine that serves version `served` should load `version`.

        While a trainer that went back to a checkpoint publishes weights older than `served`, the engine keeps its own:
        the trainer will produce them again.
        """
        return version > served and not self.is_older(version, served)

    def oldest(self, *, ahead: int, max_lag: int) -> int:
        """Return the version whose weights are `max_lag` publications behind those held `ahead` publications from now.

        The result is above `newest` if that version is not published yet, and -1 before the first version.
        """
        if self.newest is None:
            return -1
        place, end = max(len(self._links) - 1 + ahead - max_lag, 0), len(self._links) - 1
        return self._links[place].newest if place <= end else self.newest + place - end

    def of_step(self, step: int) -> int | None:
        """Return the newest version if its weights have taken `step` optimizer steps, else None."""
        return self.newest if self.newest is not None and self.step_of(self.newest) == step else None

    def _go_back(self, step: int) -> None:
        """Take everything beyond the weights of `step` off the chain, because a new trainer generation starts from
        them.
        """
        kept = next((place for place, link in enumerate(self._links) if link.step > step), len(self._links))
        for link in self._links[kept:]:
            self._lost.setdefault(link.step, []).append(link)
            for version in link.versions:
                del self._places[version]
        del self._links[kept:]


def _weight_names(event: WeightVersionPublished) -> set[str]:
    """Return the hash of the checksums if the record names files, and that of the digests if it has any."""
    found = set() if event.state == ANNOUNCED else {f"checksums:{environment_digest(event.checksums)}"}
    return found | ({f"digests:{environment_digest(event.digests)}"} if event.digests else set())


@dataclass(slots=True)
class DeviceTurn:
    """The current user of devices that engines and trainer share ([engine] colocate).

    The trainer owns them from the time a batch is formed; the engines own them again once weights are published that
    include every batch. A fold of manifests and versions, which may be interleaved in any order.
    """

    formed: int = -1
    """Index of the newest batch formed; -1 before the first."""
    weights: WeightChain = field(default_factory=WeightChain)

    def apply(self, event: Event) -> None:
        """Fold one record; ignore records of other types."""
        self.weights.apply(event)
        if isinstance(event, SampleBatchFormed):
            self.formed = max(self.formed, event.batch_index)

    @property
    def trainers(self) -> bool:
        """Whether engines must release the devices to the trainer."""
        return self.formed > self.weights.batch


class BatchProgress:
    """Fold of three topics, each in offset order and interleaved in any order; repeated records change nothing.

    It retains one number per rollout batch that publishes weights, and of each weight version what WeightChain does;
    everything else concerns unfinished rollout batches. A record costs O(groups and samples that it names), a query
    O(log rollout batches).
    """

    def __init__(self, *, publish_every: int) -> None:
        self._publish_every = publish_every
        self._publishing: list[int] = []
        """Last batch of every publish_every-th rollout batch that trains, ascending."""
        self._last_draw = -1
        """The newest rollout batch that trains."""
        self._ahead: deque[int] = deque()
        """Batches without a step, ascending."""
        self._stepped = -1
        self._published_ever = -1
        """Like `batch` of the chain, but over all trainer generations: the last batch whose weights were published."""
        self._positions: dict[int, int] = {}
        self.next_batch = 0
        self.next_draw = 0
        self._chain = WeightChain()
        self._behind: dict[int, int] = {}
        """Trainer generation -> the last batch that it stepped on, or that its published weights include."""
        self.trained_draws_formed = 0
        """Number of rollout batches with at least one batch."""
        self._taken: dict[str, tuple[int, int] | None] = {}
        """Group that a rollout batch has taken and that may be read again -> (partition, offset) of its last sample, or
        None.
        """

    def apply(self, event: Event) -> None:
        """Fold one record of the run."""
        if isinstance(event, SampleBatchFormed | BatchSkipped):
            if event.batch_index >= self.next_batch:
                self._apply_formed(event)
        elif isinstance(event, StepCompleted):
            self._stepped = max(self._stepped, event.batch_index)
            self._note(event.incarnation, event.batch_index)
            while self._ahead and self._ahead[0] <= self._stepped:
                self._ahead.popleft()
        elif isinstance(event, WeightVersionPublished):
            if self.version is None or event.version > self.version:
                self._note(event.incarnation, event.batch_index)
            self._chain.apply(event)
            self._published_ever = max(self._published_ever, event.batch_index)

    def _note(self, incarnation: int, batch: int) -> None:
        self._behind[incarnation] = max(self._behind.get(incarnation, -1), batch)

    def _apply_formed(self, event: SampleBatchFormed | BatchSkipped) -> None:
        self.next_batch = event.batch_index + 1
        self.next_draw = max(self.next_draw, event.draw_index + 1)
        self._positions.update({position.partition: position.offset for position in event.positions})
        self._take(event)
        if not isinstance(event, SampleBatchFormed):
            return
        if event.batch_index > self._stepped:
            self._ahead.append(event.batch_index)
        if event.draw_index != self._last_draw:
            self._last_draw = event.draw_index
            self.trained_draws_formed += 1
            if self.trained_draws_formed % self._publish_every == 0:
                self._publishing.append(event.batch_index)
        elif self.trained_draws_formed % self._publish_every == 0:
            self._publishing[-1] = event.batch_index

    def _take(self, event: SampleBatchFormed | BatchSkipped) -> None:
        """Record the groups that a rollout batch takes, and drop those that will not be read again.

        A group's samples are adjacent and its score follows directly: the place of the last sample shows whether a
        position is beyond all of them. Part 0 names what every part of the rollout batch dropped.
        """
        for group in event.groups:
            self._taken.setdefault(group, None)
        rows: list[BatchSample | DroppedSample] = list(event.dropped)
        if isinstance(event, SampleBatchFormed):
            rows += event.samples
        for row in rows:
            place = row.partition, row.offset
            self._taken[row.group_id] = max(self._taken.get(row.group_id) or place, place)
        self._taken = {
            group: place
            for group, place in self._taken.items()
            if place is None or place[1] + 1 >= self._positions.get(place[0], 0)
        }

    def is_taken(self, group_id: str) -> bool:
        """Whether a rollout batch has taken this group, whose records may lie at or after the current positions."""
        return group_id in self._taken

    def forget(self, group_id: str) -> None:
        """Forget a group of which nothing will be read again."""
        self._taken.pop(group_id, None)

    def forget_taken(self) -> None:
        """Forget all groups taken so far, because nothing of them will be read again. No manifest states where the
        score of an empty group lies.
        """
        self._taken.clear()

    @property
    def batches_ahead(self) -> int:
        """Number of batches formed that have no step yet."""
        return len(self._ahead)

    def room_for(self, batches: int, ready: int) -> bool:
        """Whether a rollout batch of `batches` batches keeps within `ready` batches ahead; one is always admitted if
        none is ahead.
        """
        return self.batches_ahead == 0 or self.batches_ahead + batches <= ready

    def position(self, partition: int) -> int:
        """Return the offset of segment-samples from which a new batcher reads a partition."""
        return self._positions.get(partition, 0)

    @property
    def version(self) -> int | None:
        """The newest published weight version; None before the first."""
        return self._chain.newest

    @property
    def repeats(self) -> bool:
        """Whether the trainer was killed and is repeating steps on earlier batches.

        No batch needs to be formed meanwhile. Which weights of the dead generation are published again is not known
        until they are: a step and its weights are one transaction over two topics, so a reader may meet either first.
        """
        if not self._behind:
            return False
        due = bisect_right(self._publishing, self._published_ever)
        weights_due = due > 0 and self._chain.batch < self._publishing[due - 1]
        return weights_due or self._behind[max(self._behind)] < self._stepped

    def held_at_next_draw(self, versions: Iterable[int] = ()) -> HeldVersion:
        """Return the version that the trainer will hold when it trains the next rollout batch, with the lags of
        `versions`.

        It is the newest published version plus one for every pending rollout batch that publishes: every
        publish_every-th of those that train. Raises ValueError before the first version.
        """
        ahead = len(self._publishing) - bisect_right(self._publishing, self._chain.batch)
        return self._chain.expected_version(ahead, versions)


@dataclass(slots=True)
class EvaluationRounds:
    """Fold of group-requests and group-scores: the groups of each evaluation round, and whether they are scored.
    Repeated records change nothing.
    """

    _groups: dict[int, set[str]] = field(default_factory=dict)
    """Round -> its groups."""
    _scored: set[str] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Fold one record; other kinds are ignored."""
        match event:
            case GroupRequested(purpose=Purpose.eval):
                self._groups.setdefault(event.dataset_epoch, set()).add(event.group_id)
            case GroupEmitted(purpose=Purpose.eval):
                self._scored.add(event.group_id)
            case _:
                pass

    def knows(self, group_id: str) -> bool:
        """Return whether the group belongs to a round that was requested."""
        return any(group_id in groups for groups in self._groups.values())

    def is_evaluated(self, number: int) -> bool:
        """Return whether a round was requested and is completely scored."""
        return number in self._groups and self._groups[number] <= self._scored

    def due(self, draws_trained: int, every: int) -> int | None:
        """Return the round to request now, or None. `every`: rollout batches between rounds; 0 for no rounds."""
        if not every:
            return None
        newest = draws_trained // every
        return None if newest in self._groups else newest


@dataclass(slots=True)
class RunView:
    """Fold of the topics of a run. Repeated records are counted once for steps and tool calls, where it matters."""

    steps: dict[int, StepCompleted] = field(default_factory=dict)
    """Batch -> its last step on the log."""
    sessions_started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    output_tokens: int = 0
    tool_calls: dict[str, str] = field(default_factory=dict)
    batches: int = 0
    phase: str = ""
    """Phase in the last RunPlanned; empty means running."""
    lag: int = 0
    weights: WeightChain = field(default_factory=WeightChain)
    fleet: Fleet = field(default_factory=Fleet)
    rounds: EvaluationRounds = field(default_factory=EvaluationRounds)

    def apply(self, event: Event) -> None:
        """Fold one event."""
        match event:
            case RunPlanned():
                self.phase = event.phase or self.phase
            case SessionStarted():
                self.sessions_started += 1
            case SessionFinished():
                self.outcomes[event.outcome.value] += 1
            case TurnCompleted():
                self.turns += 1
                self.output_tokens += event.output_tokens
            case ToolCallCompleted():
                self.tool_calls.setdefault(event.call_id, event.status.value)
            case SampleBatchFormed():
                self.batches, self.lag = event.batch_index + 1, event.max_lag
            case StepCompleted():
                self.steps[event.batch_index] = event
            case _:
                self.weights.apply(event)
                self.fleet.apply(event)
                self.rounds.apply(event)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch, in order."""
        return [self.steps[index].reward_mean for index in sorted(self.steps)]

    @property
    def draws_trained(self) -> int:
        """Number of rollout batches with a step."""
        return len({step.draw_index for step in self.steps.values()})

    def is_over(self, draws: int, eval_every: int) -> bool:
        """Return whether `draws` rollout batches are trained, their weights are published, stored and acknowledged by
        every engine, and the last evaluation round is scored. `eval_every`: rollout batches between rounds; 0 for no
        rounds.
        """
        if self.weights.newest_state == ANNOUNCED:
            return False
        loaded = all(version >= self.weights.version for version in self.fleet.acknowledged_versions().values())
        evaluated = not eval_every or self.rounds.is_evaluated(draws // eval_every)
        return self.draws_trained >= draws and self.weights.batch >= max(self.steps) and loaded and evaluated
