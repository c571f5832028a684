"""Replay over the log in memory: identical, different and why, interrupted, up to a moment, in bounded memory."""

from __future__ import annotations

import dataclasses
import gc
import io
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.consumers.replay.progress import TerminalProgress
from turnlog.consumers.replay.source import BrokenFold, HistoryPruned, NoSuchMoment, NothingToReplay
from turnlog.consumers.replay.verify import Memory, run
from turnlog.infra.log import Partition, Record, partition_of
from turnlog.processors.core.fold.group import GroupFold
from turnlog.schemas import topics
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import (
    ALL,
    Event,
    GroupEmitted,
    GroupScored,
    SampleBatchFormed,
    SegmentSample,
    SessionStarted,
    SkipRequested,
    TurnTreeAssembled,
)
from turnlog.schemas.types import float32s, int32s

Make = Callable[..., Any]
CODEC = Codec({name: number for number, name in enumerate(ALL, start=1)})


def records_of(made: Any, topic: str) -> list[Record]:
    found = []
    for number in range(made.broker.partitions(topic)):
        found += made.broker.read(Partition(topic, number), 0, 10**9)[0]
    return found


def rewrite(made: Any, record: Record, value: bytes) -> None:
    """Change a record where it stands, as nobody may."""
    log = made.broker.log_of(Partition(record.topic, record.partition))
    entry = log.entries[record.offset]
    log.entries[record.offset] = dataclasses.replace(entry, record=dataclasses.replace(record, value=value))


def first(made: Any, kind: type, wanted: Callable[[Event], bool] = lambda _: True) -> tuple[Record, Event]:
    topic = topics.TOPIC_OF[kind.__name__].name
    found = ((record, CODEC.decode(record.value)) for record in records_of(made, topic))
    return next((record, event) for record, event in found if isinstance(event, kind) and wanted(event))


async def test_a_history_with_records_of_another_run_replays_as_it_was_folded(trained_run: Make) -> None:
    made = trained_run()
    rng = np.random.default_rng(3)
    for run_id, name in (("theirs", "group-0"), ("theirs", "foreign")):
        await made.append(whole_group(GroupName(run_id, name, 0, 2), rng, turns=1, shape=Shape()))
    await made.good_days(groups=6)
    assert {letter.cause for letter in await made.read(topics.DEAD_LETTERS)} == {"ForeignRun"}
    verdict = await run(made.role("replay"))
    assert verdict.identical, verdict.divergence
    assert {event.group_id for event in await made.read(topics.TREES)} == {f"group-{number}" for number in range(6)}


async def test_what_was_too_late_for_the_run_is_too_late_for_its_replay_whatever_the_horizon_is_today(
    trained_run: Make,
) -> None:
    """The horizon moves when the fold forgets, which the assembler does at each commit."""
    made = trained_run()
    today = made.settings
    made.settings = dataclasses.replace(today, assembler=dataclasses.replace(today.assembler, horizon_records=0))
    await made.configure()
    await made.good_groups(groups=6)
    await made.fold()
    await made.append(whole_group(GroupName("run", "late", 0, 2), np.random.default_rng(3), turns=1, shape=Shape()))
    await made.fold()
    assert "late" not in {event.group_id for event in await made.read(topics.TREES)}
    made.settings = today
    verdict = await run(made.role("replay"), memory=Memory(poll_records=10, forget_every=1))
    assert verdict.identical, verdict.divergence
    assert verdict.samples_compared == 12


@pytest.mark.parametrize("players", [False, True])
async def test_what_the_assembler_and_the_batcher_wrote_replays_identically(trained_run: Make, players: bool) -> None:
    made = trained_run()
    await made.bad_days(groups=16, players=players)
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    written = [
        CODEC.decode(r.value)
        for topic in ("turn-trees", "segment-samples", "group-scores")
        for r in records_of(made, topic)
    ]
    assert verdict.records_compared == len(written)
    assert verdict.samples_compared == sum(isinstance(event, SegmentSample) for event in written) > 0
    assert verdict.batches_compared == len(records_of(made, "sample-batches")) > 1


async def test_the_archive_alone_replays_identically_after_the_topics_are_gone(trained_run: Make) -> None:
    made = trained_run()
    await made.bad_days(seed=1, groups=16)
    before = await run(made.role())
    await made.archive()
    made.broker.logs.clear()
    made.broker.specs.clear()
    after = await run(await made.archived())
    assert after.identical, after.divergence
    assert dataclasses.replace(after, resumed=False) == before


async def test_a_changed_token_is_named_with_its_place_its_turn_and_both_ids(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=3, turns=2, shape=Shape(delta=6, output=4))
    record, sample = first(made, SegmentSample)
    ids = int32s(sample.token_ids).copy()
    ids[17] += 1
    rewrite(made, record, CODEC.encode(dataclasses.replace(sample, token_ids=ids.tobytes())))
    verdict = await run(made.role())
    assert not verdict.identical
    assert verdict.divergence == (
        f"segment-samples[{record.partition}]@{record.offset}: SegmentSample of session {sample.session_id}, segment 0 "
        f"differs: token_ids: token 17 (token 1 of the output of turn 1, version 0) is {ids[17]} as emitted, "
        f"{ids[17] - 1} as folded"
    )


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (SegmentSample, lambda s: {"logprobs": (-float32s(s.logprobs)).tobytes()}, r"logprobs: entry 0, token 6 "),
        (SegmentSample, lambda s: {"advantage": s.advantage + 1}, r"differs: advantage: \S+ as emitted, \S+ as folded"),
        (SegmentSample, lambda s: {"token_ids": s.token_ids[:-4]}, r"19 tokens as emitted, 20 as folded"),
        (SegmentSample, lambda s: {"spans": (dataclasses.replace(s.spans[0], version=7), *s.spans[1:])},
         r"spans\[0\]\.version: 7 as emitted, 0 as folded"),
        (TurnTreeAssembled, lambda t: {"books": dataclasses.replace(t.books, sampled=9)}, r"books\.sampled: 9 as"),
        (GroupScored, lambda g: {"reason": "because"}, r"reason: 'because' as emitted, '' as folded"),
        (GroupEmitted, lambda g: {"samples": 7}, r"^group-scores\[\d\]@\d+: GroupEmitted .* differs: samples: 7 as"),
    ],
)  # fmt: skip
async def test_a_changed_field_is_named(trained_run: Make, kind: type, change: Any, words: str) -> None:
    made = trained_run()
    await made.good_days(groups=2)
    record, event = first(made, kind)
    rewrite(made, record, CODEC.encode(dataclasses.replace(event, **change(event))))
    verdict = await run(made.role())
    assert verdict.divergence is not None
    assert re.search(words, verdict.divergence), verdict.divergence


async def test_what_only_one_side_has_is_named(trained_run: Make) -> None:
    for twice in (False, True):
        made = trained_run()
        await made.good_days(groups=2)
        record, event = first(made, SegmentSample)
        _, other = first(made, SegmentSample, lambda sample: sample.event_id != event.event_id)  # noqa: B023
        if twice:
            rewrite(made, record, CODEC.encode(dataclasses.replace(event, event_id="invented")))
            words = "was emitted, the fold does not give it"
        else:
            rewrite(made, record, CODEC.encode(dataclasses.replace(event, run_id="another")))
            words = f"the fold gives SegmentSample of session {event.session_id}, segment 0, which was never emitted"
        verdict = await run(made.role())
        assert words in (verdict.divergence or "")
        assert other.event_id


async def test_a_batch_with_another_weight_or_a_sample_elsewhere_is_named(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=4)
    record, manifest = first(made, SampleBatchFormed)
    row = manifest.samples[1]
    heavier = dataclasses.replace(row, weight_divisor=row.weight_divisor + 1)
    moved = dataclasses.replace(row, offset=row.offset + 1)
    for other, words in (
        (
            heavier,
            f"batch 0: row of sample {row.sample_id}: weight_divisor is {row.weight_divisor + 1} in the manifest",
        ),
        (moved, f"sample {row.sample_id} is not at segment-samples[{row.partition}]@{row.offset + 1}"),
    ):
        samples = (manifest.samples[0], other, *manifest.samples[2:])
        rewrite(made, record, CODEC.encode(dataclasses.replace(manifest, samples=samples)))
        verdict = await run(made.role())
        assert words in (verdict.divergence or "")
        assert verdict.batches_compared == 0
    rewrite(made, record, CODEC.encode(manifest))
    made.objects.objects[manifest.file.sha256] = b"broken"
    assert "its file cannot be read" in ((await run(made.role())).divergence or "")


@pytest.mark.parametrize("held", [0, 1000])
async def test_what_waits_as_a_hash_is_compared_as_what_waits_whole(trained_run: Make, held: int) -> None:
    made = trained_run()
    await made.good_days(groups=6)
    whole = await run(made.role())
    memory = Memory(held_bytes=held)
    assert await run(made.role(), memory=memory) == whole
    assert whole.identical, whole.divergence
    record, event = first(made, SegmentSample)
    rewrite(made, record, CODEC.encode(dataclasses.replace(event, advantage=event.advantage + 1)))
    assert "differs: advantage" in ((await run(made.role(), memory=memory)).divergence or "")


class Killed(BaseException):
    """kill -9, as far as the process's own state goes."""


class Mortal:
    """A progress that dies after so many calls; notes what was read."""

    def __init__(self, calls: int | None = None) -> None:
        self.left = calls
        self.records = 0

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, records: int, tokens: int = 0) -> None:
        self.records += records
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


async def test_a_killed_replay_goes_on_where_it_stood_and_compares_everything(
    trained_run: Make, tmp_path: Path
) -> None:
    made = trained_run()
    await made.bad_days(seed=2, groups=60)
    whole = Mortal()
    calm = await run(made.role(), progress=whole)
    assert calm.identical, calm.divergence
    deaths, read = 0, []
    for calls in range(1, 40):
        mortal = Mortal(calls)
        try:
            verdict = await run(made.role(), progress=mortal, folder=tmp_path, save_every_s=0.0)
        except Killed:
            deaths += 1
            read.append(mortal.records)
            continue
        break
    assert deaths > 2
    assert verdict == dataclasses.replace(calm, resumed=True)
    assert mortal.records < whole.records
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240


async def test_a_difference_behind_the_point_of_a_kill_is_still_found(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await made.good_days(groups=40)
    with pytest.raises(Killed):
        await run(made.role(), progress=Mortal(2), folder=tmp_path, save_every_s=0.0)
    record = [r for r in records_of(made, "segment-samples") if isinstance(CODEC.decode(r.value), GroupScored)][-1]
    rewrite(made, record, CODEC.encode(dataclasses.replace(CODEC.decode(record.value), reason="changed")))
    verdict = await run(made.role(), folder=tmp_path, save_every_s=0.0)
    assert verdict.resumed
    assert "reason: 'changed' as emitted" in (verdict.divergence or "")


async def test_time_travel_compares_what_was_derived_up_to_a_moment(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=8)
    await made.steps()
    whole = await run(made.role())
    middle = records_of(made, "agent.sessions")[len(records_of(made, "agent.sessions")) // 2]
    place = f"{middle.topic}[{middle.partition}]@{middle.offset}"
    part = await run(made.role(), until=place)
    assert part.identical, part.divergence
    assert 0 < part.samples_compared < whole.samples_compared
    assert await run(made.role(), until=str(middle.timestamp_ms)) == part
    step = await run(made.role(), until="step:2")
    assert step.identical, step.divergence
    assert (step.samples_compared, step.batches_compared) == (whole.samples_compared, 2)
    for broken in ("step:99", "agent.sessions[0]@100000", "yesterday"):
        with pytest.raises(NoSuchMoment):
            await run(made.role(), until=broken)


async def test_a_change_after_the_moment_does_not_show_before_it(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=8)
    scores = [r for r in records_of(made, "segment-samples") if isinstance(CODEC.decode(r.value), GroupScored)]
    last = max(scores, key=lambda record: record.timestamp_ms)
    rewrite(made, last, CODEC.encode(dataclasses.replace(CODEC.decode(last.value), reason="changed")))
    sessions = records_of(made, "agent.sessions")
    middle = sorted(record.timestamp_ms for record in sessions)[len(sessions) // 2]
    assert (await run(made.role(), until=str(middle))).identical
    assert not (await run(made.role())).identical


async def test_a_run_that_is_not_there_or_lost_its_beginning_is_no_difference(trained_run: Make) -> None:
    empty = trained_run()
    with pytest.raises(NothingToReplay, match="no run is configured on this log"):
        await run(empty.role())
    made = trained_run()
    await made.good_days(groups=4)
    made.broker.truncate(Partition("agent.turns", 1), 2)
    with pytest.raises(HistoryPruned, match=r"agent\.turns\[1\] begins at 2"):
        await run(made.role())


async def test_memory_does_not_grow_with_the_history(trained_run: Make) -> None:
    """Small chunks, so that a history of forty groups is long beside what is read at once."""
    memory = Memory(poll_records=10, forget_every=50)
    peaks: dict[str, list[int]] = {"topics": [], "archive": []}
    for groups in (30, 100):
        made = trained_run()
        assembler = dataclasses.replace(made.settings.assembler, horizon_records=50)
        made.settings = dataclasses.replace(made.settings, assembler=assembler)
        await made.good_days(groups=groups, shape=Shape(delta=100, output=100))
        await made.archive()
        for source, role in (("topics", made.role()), ("archive", await made.archived())):
            gc.collect()
            tracemalloc.start()
            try:
                assert (await run(role, memory=memory)).identical
                peaks[source].append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    for small, large in peaks.values():
        assert large < 1.6 * small, peaks  # a history that is kept would take 3.3 times as much


class Brittle(GroupFold):
    """A fold with a defect at one record."""

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        if self.group_id.startswith("brittle") and isinstance(event, SessionStarted):
            raise ValueError("a defect")
        return super().apply(topic, offset, event)


async def test_a_defect_of_the_fold_names_its_record_and_a_skip_that_was_requested_is_honoured(
    trained_run: Make,
) -> None:
    made = trained_run()
    await made.good_days(groups=4)
    name = next(name for name in (f"brittle-{n}" for n in range(9)) if partition_of(name.encode(), 2) == 1)
    floor = made.broker.log_of(Partition("agent.sessions", 1)).end
    await made.append(
        [next(whole_group(GroupName("run", name, floor, 1), np.random.default_rng(0), turns=1, shape=Shape()))]
    )
    await made.fold()
    with pytest.raises(BrokenFold, match=rf"agent\.sessions\[1\]@{floor}: ValueError: a defect"):
        await run(made.role(), group_fold=Brittle)
    skip = SkipRequested(
        event_id="skip", run_id="run", group_id=name, floor=floor, topic="agent.sessions", partition=1, offset=floor,
        reason="a defect",
    )  # fmt: skip
    await made.append([skip])
    await made.fold()
    verdict = await run(made.role(), group_fold=Brittle)
    assert verdict.identical, verdict.divergence


async def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=6)
    for terminal in (True, False):
        out = io.StringIO()
        with TerminalProgress(Console(file=out, force_terminal=terminal, width=100), lines_every_s=0.0) as progress:
            await run(made.role(), progress=progress)
        assert "folding again" in out.getvalue()
        assert ("\x1b[" in out.getvalue()) is terminal
        assert "records/s" in out.getvalue()
