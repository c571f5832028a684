"""Checks batches against the samples on the log, and forms the recorded rollout batches again under other rules.

The check covers rows, weights, hashes and the file. Each sample is read at the offset that the manifest names. Forming
a rollout batch again writes one Arrow file per batch, with its weight columns. Which groups were drawn together and
which version the trainer held are recorded decisions and stay; lengths, masks, admission, weights and the cut into
batches follow the rules.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.batch_files import CorruptBatch, build_batch_file, open_rows
from turnlog.infra.blobs import BlobError, inlined
from turnlog.infra.history import caught_up, events
from turnlog.infra.log import Log, Partition, Reader, Record
from turnlog.infra.roles.role import Role
from turnlog.names import RECORD_HEADER
from turnlog.processors.core.batches.draws import (
    DrawRules,
    FormedBatch,
    PlacedSample,
    ReadableGroup,
    form_draw,
    reform_batch,
)
from turnlog.processors.core.batches.rows import ROWS_VERSIONS, rows_sha256
from turnlog.processors.core.views.progress import HeldVersion, recorded_version
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import BatchSample, GroupScored, SampleBatchFormed, SegmentSample
from turnlog.schemas.topics import BATCHES, SAMPLES

SCORE = GroupScored.__name__.encode()
CACHE_BYTES = 32 << 20
"""Cache size per partition in bytes. It keeps samples that were read on the way to others, because rollout batches do
not follow the order of the log."""


class SampleReader:
    """Reader of one partition's samples by offset. Reads forward, and seeks back only for samples that left the
    cache."""

    def __init__(self, place: Partition, reader: Reader, start: int, end: int) -> None:
        self._place = place
        self._reader = reader
        self._end = end
        self._held: dict[int, Record] = {}
        """Cached records by offset, oldest read first."""
        self._bytes = 0
        reader.assign({place: start})

    async def get(self, offsets: Iterable[int]) -> dict[int, Record]:
        """Return the records at these offsets. Offsets without a record are absent from the result."""
        wanted = set(offsets)
        found = {offset: self._take(offset) for offset in wanted & self._held.keys()}
        missing = {offset for offset in wanted - found.keys() if offset < self._end}
        if missing and min(missing) < self._reader.position(self._place):
            self._reader.seek(self._place, min(missing))
        while missing and not caught_up(self._reader, {self._place: max(missing) + 1}):
            for record in await self._reader.poll():
                if record.offset in missing:
                    found[record.offset] = record
                else:
                    self._hold(record)
            missing -= found.keys()
        return found

    def _hold(self, record: Record) -> None:
        if record.offset not in self._held and dict(record.headers).get(RECORD_HEADER) != SCORE:
            self._held[record.offset] = record
            self._bytes += len(record.value)
        while self._bytes > CACHE_BYTES:
            self._take(next(iter(self._held)))

    def _take(self, offset: int) -> Record:
        record = self._held.pop(offset)
        self._bytes -= len(record.value)
        return record


class Samples:
    """Reader of samples of all partitions by the offsets that manifests name."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._readers: dict[int, SampleReader] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Samples:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def read_samples(self, rows: Iterable[tuple[str, int, int]]) -> dict[str, PlacedSample]:
        """Return samples by id, from rows of (sample id, partition, offset). A row whose offset holds another record is
        absent from the result. Payloads are inline. Raises BlobError, LogError, RegistryUnavailable."""
        by_partition: dict[int, dict[int, str]] = {}
        for sample_id, partition, offset in rows:
            by_partition.setdefault(partition, {})[offset] = sample_id
        found: dict[str, PlacedSample] = {}
        for partition, wanted in by_partition.items():
            for offset, record in (await (await self._reader(partition)).get(wanted)).items():
                try:
                    event = await inlined(await self._role.events.decode(record), self._role.blobs)
                except UndecodableRecord:
                    continue
                if isinstance(event, SegmentSample) and event.sample_id == wanted[offset]:
                    found[event.sample_id] = PlacedSample(event, partition, offset)
        return found

    async def _reader(self, partition: int) -> SampleReader:
        if partition not in self._readers:
            log: Log = self._role.log
            place = Partition(SAMPLES.name, partition)
            start, end = (await log.start_offsets([place]))[place], (await log.end_offsets([place]))[place]
            reader = await self._stack.enter_async_context(log.reader())
            self._readers[partition] = SampleReader(place, reader, start, end)
        return self._readers[partition]


def sample_positions(rows: Iterable[BatchSample]) -> list[tuple[str, int, int]]:
    """Convert manifest rows to the arguments of `Samples.read_samples`."""
    return [(row.sample_id, row.partition, row.offset) for row in rows]


async def batch_difference(
    role: Role, manifest: SampleBatchFormed, samples: Mapping[str, PlacedSample], rules: DrawRules
) -> str | None:
    """Explain how a batch differs from its manifest or its file; return None if it does not."""
    where = f"batch {manifest.batch_index}"
    missing = next((row for row in manifest.samples if row.sample_id not in samples), None)
    if missing is not None:
        place = f"{SAMPLES.name}[{missing.partition}]@{missing.offset}"
        return f"{where}: sample {missing.sample_id} is not at {place}, where the manifest says"
    held = recorded_version(manifest.trainer_version, manifest.lags)
    again = reform_batch(manifest.samples, samples, held, rules)
    erased = any(holds_erased(placed.sample) for placed in samples.values())
    if erased:
        again = _with_recorded_prefixes(manifest, again)
    if difference := _manifest_difference(manifest, again):
        return f"{where}: {difference}"
    if manifest.rows_version not in ROWS_VERSIONS:
        return f"{where}: its rows have version {manifest.rows_version}, which this release does not support"
    sha256 = rows_sha256(again.rows, manifest.rows_version)
    if sha256 != manifest.rows_sha256 and not erased:
        return f"{where}: the rows hash to {sha256[:16]}, the manifest says {manifest.rows_sha256[:16]}"
    try:
        rows = open_rows(await role.blobs.get(manifest.file), role.events.keys).rows
    except (BlobError, CorruptBatch) as error:
        return f"{where}: its file cannot be read: {error}"
    # What was erased has the token 0 on both sides, so that the other rows are compared as before.
    trained = rows_sha256(rows, manifest.rows_version)
    return None if trained == sha256 else f"{where}: the rows of the file differ from the manifest"


def _with_recorded_prefixes(manifest: SampleBatchFormed, again: FormedBatch) -> FormedBatch:
    """Return the batch with the shared prefixes of the manifest, since those of erased tokens are unknown."""
    if len(again.samples) != len(manifest.samples):
        return again
    samples = tuple(
        dataclasses.replace(row, parent_row=told.parent_row, shared_tokens=told.shared_tokens)
        for row, told in zip(again.samples, manifest.samples, strict=True)
    )
    return dataclasses.replace(again, samples=samples)


def _manifest_difference(manifest: SampleBatchFormed, again: FormedBatch) -> str | None:
    if again.samples != manifest.samples:
        for row, other in zip(manifest.samples, again.samples, strict=True):
            for name in ("sample_id", "tokens", "trained_tokens", "weight_divisor", "parent_row", "shared_tokens"):
                if getattr(row, name) != getattr(other, name):
                    return (
                        f"row of sample {row.sample_id}: {name} is {getattr(row, name)} in the manifest, "
                        f"{getattr(other, name)} as formed again"
                    )
        return "its rows are not in the order of the manifest"
    counted = {
        "prompts": again.weights.prompts,
        "trajectories": again.weights.trajectories,
        "trained_tokens": again.weights.trained_tokens,
        "constant_length": again.weights.constant_length,
        "max_lag": again.max_lag,
        "whitening_mean": again.whitening.mean if again.whitening else None,
        "whitening_std": again.whitening.std if again.whitening else None,
    }
    for name, value in counted.items():
        if getattr(manifest, name) != value:
            return f"{name} is {getattr(manifest, name)} in the manifest, {value} as formed again"
    return None


FOLDER = "batches"
INDEX = "index.jsonl"
"""Name of the index file: one JSON line per batch, with what its manifest would contain."""
GroupOf = Callable[[str], ReadableGroup | None]


@dataclass(slots=True)
class Draw:
    """A recorded rollout batch."""

    index: int
    held: HeldVersion
    groups: list[str]
    """Group ids, in the order of its batches."""


async def recorded_draws(role: Role, until_ms: int | None) -> AsyncIterator[Draw]:
    """Yield the rollout batches that formed at least one batch, in order. Skipped ones are left out: they do not record
    the version of the trainer."""
    draw: Draw | None = None
    async for record, manifest in events(role, BATCHES):
        if not isinstance(manifest, SampleBatchFormed) or (until_ms is not None and record.timestamp_ms > until_ms):
            continue
        if draw is not None and draw.index != manifest.draw_index:
            yield draw
            draw = None
        draw = draw or Draw(manifest.draw_index, recorded_version(manifest.trainer_version, manifest.lags), [])
        draw.groups += [group for group in manifest.groups if group not in draw.groups]
    if draw is not None:
        yield draw


class DrawWriter:
    """Writer of batches below OUT/batches. A successor of a killed writer resumes after the last complete rollout
    batch."""

    def __init__(self, out: Path, rules: DrawRules, group_of: GroupOf) -> None:
        self._rules = rules
        self._group_of = group_of
        self._part = out / f"{FOLDER}.part"
        self._done = out / FOLDER
        self._part.mkdir(parents=True, exist_ok=True)
        self._lines = self._whole_draws()
        self.batches = sum(bool(line["rows"]) for line in self._lines)

    def _whole_draws(self) -> list[dict[str, object]]:
        """Return the index lines of complete rollout batches. The last one counts only if its final line is marked
        `last`."""
        index = self._part / INDEX
        text = index.read_text() if index.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        while lines and not lines[-1]["last"]:
            lines.pop()
        index.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return lines

    def write(self, draw: Draw) -> None:
        """Form one rollout batch and write its files. Raises WeightsDoNotAddUp, OSError."""
        if self._lines and draw.index <= int(str(self._lines[-1]["draw"])):
            return
        groups = [group for name in draw.groups if (group := self._group_of(name)) is not None]
        formed = form_draw(groups, draw.held, self._rules)
        dropped = [{"sample_id": row.sample_id, "reason": row.reason} for row in formed.dropped]
        lines: list[dict[str, object]] = [self._batch(draw, part, batch) for part, batch in enumerate(formed.batches)]
        lines = lines or [{"draw": draw.index, "rows": 0}]
        for part, line in enumerate(lines):
            line |= {"dropped": [] if part else dropped, "last": part == len(lines) - 1}
        with (self._part / INDEX).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self._lines += lines

    def close(self) -> None:
        """Rename the folder to its final name, once everything is written."""
        os.replace(self._part, self._done)

    def _batch(self, draw: Draw, part: int, batch: FormedBatch) -> dict[str, object]:
        name = f"batch-{self.batches:06d}.arrow"
        self.batches += 1
        content, sha256 = build_batch_file(batch, self._rules.weighting)
        (self._part / name).write_bytes(content)
        weights = batch.weights
        return {
            "draw": draw.index,
            "part": part,
            "file": name,
            "rows": len(batch.rows),
            "rows_sha256": sha256,
            "groups": list(batch.groups),
            "weighting": self._rules.weighting.value,
            "prompts": weights.prompts,
            "trajectories": weights.trajectories,
            "trained_tokens": weights.trained_tokens,
            "constant_length": weights.constant_length,
            "trainer_version": draw.held.number,
            "max_lag": batch.max_lag,
            "masked": batch.masked,
        }
