"""`turnlog replay --verify`: fold the topics again and compare with what was emitted and trained, record by record.

Everything up to the assembler's committed position is folded; every tree, sample and score must come out with the same
body, and every batch with the same rows, weights and hashes as its manifest and its file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from rich.console import Console

from turnlog.consumers.history import all_events, records
from turnlog.infra.batch_files import CorruptBatch, read_rows
from turnlog.infra.blobs import BlobError
from turnlog.infra.log import Partition, Record
from turnlog.infra.payloads import inlined
from turnlog.infra.role import Role, opened
from turnlog.processors.core.assembler import FoldRules, GroupFold
from turnlog.processors.core.draws import reform_batch
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.low_water import committed_high
from turnlog.processors.core.rows import rows_sha256
from turnlog.processors.core.rules import draw_rules, fold_rules, recorded_settings
from turnlog.processors.core.trimmed import DrawRules, PlacedSample
from turnlog.schemas import topics
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event, RunConfigured, SampleBatchFormed, SegmentSample
from turnlog.settings import Settings

INPUTS = (topics.SESSIONS, topics.TURNS, topics.SNAPSHOTS)
OUTPUTS = (topics.TREES, topics.SAMPLES)


class NothingToReplay(Exception):
    """The run has no RunConfigured on the log: check [run] id and [kafka] prefix."""


@dataclass(slots=True)
class Verdict:
    """What a replay found. `divergence` is the first one, explained."""

    samples_compared: int = 0
    batches_compared: int = 0
    records_compared: int = 0
    divergence: str | None = None

    @property
    def identical(self) -> bool:
        """Nothing differed, and there was something to compare."""
        return self.divergence is None and self.records_compared > 0


@dataclass(slots=True)
class Refolded:
    """Outputs of one unit: body hashes by event_id, and the samples that batches may need."""

    bodies: dict[str, tuple[str, str]] = field(default_factory=dict)
    """event_id -> (record name and what it is about, sha256 of the body)"""
    samples: dict[str, SegmentSample] = field(default_factory=dict)


async def replay(settings: Settings, *, verify: bool, console: Console | None = None) -> int:
    """Print the verdict; 0 when identical, 1 at the first divergence. Without `verify` only counts are shown."""
    console = console or Console()
    async with opened("replay", settings) as role:
        with console.status("folding the topics again"):
            verdict = await run(role)
    compared = f"{verdict.samples_compared:,} samples, {verdict.batches_compared} batches, "
    compared += f"{verdict.records_compared:,} records compared"
    if not verify:
        console.print(compared)
        return 0
    if verdict.identical:
        console.print(f"replay: [green]identical[/green] ({compared})")
        return 0
    console.print(f"replay: [red]DIFFERENT[/red] ({compared})\nfirst divergence: {verdict.divergence or 'no records'}")
    return 1


async def run(role: Role) -> Verdict:
    """Replay the run of `role`. Raises NothingToReplay."""
    configured = [event for event in await all_events(role, topics.RUNS) if isinstance(event, RunConfigured)]
    if not configured:
        raise NothingToReplay(f"no RunConfigured of run {role.settings.run.id!r} is on the log; check [run] id")
    fold, batcher = recorded_settings(configured[0].settings)
    rules = fold_rules(fold, run_id=role.settings.run.id, settings_sha256=configured[0].settings_sha256)
    verdict = Verdict()
    samples: dict[str, PlacedSample] = {}
    for unit in range(role.settings.kafka.groups):
        await _verify_unit(role, unit, rules, verdict, samples)
        if verdict.divergence:
            return verdict
    manifests = await all_events(role, topics.BATCHES)
    for manifest in manifests:
        if isinstance(manifest, SampleBatchFormed) and not verdict.divergence:
            verdict.divergence = await _verify_batch(role, manifest, samples, draw_rules(fold, batcher))
            verdict.batches_compared += verdict.divergence is None
    return verdict


async def _verify_unit(
    role: Role, unit: int, rules: FoldRules, verdict: Verdict, samples: dict[str, PlacedSample]
) -> None:
    """Refold unit `unit` and hold each emitted record against it; keeps the samples for the batches."""
    highs = await _high(role, unit)
    refolded = await _refold(role, highs, rules)
    wanted = [Partition(topic.name, unit) for topic in OUTPUTS]
    ends = await role.log.end_offsets(wanted)
    async for record in records(role, wanted, ends):
        event = await inlined(await role.events.decode(record), role.blobs)
        if event.run_id != role.settings.run.id:
            continue
        verdict.divergence = _compare(record, event, refolded, role)
        if verdict.divergence:
            return
        verdict.records_compared += 1
        if isinstance(event, SegmentSample):
            verdict.samples_compared += 1
            placed = PlacedSample(refolded.samples.pop(event.event_id), record.partition, record.offset)
            samples[event.sample_id] = placed
    for about, _ in refolded.bodies.values():
        verdict.divergence = f"unit {unit}: the fold gives {about}, which was never emitted"
        return


def _compare(record: Record, event: Event, refolded: Refolded, role: Role) -> str | None:
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    again = refolded.bodies.pop(event.event_id, None)
    if again is None:
        return f"{where}: {_about(event)} was emitted, the fold does not give it (or it was emitted twice)"
    if again[1] == _body_sha256(role, event):
        return None
    return f"{where}: {_about(event)} differs: {_first_difference(event, refolded.samples.get(event.event_id))}"


def _first_difference(event: Event, again: SegmentSample | None) -> str:
    if again is None:
        return "its body"
    for name in type(event).__slots__:
        emitted, folded = getattr(event, name), getattr(again, name)
        if emitted != folded:
            if isinstance(emitted, bytes) and isinstance(folded, bytes):
                at = next((i for i, (a, b) in enumerate(zip(emitted, folded, strict=False)) if a != b), None)
                return f"{name}, at entry {'the end' if at is None else at // 4}"
            return f"{name}: emitted {emitted!r}, folded {folded!r}"
    return "its encoding"


async def _high(role: Role, unit: int, *, patience_s: float = 30.0) -> dict[Partition, int]:
    """How far the unit's assembler has folded, per input partition; waits while a live one still catches up."""
    inputs = [Partition(topic.name, unit) for topic in INPUTS]
    ends = await role.log.end_offsets(inputs)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        commits = await role.log.commits(f"{role.settings.run.id}.assembler", inputs)
        highs = {partition: committed_high(commits[partition].metadata) for partition in commits}
        behind = any(highs.get(partition, 0) < ends[partition] for partition in inputs)
        if not behind or loop.time() > deadline:
            return {partition: highs.get(partition, 0) for partition in inputs}
        await asyncio.sleep(0.2)  # the commit of another process is no event that we could await


async def _refold(role: Role, highs: dict[Partition, int], rules: FoldRules) -> Refolded:
    refolded = Refolded()
    groups: dict[str, GroupFold] = {}
    done: set[str] = set()
    async for record, event in _decoded(role, records(role, list(highs), highs)):
        if event.group_id in done:
            continue
        group = groups.get(event.group_id) or GroupFold(event.group_id, event.floor, rules)
        groups[event.group_id] = group
        for output in _outputs(group, record, event):
            about, body = _about(output), _body_sha256(role, output)
            refolded.bodies[output.event_id] = (about, body)
            if isinstance(output, SegmentSample):
                refolded.samples[output.event_id] = output
        if group.complete:
            done.add(event.group_id)
            del groups[event.group_id]
    return refolded


async def _decoded(role: Role, history: AsyncIterator[Record]) -> AsyncIterator[tuple[Record, Event]]:
    async for record in history:
        try:
            event = await role.events.decode(record)
        except UndecodableRecord:
            continue  # parked by the assembler; no part of any fold
        if event.run_id == role.settings.run.id:
            yield record, await inlined(event, role.blobs)


def _outputs(group: GroupFold, record: Record, event: Event) -> list[Event]:
    try:
        return group.apply(record.topic, record.offset, event)
    except FoldError as refused:
        return refused.outputs


async def _verify_batch(
    role: Role, manifest: SampleBatchFormed, samples: dict[str, PlacedSample], rules: DrawRules
) -> str | None:
    """Why the batch differs from its manifest or its file; None when it does not. Frees the samples it used."""
    where = f"batch {manifest.batch_index}"
    missing = [row.sample_id for row in manifest.samples if row.sample_id not in samples]
    if missing:
        return f"{where}: sample {missing[0]} is in the manifest, not among the samples of the log"
    again = reform_batch(manifest.samples, samples, manifest.trainer_version, rules)
    if again.samples != manifest.samples:
        row = next(row for row, other in zip(again.samples, manifest.samples, strict=True) if row != other)
        return f"{where}: row of sample {row.sample_id} has other weights or counts"
    if rows_sha256(again.rows) != manifest.rows_sha256:
        return (
            f"{where}: the rows hash to {rows_sha256(again.rows)[:16]}, the manifest says {manifest.rows_sha256[:16]}"
        )
    try:
        trained = rows_sha256(read_rows(await role.blobs.get(manifest.file)))
    except (BlobError, CorruptBatch) as error:
        return f"{where}: its file cannot be read: {error}"
    for row in manifest.samples:
        del samples[row.sample_id]
    return None if trained == manifest.rows_sha256 else f"{where}: the file holds other rows than the manifest says"


def _body_sha256(role: Role, event: Event) -> str:
    return hashlib.sha256(role.events.codec.encode(event)).hexdigest()


def _about(event: Event) -> str:
    session = getattr(event, "session_id", None)
    return f"{type(event).__name__} of " + (f"session {session}" if session else f"group {event.group_id}")
