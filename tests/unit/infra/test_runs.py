"""Whose log it is: one run per cluster and prefix, whoever starts first, whatever is configured meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from turnlog.fold_settings import FOLD_SECTIONS, Since
from turnlog.infra.blobs import MemoryBlobs, Owner
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import EVERY_RUN, ReadStatistics, all_events, events_of
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles import Unreachable, is_unreachable
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, RunPhase
from turnlog.infra.roles.runs import (
    WITHOUT_CONTENT,
    Configured,
    NotConfigured,
    OtherRun,
    OtherSettings,
    RunClosed,
    RunUnreadable,
    claim_log,
    configuration,
    configure,
    life,
    load_configuration,
    set_phase,
)
from turnlog.infra.topics_admin import specs
from turnlog.names import RECORD_HEADER
from turnlog.schemas import OtherRegistry, topics
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER
from turnlog.schemas.events import ALL, Event, RunConfigured, RunPlanned
from turnlog.settings import (
    AssemblerSettings,
    BatcherSettings,
    ErasureSettings,
    FeederSettings,
    FoldSettings,
    KafkaSettings,
    RunSettings,
    Settings,
)

GOLDEN = Path(__file__).parents[2] / "golden"
OURS = Settings(run=RunSettings(id="ours"), kafka=KafkaSettings(prefix="team."))
THEIRS = dataclasses.replace(OURS, run=RunSettings(id="theirs"))
Connect = Callable[..., Awaitable[Role]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Processes on one log."""
    broker, registry = MemoryBroker(), MemoryRegistry()
    broker.create(specs(OURS))
    async with AsyncExitStack() as stack:

        async def role(
            settings: Settings, kind: type[EventLog] = EventLog, registry: MemoryRegistry = registry
        ) -> Role:
            log = MemoryLog(broker)
            events = await stack.enter_async_context(kind.open(log, registry, writer="test"))
            return Role("test", "test-0", settings, log, events, MemoryBlobs(), Health("test"))

        yield role


async def written(role: Role, kind: type) -> list[object]:
    """Every record of one kind on `runs`, of any run."""
    place = Partition("runs", 0)
    end = (await role.log.end_offsets([place]))[place]
    return [event async for _, event in events_of(role, place, end, {kind.__name__}, runs=EVERY_RUN)]


def of_release(version: str) -> RunConfigured:
    """What a release recorded of its default settings."""
    golden = json.loads((GOLDEN / f"run-configured-{version}.json").read_text())
    return dataclasses.replace(configuration(OURS), **{**golden, "settings": golden["settings"].encode()})


@pytest.mark.parametrize("first", ["nothing", "another", "all in another order"])
async def test_a_registry_that_was_restored_with_other_ids_is_no_empty_log(connect: Connect, first: str) -> None:
    """Under the id of RunConfigured it holds nothing, a schema of somebody else, or another record of ours."""
    before = await connect(OURS)
    await configure(before)
    schema_id = HEADER.unpack_from(before.log.broker.read(Partition("runs", 0), 0, 1)[0][0].value)[1]
    restored = MemoryRegistry()
    if first == "nothing":
        for number in range(1, 1000):
            restored._ids[f"taken {number}"] = number  # its own ids begin later
    if first == "another":
        await restored.register("orders", {"type": "record", "name": "Order", "fields": []})
    for name in reversed(ALL):
        await restored.register(name, stored_schema(name))
    changed = dataclasses.replace(OURS, fold=dataclasses.replace(OURS.fold, min_valid=5))
    for settings in (OURS, changed):
        role = await connect(settings, registry=restored)
        with pytest.raises(
            OtherRegistry,
            match=rf"runs\[0\]@0 was written as RunConfigured with schema id {schema_id}, .*\[registry\] url",
        ):
            await configure(role)
        with pytest.raises(OtherRegistry):
            await load_configuration(role, wait=False)
        with pytest.raises(OtherRegistry):
            async with claim_log(role):
                pass
    there = Partition("runs", 0)
    assert (await role.log.end_offsets([there]))[there] == 2, "RunConfigured and RunPlanned, once"


async def test_a_record_with_another_kind_in_its_header_is_no_other_registry(connect: Connect) -> None:
    """Whoever may write a topic can make one: it ends no role, which by then knows the run's own record."""
    role = await connect(OURS)
    await configure(role)
    place = Partition(topics.ENGINES.name, 0)
    async with role.log.appender() as appender:
        value = role.events.codec.encode(configuration(OURS))
        for topic in (topics.RUNS, topics.ENGINES):
            await appender.append(topic.name, b"k", value, headers=[(RECORD_HEADER, b"EngineRegistered")])
            await appender.append(topic.name, b"k", value[:-4], headers=[(RECORD_HEADER, b"RunConfigured")])
    await configure(role)
    async with claim_log(role):
        assert await all_events(role, topics.ENGINES) == []
        reading = ReadStatistics()
        end = (await role.log.end_offsets([place]))[place]
        assert [one async for one in events_of(role, place, end, ("EngineRegistered",), reading=reading)] == []
        assert reading.undecodable == {topics.ENGINES.name: 1}
        for record in role.log.broker.read(place, 0, 9)[0]:
            assert await role.events.decode_known(record) is None
    moved = MemoryRegistry()
    for name in reversed(ALL):
        await moved.register(name, stored_schema(name))
    with pytest.raises(OtherRegistry):
        await all_events(await connect(OURS, registry=moved), topics.ENGINES)


async def test_a_damaged_record_of_the_run_is_no_empty_log(connect: Connect) -> None:
    role = await connect(OURS)
    value = role.events.codec.encode(configuration(OURS))[:-4]
    async with role.log.appender() as appender:
        await appender.append("runs", b"k", b"garbage of somebody else")
        await appender.append("runs", b"k", value, headers=[(RECORD_HEADER, b"RunConfigured")])
    with pytest.raises(RunUnreadable, match=r"runs\[0\]@1 holds the run's configuration and cannot be read"):
        await configure(role)


async def test_a_run_is_configured_once_and_a_restart_finds_it_so(connect: Connect) -> None:
    role = await connect(OURS)
    first = await configure(role)
    assert first == await configure(await connect(OURS)) == Configured.today(OURS)
    assert len(await written(role, RunConfigured)) == len(await written(role, RunPlanned)) == 1


async def test_blobs_of_a_run_lie_in_its_folder_and_the_store_says_whose_that_is(connect: Connect) -> None:
    one, other = await connect(OURS), await connect(OURS)
    owner = Owner("memory", "team.", "ours")
    async with claim_log(other):
        assert other.blobs.folder == "", "nobody has configured the run"
        await configure(one)
        await set_phase(one, RunPhase.CLOSED)
        await other.stopping.wait()
        assert {one.blobs.folder, other.blobs.folder} == {owner.folder}
    assert await one.blobs.names("owners/") == [owner.name]
    with pytest.raises(OtherRun):
        await configure(role := await connect(THEIRS))
    assert await role.blobs.names("") == [], "who is refused owns nothing"


async def test_blobs_of_a_run_that_an_earlier_release_began_stay_where_they_are(connect: Connect) -> None:
    role = await connect(OURS)
    await role.events.append(configuration(OURS))
    await configure(role)
    assert role.blobs.folder == ""
    assert await role.blobs.names("owners/") == [Owner("memory", "team.", "ours").name]


async def test_another_run_on_the_prefix_is_refused_by_both_names_and_with_the_remedy(connect: Connect) -> None:
    await configure(await connect(THEIRS))
    with pytest.raises(OtherRun, match=r"prefix 'team\.'.*to run 'theirs', but this is run 'ours'.*\[kafka\] prefix"):
        await configure(await connect(OURS))
    assert len(await written(await connect(OURS), RunConfigured)) == 1


class Overtaken(EventLog):
    """Between its look at the log and its record, another process configures the log."""

    overtaker: Role | None = None

    async def append(self, event: Event) -> tuple[int, int]:
        if self.overtaker is not None:
            overtaker, self.overtaker = self.overtaker, None
            await configure(overtaker)
        return await super().append(event)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [(THEIRS, OtherRun), (dataclasses.replace(OURS, fold=FoldSettings(estimator="rloo")), OtherSettings)],
    ids=["of two runs", "of one run, otherwise"],
)
async def test_of_two_that_configure_a_log_at_once_the_one_whose_record_came_first_stays(
    connect: Connect, settings: Settings, refusal: type[Exception]
) -> None:
    late = await connect(settings, Overtaken)
    late.events.overtaker = await connect(OURS)
    with pytest.raises(refusal):
        await configure(late)
    assert len(await written(late, RunConfigured)) == 2
    assert await configure(await connect(OURS)) == Configured.today(OURS)
    with pytest.raises(refusal):
        await configure(await connect(settings))


async def test_other_recorded_values_are_refused_key_by_key_and_operational_ones_are_not_looked_at(
    connect: Connect,
) -> None:
    await configure(await connect(OURS))
    pace = dataclasses.replace(OURS, batcher=BatcherSettings(ready_batches=9, order="freshest"))
    assert await configure(await connect(pace)) == Configured.today(OURS)
    other = dataclasses.replace(OURS, fold=FoldSettings(min_valid=3), batcher=BatcherSettings(max_lag=1))
    said = (
        r"run 'ours': fold.min_valid was recorded as 0 and is 3 here; batcher.max_lag was recorded as 0 and is 1 here"
    )
    for look in (configure, load_configuration):
        with pytest.raises(OtherSettings, match=said):
            await look(await connect(other))
    nearer = dataclasses.replace(OURS, assembler=AssemblerSettings(horizon_records=9, commit_interval_s=2.0))
    with pytest.raises(OtherSettings, match=r"ours': assembler.horizon_records was recorded as 20000 and is 9 here:"):
        await load_configuration(await connect(nearer))


async def test_a_role_keeps_to_the_choice_of_its_run_to_encrypt_content(connect: Connect) -> None:
    sealed = dataclasses.replace(OURS, erasure=ErasureSettings(master_keys="0123456789abcdef"))
    await configure(await connect(OURS))
    for look in (configure, load_configuration):
        with pytest.raises(OtherSettings, match=r"was configured without it.*unset it"):
            await look(await connect(sealed))


async def test_a_role_without_the_master_key_of_a_run_ends_unless_it_reads_no_content(connect: Connect) -> None:
    sealed = dataclasses.replace(OURS, erasure=ErasureSettings(master_keys="0123456789abcdef"))
    await configure(await connect(sealed))
    for look in (configure, load_configuration):
        with pytest.raises(OtherSettings, match=r"encrypts the content .* TURNLOG_ERASURE_MASTER_KEYS_FILE"):
            await look(await connect(OURS))
    assert await load_configuration(await connect(sealed)) is not None
    for name in WITHOUT_CONTENT:
        role = dataclasses.replace(await connect(OURS), name=name)
        assert await load_configuration(role) is not None


async def test_a_key_that_each_role_took_from_its_own_settings_is_still_taken_from_there(connect: Connect) -> None:
    """No release before v3 recorded the horizon, so nobody knows what the run's own was."""
    await (await connect(OURS)).events.append(of_release("v2"))
    for horizon in (9, 20_000):
        own = dataclasses.replace(OURS, assembler=AssemblerSettings(horizon_records=horizon))
        found = await load_configuration(await connect(own))
        assert found is not None
        assert found.rules().horizon_records == found.assembler.horizon_records == horizon


@pytest.mark.parametrize("version", ["v1", "v2"])
async def test_a_run_that_an_earlier_release_configured_goes_on_under_its_own_hash(
    connect: Connect, version: str
) -> None:
    recorded = of_release(version)
    await (await connect(OURS)).events.append(recorded)
    same = dataclasses.replace(OURS, fold=FoldSettings(min_valid=2 if version == "v1" else 0))
    found = await load_configuration(await connect(same))
    assert found is not None
    assert found == await configure(await connect(same))
    assert found.settings_sha256 == recorded.settings_sha256 != Configured.today(same).settings_sha256
    assert found.rules().settings_sha256 == found.name.settings_sha256 == recorded.settings_sha256
    assert (found.fold, found.fold_version) == (same.fold, "1")


async def test_a_key_that_the_run_lacks_is_compared_by_what_its_release_did(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later release has another key in each section, with a default that does something else."""

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Fold(FoldSettings):
        fresh: Annotated[int, Since("v3", before=1)] = 2

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Draws(BatcherSettings):
        later: Annotated[str, Since("v3", before="as ever")] = "anew"

    await configure(await connect(OURS))
    monkeypatch.setitem(FOLD_SECTIONS, "fold", Fold)
    monkeypatch.setitem(FOLD_SECTIONS, "batcher", Draws)
    kept = dataclasses.replace(OURS, fold=Fold(fresh=1), batcher=Draws(later="as ever"))
    found = await load_configuration(await connect(kept))
    assert found is not None
    assert (found.fold, found.batcher) == (kept.fold, kept.batcher)
    with pytest.raises(
        OtherSettings, match=r"fold.fresh was recorded as 1 and is 2.*batcher.later was recorded as 'as"
    ):
        await load_configuration(await connect(dataclasses.replace(OURS, fold=Fold(), batcher=Draws())))


async def test_a_plan_is_written_again_when_it_changes_and_the_latest_counts(connect: Connect) -> None:
    def with_draws(draws: int) -> Settings:
        return dataclasses.replace(OURS, feeder=FeederSettings(draws=draws))

    for draws in (30, 30, 60, 30):
        await configure(await connect(with_draws(draws)))
    plans = await written(await connect(OURS), RunPlanned)
    assert [plan.draws for plan in plans] == [30, 60, 30]
    assert len({plan.event_id for plan in plans}) == 3
    assert (plans[0].publish_every, plans[0].groups, plans[0].rollouts) == (1, 4, 4)


async def test_a_role_does_not_start_on_the_log_of_another_run(connect: Connect) -> None:
    await configure(await connect(THEIRS))
    worked = False
    with pytest.raises(OtherRun, match="belongs to run 'theirs', but this is run 'ours'"):
        async with claim_log(await connect(OURS)):
            worked = True
    assert not worked


async def test_a_role_that_started_first_ends_as_soon_as_another_run_is_configured(connect: Connect) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with claim_log(await connect(OURS)):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    async with asyncio.timeout(20):
        working = asyncio.create_task(work())
        await started.wait()
        await configure(await connect(THEIRS))
        with pytest.raises(OtherRun):
            await working
    assert ended.is_set()


async def test_a_role_goes_on_when_its_own_run_is_configured_and_what_it_raises_is_what_comes_out(
    connect: Connect,
) -> None:
    async def work() -> None:
        async with claim_log(await connect(OURS)):
            await configure(await connect(OURS))
            assert await load_configuration(await connect(OURS))
            raise ZeroDivisionError

    async with asyncio.timeout(20):
        with pytest.raises(ZeroDivisionError):
            await work()


async def test_what_a_role_ends_with_keeps_the_silence_of_a_server_that_it_was_raised_from(connect: Connect) -> None:
    with pytest.raises(ZeroDivisionError) as ended:
        async with claim_log(await connect(OURS)):
            raise ZeroDivisionError from Unreachable("nobody listens")
    assert is_unreachable(ended.value)


async def test_a_role_waits_ready_until_its_run_is_configured_or_it_is_asked_to_stop(connect: Connect) -> None:
    waits, stops = await connect(OURS), await connect(OURS)
    async with asyncio.timeout(20):
        waiting, stopping = (
            asyncio.create_task(load_configuration(waits)),
            asyncio.create_task(load_configuration(stops)),
        )
        await asyncio.wait((waiting, stopping), timeout=0.1)
        assert not waits.health.waiting
        stops.stopping.set()
        assert await stopping is None
        assert not waiting.done()
        run = await configure(await connect(OURS))
        assert await waiting == run


async def test_bytes_that_are_no_record_do_not_hide_whose_log_it_is(connect: Connect) -> None:
    role = await connect(OURS)
    async with role.log.appender() as appender:
        await appender.append("runs", b"ours", b"\x00junk")
    await configure(await connect(THEIRS))
    with pytest.raises(OtherRun):
        await configure(role)


async def test_a_phase_is_said_once_and_outlives_new_plans(connect: Connect) -> None:
    role = await connect(OURS)
    with pytest.raises(NotConfigured):
        await set_phase(role, RunPhase.PAUSED)
    await configure(role)
    assert await set_phase(role, RunPhase.RUNNING) is RunPhase.RUNNING
    assert await set_phase(role, RunPhase.PAUSED) is RunPhase.RUNNING
    assert await set_phase(role, RunPhase.PAUSED) is RunPhase.PAUSED
    await configure(await connect(dataclasses.replace(OURS, feeder=FeederSettings(draws=7))))
    found = await life(role)
    assert found.plan is not None
    assert (found.phase, found.plan.draws, found.plans) == (RunPhase.PAUSED, 7, 3)
    assert await set_phase(role, RunPhase.RUNNING) is RunPhase.PAUSED
    found = await life(role)
    assert found.plan is not None
    assert (found.phase, found.plan.draws) == (RunPhase.RUNNING, 7), "a phase changes no plan"


async def test_a_closed_run_is_over_for_good(connect: Connect) -> None:
    role = await connect(OURS)
    await configure(role)
    assert await set_phase(role, RunPhase.CLOSED) is RunPhase.RUNNING
    assert await set_phase(role, RunPhase.CLOSED) is RunPhase.CLOSED
    for phase in (RunPhase.RUNNING, RunPhase.PAUSED):
        with pytest.raises(RunClosed, match=r"run 'ours' is closed: no role starts.*turnlog run fork --from"):
            await set_phase(role, phase)
    with pytest.raises(RunClosed):
        await configure(await connect(OURS))
    await role.events.append(RunPlanned(event_id="x", run_id="ours", draws=1, publish_every=1, groups=1, rollouts=1,
                                        phase="running"))  # fmt: skip
    assert (await life(role)).phase is RunPhase.CLOSED


async def test_a_role_obeys_while_it_works_and_does_not_start_for_a_closed_run(connect: Connect) -> None:
    role, owner = await connect(OURS), await connect(OURS)
    await configure(owner)
    await set_phase(owner, RunPhase.PAUSED)
    async with asyncio.timeout(20), claim_log(role):
        assert role.phase is RunPhase.PAUSED, "it is known before the role begins"
        await set_phase(owner, RunPhase.CLOSED)
        await role.stopping.wait()
    worked = False
    with pytest.raises(RunClosed):
        async with claim_log(await connect(OURS)):
            worked = True
    assert not worked


@pytest.mark.parametrize("name", ["archive", "views"])
async def test_who_copies_and_who_shows_outlive_their_run(connect: Connect, name: str) -> None:
    role = await connect(OURS)
    await configure(role)
    await set_phase(role, RunPhase.CLOSED)
    role.name = name
    async with claim_log(role):
        assert role.phase is RunPhase.CLOSED
        assert not role.stopping.is_set()


async def test_a_phase_of_a_later_release_admits_nothing(connect: Connect) -> None:
    role = await connect(OURS)
    await configure(role)
    await role.events.append(RunPlanned(event_id="x", run_id="ours", draws=1, publish_every=1, groups=1, rollouts=1,
                                        phase="dreaming"))  # fmt: skip
    assert (await life(role)).phase is RunPhase.PAUSED
