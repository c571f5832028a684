"""Replay: fold the log again, from topics or the archive, and compare with what was emitted and trained.

Everything up to a Cut is folded. Every tree, sample and score must come out with the same bytes. Every batch must come
out with the same rows, weights and hashes as its manifest and its file. With other settings, a refold writes a
dataset instead (refold.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.consumers.replay.batches import Samples, batch_difference, sample_positions
from turnlog.consumers.replay.progress import ProgressReceiver, ReplayState
from turnlog.consumers.replay.source import (
    POLL_RECORDS,
    BrokenFold,
    Inputs,
    LoneGroup,
    Merge,
    Skips,
    SkipsFound,
    Until,
    cut_of,
    erased_sessions,
    fresh,
    moment,
    places,
    recorded_run,
)
from turnlog.consumers.replay.unit import (
    HELD_BYTES,
    HistoryFold,
    OutputMatcher,
    Suspect,
    UnitState,
    about,
    digest_of,
    first_difference,
)
from turnlog.infra.archive import ArchiveLog, Cut
from turnlog.infra.blobs import BlobMissing, inlined
from turnlog.infra.garbage import cheap_collections
from turnlog.infra.history import recorded_erasures
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.batches.draws import DrawRules
from turnlog.processors.core.fold.erasure import Erasures
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import OUTPUTS, SPINE
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import SampleBatchFormed
from turnlog.schemas.topics import BATCHES

FORGET_EVERY = 500
"""Number of records between two attempts to forget finished groups."""
ARCHIVE = "archive"
FOLDER = "replay"
"""Folder in the run's directory that stores the state of unfinished replays."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Limits on how much of a history a replay holds in memory at once."""

    poll_records: int = POLL_RECORDS
    held_bytes: int = HELD_BYTES
    forget_every: int = FORGET_EVERY


MEMORY = Memory()


@dataclass(slots=True)
class ReplayResult:
    """Result of a replay. `divergence` explains the first difference."""

    samples_compared: int = 0
    batches_compared: int = 0
    records_compared: int = 0
    divergence: str | None = None
    batches_later: int = 0
    """Batches of samples beyond the cut, which were not compared."""
    resumed: bool = False

    @property
    def identical(self) -> bool:
        """True if nothing differed and there was something to compare."""
        return self.divergence is None and self.records_compared > 0

    @property
    def comparison_summary(self) -> str:
        """Summary of what was compared, in words."""
        later = f", {self.batches_later} batches formed later" if self.batches_later else ""
        return (
            f"{self.samples_compared:,} samples, {self.batches_compared} batches, {self.records_compared:,} records "
            f"compared{later}"
        )


async def run(
    role: Role,
    *,
    until: str | None = None,
    progress: ProgressReceiver | None = None,
    folder: Path | None = None,
    fresh: bool = False,
    save_every_s: float = 5.0,
    memory: Memory = MEMORY,
    group_fold: type[GroupFold] = GroupFold,
) -> ReplayResult:
    """Replay the run that `role` reads. `folder` stores the state that a killed replay resumes from; without it,
    nothing is stored. Raises ReplayError, LogError, BlobError, RegistryError."""
    found = await recorded_run(role)
    question_key = replay_key(role, until, found, await erased_sessions(role))
    state = ReplayState(folder, question_key, every_s=save_every_s)
    state.load(fresh=fresh)
    cuts = await cuts_of(role, state)
    limit = None if until is None else await moment(role, until)
    question = ReplayContext(role, found, cuts, limit, state, progress or ProgressReceiver(), memory, group_fold)
    question.progress.begin("folding again", await _total(role, cuts))
    verdict = ReplayResult(resumed=state.resumed)
    done: dict[str, dict[str, int]] = state.sections.setdefault("done", {})
    with cheap_collections():
        for unit in cuts:
            if str(unit) not in done:
                verdict.divergence, done[str(unit)] = await verify_unit(question, unit)
                state.sections.pop("unit", None)
            verdict.records_compared += done[str(unit)].get("records", 0)
            verdict.samples_compared += done[str(unit)].get("samples", 0)
            if verdict.divergence is not None:
                break
    if verdict.divergence is None:
        state.save()
        await verify_batches(question, found.draw_rules(), verdict)
    state.remove()
    return verdict


def replay_key(role: Role, until: str | None, configured: Configured, erased: Iterable[str]) -> dict[str, Any]:
    """Return the values that must match for the stored state of a killed replay to be used. `erased` are the sessions
    that were erased before it began: others give other values from then on."""
    source = role.log.index.root if isinstance(role.log, ArchiveLog) else f"topics {role.settings.kafka.prefix}"
    return {
        "run": role.settings.run.id,
        "source": source,
        "until": until,
        "settings": configured.settings_sha256,
        "fold": configured.fold_version,
        "units": role.settings.kafka.groups,
        "erased": sorted(erased),
    }


async def cuts_of(role: Role, state: ReplayState) -> dict[int, Cut]:
    """Return the cut of every partition. A resumed attempt uses its stored cuts, so that what it compared stays
    valid."""
    if "cuts" not in state.sections:
        cuts = [await cut_of(role, unit) for unit in range(role.settings.kafka.groups)]
        state.sections["cuts"] = [cut.as_json() for cut in cuts]
    return {cut.unit: cut for cut in map(Cut.from_json, state.sections["cuts"])}


async def _total(role: Role, cuts: dict[int, Cut]) -> int:
    ends = {Partition(t, unit): end for unit, cut in cuts.items() for t, end in {**cut.high, **cut.ends}.items()}
    starts = await role.log.start_offsets(list(ends))
    return sum(max(end - starts[place], 0) for place, end in ends.items())


UNKNOWN = "unknown"


@dataclass(slots=True)
class ReplayContext:
    """Everything that the parts of one replay share."""

    role: Role
    configured: Configured
    cuts: dict[int, Cut]
    until: Until | None
    state: ReplayState
    progress: ProgressReceiver
    memory: Memory
    group_fold: type[GroupFold]


async def verify_unit(question: ReplayContext, unit: int) -> tuple[str | None, dict[str, int]]:
    """Fold one partition and compare it with its outputs: return the first difference, and what was compared if there
    is none. Start again without the records that an operator asked to skip, once the fold stops at one, and with the
    present erasures, if a session was erased meanwhile. Raises ReplayError, LogError, BlobError,
    RegistryUnavailable."""
    kept: dict[str, Any] = question.state.sections.get("unit") or {}
    skips: Skips = frozenset()
    state: UnitState | None = None
    if kept.get("number") == unit:
        skips = frozenset((topic, offset) for topic, offset in kept["skips"])
        state = UnitState.from_json(kept["state"])
    role = question.role
    while True:
        erased = await erased_sessions(role)
        erasures = await recorded_erasures(role.log, role.events, Partition(SPINE, unit), role.settings.run.id)
        if erasures:  # the fold may not stop any more at a record whose content was erased
            skips |= await Inputs(role, question.configured.rules(), unit).read_skips()
        begun = state or await fresh(role, question.cuts[unit])
        try:
            found = await _Verifier(question, unit, skips, begun, erasures).run()
            if found[0] is None or await erased_sessions(role) == erased:
                return found
        except SkipsFound as requested:
            skips = requested.skips
        except (BrokenFold, BlobMissing):
            if await erased_sessions(role) == erased:
                raise
        state = None


class _Verifier:
    def __init__(self, question: ReplayContext, unit: int, skips: Skips, state: UnitState, erasures: Erasures) -> None:
        self._question = question
        self._unit = unit
        self._state = state
        self._cut = question.cuts[unit]
        role = question.role
        rules = question.configured.rules()
        self._inputs = Inputs(role, rules, unit, skips, erasures=erasures)
        self._fold = HistoryFold(state, rules, question.group_fold, erasures)
        held = question.memory.held_bytes
        self._difference = OutputMatcher(state, role.events.codec, role.settings.run.id, held_bytes=held)
        self._since = 0
        """Records since the last attempt to forget finished groups."""

    async def run(self) -> tuple[str | None, dict[str, int]]:
        """Compare until inputs and outputs are both exhausted."""
        role, state, until = self._question.role, self._state, self._question.until
        starts, ends = places(self._unit, self._fold.position), places(self._unit, self._cut.high)
        beside = places(self._unit, state.outputs), places(self._unit, self._cut.ends)
        limit = None if until is None else until.time_ms
        poll = self._question.memory.poll_records
        async with (
            Merge(role.log, starts, ends, until_ms=limit, poll_records=poll) as inputs,
            Merge(role.log, *beside, poll_records=poll) as outputs,
        ):
            while divergence := await self._next(inputs, outputs):
                if divergence is not UNKNOWN:
                    return divergence, {}
        return await self._left_over(), {"records": state.counts.records, "samples": state.counts.samples}

    async def _next(self, inputs: Merge, outputs: Merge) -> str | None:
        """Fold one chunk, then read emitted records as long as outputs wait for theirs. Return UNKNOWN while there is
        more to do, None at the end, else the first difference."""
        tokens = self._state.counts.folded_tokens
        chunk = await inputs.chunk()
        divergence = await self._fold_all(chunk)
        self._advance(len(chunk), self._state.counts.folded_tokens - tokens)
        more = bool(chunk)
        while divergence is None and (self._difference.wants_records if chunk else self._wants_the_rest):
            found = await outputs.chunk()
            divergence = await self._meet_all(found, keep=bool(chunk) or self._question.until is None)
            self._advance(len(found), 0)
            if not found:
                break
            more = True
        if divergence is None and self._difference.has_excess_outputs:
            divergence = await self._left_over()
        self._remember(outputs)
        return divergence or (UNKNOWN if more else None)

    @property
    def _wants_the_rest(self) -> bool:
        """Whether to read more outputs after all inputs were folded. What is unmatched then stays unmatched, unless it
        derives from inputs after `until`."""
        return bool(self._state.folded) if self._question.until is not None else not self._state.emitted

    async def _fold_all(self, chunk: list[Record]) -> str | None:
        for record in chunk:
            for output in await self._inputs.fold(self._fold, record):
                suspect = self._difference.match_output(output)
                if suspect is not None and (divergence := await self._settle(suspect)):
                    return divergence
        return None

    async def _meet_all(self, chunk: list[Record], *, keep: bool) -> str | None:
        for record in chunk:
            try:
                suspect = self._difference.match_record(record, keep=keep)
            except UndecodableRecord as error:
                return f"{record.topic}[{record.partition}]@{record.offset}: {error}"
            if suspect is not None and (divergence := await self._settle(suspect)):
                return divergence
        return None

    def _advance(self, records: int, tokens: int) -> None:
        self._since += records
        self._question.progress.advance(records, tokens)

    async def _settle(self, suspect: Suspect) -> str | None:
        """Compare the decoded values: under the current schema, with large payloads fetched and externalized again.
        Return None if they are equal, else an explanation."""
        role, codec = self._question.role, self._question.role.events.codec
        where = f"{suspect.topic}[{self._unit}]@{suspect.offset}"
        try:
            record = await self._at(suspect.topic, suspect.offset)
            emitted = await inlined(await role.events.decode(record), role.blobs)
        except UndecodableRecord as error:
            return f"{where}: {suspect.folded.about} cannot be decoded: {error}"
        if digest_of(codec, emitted) == suspect.folded.value.digest:
            self._difference.same(suspect.folded)
            return None
        group = LoneGroup(suspect.folded.group_id)
        await self._inputs.fold_group(group, places(self._unit, self._cut.high))
        folded = next((each for each in group.outputs if each.event_id == suspect.event_id), None)
        if folded is None:
            return f"{where}: {suspect.folded.about} differs, and the fold of its group alone does not give it"
        return f"{where}: {suspect.folded.about} differs: {first_difference(emitted, folded)}"

    async def _at(self, topic: str, offset: int) -> Record:
        place = Partition(topic, self._unit)
        async with self._question.role.log.reader() as reader:
            reader.assign({place: offset})
            while True:
                for record in await reader.poll(max_records=1):
                    return record

    def _remember(self, outputs: Merge) -> None:
        """Forget finished groups, and from time to time save where a successor resumes."""
        save = self._question.state.due
        if not save and self._since < self._question.memory.forget_every:
            return
        self._since = 0
        marks = self._fold.advance()
        gc.collect()  # token trees are cyclic: without this they would survive until a rare full collection
        if marks is None or not save:
            return
        self._state.marks = marks
        self._state.outputs = {place.topic: at for place, at in outputs.passed.items()}
        section = {"number": self._unit, "skips": sorted(self._inputs.skips), "state": self._state.to_json()}
        self._question.state.sections["unit"] = section
        self._question.state.save()

    async def _left_over(self) -> str | None:
        """Explain an output or record without a counterpart; return None if there is none."""
        emitted, folded = self._state.emitted, self._state.folded
        if emitted and self._question.until is None:
            first = min(emitted.values(), key=lambda each: (each.topic != OUTPUTS[0], each.offset))
            record = await self._at(first.topic, first.offset)
            name = about(await self._question.role.events.decode(record))
            return (
                f"{first.topic}[{self._unit}]@{first.offset}: {name} was emitted, the fold does not give it (or it was "
                "emitted twice)"
            )
        if folded:
            return f"unit {self._unit}: the fold gives {next(iter(folded.values())).about}, which was never emitted"
        return None


async def verify_batches(question: ReplayContext, rules: DrawRules, result: ReplayResult) -> None:
    """Check every manifest up to `until`, in order. Raises LogError, BlobError."""
    role, until = question.role, question.until
    kept = question.state.sections.get("batches") or {}
    result.batches_compared, result.batches_later = kept.get("compared", 0), kept.get("later", 0)
    place = Partition(BATCHES.name, 0)
    start, end = await role.log.start_offsets([place]), await role.log.end_offsets([place])
    start[place] = kept.get("next", start[place])
    question.progress.begin("batches", end[place] - start[place])
    limit = None if until is None else until.time_ms
    async with Samples(role) as samples, Merge(role.log, start, end, until_ms=limit) as merge:
        while chunk := await merge.chunk():
            for record in chunk:
                result.divergence = await _verify_batch(question, record, samples, rules, result)
                if result.divergence is not None:
                    return
                question.progress.advance(1)
                if question.state.due:
                    question.state.sections["batches"] = {
                        "next": record.offset + 1, "compared": result.batches_compared, "later": result.batches_later,
                    }  # fmt: skip
                    question.state.save()


async def _verify_batch(
    question: ReplayContext, record: Record, samples: Samples, rules: DrawRules, result: ReplayResult
) -> str | None:
    role, until = question.role, question.until
    try:
        manifest = await role.events.decode(record)
    except UndecodableRecord as error:
        return f"{record.topic}[0]@{record.offset}: {error}"
    if not isinstance(manifest, SampleBatchFormed) or manifest.run_id != role.settings.run.id:
        return None
    if until is not None and until.batch_index is not None and manifest.batch_index > until.batch_index:
        return None
    ends = {unit: cut.ends[OUTPUTS[1]] for unit, cut in question.cuts.items()}
    if any(row.offset >= ends.get(row.partition, 0) for row in manifest.samples):
        result.batches_later += 1
        return None
    rows = sample_positions(manifest.samples)
    divergence = await batch_difference(role, manifest, await samples.read_samples(rows), rules)
    if divergence is not None and role.events.keys is not None:  # was a session erased between samples and file?
        await role.events.keys.refresh()
        divergence = await batch_difference(role, manifest, await samples.read_samples(rows), rules)
    result.batches_compared += divergence is None
    return divergence
