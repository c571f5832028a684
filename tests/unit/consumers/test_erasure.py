"""One session of a run is erased: everything else folds, replays and adds up as before."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.fakes.memory_log import Died, MemoryLog
from tests.fakes.sessions import GroupName, Shape, whole_group
from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.access_settings import AccessSettings
from turnlog.consumers.datasets import build as datasets
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.erasure import Erasure, NotErasable, erase, plan_erasure
from turnlog.consumers.gc import LEAST_GRACE_S
from turnlog.consumers.index import BusyIndex, NoIndex
from turnlog.consumers.index.fate import of_session
from turnlog.consumers.index.indexer import build, main
from turnlog.consumers.index.reader import Index
from turnlog.consumers.replay.verify import run
from turnlog.infra.archive import ArchiveLog
from turnlog.infra.batch_files import open_rows, read_tokens, write_tokens
from turnlog.infra.blobs import MemoryBlobs, Owner, externalize_payloads
from turnlog.infra.event_log import EventLog, schema_ids, sealed_schema_ids
from turnlog.infra.log import Appender, Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, session_keys
from turnlog.infra.roles.runs import configuration
from turnlog.plugins.dashboard.drawing import clock
from turnlog.plugins.dashboard.export import as_html, json_file
from turnlog.plugins.dashboard.records import Vocabulary, session_tokens
from turnlog.plugins.exporters.spans import Traces, TraceSpan
from turnlog.plugins.exporters.tracing import TOLD
from turnlog.schemas import MasterKeyMissing, topics
from turnlog.schemas.codec import Codec
from turnlog.schemas.content import holds_erased
from turnlog.schemas.events import (
    AccessAudited,
    Event,
    GroupScored,
    GroupStatus,
    Outcome,
    RewardAssigned,
    RunConfigured,
    SampleBatchFormed,
    SandboxSpec,
    SegmentSample,
    SessionErased,
    SessionFinished,
    TokenSnapshot,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
)
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef, pack_int32s
from turnlog.settings import ErasureSettings, IndexSettings
from turnlog.trainer.manifests import fetch_rows

FOLDER = Owner("memory", "", "run").folder
SEALED = dataclasses.replace(SETTINGS, erasure=ErasureSettings(master_keys="0123456789abcdef"))


@dataclass
class SealedRun(TrainedRun):
    """A run that encrypts the content of its sessions."""

    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    ids: dict[str, int] = field(default_factory=dict)
    sealed: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def begin(cls) -> SealedRun:
        """An empty run."""
        made = cls(SEALED)
        made.ids, made.sealed = await schema_ids(made.registry), await sealed_schema_ids(made.registry)
        made.objects.folder = FOLDER
        return made

    async def configure(self, configured: RunConfigured | None = None) -> None:
        """See TrainedRun. The run owns a folder of the store."""
        await super().configure(dataclasses.replace(configured or configuration(self.settings), blob_folder=FOLDER))

    def role(self, name: str = "test", log: MemoryLog | None = None, appender: Appender | None = None) -> Role:
        log, keys = log or MemoryLog(self.broker), session_keys(self.settings)
        assert keys is not None
        codec = Codec(self.ids, sealed_ids=self.sealed, cipher=keys)
        events = EventLog(log, self.registry, codec, name, appender=appender, keys=keys)
        keys.attach(events)
        return Role(name, name, self.settings, log, events, self.objects, Health(name))

    async def archived(self) -> Role:
        keys = session_keys(self.settings)
        assert keys is not None
        keys.attach(self.role().events)
        log = await ArchiveLog.open(self.objects, self.settings.run.id)
        events = log.events(writer="test", keys=keys)
        return Role("test", "test", self.settings, log, events, self.objects, Health("test"))

    async def append(self, events: Iterable[Event]) -> None:
        log = MemoryLog(self.broker)
        async with log.appender() as appender:
            role = self.role("writer", log, appender)
            for event in events:
                await role.events.append(event)

    async def read(self, topic: topics.Topic) -> list[Event]:
        role, found = self.role("reader"), []
        for number in range(self.broker.partitions(topic.name)):
            place = Partition(topic.name, number)
            records, _ = self.broker.read(place, self.broker.log_of(place).start, 10**9)
            found += [await role.events.decode(record) for record in records]
        return found

    def wait(self, seconds: float = LEAST_GRACE_S) -> None:
        """Let time pass for the store."""
        before = self.objects.clock
        self.objects.clock = lambda: before() + seconds

    async def erase(self, session: str, *, patience_s: float = 30.0) -> Erasure:
        """`turnlog erase SESSION --yes`, when its objects are no longer young; what is left of it."""
        self.wait()
        log = MemoryLog(self.broker)
        async with log.appender() as appender:
            role = self.role("erase", log, appender)
            return await erase(role, await plan_erasure(role, session), by="an operator", patience_s=patience_s)


async def trained_session(made: SealedRun) -> str:
    return next(event.session_id for event in await made.read(topics.SAMPLES) if isinstance(event, SegmentSample))


async def test_a_run_that_encrypts_replays_as_any_other() -> None:
    made = await SealedRun.begin()
    await made.bad_days(seed=1, groups=16)
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    assert verdict.samples_compared > 0
    assert verdict.batches_compared > 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_replay_of_everything_else_is_identical_after_a_trained_session_was_erased(seed: int) -> None:
    made = await SealedRun.begin()
    await made.bad_days(seed=seed, groups=16)
    before = {event.event_id: event for topic in (topics.TREES, topics.SAMPLES) for event in await made.read(topic)}
    session = await trained_session(made)
    done = await made.erase(session)
    assert done.batches
    await made.fold()
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    for topic in (topics.TREES, topics.SAMPLES):
        for event in await made.read(topic):
            if getattr(event, "session_id", "") == session and isinstance(event, SegmentSample):
                assert holds_erased(event)
            else:
                assert event == before[event.event_id]


async def test_every_session_of_a_run_can_be_erased_one_after_the_other() -> None:
    made = await SealedRun.begin()
    await made.bad_days(seed=3, groups=10)
    finished = {event.session_id for event in await made.read(topics.SESSIONS) if isinstance(event, SessionFinished)}
    trees = {event.session_id for event in await made.read(topics.TREES)}
    refused: dict[str, str] = {}
    for session in sorted(finished):
        try:
            await made.erase(session)
        except NotErasable as error:
            refused[session] = str(error)
    assert trees
    assert trees.isdisjoint(refused)
    assert all("has not settled" in why for why in refused.values())
    await made.fold()
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    assert all(holds_erased(event) for event in await made.read(topics.SAMPLES) if isinstance(event, SegmentSample))


async def test_the_archive_shows_an_erased_session_no_more_and_replays() -> None:
    made = await SealedRun.begin()
    await made.bad_days(seed=1, groups=16)
    session = await trained_session(made)
    await made.archive()
    await made.erase(session)
    await made.archive()
    role = await made.archived()
    assert topics.SESSION_KEYS.name not in await role.log.topics()
    verdict = await run(role)
    assert verdict.identical, verdict.divergence


async def test_an_archive_without_the_record_of_an_erasure_replays_with_that_of_the_topic() -> None:
    made = await SealedRun.begin()
    await made.bad_days(seed=1, groups=16)
    await made.archive()
    await made.erase(await trained_session(made))
    verdict = await run(await made.archived())
    assert verdict.identical, verdict.divergence


def open_group(made: SealedRun, name: str = "group-0") -> list[Event]:
    """The records of a group of two sessions, neither of them settled yet at its beginning."""
    return list(whole_group(GroupName("run", name, 0, 2), np.random.default_rng(0), turns=2, shape=Shape()))


async def test_a_session_erased_before_its_group_settles_is_excluded_as_erased() -> None:
    made = await SealedRun.begin()
    await made.configure()
    events = open_group(made)
    first = next(event.session_id for event in events if isinstance(event, SessionFinished))
    await made.append([event for event in events if getattr(event, "session_id", "") == first])
    await made.fold()
    await made.erase(first)
    await made.append([event for event in events if getattr(event, "session_id", "") != first])
    await made.fold()  # a new assembler, which cannot read the first session
    (scored,) = [event for event in await made.read(topics.SAMPLES) if isinstance(event, GroupScored)]
    assert [one.excluded_reason for one in scored.rollouts if one.session_id == first] == ["erased"]
    assert scored.books.masked["erased"] > 0
    samples = [event for event in await made.read(topics.SAMPLES) if isinstance(event, SegmentSample)]
    assert first not in {sample.session_id for sample in samples}
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence


async def test_what_is_erased_later_changes_no_score() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    before = [event for event in await made.read(topics.SAMPLES) if isinstance(event, GroupScored)]
    await made.erase(await trained_session(made))
    await made.fold()
    after = [event for event in await made.read(topics.SAMPLES) if isinstance(event, GroupScored)]
    assert after == before
    assert {event.status for event in after} == {GroupStatus.trained}


async def test_an_erasure_is_recorded_once_with_its_batches_and_may_be_repeated() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    session = await trained_session(made)
    first, again = await made.erase(session), await made.erase(session)
    (record,) = [event for event in await made.read(topics.SESSIONS) if isinstance(event, SessionErased)]
    assert (record.session_id, record.by, record.batches) == (session, "an operator", first.batches)
    assert again.batches == first.batches
    assert record.turns


async def test_a_settled_group_that_nobody_has_scored_yet_is_waited_for() -> None:
    made = await SealedRun.begin()
    await made.configure()
    events = open_group(made)
    await made.append(events)
    with pytest.raises(NotErasable, match="assembler"):
        await made.erase(events[0].session_id, patience_s=0.0)
    assert not any(map(holds_erased, [e for e in await made.read(topics.TURNS) if isinstance(e, TurnCompleted)]))
    await asyncio.gather(made.erase(events[0].session_id), made.fold())
    turns = [event for event in await made.read(topics.TURNS) if event.session_id == events[0].session_id]
    assert turns
    assert all(map(holds_erased, turns))


PLANTED = b"the-secret-that-a-user-has-told"
SECRET_IDS = pack_int32s([77_001, 77_002, 77_003, 77_004])
LARGE = b"[" + b'"%s",' % PLANTED * (INLINE_LIMIT_BYTES // len(PLANTED)) + b'""]'


def planted(events: Iterable[Event], session: str, blob: BlobRef) -> Iterator[Event]:
    """The records of a session that says and sees what must not be found later, in every field that can hold it."""
    for event in events:
        if getattr(event, "session_id", "") != session:
            yield event
        elif isinstance(event, TurnCompleted):
            answer = b'{"role":"assistant","content":"%s"}' % PLANTED
            yield dataclasses.replace(event, response=answer, new_messages=LARGE, tools=b'["%s"]' % PLANTED)
            about = {
                "event_id": "call", "run_id": "run", "group_id": event.group_id, "session_id": session, "floor": 0,
                "rollout_id": "rollout", "call_id": "call", "call_seq": 0,
            }  # fmt: skip
            yield ToolCallRequested(
                **about, tool="shell", arguments=b'{"command":"echo %s"}' % PLANTED, sandbox=SandboxSpec(),
                workspace=None, deadline_s=1.0,
            )  # fmt: skip
            yield ToolCallCompleted(
                **{**about, "event_id": "answer"}, status=ToolStatus.ok, reason="", exit_code=0, output=PLANTED,
                full_output=blob, duration_s=0.0, queue_s=0.0, workspace=blob, attempt=1, worker="w", cached=False,
            )  # fmt: skip
        elif isinstance(event, TokenSnapshot):
            yield dataclasses.replace(event, output_ids=SECRET_IDS + event.output_ids[len(SECRET_IDS) :])
        elif isinstance(event, RewardAssigned):
            yield dataclasses.replace(event, evidence=b'{"seen":"%s"}' % PLANTED)
        else:
            yield event


def holds(content: bytes) -> bool:
    return PLANTED in content or SECRET_IDS in content


@dataclass
class Planted:
    """A run in which one session says and sees what must not be found later."""

    made: SealedRun
    session: str
    shared: BlobRef
    folder: Path

    @property
    def index(self) -> Path:
        return self.folder / "index.sqlite"

    @property
    def dataset(self) -> Path:
        return self.folder / "dataset"

    @classmethod
    async def tell(cls, folder: Path) -> Planted:
        made = await SealedRun.begin()
        await made.configure()
        rng = np.random.default_rng(0)
        names = [GroupName("run", f"group-{number}", 0, 2) for number in range(4)]
        groups = [list(whole_group(name, rng, turns=1, shape=Shape())) for name in names]
        session, other = groups[0][0].session_id, groups[1][0].session_id
        own, shared = await made.objects.put(b"own " + PLANTED), await made.objects.put(b"both need this workspace")
        for event in planted(itertools.chain(*groups), session, own):
            is_call = isinstance(event, ToolCallCompleted)
            told = dataclasses.replace(event, workspace=shared) if is_call else event
            await made.append([await externalize_payloads(told, made.objects)])
        await made.append([call(other, shared)])
        await made.fold()
        await made.draw()
        await made.archive()
        found = cls(made, session, shared, folder)
        await build(made.role("index"), found.index)
        await datasets.build(made.role(), Query(), found.dataset, view="rl", format="arrow")
        return found

    def files(self) -> set[str]:
        """Names of the folders of files that hold what was planted."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.parent.name for path in files if holds(path.read_bytes())}

    def objects(self) -> list[str]:
        """Names of the objects that hold it."""
        return [name for name, content in self.made.objects.named.items() if holds(content)]

    async def events(self) -> list[Event]:
        """Every event that a reader of the log gets."""
        kinds = (
            topics.SESSIONS,
            topics.TURNS,
            topics.SNAPSHOTS,
            topics.TOOL_CALLS,
            topics.TOOL_RESULTS,
            topics.SAMPLES,
        )
        return [event for topic in kinds for event in await self.made.read(topic)]


async def test_what_was_planted_in_a_session_is_found_nowhere_after_it_was_erased(tmp_path: Path) -> None:
    told = await Planted.tell(tmp_path)
    made, before = told.made, {event.event_id: event for event in await told.events()}
    assert told.files() == {tmp_path.name, "data"}
    assert told.objects()
    assert datasets.remove_session(told.dataset, told.session) == 1
    done = await made.erase(told.session)
    await build(made.role("index"), told.index)
    assert done.batches
    assert told.files() == set()
    assert told.objects() == []
    assert any(name.endswith(told.shared.sha256) for name in made.objects.named)
    logs = (entry.record for log in made.broker.logs.values() for entry in log.entries)
    assert not any(holds(record.value) for record in logs if record is not None)
    for event in await told.events():
        if getattr(event, "session_id", "") == told.session:
            payloads = [getattr(event, field.name) for field in dataclasses.fields(event)]
            assert not any(holds(value) for value in payloads if isinstance(value, bytes))
        else:
            assert event == before[event.event_id]


async def test_a_running_indexer_notices_an_erasure_and_builds_the_index_anew(tmp_path: Path) -> None:
    told = await Planted.tell(tmp_path)
    role = told.made.role("index")
    role = dataclasses.replace(
        role, settings=dataclasses.replace(role.settings, index=IndexSettings(path=str(told.index)))
    )
    running = asyncio.create_task(main(role))
    try:
        while not role.health.works:  # noqa: ASYNC110 - it offers a flag, no event
            await asyncio.sleep(0.01)
        await told.made.erase(told.session)
        with pytest.raises(BusyIndex):
            await build(told.made.role("index"), told.index)
        async with asyncio.timeout(60):
            while told.session not in erased_of(told.index):  # noqa: ASYNC110 - it asks for keys every 10 seconds
                await asyncio.sleep(0.1)
    finally:
        role.stopping.set()
        await running
    await build(told.made.role("index"), told.index)
    assert told.files() <= {"data"}, "but for the dataset"
    with Index.open(told.index) as index:
        assert index.session(told.session) is not None


def erased_of(path: Path) -> frozenset[str]:
    with contextlib.suppress(NoIndex), Index.open(path) as index:
        return index.erased
    return frozenset()


async def test_everything_else_replays_and_is_exported_after_a_planted_session_was_erased(tmp_path: Path) -> None:
    told = await Planted.tell(tmp_path)
    made = told.made
    datasets.remove_session(told.dataset, told.session)
    await made.erase(told.session)
    assert datasets.verify(told.dataset).provenance.removed["erased"] == 1
    await datasets.build(made.role(), Query(), tmp_path / "later", view="rl", format="arrow")
    assert rows_of(tmp_path / "later") == rows_of(told.dataset)
    assert told.session not in {row["session_id"] for row in rows_of(told.dataset)}
    await made.fold()
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
    assert verdict.batches_compared > 0
    await made.archive()
    assert (await run(await made.archived())).identical


def rows_of(dataset: Path) -> list[dict[str, object]]:
    return [row for path in dataset.glob("data/*.arrow") for row in pa.ipc.open_file(path).read_all().to_pylist()]


def call(session: str, workspace: BlobRef) -> ToolCallCompleted:
    return ToolCallCompleted(
        event_id="other", run_id="run", group_id="group-1", session_id=session, floor=0, rollout_id="rollout",
        call_id="other", call_seq=0, status=ToolStatus.ok, reason="", exit_code=0, output=b"", full_output=None,
        duration_s=0.0, queue_s=0.0, workspace=workspace, attempt=1, worker="w", cached=False,
    )  # fmt: skip


class DyingStore(MemoryBlobs):
    """A store whose user dies after some removals."""

    def __init__(self, like: MemoryBlobs, removals: int) -> None:
        super().__init__()
        self.folder, self.objects, self.named, self.left = like.folder, like.objects, like.named, removals
        self.times, self.clock = like.times, like.clock

    async def remove(self, name: str) -> None:
        if not self.left:
            raise Died(name)
        self.left -= 1
        await super().remove(name)


@pytest.mark.parametrize("removals", range(4))
async def test_an_erasure_that_dies_between_two_removals_finds_the_others_again(removals: int) -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=2)
    session = await trained_session(made)
    files = [await made.objects.put(PLANTED + b" in file %d" % number) for number in range(3)]
    listing = b"".join(b'{"sha256":"%s"}' % file.sha256.encode() for file in files) + PLANTED
    workspace = await made.objects.put(listing, media_type="application/vnd.turnlog.workspace+json")
    await made.append([call(session, workspace)])
    made.wait()
    log = MemoryLog(made.broker)
    async with log.appender() as appender:
        role = dataclasses.replace(made.role("erase", log, appender), blobs=DyingStore(made.objects, removals))
        with pytest.raises(Died):
            await erase(role, await plan_erasure(role, session), by="an operator")
    assert (await made.erase(session)).is_done
    assert not any(map(holds, (*made.objects.named.values(), *made.objects.objects.values())))


async def test_the_index_and_the_dashboard_say_when_and_by_whom_a_session_was_erased(tmp_path: Path) -> None:
    told = await Planted.tell(tmp_path)
    await told.made.erase(told.session)
    await build(told.made.role("index"), told.index)
    with Index.open(told.index) as index:
        view = index.session(told.session)
        assert view is not None
        tokens = await session_tokens(told.made.role(), index, view, Vocabulary(""))
    assert view.row.erased_by == "an operator"
    assert view.row.erased_ms
    page = as_html(view, tokens)
    assert f"its content was erased at {clock(view.row.erased_ms)} by an operator" in page
    assert "[erased]" in page
    for shown in (page, json_file(view, tokens)):
        assert not holds(shown.encode())
    assert {token for turn in tokens.turns for token in turn.ids.tolist()} == {0}
    (erased,) = [link for link in of_session(view) if link.kind == "SessionErased"]
    assert erased.says == "its content was erased by an operator"


async def test_an_erasure_is_in_the_audit_trail_which_stays_readable() -> None:
    made = await SealedRun.begin()
    made.settings = dataclasses.replace(made.settings, access=AccessSettings(audit=True))
    await made.good_days(groups=2)
    session = await trained_session(made)
    await made.erase(session)
    trail = [event for event in await made.read(topics.AUDIT) if isinstance(event, AccessAudited)]
    assert [(one.action, one.kind, one.about, one.form) for one in trail] == [("act", "session", (session,), "erase")]


async def test_no_reason_of_a_session_is_in_the_spans_of_a_run_that_encrypts() -> None:
    made = await SealedRun.begin()
    await made.configure()
    events = [
        dataclasses.replace(event, outcome=Outcome.agent_error, reason=PLANTED.decode())
        if isinstance(event, SessionFinished)
        else event
        for event in open_group(made)
    ]
    for content in (True, False):
        traces, spans = Traces(1.0, content=content), list[TraceSpan]()
        for _ in range(2):
            for offset, event in enumerate(events):
                if isinstance(event, TOLD):
                    spans += traces.take(Partition("all", 0), offset, 0, event)
            spans += traces.settle()
        assert any(PLANTED.decode() in span.error for span in spans) == content
        assert any(span.error == "agent_error" for span in spans) != content


async def test_a_token_file_keeps_the_rows_of_other_sessions() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    await made.draw()
    session = await trained_session(made)
    role = made.role()
    assert role.events.keys is not None
    await role.events.keys.refresh()
    (manifest, *_) = [
        event
        for event in await made.read(topics.BATCHES)
        if isinstance(event, SampleBatchFormed) and session in {row.session_id for row in event.samples}
    ]
    rows = open_rows(await made.objects.get(manifest.file), role.events.keys).rows
    figures = {name: np.random.default_rng(0).random(len(rows.token_ids), "<f4") for name in ("logprob", "ratio")}
    plain, sealed = write_tokens(rows, figures), write_tokens(rows, figures, role.events.keys)
    assert read_tokens(sealed, rows.sample_ids, role.events.keys).equals(read_tokens(plain, rows.sample_ids, None))
    with pytest.raises(MasterKeyMissing):
        read_tokens(sealed, rows.sample_ids, None)
    await made.erase(session)
    await role.events.keys.refresh()
    found = read_tokens(sealed, rows.sample_ids, role.events.keys).to_pylist()
    gone = {sample for sample, own in zip(rows.sample_ids, rows.session_ids, strict=True) if own == session}
    for row, before in zip(found, read_tokens(plain, rows.sample_ids, None).to_pylist(), strict=True):
        if row["sample_id"] in gone:
            assert np.isnan(row["logprob"])
        else:
            assert row == before


async def test_a_trainer_trains_no_token_of_erased_rows_and_all_of_the_others() -> None:
    made = await SealedRun.begin()
    await made.good_days(groups=4)
    await made.draw()
    role = made.role()
    assert role.events.keys is not None
    manifest = next(event for event in await made.read(topics.BATCHES) if isinstance(event, SampleBatchFormed))
    before = await fetch_rows(manifest, made.objects, role.events.keys)
    for session in sorted(set(before.session_ids)):
        await made.erase(session)
        rows = await fetch_rows(manifest, made.objects, role.events.keys)
        gone = np.array([role.events.keys.is_erased(name) for name in rows.session_ids])
        erased = np.repeat(gone, rows.lengths)
        assert not rows.trained[erased].any()
        assert not rows.token_ids[erased].any()
        assert (rows.trained[~erased] == before.trained[~erased]).all()
        assert (rows.token_ids[~erased] == before.token_ids[~erased]).all()
    assert not rows.trained.any()


@pytest.mark.parametrize("point", range(1, 5))
async def test_an_erasure_that_dies_before_or_after_any_record_is_completed_by_the_next_one(point: int) -> None:
    """The records are SessionErased and SessionKeyErased."""
    made = await SealedRun.begin()
    await made.good_days(groups=2)
    session = await trained_session(made)
    blob = await made.objects.put(PLANTED)
    await made.append([call(session, blob)])
    made.wait()
    log = MemoryLog(made.broker)
    async with log.appender() as appender:
        role = made.role("erase", log, appender)
        plan = await plan_erasure(role, session)
        log.dies_at = log.points + point
        with pytest.raises(Died):
            await erase(role, plan, by="an operator")
    assert log.dead
    done = await made.erase(session)
    assert done.is_done
    assert not any(map(holds, (*made.objects.named.values(), *made.objects.objects.values())))
    await made.fold()
    verdict = await run(made.role())
    assert verdict.identical, verdict.divergence
