"""Topics of the catalogue on a cluster: what they should be, making them, checking them.

TopicMismatch (LogError)   a topic exists with another partition count: keys would move, so nothing is changed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, LogError, TopicSpec
from turnlog.infra.roles.terminal import say
from turnlog.infra.run_folder import resolved
from turnlog.names import ExitStatus
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import Settings

AT_LEAST = frozenset({"max.message.bytes", "min.insync.replicas"})
"""Configuration that may be above what the catalogue asks for."""
WARNING = "warning:"
DURABLE = ("min.insync.replicas", "unclean.leader.election.enable")
CHECKED = ("cleanup.policy", "retention.ms", "retention.bytes", "max.message.bytes", "message.timestamp.type", *DURABLE)


class TopicMismatch(LogError):
    """A topic's partition count is not the one of the settings."""


def durability(settings: Settings) -> dict[str, str]:
    """An acknowledged record is on all replicas but one, and no replica that lacks it may lead: one broker may be away,
    and whichever comes back, nothing is lost (Kafka's documentation, "Replication")."""
    return dict(zip(DURABLE, (str(max(1, settings.kafka.replication - 1)), "false"), strict=True))


def specs(settings: Settings) -> list[TopicSpec]:
    """The catalogue's topics with the partition counts and the replication of the settings."""
    counts = {"groups": settings.kafka.groups, "rollouts": settings.kafka.rollouts, "one": 1}
    return [
        TopicSpec(
            topic.name, counts[topic.partitions], settings.kafka.replication, topic.config() | durability(settings)
        )
        for topic in CATALOGUE
    ]


async def apply(log: Log, settings: Settings) -> list[str]:
    """Create what is missing; the names created. What exists is left as it is (`check` tells what differs).
    Raises TopicMismatch before it creates anything, LogUnavailable."""
    found = await log.topics()
    wanted = specs(settings)
    for spec in wanted:
        if spec.name in found and found[spec.name].partitions != spec.partitions:
            raise TopicMismatch(_miscounted(spec, found[spec.name]))
    missing = [spec for spec in wanted if spec.name not in found]
    if missing:
        await log.create_topics(missing)
    return [spec.name for spec in missing]


async def check(log: Log, settings: Settings) -> list[str]:
    """What differs from the catalogue, a sentence each; warnings (topics that we do not know below our own prefix)
    begin with "warning:". Raises LogUnavailable."""
    found = await log.topics()
    wanted = specs(settings)
    problems = [problem for spec in wanted for problem in _problems(spec, found)]
    problems += _counts_apart(settings, found)
    if settings.kafka.prefix:  # without one, other people's topics look like ours
        known = {spec.name for spec in wanted}
        problems += [
            f"{WARNING} {settings.kafka.prefix}{name} is no topic of the catalogue"
            for name in sorted(set(found) - known)
        ]
    return problems


def check_internal(found: Mapping[str, TopicSpec], settings: Settings) -> list[str]:
    """What would lose offsets or transactions with a broker, a sentence each; `found` are Kafka's own topics."""
    return [
        problem
        for name, there in sorted(found.items())
        for problem in _weak(TopicSpec(name, 0, settings.kafka.replication, durability(settings)), there, DURABLE)
    ]


def _problems(spec: TopicSpec, found: Mapping[str, TopicSpec]) -> list[str]:
    there = found.get(spec.name)
    if there is None:
        return [f"{spec.name} does not exist: run `turnlog topics apply`"]
    problems = []
    if there.partitions != spec.partitions:
        problems.append(_miscounted(spec, there))
    return problems + _weak(spec, there, CHECKED)


def _weak(spec: TopicSpec, there: TopicSpec, keys: Sequence[str]) -> list[str]:
    """Replicas and configuration that are less than asked for."""
    problems = []
    if there.replication < spec.replication:
        problems.append(
            f"{spec.name} has {there.replication} replicas, kafka.replication asks for {spec.replication}: "
            "kafka-reassign-partitions.sh adds some"
        )
    for key in keys:
        if not _satisfies(key, there.config.get(key), spec.config[key]):
            problems.append(
                f"{spec.name} has {key}={there.config.get(key)}, the catalogue asks for {spec.config[key]}: "
                f"kafka-configs.sh --alter --topic {spec.name} --add-config {key}={spec.config[key]}"
            )
    return problems


def _satisfies(key: str, there: str | None, wanted: str) -> bool:
    if there is not None and key in AT_LEAST:
        return int(there) >= int(wanted)
    return there == wanted


def _counts_apart(settings: Settings, found: Mapping[str, TopicSpec]) -> list[str]:
    """Topics of one unit must share one partition count, whatever the settings say."""
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


def _miscounted(spec: TopicSpec, there: TopicSpec) -> str:
    return (
        f"{spec.name} has {there.partitions} partitions, the settings ask for {spec.partitions}: set kafka.groups and "
        "kafka.rollouts to what the cluster has, or start a new kafka.prefix; a topic's count never changes"
    )


async def run(action: str, settings: Settings) -> int:
    """`turnlog topics apply|check`: say what was done or found; status 1 when a check found a problem."""
    settings = resolved(settings)
    log = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
    try:
        if action == "apply":
            created = await apply(log, settings)
            say(f"created {', '.join(created)}" if created else "every topic of the catalogue exists")
            return 0
        problems = check_internal(await log.internal_topics(), settings) + await check(log, settings)
    finally:
        await log.close()
    say(*problems or ["every topic is as the catalogue says"])
    wrong = any(not problem.startswith(WARNING) for problem in problems)
    return ExitStatus.DIFFERS if wrong else ExitStatus.DONE
