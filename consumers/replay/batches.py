"""Batches checked against the samples on the log: rows, weights, hashes and the file, each sample read where the
manifest says that it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

from turnlog.infra.batch_files import CorruptBatch, read_rows
from turnlog.infra.blobs import BlobError
from turnlog.infra.log import Log, Partition, Reader, Record
from turnlog.infra.payloads import inlined
from turnlog.infra.role import Role
from turnlog.names import RECORD_HEADER
from turnlog.processors.core.batches.draws import DrawRules, FormedBatch, PlacedSample, reform_batch
from turnlog.processors.core.batches.rows import rows_sha256
from turnlog.processors.core.batches.weight_chain import recorded_version
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import BatchSample, GroupScored, SampleBatchFormed, SegmentSample
from turnlog.schemas.topics import SAMPLES

SCORE = GroupScored.__name__.encode()
CACHE_BYTES = 32 << 20
"""Per partition: samples that were passed on the way to others, since draws do not keep the order of the log."""


class SampleReader:
    """Samples of one partition by offset. Reads forward, and back only for what is no longer held."""

    def __init__(self, place: Partition, reader: Reader, start: int, end: int) -> None:
        self._place = place
        self._reader = reader
        self._end = end
        self._held: dict[int, Record] = {}
        """In order of offset read."""
        self._bytes = 0
        reader.assign({place: start})

    async def get(self, offsets: Iterable[int]) -> dict[int, Record]:
        """Records at these offsets; what is not there is absent."""
        wanted = set(offsets)
        found = {offset: self._take(offset) for offset in wanted & self._held.keys()}
        missing = {offset for offset in wanted - found.keys() if offset < self._end}
        if missing and min(missing) < self._reader.position(self._place):
            self._reader.seek(self._place, min(missing))
        while missing and self._reader.position(self._place) <= max(missing):
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
    """Samples of every partition, by the places that manifests name."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._readers: dict[int, SampleReader] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Samples:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def placed(self, rows: Iterable[tuple[str, int, int]]) -> dict[str, PlacedSample]:
        """(sample id, partition, offset) -> the sample that stands there, if it is that one. Payloads come inline.
        Raises BlobError, LogError, RegistryUnavailable."""
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


def named(rows: Iterable[BatchSample]) -> list[tuple[str, int, int]]:
    """What `Samples.placed` takes."""
    return [(row.sample_id, row.partition, row.offset) for row in rows]


async def batch_difference(
    role: Role, manifest: SampleBatchFormed, samples: Mapping[str, PlacedSample], rules: DrawRules
) -> str | None:
    """Why a batch differs from its manifest or its file; None when it does not."""
    where = f"batch {manifest.batch_index}"
    missing = next((row for row in manifest.samples if row.sample_id not in samples), None)
    if missing is not None:
        place = f"{SAMPLES.name}[{missing.partition}]@{missing.offset}"
        return f"{where}: sample {missing.sample_id} does not stand at {place}, where the manifest says"
    held = recorded_version(manifest.trainer_version, manifest.lags)
    again = reform_batch(manifest.samples, samples, held, rules)
    if difference := _manifest_difference(manifest, again):
        return f"{where}: {difference}"
    sha256 = rows_sha256(again.rows)
    if sha256 != manifest.rows_sha256:
        return f"{where}: the rows hash to {sha256[:16]}, the manifest says {manifest.rows_sha256[:16]}"
    try:
        trained = rows_sha256(read_rows(await role.blobs.get(manifest.file)))
    except (BlobError, CorruptBatch) as error:
        return f"{where}: its file cannot be read: {error}"
    return None if trained == manifest.rows_sha256 else f"{where}: the file holds other rows than the manifest says"


def _manifest_difference(manifest: SampleBatchFormed, again: FormedBatch) -> str | None:
    if again.samples != manifest.samples:
        for row, other in zip(manifest.samples, again.samples, strict=True):
            for name in ("sample_id", "tokens", "trained_tokens", "weight_divisor"):
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
