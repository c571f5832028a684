"""The task feeder: reads the dataset, and admits groups of rollouts as fast as training can use them, none of them
twice.

Its state is a fold of the log (admission.py), so a new feeder continues where the last one died. Admissions are written
in transactions of `<run>.feeder`: a group is requested whole or not at all, and a feeder that was replaced is fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client import Counter, Gauge

from turnlog.infra.blobs import externalize_payloads
from turnlog.infra.history import events, partitions
from turnlog.infra.log import Commit, Partition, Reader, Record, TopicMissing, Transactor, partition_of
from turnlog.infra.roles.loop import OwnerRole
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role, RunPhase
from turnlog.infra.roles.runs import Configured
from turnlog.names import RECORD_HEADER, ConsumerGroup, TransactionalId
from turnlog.processors.core.fold_versions import fold_version, scores_topic
from turnlog.processors.core.views.progress import EvaluationRounds
from turnlog.producers.admission import (
    Admission,
    AdmissionRules,
    DueGroup,
    PassRates,
    Readiness,
    RowVisit,
    TaskDataset,
    position_of,
)
from turnlog.producers.tasks import Dataset, EnvironmentTasks, EvalTasks, checked_sampling, eval_tasks, sources
from turnlog.schemas import UndecodableRecord, ids, topics
from turnlog.schemas.events import Event, GroupRequested, Limits, Purpose, RolloutRequested, Sampling, SegmentSample
from turnlog.settings import Settings, SettingsError

log = logging.getLogger(__name__)
FOLLOWED = (topics.GROUP_REQUESTS, topics.BATCHES, topics.STEPS, topics.WEIGHTS, topics.ENGINES)
"""Followed topics, in addition to the one that holds the scores of groups, which depends on the fold version: from 2
on, all are control topics, small and never pruned."""
PASSED_OVER = SegmentSample.__name__.encode()
"""Header of the records that make up most of segment-samples, and that admission does not need."""
LOOK_BACK = 64
"""Number of records in each partition of tasks that are read at start; more, while no group among them is noted."""
ADMITTED = Counter("turnlog_feeder_groups_admitted", "Groups requested", ["drawn"])
OPEN = Gauge("turnlog_feeder_groups_open", "Requested groups that have not failed and that no draw has taken")
ROOM = Gauge("turnlog_feeder_slots_free", "Groups that may be requested now")
PASSED_OVER_PLACES = Gauge(
    "turnlog_feeder_places_passed_over", "Task visits skipped because of their pass rate ([feeder] pass_rate_*)"
)
GIVEN_UP = Gauge(
    "turnlog_feeder_places_given_up",
    "Task visits given up after [feeder] discarded_repeats discarded groups",
)
TRAINED = Gauge("turnlog_feeder_draws_trained", "Draws with all batches trained")
FOLD_S, ASK_S = (STAGE_S.labels("feeder", stage) for stage in ("fold", "ask"))


class DatasetChanged(Exception):
    """The run has drawn tasks from another dataset. Use a new [run] id, or restore the file."""


ROLE = OwnerRole(owner=TransactionalId.FEEDER, group=ConsumerGroup.FEEDER, past_records=2000)


async def main(role: Role) -> None:
    """Admit groups until every rollout batch is trained, then wait for the role to stop.

    Order of effects: that of OwnerRole. Per admission: read the start offsets (`floor`) of agent.sessions, then write
    the requests of all due groups in one transaction. Raises BadSampling, BadMix, DatasetError, DatasetChanged,
    TopicMissing, OtherRun, OtherSettings, SettingsError."""
    settings = role.settings
    sampling, limits = checked_sampling(settings)
    drawn_from = await asyncio.to_thread(sources, settings)
    evaluated = await asyncio.to_thread(eval_tasks, settings)
    counts = await _partition_counts(role)

    async def followed_places(run: Configured) -> dict[Partition, int]:
        read = (*FOLLOWED, scores_topic(run.fold_version))
        places = [Partition(topic.name, number) for topic in read for number in range(counts[topic.name])]
        return await role.log.start_offsets(places)

    def open_feeder(run: Configured, transactor: Transactor) -> Feeder:
        return Feeder(role, run, transactor, drawn_from, sampling, limits, evaluated)

    await ROLE.run(role, followed_places, open_feeder)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A group to request."""

    dataset: Dataset
    recipe: str
    epoch: int
    """Epoch of the dataset; for an evaluation, the round."""
    row: int
    draw: int
    purpose: Purpose
    size: int
    version: int
    """Oldest weight version that may sample for it."""


class Feeder:
    """State of the log, and the requests that follow from it."""

    def __init__(
        self, role: Role, run: Configured, transactor: Transactor, sources: tuple[EnvironmentTasks, ...],
        sampling: Sampling, limits: Limits, evaluated: EvalTasks | None = None,
    ) -> None:  # fmt: skip
        settings = role.settings
        self._evaluated = evaluated
        self._rounds, self._eval_every = EvaluationRounds(), _eval_every(settings, run.fold_version)
        self._role = role
        self._transactor = transactor
        self._sources = sources
        self._sampling = sampling
        self._limits = limits
        self._told = False
        self._readiness = Readiness()
        self.admission = Admission(
            AdmissionRules(
                prompts_per_draw=run.batcher.prompts_per_draw,
                draws=settings.feeder.draws,
                max_lag=run.batcher.max_lag,
                publish_every=settings.trainer.publish_every,
                sources=tuple(_rows(run, number, source, settings) for number, source in enumerate(sources)),
                seed=settings.feeder.seed,
                pass_rates=_pass_rates(settings, run.fold_version),
                discarded_repeats=settings.feeder.discarded_repeats,
            )
        )

    async def take(self, records: list[Record]) -> None:
        """Fold records of the followed topics; undecodable ones are dead-lettered. Raises DatasetChanged."""
        if not records:
            return
        with FOLD_S.time():
            await self._fold(records)
        self._report()

    async def _fold(self, records: list[Record]) -> None:
        for record in records:
            if (RECORD_HEADER, PASSED_OVER) in record.headers:
                continue
            try:
                event = await self._role.events.decode(record)
            except UndecodableRecord as cause:
                await self._role.park(record, cause)
                continue
            if event.run_id != self._role.settings.run.id:
                continue
            self._apply(event)
            self._readiness.apply(event)

    async def begin(self) -> dict[Partition, int]:
        """Note what feeders of earlier releases requested; return nothing more to read."""
        await self.remember()
        return {}

    async def act(self, _: Reader) -> None:
        """Admit the groups that are due."""
        await self.admit()

    def commits(self, reader: Reader, places: Sequence[Partition]) -> dict[Partition, Commit]:
        """Return the positions up to which the topics were read. A restart reads them from their beginning."""
        return {place: Commit(reader.position(place)) for place in places}

    async def remember(self) -> None:
        """Note, all at once, the groups that a feeder without group-requests has requested: one of an earlier release,
        or one after a step back to it. Groups that are noted nowhere are at the end of their partition of tasks,
        because every feeder with group-requests notes them before it requests more. Raises DatasetChanged."""
        role, reach = self._role, LOOK_BACK
        places = partitions(role, topics.TASKS)
        starts, ends = await role.log.start_offsets(places), await role.log.end_offsets(places)
        behind = set(places)
        while behind:
            since = {place: max(starts[place], ends[place] - reach) for place in places}
            groups: dict[str, GroupRequested] = {}
            behind = {place for place in places if since[place] > starts[place]}
            async for record, request in events(role, topics.TASKS, since=since):
                role.health.beat()  # reading a long history takes longer than one iteration may
                if self.admission.knows(request.group_id) or self._rounds.knows(request.group_id):
                    behind.discard(Partition(record.topic, record.partition))
                elif request.group_id not in groups:
                    groups[request.group_id] = _group(request)
            reach *= 8
        if groups:
            log.info("recording %d groups that a feeder without group-requests had requested", len(groups))
            await role.events.transact(self._transactor, list(groups.values()))
        for group in groups.values():
            self._apply(group)

    def _apply(self, event: Event) -> None:
        names = [source.dataset.name for source in self._sources]
        trains = isinstance(event, GroupRequested) and event.purpose is Purpose.train
        if trains and event.dataset not in names:
            raise DatasetChanged(
                f"run {event.run_id} has drawn from {event.dataset}, but [feeder] dataset is now {', '.join(names)}: "
                "restore the file, or start another run ([run] id, and on a shared cluster [kafka] prefix)"
            )
        self.admission.apply(event)
        self._rounds.apply(event)

    async def admit(self) -> None:
        """Request the groups that are due, unless the run is paused, or the weights that they must be sampled with are
        not published yet."""
        if self._role.phase is not RunPhase.RUNNING:
            self._role.health.unmet("phase", f"the run is {self._role.phase}: continue it with `turnlog run resume`")
            return
        self._role.health.mark_ready("phase")
        admission = self.admission
        due, evaluation = admission.due(), self._rounds.due(admission.draws_trained, self._eval_every)
        waits_for = (due or evaluation is not None) and self._readiness.waits_for(first=admission.requested_count == 0)
        if waits_for:
            self._role.health.unmet("weights", waits_for)
            return
        missing = admission.publications_after(self._readiness.batch)
        wanted = [one for group in due if (one := self._training(group, missing)).version <= self._readiness.version]
        if due and not wanted:
            self._role.health.unmet("weights", f"{missing} weight versions of completed steps are not published yet")
        else:
            self._role.health.mark_ready("weights")
        if evaluation is not None:
            await self._evaluate(evaluation, self._readiness.version + missing)
        if wanted:
            with ASK_S.time():
                await self._ask(wanted)
            for one in wanted:
                ADMITTED.labels("again" if one.draw else "fresh").inc()
            self._report()

    def _training(self, group: DueGroup, missing: int) -> _Wanted:
        """Return the request of a training group. `missing`: publications between the published weights and those of
        the last step."""
        settings, (epoch, row, number) = self._role.settings, group.place
        source = self._sources[number]
        ahead = group.versions_ahead + missing
        return _Wanted(
            source.dataset, source.recipe, epoch, row, group.draw, Purpose.train,
            size=settings.feeder.group_size + settings.feeder.oversample,
            version=self._readiness.version_for(versions_ahead=ahead, max_lag=settings.batcher.max_lag),
        )  # fmt: skip

    async def _evaluate(self, number: int, version: int) -> None:
        """Request a round that is sampled with that version or later, all of it or nothing."""
        tasks = self._evaluated
        assert tasks is not None  # else no round is due
        log.info("evaluation round %d requests %d tasks of version %d or later", number, len(tasks.rows), version)
        await self._ask([
            _Wanted(tasks.dataset, tasks.recipe, number, row, number, Purpose.eval, size=tasks.samples, version=version)
            for row in tasks.rows
        ])  # fmt: skip
        ADMITTED.labels("eval").inc(len(tasks.rows))

    async def _ask(self, wanted: list[_Wanted]) -> None:
        role = self._role
        counts = role.settings.kafka
        sessions = [Partition(topics.SESSIONS.name, number) for number in range(counts.groups)]
        ends = await role.log.end_offsets(sessions)
        floors = {partition.number: offset for partition, offset in ends.items()}
        requests = [request for one in wanted for request in await self._requests(one, floors)]
        groups = [_group(request) for request in requests if request.rollout_index == 0]
        await role.events.transact(self._transactor, [*groups, *requests], partitions=counts.rollouts)
        for group in groups:
            self._apply(group)

    async def _requests(self, group: _Wanted, floors: dict[int, int]) -> list[RolloutRequested]:
        """Return the group's requests. They are functions of the run, the task and the draw, except for start offset
        (`floor`) and weight version."""
        settings = self._role.settings
        # One file may hold both kinds of tasks, whose groups are different.
        kind = "task" if group.purpose is Purpose.train else "eval task"
        task_id = ids.digest(kind, group.dataset.name, group.row)
        group_id = ids.group_id(settings.run.id, task_id, group.draw)
        task = await asyncio.to_thread(group.dataset.task, group.row)
        requests = []
        for index in range(group.size):
            rollout_id = ids.rollout_id(group_id, index)
            request = RolloutRequested(
                event_id=ids.digest("RolloutRequested", rollout_id),
                run_id=settings.run.id,
                group_id=group_id,
                floor=floors[partition_of(group_id.encode(), settings.kafka.groups)],
                task_id=task_id,
                rollout_id=rollout_id,
                rollout_index=index,
                group_size=group.size,
                draw=group.draw,
                dataset=group.dataset.name,
                dataset_epoch=group.epoch,
                index=group.row,
                recipe=group.recipe,
                purpose=group.purpose,
                task=task,
                sampling=self._sampling,
                limits=self._limits,
                min_weight_version=group.version,
            )
            if (redactor := self._role.events.redactor) is not None:  # before a large task becomes a blob
                request = await redactor.redact(request)
            requests.append(await externalize_payloads(request, self._role.blobs))
        return requests

    def _report(self) -> None:
        OPEN.set(self.admission.open)
        ROOM.set(self.admission.limit - self.admission.slots)
        PASSED_OVER_PLACES.set(self.admission.passed_over)
        GIVEN_UP.set(self.admission.given_up)
        TRAINED.set(self.admission.draws_trained)
        if self.admission.is_finished and not self._told:
            self._told = True
            log.info("all %d draws are trained", self.admission.draws_trained)


def _eval_every(settings: Settings, version: str) -> int:
    """Return [eval] every. Raises SettingsError if the run's fold version writes no group-scores."""
    if settings.eval.every and not fold_version(version).group_scores:
        raise SettingsError(
            f"eval.every = {settings.eval.every}: this run began under fold version {version}, which records no "
            "group-scores; leave it at 0, or start another run"
        )
    return settings.eval.every


def _pass_rates(settings: Settings, version: str) -> PassRates:
    """Return the range of pass rates. Raises SettingsError if the run's scores hold no rewards."""
    feeder = settings.feeder
    rates = PassRates(feeder.pass_rate_low, feeder.pass_rate_high, feeder.pass_rate_epochs)
    if (rates.low, rates.high) != (0.0, 1.0) and not fold_version(version).group_rewards:
        raise SettingsError(
            f"feeder.pass_rate_low = {rates.low} and pass_rate_high = {rates.high}: this run began under fold version "
            f"{version}, whose scores do not say which rollouts passed; leave them at 0 and 1, or start another run"
        )
    return rates


def _rows(run: Configured, number: int, source: EnvironmentTasks, settings: Settings) -> TaskDataset:
    """Return what admission needs of a dataset. If the run has a parent, that has passed places of the dataset, and
    left some of them."""
    dataset, parent = source.dataset, run.parent
    rows = TaskDataset(dataset.name, len(dataset.rows), source.weight)
    if parent is None or parent.dataset != dataset.name:
        return rows
    left = frozenset(RowVisit(place.epoch, place.row, number) for place in parent.left)
    if parent.last is None:
        return replace(rows, passed=parent.places, left=left)
    last = RowVisit(parent.last.epoch, parent.last.row, number)
    return replace(rows, passed=position_of(last, rows.count, settings.feeder.seed) + 1, left=left)


def _group(request: RolloutRequested) -> GroupRequested:
    return GroupRequested(
        event_id=ids.digest("GroupRequested", request.group_id),
        run_id=request.run_id,
        group_id=request.group_id,
        draw=request.draw,
        dataset=request.dataset,
        dataset_epoch=request.dataset_epoch,
        index=request.index,
        purpose=request.purpose,
        group_size=request.group_size,
    )


async def _partition_counts(role: Role) -> dict[str, int]:
    """Return the number of partitions of every topic. Raises TopicMissing."""
    found = await role.log.topics()
    missing = [topic.name for topic in (*FOLLOWED, topics.GROUP_SCORES, topics.TASKS) if topic.name not in found]
    if missing:
        raise TopicMissing(f"{', '.join(missing)}: no such topic; run `turnlog topics apply`")
    return {name: spec.partitions for name, spec in found.items()}
