"""`turnlog doctor`: query the servers of an installation, check that they guarantee what a run relies on, and print
what to change.

Broker limits that a record would otherwise hit only in the middle of a run are read beforehand. A server that does not
answer is reported as a finding like any other, so that one call reports everything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import httpx
from rich.table import Table

from turnlog import __version__
from turnlog.infra.blobs import BlobError
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.connection import METADATA_LIMIT_BYTES, Membership
from turnlog.infra.kafka.producers import TRANSACTION_TIMEOUT_MS
from turnlog.infra.log import LogError
from turnlog.infra.registry import HttpRegistry, RegistryError
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.http_clients import fetch_warnings
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.infra.roles.tls import TlsFileUnusable
from turnlog.infra.run_folder import health_addresses, resolve_endpoints
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.topics_admin import WARNING, check, check_internal
from turnlog.names import ExitStatus
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import MAX_MESSAGE_BYTES
from turnlog.settings import Settings
from turnlog.verbs.report import versions

SKEW_S = 5.0
"""Maximum difference between clocks, in seconds. A larger one makes ages, lags in seconds and `--before` wrong by as
much."""
ANSWER_S = 10.0
LEVELS = ("BACKWARD_TRANSITIVE", "FULL_TRANSITIVE")
"""Compatibility levels of a registry under which a present reader can read what any release wrote."""
PROBE = "doctor/probe"
"""Name of the only object that the doctor writes; it is overwritten each time."""
HIDDEN = "ask its operator, or grant this principal DescribeConfigs on the cluster (`turnlog topics acls`)"
GOOD, WORTH_A_LOOK, WRONG = "good", "worth a look", "wrong"
ROOM = 64 << 10
"""Bytes of a produce request in addition to its records."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one check."""

    state: str
    """good | worth a look | wrong"""
    where: str
    what: str
    remedy: str = ""


Findings = Iterable[DoctorFinding]


def command(settings: Settings, *, as_json: bool) -> int:
    """Check every server that the settings name and print the findings. Return 1 if something is wrong, else 0. Raises
    NoEndpoints."""
    found = run_verb(check_servers(resolve_endpoints(settings)))
    if as_json:
        about = {"turnlog": __version__, "packages": versions()}
        say_json({**about, "findings": [dataclasses.asdict(finding) for finding in found]})
    else:
        _tell(found)
    return ExitStatus.DIFFERS if any(finding.state == WRONG for finding in found) else ExitStatus.DONE


async def check_servers(settings: Settings) -> list[DoctorFinding]:
    """Check the servers. `settings` must have their addresses filled in."""
    looks: dict[str, Callable[[Settings], Awaitable[Findings]]] = {
        f"[kafka] bootstrap {settings.kafka.bootstrap}": _kafka,
        f"[registry] url {settings.registry.url}": _registry,
        f"[store] endpoint {settings.store.endpoint}": _store,
    }
    answers = await asyncio.gather(*(_run_check(where, look, settings) for where, look in looks.items()))
    roles = await asyncio.to_thread(_roles, settings)
    return [*direct_findings(settings), *(finding for answer in answers for finding in answer), *roles]


def direct_findings(settings: Settings) -> Iterator[DoctorFinding]:
    """Yield consequences of `publish = "direct"` that the settings do not show."""
    if settings.trainer.publish != "direct":
        return
    if settings.engine.urls:
        yield DoctorFinding(
            WORTH_A_LOOK,
            f"[engine] urls {', '.join(settings.engine.urls)}",
            "an engine takes weights from training ranks only with turnlog's plugin of SGLang; without it, it waits "
            "for each version's copy in the store",
            "install turnlog in the Python environment of its SGLang (docs/engines.md), unless it is there already",
        )
    if settings.eval.every and settings.weights.durable_every > 1:
        yield DoctorFinding(
            WORTH_A_LOOK,
            f"[weights] durable_every {settings.weights.durable_every}",
            "the version that evaluations find best may have no files; its checkpoint is kept",
            "export it with --checkpoint, or set durable_every = 1",
        )


def _roles(settings: Settings) -> list[DoctorFinding]:
    """Collect the warnings of running roles from their health endpoints."""
    addresses = health_addresses(settings) | {one: one for one in settings.status.health}
    with ThreadPoolExecutor(max(1, min(32, len(addresses)))) as pool:
        told = zip(
            addresses, pool.map(lambda one: fetch_warnings(one, timeout_s=ANSWER_S), addresses.values()), strict=True
        )
        return [DoctorFinding(WORTH_A_LOOK, name, line) for name, lines in told for line in lines]


async def _run_check(
    where: str, look: Callable[[Settings], Awaitable[Findings]], settings: Settings
) -> list[DoctorFinding]:
    """Run one check. If the server does not answer, return that as the finding."""
    try:
        return list(await look(settings))
    except (LogError, BlobError, RegistryError, TlsFileUnusable) as error:
        return [DoctorFinding(WRONG, where, f"{type(error).__name__}: {error}", "start it, or correct the setting")]


async def _kafka(settings: Settings) -> Findings:
    log = KafkaLog.of(settings.kafka)
    try:
        brokers = await log.brokers()
        problems = check_internal(await log.internal_topics(), settings) + await check(log, settings)
    finally:
        await log.close()
    found = [_check_brokers(len(brokers), settings)]
    for broker, config in sorted(brokers.items()):
        found += broker_findings(f"broker {broker}", config, settings)
    found += [
        DoctorFinding(WORTH_A_LOOK if problem.startswith(WARNING) else WRONG, "topics", problem) for problem in problems
    ]
    return (
        found
        if problems
        else [*found, DoctorFinding(GOOD, "topics", "counts, replicas and limits match the catalogue")]
    )


def _check_brokers(brokers: int, settings: Settings) -> DoctorFinding:
    wanted = settings.kafka.copies
    what = f"{brokers} brokers, {wanted} copies of each topic (kafka.replication)"
    if brokers < wanted:
        return DoctorFinding(WRONG, "brokers", what, "add brokers, or lower kafka.replication")
    if brokers > 1 and wanted == 1:
        return DoctorFinding(WORTH_A_LOOK, "brokers", what, "set kafka.replication = 3: a single disk holds each topic")
    return DoctorFinding(GOOD, "brokers", what)


def broker_findings(where: str, config: Mapping[str, str], settings: Settings) -> Iterator[DoctorFinding]:
    """Check the configuration of one broker. Keys that it does not report (managed clusters hide some) are worth a
    look."""
    pause, member = settings.run.longest_pause_s, Membership()
    why = f"run.longest_pause_s is {pause:g} s: Kafka would forget offsets before that, and a restart miss records"
    limits = (
        ("offsets.retention.minutes", int(-(-pause // 60)), None, why),
        ("transaction.max.timeout.ms", TRANSACTION_TIMEOUT_MS, None, "a broker refuses longer transactions"),
        ("socket.request.max.bytes", MAX_MESSAGE_BYTES + ROOM, None, "the largest record is one request"),
        ("offset.metadata.max.bytes", METADATA_LIMIT_BYTES, None, "the low-water marks of a unit can take this much"),
        ("group.min.session.timeout.ms", None, member.session_ms, "members of consumer groups request it"),
        ("group.max.session.timeout.ms", member.session_ms, None, "members of consumer groups request it"),
    )
    for key, least, most, reason in limits:
        bound = f"at least {least}" if least is not None else f"at most {most}"
        said = config.get(key)
        if said is None or not said.lstrip("-").isdigit():
            yield DoctorFinding(WORTH_A_LOOK, where, f"{key} is not reported; it must be {bound}: {reason}", HIDDEN)
        elif (least is not None and int(said) < least) or (most is not None and int(said) > most):
            yield DoctorFinding(
                WRONG, where, f"{key}={said}, it must be {bound}: {reason}", f"set {key} on every broker"
            )
        else:
            yield DoctorFinding(GOOD, where, f"{key}={said}, {bound}")


async def _registry(settings: Settings) -> Findings:
    url = settings.registry.url.rstrip("/")
    registry = HttpRegistry(settings.registry, timeout_s=ANSWER_S)
    try:
        answer = await registry.config()
        found = [skew("registry", url, answer.headers.get("date")), level_of(url, "", answer)]
        for record in ALL:
            own = await registry.config(record)
            if own.status_code != HTTPStatus.NOT_FOUND:
                found.append(level_of(url, settings.registry.subject_prefix + record, own))
    finally:
        await registry.close()
    return [finding for finding in found if finding.state != GOOD or not finding.where.startswith("subject")]


def level_of(url: str, subject: str, answer: httpx.Response) -> DoctorFinding:
    """Check the compatibility level of a subject in a registry's answer; subject "" stands for the registry's
    default."""
    where = f"subject {subject}" if subject else f"registry {url}"
    if answer.is_error:
        return DoctorFinding(
            WORTH_A_LOOK, where, f"its level cannot be read: HTTP {answer.status_code}", "ask its operator"
        )
    said = answer.json()
    level = said.get("compatibilityLevel") or said.get("compatibility")
    if level in LEVELS:
        return DoctorFinding(GOOD, where, f"compatibility {level}")
    return DoctorFinding(
        WRONG, where, f"compatibility {level}: a change that breaks readers of old records would pass",
        f"PUT {url}/config{subject and '/' + subject} " + '{"compatibility": "BACKWARD_TRANSITIVE"}',
    )  # fmt: skip


def skew(name: str, url: str, said: str | None) -> DoctorFinding:
    """Compare a server's clock with this machine's, by the Date header of its answer. That has whole seconds, so half a
    second is added to it."""
    where = f"{name} {url}"
    if said is None:
        return DoctorFinding(
            WORTH_A_LOOK, where, "its answers have no Date header: its clock is unknown", "check its clock"
        )
    apart = parsedate_to_datetime(said).timestamp() + 0.5 - time.time()
    what = f"its clock is {apart:+.1f} s from this machine's"
    if abs(apart) > SKEW_S:
        return DoctorFinding(WRONG, where, f"{what}, {SKEW_S:g} s at most", "run NTP on both")
    return DoctorFinding(GOOD, where, what)


async def _store(settings: Settings) -> Findings:
    url, bucket = settings.store.endpoint, settings.store.bucket
    blobs = S3Blobs(settings.store, patient=False)
    try:
        found = [skew("store", url, await blobs.date())]
        for look in ("written", "overwritten"):
            content = secrets.token_bytes(32)
            await blobs.put_named(PROBE, content)
            read, named = await blobs.get_named(PROBE), PROBE in await blobs.names(PROBE)
            good = read == content and named
            what = f"an object that was {look} is {'' if good else 'not immediately '}read back and listed"
            remedy = "" if good else "use a store with read-after-write consistency, as S3 has since 2020"
            found.append(DoctorFinding(GOOD if good else WRONG, f"store {url}, bucket {bucket}", what, remedy))
    finally:
        await blobs.close()
    return found


def _tell(found: Iterable[DoctorFinding]) -> None:
    console = Terminal()
    table = Table("", "where", "what", "what to change")
    for finding in found:
        table.add_row(finding.state, finding.where, finding.what, finding.remedy)
    console.print(table)
    console.print(f"turnlog {__version__}; " + ", ".join(f"{name} {version}" for name, version in versions().items()))
