"""The catalogue's topics on a cluster: their desired properties, creating and checking them, and ACLs.

TopicMismatch (LogError)   a topic exists with another partition count: keys would move, so nothing is changed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from turnlog.infra.archive import archive_name
from turnlog.infra.log import Log, LogError, TopicSpec
from turnlog.names import REGISTRY_TOPIC, ConsumerGroup, TransactionalId
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS
from turnlog.schemas import topics
from turnlog.schemas.content import WITH_CONTENT
from turnlog.schemas.topics import ARCHIVED, BY_NAME, CATALOGUE, CONTROL, SESSION_KEYS, Topic
from turnlog.settings import Settings

AT_LEAST = frozenset({"max.message.bytes", "min.insync.replicas"})
"""Configuration keys whose value may exceed the catalogue's."""
AT_MOST = frozenset({"segment.ms", "max.compaction.lag.ms", "min.cleanable.dirty.ratio"})
"""Configuration keys whose value may be below the catalogue's: what was replaced is removed even sooner."""
WARNING = "warning:"
DURABLE = ("min.insync.replicas", "unclean.leader.election.enable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Operations of a role or a verb on the log."""

    group: ConsumerGroup | None = None
    """Consumer group in which it commits offsets."""
    consumes: tuple[Topic, ...] = ()
    """Topics whose offsets it commits in `group`."""
    reads: tuple[Topic, ...] = ()
    """Further topics that it reads, from any offset."""
    measures: tuple[Topic, ...] = ()
    """Topics whose end offsets, or whose commits of another group, it requests."""
    writes: tuple[Topic, ...] = ()
    deletes: tuple[Topic, ...] = ()
    """Topics from which it deletes records, or which it deletes, for good."""
    owner: TransactionalId | None = None
    asks: tuple[ConsumerGroup, ...] = ()
    """Other groups whose commits it reads."""
    forgets: tuple[ConsumerGroup, ...] = ()
    """Groups that it deletes."""
    makes: tuple[Topic, ...] = ()
    examines: tuple[Topic, ...] = ()
    """Topics whose configuration it compares with the catalogue."""
    follows: bool = True
    """True if it reads `runs`, which states to which run the log belongs."""
    appends: bool = True
    """True if it has a producer for events, even if it writes to no topic."""

    @property
    def receives(self) -> tuple[Topic, ...]:
        """All topics from which it reads records."""
        return tuple(dict.fromkeys((*((topics.RUNS,) if self.follows else ()), *self.consumes, *self.reads)))


AGENTS = (topics.SESSIONS, topics.TURNS, topics.SNAPSHOTS)
PARKED = topics.DEAD_LETTERS
REFUSABLE = tuple(
    topic for topic in CATALOGUE if topic not in (topics.RUNS, topics.TREES, SESSION_KEYS, topics.AUDIT, PARKED)
)
"""Topics whose readers dead-letter records. Readers of the other topics never do."""
UNINDEXED = (
    *(topics.GROUP_REQUESTS, topics.GROUP_SCORES, topics.ENGINE_REQUESTS, topics.TRANSFERS, topics.RUN_HEALTH),
    *(topics.TENANT_COMMANDS, topics.TENANT_RESULTS, topics.AUDIT, SESSION_KEYS),
)
INDEXED = tuple(topic for topic in CATALOGUE if topic not in UNINDEXED)
PRUNED = tuple(topic for topic in CATALOGUE if topic not in CONTROL)
FEEDER = Access(
    group=ConsumerGroup.FEEDER,
    consumes=(topics.GROUP_SCORES, topics.BATCHES, topics.STEPS, topics.WEIGHTS, topics.ENGINES),
    reads=(topics.GROUP_REQUESTS, topics.TASKS, topics.SAMPLES),
    measures=(topics.SESSIONS,),
    writes=(topics.GROUP_REQUESTS, topics.TASKS, PARKED),
    owner=TransactionalId.FEEDER,
)
CONFIGURE = Access(writes=(topics.RUNS,), makes=CATALOGUE, examines=CATALOGUE)
FLEET = Access(reads=(topics.ENGINES, topics.ENGINE_REQUESTS), writes=(topics.ENGINE_REQUESTS,), follows=False)
ACCESS: Mapping[str, Access] = {
    "feeder": FEEDER,
    "gateway": Access(
        reads=(*AGENTS, topics.ENGINES, topics.ENGINE_REQUESTS, topics.WEIGHTS),
        writes=(*AGENTS, topics.ENGINE_REQUESTS),
    ),
    "runner": Access(
        group=ConsumerGroup.RUNNER,
        consumes=(topics.TASKS, topics.TOOL_RESULTS),
        reads=(topics.GROUP_SCORES,),
        writes=(topics.SESSIONS, topics.TOOL_CALLS, PARKED),
    ),
    "sandbox": Access(
        group=ConsumerGroup.SANDBOX,
        consumes=(topics.TOOL_CALLS,),
        reads=(topics.TOOL_RESULTS,),
        writes=(topics.TOOL_RESULTS, PARKED),
    ),
    "assembler": Access(
        group=ConsumerGroup.ASSEMBLER,
        consumes=tuple(BY_NAME[name] for name in INPUTS),
        reads=(*(BY_NAME[name] for name in OUTPUTS), topics.GROUP_SCORES, topics.ENGINES),
        writes=(*(BY_NAME[name] for name in OUTPUTS), topics.GROUP_SCORES, topics.SESSIONS, PARKED),
        owner=TransactionalId.ASSEMBLER,
        # Without Describe, the broker leaves these commits out, and a run whose runner is away seems to have none.
        measures=(topics.TASKS, topics.TOOL_RESULTS),
        asks=(ConsumerGroup.RUNNER,),
    ),
    "batcher": Access(
        group=ConsumerGroup.BATCHER,
        consumes=(topics.SAMPLES,),
        reads=(topics.BATCHES, topics.STEPS, topics.WEIGHTS),
        writes=(topics.BATCHES, PARKED),
        owner=TransactionalId.BATCHER,
    ),
    "trainer": Access(
        group=ConsumerGroup.TRAINER,
        consumes=(topics.BATCHES,),
        reads=(
            *(topics.WEIGHTS, topics.TRANSFERS, topics.ENGINES, topics.ENGINE_REQUESTS, topics.SESSIONS),
            *(topics.SAMPLES, topics.GROUP_REQUESTS, topics.TREES),  # experts, images; what evaluations need
        ),
        writes=(topics.STEPS, topics.WEIGHTS, topics.TRANSFERS),
        owner=TransactionalId.TRAINER,
    ),
    "loader": Access(
        group=ConsumerGroup.LOADER,
        consumes=(topics.WEIGHTS,),
        reads=(topics.ENGINES, topics.ENGINE_REQUESTS, topics.TRANSFERS, topics.BATCHES),
        writes=(topics.ENGINES, topics.TRANSFERS),
        owner=TransactionalId.LOADER,
    ),
    "tinker": Access(
        group=ConsumerGroup.TINKER,
        consumes=(topics.TENANT_COMMANDS,),
        reads=(topics.TENANT_RESULTS,),
        writes=(topics.RUNS, topics.TENANT_COMMANDS, topics.TENANT_RESULTS, PARKED),
        owner=TransactionalId.TINKER,
    ),
    "views": Access(
        group=ConsumerGroup.VIEWS,
        consumes=(topics.SESSIONS, topics.STEPS, topics.WEIGHTS),
        appends=False,
    ),
    "archive": Access(
        group=ConsumerGroup.ARCHIVE,
        consumes=ARCHIVED,
        owner=TransactionalId.ARCHIVE,
        asks=(ConsumerGroup.ASSEMBLER,),
    ),
    "index": Access(reads=INDEXED),
    "trace": Access(
        group=ConsumerGroup.TRACE,
        consumes=(
            *(*AGENTS[:2], topics.TOOL_CALLS, topics.TOOL_RESULTS, topics.SAMPLES, topics.BATCHES),
            *(topics.STEPS, topics.WEIGHTS, topics.ENGINES),
        ),
        owner=TransactionalId.TRACE,
    ),
    "track": Access(reads=(topics.STEPS,)),
    "lag": Access(reads=CATALOGUE, asks=tuple(ConsumerGroup), appends=False),
    "alerts": Access(reads=CATALOGUE, asks=tuple(ConsumerGroup)),
    "reader": Access(reads=CATALOGUE, asks=tuple(ConsumerGroup), writes=(topics.AUDIT,)),
    "prune": Access(
        reads=(topics.BATCHES, topics.GROUP_REQUESTS, topics.TASKS),
        asks=(ConsumerGroup.ASSEMBLER, ConsumerGroup.RUNNER, ConsumerGroup.SANDBOX, ConsumerGroup.VIEWS),
        deletes=PRUNED,
        follows=False,
    ),
    "erase": Access(reads=CATALOGUE, writes=(topics.SESSIONS, SESSION_KEYS, topics.AUDIT)),
    "dead-letters": Access(reads=(PARKED, *REFUSABLE), writes=REFUSABLE, follows=False),
    "skip": Access(reads=AGENTS, writes=(topics.SESSIONS,), follows=False),
    "gc": Access(reads=CATALOGUE, appends=False),
    "run": replace(
        FEEDER,
        reads=(*FEEDER.reads, *AGENTS[:2], topics.TOOL_RESULTS),
        writes=(*FEEDER.writes, *CONFIGURE.writes),
        makes=CONFIGURE.makes,
        examines=CONFIGURE.examines,
    ),
    "configure": CONFIGURE,
    "apply": Access(makes=CATALOGUE, follows=False, appends=False),
    "fork": replace(CONFIGURE, reads=(topics.WEIGHTS,)),
    "pause": Access(writes=(topics.RUNS,)),
    "engines": FLEET,
    "up": replace(FLEET, writes=(topics.ENGINES, topics.ENGINE_REQUESTS, topics.RUN_HEALTH)),
    "delete": Access(reads=(topics.WEIGHTS,), writes=(topics.RUNS,), deletes=CATALOGUE, forgets=tuple(ConsumerGroup)),
    "doctor": Access(examines=CATALOGUE, follows=False, appends=False),
}
"""Role or verb -> its operations. Verbs are listed as if they were roles (VERBS)."""
VERBS: Mapping[str, str] = {
    "archive": "role archive; log archive flush and status",
    "index": "role index; log index build",
    "lag": "role lag",
    "reader": "status, replay, dataset, export, dashboard, run list; log audit, books, cheating, eval, fold, report, "
    "reward, session, tail, why, dead-letters list and show",
    "prune": "log archive prune",
    "erase": "erase",
    "dead-letters": "log dead-letters requeue",
    "skip": "log dead-letters skip",
    "run": "run, its feeder included",
    "configure": "run configure, topics apply and check",
    "apply": "topics apply",
    "fork": "run fork in the new run; in the parent run it has the rights of reader",
    "pause": "run pause, resume and close",
    "engines": "engines",
    "up": "up, supervise: the supervisor's own part",
    "delete": "run delete; in the other runs of the bucket it has the rights of gc",
    "doctor": "doctor, topics check",
    "registry": "role registry (the embedded one; a registry of your own has its own rights)",
}
"""Key of ACCESS -> the commands that run with its rights. Every other role is `turnlog role NAME`."""


@dataclass(frozen=True, slots=True)
class Acl:
    """A right of one role, in the terms of Kafka's `kafka-acls.sh`."""

    role: str
    principal: str
    resource: str
    """topic | group | transactional-id | cluster"""
    name: str
    pattern: str
    """literal | prefixed"""
    operation: str


class TopicMismatch(LogError):
    """The partition count of a topic differs from the settings."""


def durability(settings: Settings) -> dict[str, str]:
    """Return the topic configuration under which losing one broker loses nothing. An acknowledged record is on all
    replicas but one, and no replica that lacks it may become leader (Kafka's documentation, "Replication")."""
    return dict(zip(DURABLE, (str(max(1, settings.kafka.copies - 1)), "false"), strict=True))


def specs(settings: Settings) -> list[TopicSpec]:
    """Return the catalogue's topics with the partition counts and the replication of the settings."""
    return [
        TopicSpec(
            topic.name,
            settings.kafka.count(topic.partitions),
            settings.kafka.copies,
            topic.config() | durability(settings),
        )
        for topic in CATALOGUE
    ]


async def apply(log: Log, settings: Settings) -> list[str]:
    """Create missing topics and return their names. Existing topics are left unchanged (`check` reports differences).
    Raises TopicMismatch before it creates anything. Raises LogUnavailable."""
    found = await log.topics()
    wanted = specs(settings)
    for spec in wanted:
        if spec.name in found and found[spec.name].partitions != spec.partitions:
            raise TopicMismatch(_count_mismatch(spec, found[spec.name]))
    missing = [spec for spec in wanted if spec.name not in found]
    if missing:
        await log.create_topics(missing)
    return [spec.name for spec in missing]


async def check(log: Log, settings: Settings) -> list[str]:
    """Return the differences from the catalogue, one sentence each. Warnings, for unknown topics under our own prefix,
    begin with "warning:". Raises LogUnavailable."""
    found = await log.topics(configs=True)
    wanted = specs(settings)
    problems = [problem for spec in wanted for problem in _problems(spec, found)]
    problems += _counts_apart(settings, found)
    if settings.kafka.prefix:  # without a prefix, other people's topics look like ours
        known = {spec.name for spec in wanted}
        problems += [
            f"{WARNING} {settings.kafka.prefix}{name} is not a topic of the catalogue"
            for name in sorted(set(found) - known)
        ]
    return problems


def check_internal(found: Mapping[str, TopicSpec], settings: Settings) -> list[str]:
    """Return, one sentence each, settings of Kafka's internal topics (`found`) that would lose offsets or transactions
    along with a broker."""
    return [
        problem
        for name, there in sorted(found.items())
        for problem in _weak(TopicSpec(name, 0, settings.kafka.copies, durability(settings)), there, DURABLE)
    ]


def _problems(spec: TopicSpec, found: Mapping[str, TopicSpec]) -> list[str]:
    there = found.get(spec.name)
    if there is None:
        return [f"{spec.name} does not exist: run `turnlog topics apply`"]
    problems = []
    if there.partitions != spec.partitions:
        problems.append(_count_mismatch(spec, there))
    return problems + _weak(spec, there, tuple(spec.config))


def _weak(spec: TopicSpec, there: TopicSpec, keys: Sequence[str]) -> list[str]:
    """Return problems with replicas and configuration values that are below those of `spec`."""
    problems = []
    if there.replication < spec.replication:
        problems.append(
            f"{spec.name} has {there.replication} replicas, kafka.replication asks for {spec.replication}: add "
            "replicas with kafka-reassign-partitions.sh"
        )
    if not there.config:
        problems.append(f"the configuration of {spec.name} cannot be read: grant this principal DescribeConfigs on it")
    for key in keys if there.config else ():
        if not _satisfies(key, there.config.get(key), spec.config[key]):
            problems.append(
                f"{spec.name} has {key}={there.config.get(key)}, the catalogue asks for {spec.config[key]}: "
                f"kafka-configs.sh --alter --topic {spec.name} --add-config {key}={spec.config[key]}"
            )
    return problems


def _satisfies(key: str, there: str | None, wanted: str) -> bool:
    if there is not None and key in AT_LEAST:
        return int(there) >= int(wanted)
    if there is not None and key in AT_MOST:
        return float(there) <= float(wanted)
    return there == wanted


def _counts_apart(settings: Settings, found: Mapping[str, TopicSpec]) -> list[str]:
    """Return problems with topics that form partition tasks together and differ in their partition counts. These must
    be equal, whatever the settings say."""
    problems = []
    for kind in ("groups", "rollouts"):
        counts = {
            topic.name: found[topic.name].partitions
            for topic in CATALOGUE
            if topic.partitions == kind and topic.name in found
        }
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} has {count}" for name, count in counts.items())
            problems.append(f"topics that must share one partition count (kafka.{kind}) do not: {told}")
    return problems


def _count_mismatch(spec: TopicSpec, there: TopicSpec) -> str:
    return (
        f"{spec.name} has {there.partitions} partitions, the settings ask for {spec.partitions}: set kafka.groups and "
        "kafka.rollouts to what the cluster has, or use a new kafka.prefix; a topic's partition count never changes"
    )


def _with_keys(access: Access, settings: Settings) -> Access:
    """Add the rights on the keys of sessions that reading and writing encrypted content needs."""
    if not settings.erasure.master_keys or not WITH_CONTENT & {*access.receives, *access.writes}:
        return access
    writes = (SESSION_KEYS,) if WITH_CONTENT & set(access.writes) else ()
    return replace(access, reads=(*access.reads, SESSION_KEYS), writes=(*access.writes, *writes))


def acls(settings: Settings, role: str, principal: str = "") -> list[Acl]:
    """Return the minimum rights of the role on this cluster, prefix and run. `principal` defaults to User:ROLE."""
    access, prefix = _with_keys(ACCESS.get(role, Access()), settings), settings.kafka.prefix
    filled = {"run": settings.run.id, "archive": archive_name(settings)}

    def on(resource: str, operation: str, name: str, **more: str) -> Acl:
        """Create a right on a name under the prefix. A name with a part that only its owner knows becomes a prefix
        pattern."""
        said = prefix + name.partition("{engine}")[0].partition("{unit}")[0].format(**filled)
        pattern = "prefixed" if name.endswith(("{engine}", "{unit}")) else "literal"
        return Acl(role, principal or f"User:{role}", resource, said, more.get("pattern", pattern), operation)

    def of_topics(operation: str, wanted: Iterable[Topic]) -> Iterator[Acl]:
        return (on("topic", operation, topic.name) for topic in dict.fromkeys(wanted))

    def at_all(resource: str, operation: str, name: str) -> Acl:
        """Create a right on the cluster as a whole, without the prefix."""
        return Acl(role, principal or f"User:{role}", resource, name, "literal", operation)

    if role == "registry":
        operations = ("Create", "Read", "Write")
        return [*(on("topic", operation, REGISTRY_TOPIC) for operation in operations),
                on("transactional-id", "Write", TransactionalId.REGISTRY)]  # fmt: skip
    seen = {*access.receives, *access.writes, *access.deletes}  # each of these rights implies Describe
    found = [
        *of_topics("Read", access.receives),
        *of_topics("Write", access.writes),
        *of_topics("Delete", access.deletes),
        *of_topics("Describe", (t for t in access.measures + access.examines + access.makes if t not in seen)),
        *of_topics("Create", access.makes),
        *of_topics("DescribeConfigs", access.examines),
        *(on("group", "Read", group) for group in (access.group,) if group is not None),
        *(on("group", "Describe", group) for group in access.asks),
        *(on("group", "Delete", group) for group in access.forgets),
        *(on("transactional-id", "Write", owner) for owner in (access.owner,) if owner is not None),
    ]
    if access.appends and not access.writes:
        # Its producer of events requests a producer id. Since Kafka 3.0, write access to any topic suffices (KIP-679).
        found.append(at_all("cluster", "IdempotentWrite", CLUSTER))
    own = f"{ConsumerGroup.VIEWS}-"
    if role == "delete":  # it asks who uses a transactional id, and for sizes
        found += [on("transactional-id", "Describe", one) for one in TransactionalId if one != TransactionalId.REGISTRY]
        found += [on("topic", "Delete", own, pattern="prefixed"), at_all("cluster", "Describe", CLUSTER)]
    if role == "views":  # Faust's changelogs
        found += [on("topic", operation, own, pattern="prefixed") for operation in ("Create", "Read", "Write")]
    if role in ("configure", "doctor"):  # `topics check`
        both = ("Describe", "DescribeConfigs")
        found += [at_all("topic", operation, name) for name in INTERNAL for operation in both]
    if role == "doctor":  # it examines the brokers' configuration
        found.append(at_all("cluster", "DescribeConfigs", CLUSTER))
    return found


CLUSTER = "kafka-cluster"
INTERNAL = ("__consumer_offsets", "__transaction_state")
ROLES = (*ACCESS, "registry")
