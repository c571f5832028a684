"""List runs: `turnlog run list`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from turnlog.infra import run_folder
from turnlog.infra.blobs import BlobError
from turnlog.infra.history import read_range
from turnlog.infra.log import LogError, Partition, Record
from turnlog.infra.registry import RegistryError
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.runs import Life
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.names import ExitStatus
from turnlog.processors.core.books import counting_step
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import StepCompleted
from turnlog.settings import Settings, SettingsError, load

DOWN = "down"
"""State of a run on this machine whose log cannot be read, because its servers do not run or cannot be reached."""
FOLDED = (topics.RUNS.name, topics.STEPS.name)
"""Topics that are read from their beginning. Of the other topics only the last record is read."""
LOOKED_AT = (topics.GROUP_REQUESTS, topics.SESSIONS, topics.TURNS, topics.BATCHES, topics.WEIGHTS, topics.ENGINES)
LAST_FEW = 8
"""Number of offsets before the end of a partition in which its last record is searched for first. Transaction markers
and aborted records take up offsets, too."""


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """A run found by `turnlog run list`."""

    run: str
    state: str
    """configured | running | paused | finished | closed, as the log says; down for a local run whose log is not served;
    unreadable for a directory whose settings cannot be loaded."""
    last_step: int | None = None
    """Number of optimizer steps done, up to the newest effective one."""
    draws_trained: int = 0
    draws_planned: int | None = None
    last_event: str | None = None
    """Timestamp of the newest record of the topics that are read, as ISO 8601 in UTC, by the clock of its writer."""
    parent: str | None = None
    """RUN@STEP from which the run was forked."""
    kafka: str = ""
    prefix: str = ""
    directory: str = ""
    """Directory of the run, if it is on this machine."""
    bytes: int | None = None
    """Total size of all files of that directory."""
    checkpoint_bytes: int | None = None
    """Total size of the files below its `checkpoints`."""
    why: str = ""
    """Reason why the run is down or unreadable."""


def list_command(settings: Settings, *, as_json: bool) -> int:
    """Print runs and return 0. They are the runs on the cluster of `settings`, on every cluster that serves a run
    beside `[run] directory`, and in those directories. Raises LogUnavailable, RegistryUnavailable or StoreUnavailable
    if the cluster of `settings` cannot be read."""
    named = _with_address(settings)
    found = {} if named is None else {named.kafka.bootstrap: run_verb(runs_of(named))}
    for path in sorted(Path(settings.run.directory).parent.glob(f"*/{run_folder.SETTINGS}")):
        _add_local(path, found)
    runs = [run for cluster in found.values() for run in cluster]
    for run in runs:
        _weigh(run)
    if as_json:
        say_json([dataclasses.asdict(run) for run in runs])
    else:
        _tell(runs)
    return ExitStatus.DONE


def _add_local(path: Path, found: dict[str, list[RunSummary]]) -> None:
    """Add the run of a directory and everything else on its cluster. An error in one run does not hide the others."""
    directory = str(path.parent)
    try:
        own = load(path, {})
    except (SettingsError, OSError) as error:
        found.setdefault("", []).append(
            RunSummary(run=path.parent.name, state="unreadable", directory=directory, why=str(error))
        )
        return
    why, served = "its servers are not running", _with_address(own)
    if served is not None and served.kafka.bootstrap not in found:
        try:
            found[served.kafka.bootstrap] = run_verb(runs_of(served))
        except (LogError, RegistryError, BlobError) as error:
            served, why = None, str(error)
    there = {(run.run, run.prefix): run for run in (found[served.kafka.bootstrap] if served else ())}
    if run := there.get((own.run.id, own.kafka.prefix)):
        run.directory = directory
    else:
        down = RunSummary(run=own.run.id, state=DOWN, directory=directory, prefix=own.kafka.prefix, why=why)
        found.setdefault("", []).append(down)


def _weigh(run: RunSummary) -> None:
    """Fill in the disk usage of a run's directory, so that its owner can decide which one to delete."""
    if run.directory:
        sizes = run_folder.file_sizes(Path(run.directory))
        run.checkpoint_bytes = sum(sizes[run_folder.CHECKPOINTS])
        run.bytes = run.checkpoint_bytes + sum(sizes["directory"])


def _with_address(settings: Settings) -> Settings | None:
    """Return the settings with the address of the run's log filled in, or None if nothing serves it."""
    try:
        return run_folder.resolve_endpoints(settings)
    except run_folder.NoEndpoints:
        return None


@dataclass(slots=True)
class _Seen:
    """State of the topics below one prefix."""

    events: list[Any] = field(default_factory=list)
    """Events of topic `runs`, in order."""
    steps: dict[tuple[str, int], StepCompleted] = field(default_factory=dict)
    """(run, batch) -> its effective step."""
    newest_ms: int = -1
    asked: bool = False

    def take(self, topic: str, record: Record, event: Any) -> None:
        """Fold one record. `event` is None for topics that are not folded."""
        self.newest_ms = max(self.newest_ms, record.timestamp_ms)
        self.asked = self.asked or topic == topics.GROUP_REQUESTS.name
        if topic == topics.RUNS.name:
            self.events.append(event)
        elif isinstance(event, StepCompleted):
            place = event.run_id, event.batch_index
            self.steps[place] = counting_step(self.steps.get(place), event)

    def find_run(self, prefix: str, kafka: str) -> RunSummary | None:
        """Return the run that these topics belong to, or None if no run is configured there."""
        whose = Life("")
        for event in self.events:
            whose.apply(event)
        if whose.configured is None:
            return None
        said = Life(whose.configured.run_id)
        for event in self.events:
            said.apply(event)
        steps = [step for (run, _), step in self.steps.items() if run == said.run_id]
        trained = len({step.draw_index for step in steps})
        return RunSummary(
            run=said.run_id,
            state=_state(said, trained, begun=self.asked or bool(steps)),
            last_step=max((step.step for step in steps), default=None),
            draws_trained=trained,
            draws_planned=None if said.plan is None else said.plan.draws,
            last_event=datetime.fromtimestamp(self.newest_ms / 1000, UTC).isoformat(timespec="seconds"),
            parent=f"{said.parent.run_id}@{said.parent.step}" if said.parent else None,
            kafka=kafka,
            prefix=prefix,
        )


def _state(said: Life, trained: int, *, begun: bool) -> str:
    if said.phase is RunPhase.CLOSED:
        return said.phase
    if said.plan is not None and trained >= said.plan.draws:
        return "finished"
    return said.phase if begun or said.phase is RunPhase.PAUSED else "configured"


async def runs_of(settings: Settings) -> list[RunSummary]:
    """Return the runs of a cluster, sorted by prefix, under every prefix whose topics this login may see. Raises
    LogUnavailable, RegistryUnavailable."""
    everything = dataclasses.replace(settings, kafka=dataclasses.replace(settings.kafka, prefix=""))
    async with open_role("run", everything) as role:
        counts = {name: spec.partitions for name, spec in (await role.log.topics()).items()}
        wanted = (*FOLDED, *(topic.name for topic in LOOKED_AT))
        ends_so = [name.removesuffix(topics.RUNS.name) for name in counts if name.endswith(topics.RUNS.name)]
        prefixes = [prefix for prefix in ends_so if all(prefix + topic in counts for topic in wanted)]
        place_of = {
            Partition(prefix + topic, number): (prefix, topic)
            for prefix in prefixes
            for topic in wanted
            for number in range(counts[prefix + topic])
        }
        seen = await _seen(role, place_of)
    runs = (seen[prefix].find_run(prefix, settings.kafka.bootstrap) for prefix in sorted(prefixes))
    return [run for run in runs if run is not None]


async def _seen(role: Role, place_of: Mapping[Partition, tuple[str, str]]) -> dict[str, _Seen]:
    """Read the topics and return their state by prefix."""
    seen: defaultdict[str, _Seen] = defaultdict(_Seen)
    starts, ends = await role.log.start_offsets(list(place_of)), await role.log.end_offsets(list(place_of))
    few, wanted = LAST_FEW, [place for place in place_of if starts[place] < ends[place]]
    while wanted:
        begin = {
            place: starts[place] if place_of[place][1] in FOLDED else max(starts[place], ends[place] - few)
            for place in wanted
        }
        met = set()
        async with role.log.reader() as reader:
            async for record in read_range(reader, begin, ends, max_records=2000):
                prefix, topic = place_of[Partition(record.topic, record.partition)]
                met.add(Partition(record.topic, record.partition))
                try:
                    event = await role.events.decode(record) if topic in FOLDED else None
                except UndecodableRecord:
                    continue  # another program's topic of that name; or its own role dead-letters the record
                seen[prefix].take(topic, record, event)
        few *= LAST_FEW
        wanted = [place for place in wanted if place not in met and begin[place] > starts[place]]
    return seen


def _tell(found: Iterable[RunSummary]) -> None:
    table = Table("run", "state", "step", "draws", "last event", "bytes", "checkpoints", "prefix", "kafka", "directory")
    table.columns[0].no_wrap = True  # users copy it
    table.columns[0].overflow = "ignore"
    for run in found:
        planned = "?" if run.draws_planned is None else run.draws_planned
        step = "-" if run.last_step is None else str(run.last_step)
        draws = "-" if run.state in (DOWN, "unreadable") else f"{run.draws_trained} of {planned}"
        sizes = ["-" if size is None else f"{size:,}" for size in (run.bytes, run.checkpoint_bytes)]
        where = f"{run.directory} ({run.why})" if run.why else run.directory
        table.add_row(run.run, run.state, step, draws, run.last_event or "-", *sizes, run.prefix, run.kafka, where)
    Terminal().print(table)
