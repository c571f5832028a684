"""`turnlog topics acls` on a Kafka that allows nothing else: each role logs in as itself, and does its whole work."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.addresses import variables
from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.otlp_collector import collecting
from tests.integration.test_runner_live import (
    GROUP,
    PROMPTS,
    acts,
    gateway,
    read,
    settings,
    started,
)
from tests.integration.test_trainer_loop import start
from tests.secure.test_each_acl import misses_each, with_log
from tests.secured import PASSWORD, SUPER, Secured
from tests.unit.gateway.conftest import until
from turnlog.cli import parser
from turnlog.consumers.archiver import flush
from turnlog.consumers.index.indexer import build
from turnlog.consumers.lag import lag_of
from turnlog.consumers.loader.role import Loader
from turnlog.infra.blobs import Owner
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.event_log import dead_letter
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import (
    ClusterNotAuthorized,
    Commit,
    GroupNotAuthorized,
    Log,
    LogError,
    Partition,
    Record,
    TopicMissing,
    TopicNotAuthorized,
    TopicSpec,
    TransactionalIdNotAuthorized,
)
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import claim_log, configure
from turnlog.infra.run_folder import write_settings
from turnlog.infra.topics_admin import AGENTS, REFUSABLE, ROLES, Acl, acls, apply
from turnlog.plugins.exporters import alerts
from turnlog.processors.runtime import assembler, batcher
from turnlog.producers import feeder, runner
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.sandbox_workers import worker
from turnlog.schemas import topics
from turnlog.schemas.events import (
    DeadLetter,
    EngineWeightsLoaded,
    GroupEmitted,
    RewardAssigned,
    RoleFailed,
    StepCompleted,
)
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import KafkaSettings, RunSettings, Settings
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.warm_start import make_base
from turnlog.trainer.weight_records import read_past
from turnlog.verbs.replay import replay_or_refold

__all__ = ["settings"]
pytestmark = pytest.mark.kafka


@pytest.fixture
def live_settings(secured: Secured, store: Any, tmp_path: Path) -> Settings:
    """As of tests/conftest.py, on the secured broker: `settings` of the runner's tests builds upon it."""
    from turnlog.sandbox_settings import SandboxSettings
    from turnlog.settings import EngineSettings, GatewaySettings, RegistrySettings, RunSettings

    name = f"t{uuid4().hex[:8]}"
    (tmp_path / name).mkdir()
    return Settings(
        run=RunSettings(id=name, directory=str(tmp_path / name)),
        kafka=KafkaSettings(bootstrap=secured.sasl, prefix=f"{name}-", groups=2, rollouts=2),
        registry=RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"),
        store=dataclasses.replace(store, bucket=name),
        gateway=GatewaySettings(url=f"http://{HOST}:{free_ports(1)[0]}"),
        engine=EngineSettings(urls=(f"http://{HOST}:{free_ports(1)[0]}",)),
        sandbox=SandboxSettings(allow_unisolated=True),
    )


def of(role: str, secured: Secured, settings: Settings) -> Settings:
    """The settings of a role that logs in under its own name."""
    kafka = settings.kafka
    own = secured.scram(role, prefix=kafka.prefix, groups=kafka.groups, rollouts=kafka.rollouts)
    return dataclasses.replace(settings, kafka=own)


def environment(role: str, secured: Secured, settings: Settings) -> dict[str, str]:
    """The same, of a process."""
    return variables(settings) | {
        "TURNLOG_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "TURNLOG_KAFKA_CA_FILE": str(secured.authority.file),
        "TURNLOG_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
        "TURNLOG_KAFKA_USERNAME": role,
        "TURNLOG_KAFKA_PASSWORD": PASSWORD,
        "TURNLOG_KAFKA_GROUPS": str(settings.kafka.groups),
        "TURNLOG_KAFKA_ROLLOUTS": str(settings.kafka.rollouts),
        "TURNLOG_REGISTRY_PORT": settings.registry.url.rpartition(":")[2],
    }


@contextlib.asynccontextmanager
async def process(role: str, verb: str, url: str, env: dict[str, str], folder: Path) -> AsyncIterator[None]:
    """A role as a process of its own, as soon as it answers at `url`."""

    def answers() -> bool:
        try:
            return httpx.get(url, timeout=1).is_success
        except httpx.TransportError:
            return False

    argv = (sys.executable, "-m", "turnlog.cli", "role", verb)
    child = Child(Launch(name=role, argv=argv, log=folder / f"{role}.log", env=env, ready=answers))
    await asyncio.to_thread(child.start)
    try:
        await asyncio.to_thread(child.wait_ready)
        yield
    finally:
        await asyncio.to_thread(child.stop)


def taught() -> Callable[[str], str]:
    """A policy with something to learn: every second answer to the same question is wrong."""
    asked: Counter[str] = Counter()

    def act(prompt: str) -> str:
        asked[prompt] += 1
        wrong = "tool\n" in prompt and asked[prompt] % 2 == 0
        return f"{acts(prompt)}0" if wrong else acts(prompt)

    return act


async def loading(role: Role) -> None:
    """The loader role beside an engine in memory."""
    model = Path(role.settings.model.path)
    await Loader(role, MemoryEngineControl(model), "engine-0", "http://e").run()


MAINS: Mapping[str, Callable[[Role], Awaitable[None]]] = {
    "gateway": lambda role: gateway(role, taught()),
    "loader": loading,
    "sandbox": worker.main,
    "runner": runner.main,
    "assembler": assembler.main,
    "batcher": batcher.main,
    "feeder": feeder.main,
}
"""Roles that live in this process. The trainer, the views and the registry have processes of their own."""


async def begun(stack: AsyncExitStack, name: str, secured: Secured, settings: Settings) -> None:
    """A role that follows the run, as its own process has it."""

    async def main(role: Role) -> None:
        async with claim_log(role):
            await MAINS[name](role)

    await stack.enter_async_context(started(name, main, of(name, secured, settings)))


async def configured(secured: Secured, settings: Settings) -> None:
    """The topics job."""
    own = of("configure", secured, settings)

    async def job(log: KafkaLog) -> None:
        await apply(log, own)

    await with_log(own.kafka, job)
    async with open_role("configure", own) as role:
        await configure(role)


@contextlib.asynccontextmanager
async def training(secured: Secured, settings: Settings) -> AsyncIterator[asyncio.subprocess.Process]:
    """The trainer, with the model that everybody has."""
    trainer = await start(of("trainer", secured, settings))
    try:
        yield trainer
    finally:
        if trainer.returncode is None:
            trainer.kill()
        await trainer.wait()


async def seen(url: str, wanted: Callable[[Any], bool]) -> None:
    """Wait until the page is as wanted."""
    async with httpx.AsyncClient() as http, asyncio.timeout(120):
        for _ in itertools.count():
            if wanted((await http.get(url)).json()):
                return
            await asyncio.sleep(0.2)  # a page is looked at: there is nothing to await


async def first_life(secured: Secured, settings: Settings, folder: Path) -> str:
    """One draw through every role; the id of a session."""
    port = free_ports(1)[0]
    views = environment("views", secured, settings) | {"TURNLOG_VIEWS_PORT": str(port)}
    page = f"http://{HOST}:{port}"
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(training(secured, settings))
        serving = stack.enter_async_context(process("views", "views", f"{page}/readyz", views, folder))
        watching = asyncio.ensure_future(serving)
        for name in MAINS:
            await begun(stack, name, secured, settings)
        async with open_role("reader", of("reader", secured, settings)) as reader:
            rewards = await read(reader, RewardAssigned, PROMPTS * GROUP)
            assert {reward.value for reward in rewards} == {0.0, 1.0}
            await read(reader, GroupEmitted, PROMPTS)
            (step,) = await read(reader, StepCompleted, 1)
            assert step.trained_tokens > 0
            loaded = await read(reader, EngineWeightsLoaded, 2)
            assert [event.version for event in loaded] == [0, 1]
        async with asyncio.timeout(120):
            assert await trainer.wait() == 0
        await watching
        await seen(f"{page}/views", lambda now: sum(now.get("sessions", {}).values()) == PROMPTS * GROUP)
    async with open_role("archive", of("archive", secured, settings)) as archive:
        assert await flush(archive) > 0
    async with open_role("index", of("index", secured, settings)) as index:
        assert await build(index, Path(settings.run.directory) / "index.sqlite") > 0
    lags = await with_log(of("lag", secured, settings).kafka, lambda log: lag_of(log, settings))
    assert {lag.role for lag in lags} >= {"assembler", "runner", "sandbox", "batcher", "feeder", "trainer", "loader"}
    return str(rewards[0].session_id)


async def garbage(role: Role, topic: str) -> Record:
    async with role.log.appender() as appender:
        place = await appender.append(topic, b"g", b"garbage")
    return Record(topic, *place, b"g", b"garbage", (), 0)


async def more_engines(settings: Settings) -> None:
    """One is asked for at the gateway, which lists it."""
    key = SigningKeys(settings.gateway, Path(settings.run.directory)).first
    headers = {"authorization": f"Bearer {key.decode()}"}
    trusted = ssl.create_default_context(cafile=settings.gateway.ca_file)
    async with httpx.AsyncClient(base_url=settings.gateway.url, headers=headers, verify=trusted) as http:
        asked = await http.post("/engines/register", json={"url": "http://engine:1", "name": ASKED_FOR})
        assert asked.status_code == 202, asked.text
        assert ASKED_FOR in {one["id"] for one in (await http.get("/engines")).json()["engines"]}


async def looked(secured: Secured, settings: Settings) -> None:
    """Alarms are looked for once."""
    file = Path(settings.run.directory) / alerts.FILE
    async with open_role("alerts", of("alerts", secured, settings)) as role, asyncio.timeout(120):
        telling = asyncio.create_task(alerts.tell(role, []))
        await until(file.exists)  # it is written after a look
        role.stopping.set()
        await telling


ASKED_FOR = "engine-9"
STRAYS = {"assembler": topics.SESSIONS, "runner": topics.TASKS, "sandbox": topics.TOOL_CALLS, "feeder": topics.STEPS}


async def second_life(secured: Secured, settings: Settings) -> None:
    """Roles go on behind what their last owners did, and park what they cannot read."""
    async with AsyncExitStack() as stack:
        test = await stack.enter_async_context(open_role("test", of(SUPER, secured, settings)))
        for topic in STRAYS.values():
            await garbage(test, topic.name)
        for name in ("gateway", *STRAYS):
            await begun(stack, name, secured, settings)
        letters = await read(test, DeadLetter, len(STRAYS))
        assert {letter.role for letter in letters} == set(STRAYS)
        await more_engines(settings)
        failed = RoleFailed(
            event_id="failed", run_id=settings.run.id, role="runner-0", cause="a test", remedy="given_up", restart=0,
            host="here",
        )  # fmt: skip
        await test.events.append(failed)
        trainer = await stack.enter_async_context(open_role("trainer", of("trainer", secured, settings)))
        past, _ = await read_past(trainer.log, trainer.events, settings.run.id)
        assert past.incarnation == 0


async def places(secured: Secured, settings: Settings) -> dict[str, str]:
    """Of each topic that the assembler folds, where its first record stands; the run, and the folder of its fork."""
    async with open_role("test", of(SUPER, secured, settings)) as test, test.log.reader() as reader:
        owner = Owner(await test.log.cluster(), f"{settings.kafka.prefix}fork-", "fork")
        found = {"run": settings.run.id, "fork": owner.folder}
        for topic in AGENTS:
            reader.assign({Partition(topic.name, number): 0 for number in range(settings.kafka.groups)})
            while _last(topic.name) not in found:
                for record in await reader.poll(max_records=1):
                    found[_last(topic.name)] = f"{topic.name}[{record.partition}]@{record.offset}"
        return found


async def refused(secured: Secured, settings: Settings) -> str:
    """A dead letter of each topic of which there may be any; the id of one."""
    async with open_role("test", of(SUPER, secured, settings)) as test:
        for topic in REFUSABLE:
            record = await garbage(test, topic.name)
            letter = dead_letter(record, LookupError("by hand"), run_id=settings.run.id, role="us")
            await test.events.append(letter)
            if topic.name == "sample-scores":  # nothing else reads it here
                found = letter.event_id
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


AT_ONCE = (
    ("trace", "role trace --to {collector} --until-end"),  # its group is there for `status`
    ("configure", "topics check"),
    ("doctor", "doctor"),
    ("engines", "engines list"),
    ("engines", f"engines drain {ASKED_FOR}"),
    ("pause", "run pause"),
    ("pause", "run resume"),
    ("reader", "status --json"),
    ("reader", "log books"),
    ("reader", "log fold"),
    ("reader", "replay --verify"),
    ("reader", "log session show {session}"),
    ("reader", "run list"),
    ("reader", "log dead-letters list"),
    ("reader", "dataset build {folder}/dataset"),
    ("reader", "log report"),
    ("track", "role track --to tensorboard={folder}/curves --until-end"),
    ("gc", "gc --grace 2h --delete"),
    ("fork", "run fork --from {directory} --to-prefix {prefix}fork-"),
)
"""Who does what when the roles of a run are gone."""
WITH_LETTERS = (
    ("reader", "log dead-letters show {letter}"),
    ("dead-letters", "log dead-letters requeue --cause LookupError --yes"),
    *(("skip", f"log dead-letters skip {{{_last(topic.name)}}} --reason ours") for topic in AGENTS),
    ("prune", "log archive prune --before 2100-01-01T00:00 --yes"),
    ("delete", "run delete {run} --retired {fork} --delete --yes"),
)


async def done(who: str, line: str, secured: Secured, settings: Settings, words: Mapping[str, object]) -> None:
    """A verb as that principal."""
    own = of(who, secured, settings)
    if who == "fork":
        own = dataclasses.replace(own, run=RunSettings(id="fork", directory=f"{words['folder']}/fork"))
    arguments = parser().parse_args(["--settings", "here", *line.format(**words).split()])
    # Not by uvloop, which complains of connections that are closed with their loop.
    call = functools.partial(asyncio.run, replay_or_refold(own, arguments)) if arguments.verb == "replay" else None
    assert await asyncio.to_thread(call or functools.partial(arguments.entry.call, own, arguments)) == 0, line


APART = ("apply", "run")
"""They make the topics, each below a prefix of its own (tests/secure/test_loop_acls.py)."""
RARE: dict[str, set[tuple[str, str]]] = {
    "assembler": {("Write", "agent.sessions"), ("Read", "segment-samples")},  # of its reaper; of fold version 1
    "batcher": {("Write", "dead-letters")},  # of what does not belong into segment-samples
    "feeder": {("Read", "segment-samples"), ("Read", "tasks")},  # of runs that older releases began
    "gateway": {("Read", "agent.turns"), ("Read", "agent.token-snapshots")},  # of another's session
    "registry": {("Read", "_schemas")},  # when it starts again
    "lag": {
        ("Describe", "{run}.trace"),
        *(("Read", topic.name) for topic in CATALOGUE),
    },  # once traced; markers at an end
    "run": {("Read", "segment-samples"), ("Read", "tasks")},  # as of the feeder
    "fork": {("Read", "fork-weight-versions")},  # of a run that has begun, which is refused
    "prune": {("Delete", "sample-scores")},  # nobody wrote any
    "gc": {("Read", "sample-scores"), ("Read", "weight-transfers")},  # nobody wrote any
    "reader": {("Read", "weight-transfers")},
    "alerts": {("Read", topic.name) for topic in CATALOGUE if topic.name != "run-health"},  # as of lag
    "loader": {  # where engines and trainer take turns on their devices; where ranks send weights
        *(("Read", one) for one in ("sample-batches", "weight-transfers")),
        ("Write", "weight-transfers"),
    },
    "trainer": {  # the same; evaluations, experts and images
        *(("Read", one) for one in ("engine-status", "engine-requests", "weight-transfers")),
        *(("Read", one) for one in ("group-requests", "segment-samples", "turn-trees")),
        ("Write", "weight-transfers"),
    },
    "up": {
        *((operation, name) for operation in ("Read", "Write") for name in ("engine-status", "engine-requests")),
        ("Write", "run-health"),
    },  # of what it starts itself, which is nothing here
}
"""What does not come up here, by role."""


def needed(asked: set[tuple[str, str, str, str]], role: str) -> set[tuple[str, str, str]]:
    """What a principal was asked for, without the Describe that a greater right implies (Kafka, "Authorization")."""
    own = {(operation, kind, name) for who, operation, kind, name in asked if who == role}
    greater = {(kind, name) for operation, kind, name in own if operation in ("READ", "WRITE", "DELETE")}
    return {one for one in own if not (one[0] == "DESCRIBE" and one[1:] in greater)}


def grants(acl: Acl, one: tuple[str, str, str]) -> bool:
    operation, kind, name = one
    same = (acl.operation.upper(), acl.resource) == (operation.replace("_", ""), _kind(kind))
    return same and (name == acl.name if acl.pattern == "literal" else name.startswith(acl.name))


def _kind(kind: str) -> str:
    return {"TransactionalId": "transactional-id"}.get(kind, kind.lower())


@pytest.mark.timeout(900)  # four times what it takes where much else runs
@pytest.mark.long  # of one role the suite takes each ACL away
async def test_each_role_and_verb_does_its_work_with_its_printed_acls_and_needs_each_of_them(
    secured: Secured, settings: Settings, tmp_path: Path
) -> None:
    model = Path(settings.model.path)
    make_base(read_shape(model), model, model)
    forked = dataclasses.replace(
        settings, kafka=dataclasses.replace(settings.kafka, prefix=f"{settings.kafka.prefix}fork-")
    )
    printed = {role: acls(forked if role == "fork" else settings, role) for role in ROLES if role not in APART}
    secured.grant(acl for found in printed.values() for acl in found)
    since = secured.log.stat().st_size
    registry = environment("registry", secured, settings)
    async with process("registry", "registry", f"{settings.registry.url}/subjects", registry, tmp_path):
        await configured(secured, settings)
        session = await first_life(secured, settings, tmp_path)
        await second_life(secured, settings)
        write_settings(Path(settings.run.directory), of("reader", secured, settings))
        own = {"directory": settings.run.directory, "prefix": settings.kafka.prefix}
        words = {"folder": tmp_path, "session": session} | own
        with collecting() as collector:
            for who, line in AT_ONCE:
                await done(who, line, secured, settings, words | {"collector": collector.url})
        await looked(secured, settings)
        words |= {"letter": await refused(secured, settings)} | await places(secured, settings)
        for who, line in WITH_LETTERS:
            await done(who, line, secured, settings, words)
    check_used(secured, since, printed, settings)


def check_used(secured: Secured, since: int, printed: Mapping[str, Sequence[Acl]], settings: Settings) -> None:
    """Whether each right of each role was needed, and none asked for that it has not."""
    denied = {one for one in secured.asked(since, verdict="Denied") if one[0] in printed}
    assert not denied, "\n".join(map(" ".join, sorted(denied)))
    asked = secured.asked(since)
    idle = {
        (role, acl.operation, acl.resource, acl.name)
        for role, rights in printed.items()
        for acl in rights
        if not any(grants(acl, one) for one in needed(asked, role))
    }
    short = {one: one[3].removeprefix(settings.kafka.prefix).replace(settings.run.id, "{run}") for one in idle}
    idle -= {one for one in idle if (one[1], short[one]) in RARE.get(one[0], ())}
    assert not idle, "\n".join(map(" ".join, sorted(idle)))


IN, OUT = Partition("in", 0), Partition("out", 0)


async def transacts(log: Log) -> None:
    async with log.transactor("t") as transactor:
        await transactor.begin()
        await transactor.send("out", 0, b"k", b"v")
        await transactor.offsets("g", {IN: Commit(1)})
        await transactor.commit()


async def appends(log: Log) -> None:
    async with log.appender() as appender:
        await appender.append("out", b"k", b"v")


async def reads(log: Log) -> None:
    await log.end_offsets([IN])
    async with log.reader() as reader:
        reader.assign({IN: 0})
        while not await reader.poll(timeout_s=1.0):
            pass


async def joins(log: Log) -> None:
    async def assigned(_: frozenset[int]) -> None:
        reader.seek(IN, 0)

    async with log.group_reader("g", ["in"], assigned=assigned, revoked=lambda _: asyncio.sleep(0)) as reader:
        while not await reader.poll(timeout_s=1.0):
            pass


async def asks(log: Log) -> None:
    await log.commits("g", [IN])


async def makes(log: Log) -> None:
    await log.create_topics([TopicSpec("made", 1, 1, {})])


async def deletes(log: Log) -> None:
    await log.delete_before({IN: 1})


READ_IN, WRITE_OUT = ("topic", "in", "Read"), ("topic", "out", "Write")
MEMBER, OWNER = ("group", "g", "Read"), ("transactional-id", "t", "Write")
LACKS: dict[str, tuple[Any, tuple[tuple[str, str, str], ...], tuple[str, str, str], type[LogError], str]] = {
    "to read": (reads, (("topic", "in", "Describe"), READ_IN), READ_IN, TopicNotAuthorized, "in"),
    "to see": (reads, (READ_IN,), READ_IN, TopicMissing, r"in .*Describe on it \(`turnlog topics acls`\)"),
    "to write": (appends, (WRITE_OUT, ("topic", "out", "Describe")), WRITE_OUT, ClusterNotAuthorized, "producer"),
    "to write here": (
        appends, (WRITE_OUT, ("topic", "out", "Describe"), ("topic", "in", "Write")), WRITE_OUT, TopicNotAuthorized,
        "append to out: this principal lacks the ACL for this on this topic",
    ),
    "to transact": (transacts, (READ_IN, WRITE_OUT, MEMBER, OWNER), OWNER, TransactionalIdNotAuthorized, "producer t"),
    "to commit": (transacts, (READ_IN, WRITE_OUT, MEMBER, OWNER), MEMBER, GroupNotAuthorized, "offsets of g"),
    "to join": (joins, (READ_IN, MEMBER), MEMBER, GroupNotAuthorized, "group"),
    "to ask": (asks, (READ_IN, ("group", "g", "Describe")), ("group", "g", "Describe"), GroupNotAuthorized, "commits"),
    "to make": (makes, (("topic", "made", "Create"), ("topic", "made", "Describe")), ("topic", "made", "Create"),
                TopicNotAuthorized, "create topic"),
    "to delete": (deletes, (READ_IN, ("topic", "in", "Delete")), ("topic", "in", "Delete"), TopicNotAuthorized,
                  "delete records"),
}  # fmt: skip


@pytest.mark.parametrize("lack", LACKS)
async def test_an_acl_that_was_removed_is_missed_by_name(secured: Secured, lack: str) -> None:
    does, granted, lacked, error, said = LACKS[lack]
    prefix = f"t{uuid4().hex[:8]}-"
    held = {one: Acl("alice", "User:alice", one[0], prefix + one[1], "literal", one[2]) for one in granted}
    everything = secured.scram(SUPER, prefix=prefix)

    async def prepared(log: KafkaLog) -> None:
        await log.create_topics([TopicSpec(name, 1, 1, {}) for name in ("in", "out")])
        async with log.appender() as appender:
            for _ in range(2):
                await appender.append("in", b"k", b"v")

    await with_log(everything, prepared)
    secured.grant(held.values())
    async with asyncio.timeout(60):
        await with_log(secured.scram("alice", prefix=prefix), does)
    secured.revoke(held[lacked])
    async with asyncio.timeout(60):
        with pytest.raises(error, match=said):
            await with_log(secured.scram("alice", prefix=prefix), does)


async def test_a_role_misses_each_of_its_acls(secured: Secured) -> None:
    await misses_each(secured, "loader")  # of the others by `make test-secured`
