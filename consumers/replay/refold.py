"""Refold: write a dataset of the samples that the fold gives under other settings, and the batches of the recorded
rollout batches with their new weights. Nothing is written to the log.

Keys of [fold] and [batcher] and the fold version may change; all else is as the run recorded it. Folding first writes
to a spool on disk, one file per partition, so that a killed refold resumes where it stopped. Bytes beyond the length in
the saved state were not counted yet, so a successor truncates them. The dataset is written from the spool at the end,
all or nothing.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.consumers.datasets.build import build
from turnlog.consumers.datasets.manifest import DatasetManifest, Provenance
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.consumers.replay.batches import FOLDER as BATCHES
from turnlog.consumers.replay.batches import DrawWriter, recorded_draws
from turnlog.consumers.replay.progress import ProgressReceiver, ReplayState
from turnlog.consumers.replay.source import (
    BadRefold,
    BrokenFold,
    Inputs,
    Merge,
    Skips,
    SkipsFound,
    Until,
    erased_sessions,
    fresh,
    moment,
    places,
    recorded_run,
)
from turnlog.consumers.replay.unit import HistoryFold, UnitState, tokens_of
from turnlog.consumers.replay.verify import ARCHIVE, FORGET_EVERY, cuts_of, replay_key
from turnlog.infra.archive import ArchiveLog, Cut
from turnlog.infra.garbage import cheap_collections
from turnlog.infra.history import recorded_erasures
from turnlog.infra.log import Log, Partition
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.batches.draws import DrawRules, PlacedSample, ReadableGroup
from turnlog.processors.core.fold_versions import SPINE
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import Event, GroupScored, SegmentSample
from turnlog.settings import (
    FOLD_SECTIONS,
    Settings,
    SettingsError,
    fold_settings_json,
    override_settings,
    recorded_keys,
    settings_sha256,
)

if TYPE_CHECKING:  # it imports verifiers, which other refolds do not need
    from turnlog.consumers.replay.rejudge import Verdicts


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed keys of [fold] and [batcher] with their new values as text, and a changed fold version."""

    fold: dict[str, str] = field(default_factory=dict)
    batcher: dict[str, str] = field(default_factory=dict)
    fold_version: str | None = None
    """Fold version; None keeps the one that the run recorded."""

    @property
    def none(self) -> bool:
        """True if nothing changes."""
        return not self.fold and not self.batcher and self.fold_version is None

    @property
    def folds(self) -> bool:
        """True if the samples may change, so that a dataset of them is written."""
        return bool(self.fold) or self.fold_version is not None

    def settings(self, recorded: Configured) -> Settings:
        """Apply the changes to the recorded sections. Raises BadRefold."""
        variables: dict[str, str] = {}
        for section in ("fold", "batcher"):
            keys = recorded_keys(FOLD_SECTIONS[section])
            for name, value in getattr(self, section).items():
                if name not in keys:
                    raise BadRefold(f"[{section}] has no key {name} that a refold can change: {', '.join(keys)}")
                variables[f"TURNLOG_{section}_{name}".upper()] = value
        try:
            before = Settings(fold=recorded.fold, batcher=recorded.batcher, assembler=recorded.assembler)
            return override_settings(before, {}, variables, source="--set")
        except SettingsError as error:
            raise BadRefold(str(error)) from error


LENGTH = struct.Struct("<I")


class Spool:
    """File of the events of one partition, group by group: the samples, then the score."""

    def __init__(self, path: Path, codec: Codec, *, length: int = 0) -> None:
        """Open the file and truncate it to `length` bytes."""
        self.path = path
        self.codec = codec
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, length)
        self._file = path.open("r+b")
        self._file.seek(length)

    @property
    def length(self) -> int:
        """Length of the file in bytes."""
        return self._file.tell()

    def append(self, events: Sequence[Event]) -> int:
        """Append one group and return the position where it begins."""
        at = self._file.tell()
        values = [self.codec.encode(event) for event in events]
        self._file.write(LENGTH.pack(len(values)))
        for value in values:
            self._file.write(LENGTH.pack(len(value)))
            self._file.write(value)
        return at

    def sync(self) -> int:
        """Flush everything to disk and return the length."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.length

    def groups(self) -> Iterator[tuple[int, list[Event]]]:
        """Yield (position, events) of every group, in order."""
        self._file.flush()
        at, end = 0, self.length
        while at < end:
            events = self.group(at)
            yield at, events
            at = self._read_end

    def group(self, at: int) -> list[Event]:
        """Return the events of the group that begins at a position."""
        self._file.flush()
        with self.path.open("rb") as file:
            file.seek(at)
            (count,) = LENGTH.unpack(file.read(LENGTH.size))
            events = []
            for _ in range(count):
                (size,) = LENGTH.unpack(file.read(LENGTH.size))
                events.append(self.codec.decode(file.read(size)))
            self._read_end = file.tell()
        return events

    def close(self) -> None:
        """Close the file without deleting it."""
        self._file.close()

    def remove(self) -> None:
        """Close and delete the file, once the dataset is written."""
        self._file.close()
        self.path.unlink(missing_ok=True)


@dataclass(slots=True)
class Refold:
    """A refold of the run that `role` reads."""

    role: Role
    changes: Changes
    out: Path
    folder: Path
    """Folder of the state that a killed refold resumes from."""
    _: KW_ONLY
    format: str = "parquet"
    until: str | None = None
    overwrite: bool = False
    save_every_s: float = 5.0
    verdicts: Verdicts | None = None
    view: str = "rl"
    query: Query = field(default_factory=Query)
    """Selection of rows for views other than `rl`."""
    _spools: dict[int, Spool] = field(default_factory=dict, init=False)
    _index: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Group id -> (partition, position in its spool)."""

    async def run(self, *, progress: ProgressReceiver | None = None, fresh: bool = False) -> str:
        """Fold everything, write the requested outputs, and return one line that describes them."""
        progress = progress or ProgressReceiver()
        recorded = await recorded_run(self.role)
        settings = self.changes.settings(recorded)
        sha256 = settings_sha256(fold_settings_json(settings))
        now = dataclasses.replace(
            recorded, fold=settings.fold, batcher=settings.batcher, settings_sha256=sha256,
            fold_version=self.changes.fold_version or recorded.fold_version,
        )  # fmt: skip
        rules, draw_rules = now.rules(), now.draw_rules()
        erased = await erased_sessions(self.role)
        question = replay_key(self.role, self.until, now, erased) | {"refold": True}
        if self.verdicts is not None:
            question |= {
                "verdicts": self.verdicts.key(),
                "view": self.view,
                "query": self.query.non_default_values(),
            }
        state = ReplayState(self.folder, question, every_s=self.save_every_s)
        state.load(fresh=fresh)
        cuts = await cuts_of(self.role, state)
        until = None if self.until is None else await moment(self.role, self.until)
        self._check_free(state)
        progress.begin("folding again", sum(sum(cut.high.values()) for cut in cuts.values()))
        try:
            with cheap_collections():
                for unit, cut in cuts.items():
                    await self._fold_unit(unit, cut, rules, until, state, progress)
            said = await self._write_outputs(draw_rules, until, await self._provenance(cuts, now), state)
        finally:
            for spool in self._spools.values():
                spool.close()
        state.remove()
        for spool in self._spools.values():
            spool.remove()
        return said

    async def _fold_unit(
        self, unit: int, cut: Cut, rules: FoldRules, until: Until | None, state: ReplayState, progress: ProgressReceiver
    ) -> None:
        """Fold one partition into its spool, from where a killed refold stopped."""
        kept: dict[str, Any] = state.sections.setdefault("units", {}).get(str(unit)) or {}
        path = self.folder / f"{state.name}-{unit}.spool"
        self._spools[unit] = spool = Spool(path, self.role.events.codec, length=kept.get("spool", 0))
        if kept.get("whole"):
            return
        skips: Skips = frozenset((topic, offset) for topic, offset in kept.get("skips", ()))
        unit_state = UnitState.from_json(kept["state"]) if kept else await fresh(self.role, cut)
        run_id = self.role.settings.run.id
        erasures = await recorded_erasures(self.role.log, self.role.events, Partition(SPINE, unit), run_id)
        while True:
            placed = None if self.verdicts is None else self.verdicts.substitute_event
            inputs = Inputs(self.role, rules, unit, skips, placed, erasures)
            fold = HistoryFold(unit_state, rules, erasures=erasures)
            work = _UnitRefold(unit, self.role.log, inputs, unit_state, fold, spool, state, progress)
            try:
                await work.run(cut, until)
                break
            except SkipsFound as found:
                skips, unit_state = found.skips, await fresh(self.role, cut)
                spool.close()
                self._spools[unit] = spool = Spool(path, self.role.events.codec)
        state.sections["units"][str(unit)] = {"whole": True, "spool": spool.sync()}
        state.save()

    @property
    def _folds(self) -> bool:
        return self.changes.folds or self.verdicts is not None

    def _check_free(self, state: ReplayState) -> None:
        """Reject outputs that cannot be written, before hours of folding. Raises DatasetError, BadRefold."""
        if self._folds and "dataset" not in state.sections:
            DatasetWriter(self.out, self.view, self.format, overwrite=self.overwrite).abort()
        batches = self.out / BATCHES
        if self.changes.batcher and batches.exists():
            if not self.overwrite:
                raise BadRefold(f"{batches} exists: choose another --out, or --overwrite")
            shutil.rmtree(batches)

    async def _write_outputs(
        self, draw_rules: DrawRules, until: Until | None, provenance: Provenance, state: ReplayState
    ) -> str:
        said: list[str] = []
        if self.changes.batcher or self.view != "rl":
            for unit, spool in self._spools.items():
                self._index |= {events[-1].group_id: (unit, at) for at, events in spool.groups()}
        if self._folds:
            if "dataset" not in state.sections:
                counts = (await self._dataset(provenance)).counts
                state.sections["dataset"] = f"{counts.rows:,} rows, {counts.tokens:,} tokens in {self.out}"
                state.save()
            said.append(state.sections["dataset"])
        if self.changes.batcher:
            writer = DrawWriter(self.out, draw_rules, self._group)
            async for draw in recorded_draws(self.role, None if until is None else until.time_ms):
                writer.write(draw)
            writer.close()
            said.append(f"{writer.batches:,} batches in {self.out / BATCHES}")
        return "; ".join(said)

    async def _dataset(self, provenance: Provenance) -> DatasetManifest:
        if self.view != "rl":
            source = ARCHIVE if isinstance(self.role.log, ArchiveLog) else "topics"
            return await build(
                self.role, self.query, self.out, view=self.view, format=self.format, overwrite=self.overwrite,
                source=source, placed=self._scored_again, provenance=provenance,
            )  # fmt: skip
        with DatasetWriter(self.out, "rl", self.format, overwrite=self.overwrite) as writer:
            for spool in self._spools.values():
                for _, events in spool.groups():
                    writer.add(event for event in events if isinstance(event, SegmentSample))
            return writer.close(provenance)

    def _scored_again(self, event: Event) -> Event | None:
        """Replace a recorded group score by the new one. Return None for a group that was scored after the cut."""
        if not isinstance(event, GroupScored):
            return event
        found = self._group(event.group_id)
        return None if found is None else found.score

    def _group(self, group_id: str) -> ReadableGroup | None:
        if group_id not in self._index:
            return None
        unit, at = self._index[group_id]
        *samples, score = self._spools[unit].group(at)
        assert isinstance(score, GroupScored)
        return ReadableGroup(score, tuple(PlacedSample(sample, unit, -1) for sample in samples))

    async def _provenance(self, cuts: dict[int, Cut], now: Configured) -> Provenance:
        changes = dataclasses.asdict(self.changes)
        query: dict[str, Any] = {"refold": {name: value for name, value in changes.items() if value is not None}}
        if self.verdicts is not None:
            query["rewards"] = self.verdicts.summary()
        if self.until is not None:
            query["until"] = self.until
        found = Provenance(
            query=query,
            runs={self.role.settings.run.id},
            settings_sha256={now.settings_sha256},
            fold_versions={now.fold_version},
        )
        ends = {Partition(topic, unit): end for unit, cut in cuts.items() for topic, end in cut.high.items()}
        starts = await self.role.log.start_offsets(list(ends))
        found.reading.read = {place: (starts[place], end) for place, end in ends.items()}
        return found


@dataclass(slots=True)
class _UnitRefold:
    """An attempt at folding one partition into its spool. A new attempt starts if records have to be skipped."""

    unit: int
    log: Log
    inputs: Inputs
    state: UnitState
    fold: HistoryFold
    spool: Spool
    remembered: ReplayState
    progress: ProgressReceiver

    async def run(self, cut: Cut, until: Until | None) -> None:
        """Fold the inputs up to the cut, and write every completed group to the spool."""
        starts, ends = places(self.unit, self.fold.position), places(self.unit, cut.high)
        since = 0
        async with Merge(self.log, starts, ends, until_ms=None if until is None else until.time_ms) as merge:
            while chunk := await merge.chunk():
                tokens = 0
                for record in chunk:
                    tokens += self._take(await self.inputs.fold(self.fold, record))
                self.progress.advance(len(chunk), tokens)
                since += len(chunk)
                if since >= FORGET_EVERY or self.remembered.due:
                    since = 0
                    self._remember()

    def _take(self, outputs: Sequence[Event]) -> int:
        """Write a group to the spool, and return the tokens of its samples. Samples and score come out of the fold
        together."""
        group = [
            event
            for event in outputs
            if isinstance(event, SegmentSample | GroupScored) and not self.spool.codec.is_erased(event)
        ]
        if group:
            if not isinstance(group[-1], GroupScored):
                raise BrokenFold(f"unit {self.unit}: samples without their score")
            self.spool.append(group)
        return sum(tokens_of(event) for event in group)

    def _remember(self) -> None:
        marks = self.fold.advance()
        if marks is None or not self.remembered.due:
            return
        self.state.marks = marks
        self.remembered.sections["units"][str(self.unit)] = {
            "spool": self.spool.sync(), "skips": sorted(self.inputs.skips), "state": self.state.to_json(),
        }  # fmt: skip
        self.remembered.save()
