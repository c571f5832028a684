"""A role from its first instruction to its work, and the servers that it needs at the start and afterwards.

Health is served first and signals are handled, then the role waits for every server as long as necessary: a missing one
is reported on /readyz, and the process does not end because of it. While the role works, the same servers are checked
from time to time, so that /readyz names the outage, and no loop that stands still for lack of a server counts as hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeVar

from turnlog.infra.blobs import StoreUnavailable
from turnlog.infra.log import LogUnreachable, NotAuthorized, Partition, TopicMissing
from turnlog.infra.roles import Explained, Unreachable, is_unreachable
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.tls import trusting
from turnlog.names import REGISTRY_TOPIC
from turnlog.schemas import topics
from turnlog.settings import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_S, LONGEST_S = 0.2, 5.0
"""First and longest pause in seconds between two checks of a missing server. It doubles, and each is shortened at
random by up to half, so that roles that lost the server together do not return together."""
LOOK_S = 10.0
"""Maximum duration of one check in seconds."""
WATCH_S = 5.0
"""Seconds between two checks of a server that is available."""
APART_S = 300.0
"""Maximum clock difference in seconds between this machine and the store: S3 rejects signatures from 900 s on, Kafka
rejects records from 3,600 s on."""
RUNS, REGISTRY = Partition(topics.RUNS.name, 0), Partition(REGISTRY_TOPIC, 0)
WITHOUT_STORE = frozenset({"gateway", "runner", "feeder"})
"""Roles that store only the largest payloads: they can work while the store is away."""


def stop_on_signals() -> asyncio.Event:
    """Return an event of the running loop that SIGTERM and SIGINT set from now on. Call it in the main thread."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def run_until_stopped(life: Coroutine[Any, Any, T], stopping: asyncio.Event, health: Health) -> T | None:
    """Await a role's life and return its result, or None if it was cancelled. Raises what it raises.

    If the role is stopped before it has started its work, it is cancelled: there is nothing that a drain could save.
    Otherwise it observes `stopping` itself."""
    living, stop = asyncio.create_task(life), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((living, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            if not health.works:
                living.cancel()
            health.unmet("stop", "asked to stop")
        await asyncio.wait((living,))
    finally:
        stop.cancel()
        living.cancel()
    return None if living.cancelled() and stopping.is_set() else living.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredServer:
    """A server that a role cannot work without."""

    name: str
    address: str
    setting: str
    """The setting that holds its address."""
    answers: Callable[[], Awaitable[object]]
    """Check the server. Raises Unreachable while it is away or rejects our credentials; TopicMissing or NotAuthorized
    while the topics job or an ACL is missing. Any other error is a fault that waiting does not fix."""
    look_s: float = LOOK_S
    """Maximum duration of one check in seconds."""
    lasting: bool = True
    """True if the server is needed after the start, too."""
    later: bool = False
    """True if the server is checked only once the log is known to be this run's: until then nobody knows whether the
    server belongs to the run."""


class Servers:
    """The servers of one role, and their readiness conditions."""

    def __init__(
        self,
        servers: list[RequiredServer],
        health: Health,
        *,
        watch_s: float = WATCH_S,
        longest_s: float = LONGEST_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._servers, self._health = servers, health
        self._watch_s, self._longest_s, self._sleep = watch_s, longest_s, sleep

    async def there(self, *, later: bool = False) -> None:
        """Wait until every server has answered: those with `later`, or those without. Raises errors that waiting does
        not fix: RegistryUnavailable, StoreUnavailable, LogUnavailable."""
        servers = [server for server in self._servers if server.later == later]
        for server in servers:
            self._health.unmet(server.name, f"{server.name} at {server.address} was not checked yet")
        await _all(self._until(server, FIRST_S) for server in servers)

    async def watch(self) -> None:
        """Check the lasting servers forever at intervals. While one is away, the role is not ready, and none of its
        loops counts as hung."""
        await _all(self._watch(server) for server in self._servers if server.lasting)

    async def _watch(self, server: RequiredServer) -> None:
        while True:
            await self._sleep(self._watch_s)
            try:
                await self._until(server, self._watch_s)
            except Exception as error:
                log.warning("%s at %s: %s; see %s", server.name, server.address, error, server.setting)

    async def _until(self, server: RequiredServer, pause_s: float) -> None:
        """Check the server until it answers."""
        since, looks = "", 0
        while (trouble := await _look(server)) is not None:
            since, looks = since or datetime.now(UTC).isoformat(timespec="seconds"), looks + 1
            self._health.unmet(server.name, f"{trouble}; {looks} attempts since {since}")
            log.warning("waiting for %s at %s: %s", server.name, server.address, trouble)
            if looks > 1:  # the second check used new connections, so the fault is not in ours
                self._health.excuse()
            await self._sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, self._longest_s)
        if looks:
            log.info("%s at %s answers again", server.name, server.address)
            self._health.excuse()
        self._health.mark_ready(server.name)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the coroutines together; the first error cancels all and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _look(server: RequiredServer) -> str | None:
    """Check the server once; return what is wrong with it, or None. Raises errors that waiting does not fix."""
    try:
        async with asyncio.timeout(server.look_s):
            await server.answers()
    except TimeoutError:
        return f"{server.name} at {server.address} gave no answer within {server.look_s:g} s; {_remedy(server)}"
    except (TopicMissing, NotAuthorized, Explained) as missing:
        return str(missing)  # the message says what to do; brokers, secrets and ACLs may change while roles wait
    except Exception as error:
        if not is_unreachable(error):
            raise
        return f"{server.name} at {server.address} does not answer ({error}); {_remedy(server)}"
    return None


def _remedy(server: RequiredServer) -> str:
    variable = server.setting.replace("[", "TURNLOG_").replace("] ", "_").upper()
    return f"start it, or set {server.setting} ({variable}) to its address"


@asynccontextmanager
async def watch_servers(servers: Servers) -> AsyncIterator[None]:
    """Watch the servers while the block runs."""
    watching = asyncio.create_task(servers.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait((watching,))


@asynccontextmanager
async def servers_of(role: str, settings: Settings, health: Health) -> AsyncIterator[Servers]:
    """Yield the servers that the role needs before it can work. `settings` must have all addresses filled in."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [_kafka(stack, settings, REGISTRY if role == "registry" else RUNS)]
        if role != "registry":
            servers.append(_registry(stack, settings))
        if role not in ("registry", "views"):
            servers.append(_store(stack, settings, lasting=role not in WITHOUT_STORE))
            servers.append(_clock(stack, settings))
        if role == "runner":
            servers.append(_gateway(stack, settings))
        yield Servers(servers, health)


def _kafka(stack: contextlib.AsyncExitStack, settings: Settings, place: Partition) -> RequiredServer:
    """Return the check of Kafka: the topic of `place` must exist and take appends. A role that found out by a
    transaction of its own would lose a minute each time.

    The registry's topic may be missing, since the registry creates it."""
    from turnlog.infra.kafka import KafkaLog

    held: list[KafkaLog] = []

    async def close() -> None:
        while held:
            with contextlib.suppress(TimeoutError, LogUnreachable):
                async with asyncio.timeout(LOOK_S):
                    await held.pop().close()

    async def answers() -> None:
        if not held:
            held.append(KafkaLog.of(settings.kafka))
        try:
            await held[0].check_replicas(place.topic)
            await held[0].end_offsets([place])
        except TopicMissing:
            if place == RUNS:
                raise
        except BaseException:
            await close()
            raise

    stack.push_async_callback(close)
    return RequiredServer(
        name="Kafka",
        address=settings.kafka.bootstrap,
        setting="[kafka] bootstrap",
        answers=answers,
        look_s=3 * LOOK_S,  # brokers that accept connections and do not answer are skipped one after another
    )


def _registry(stack: contextlib.AsyncExitStack, settings: Settings) -> RequiredServer:
    from turnlog.infra.event_log import schema_ids
    from turnlog.infra.registry import HttpRegistry

    registry = HttpRegistry(settings.registry, timeout_s=LOOK_S / 2)
    stack.push_async_callback(registry.close)

    async def answers() -> None:
        if not settings.registry.auto_register:
            await schema_ids(registry)  # otherwise the role would exit and restart until the schemas are registered
        with contextlib.suppress(KeyError):  # an empty registry is available, too
            await registry.schema(1)

    where = settings.registry.url
    return RequiredServer(name="registry", address=where, setting="[registry] url", answers=answers, lasting=False)


def _store(stack: contextlib.AsyncExitStack, settings: Settings, *, lasting: bool) -> RequiredServer:
    from turnlog.infra.s3 import S3Blobs

    blobs = S3Blobs(settings.store, threads=1, patient=False)
    stack.push_async_callback(blobs.close)
    return RequiredServer(
        name="store",
        address=settings.store.endpoint,
        setting="[store] endpoint",
        answers=lambda: blobs.names("none/"),
        lasting=lasting,
    )


class ClocksApart(Explained):
    """The clocks of this machine and the store differ too much; either may be wrong. Remedy: NTP on both."""


def _clock(stack: contextlib.AsyncExitStack, settings: Settings) -> RequiredServer:
    """Return the check of the clock, which is no server, but roles on several machines depend on a common time just as
    they depend on a server."""
    from turnlog.infra.s3 import S3Blobs

    blobs = S3Blobs(settings.store, threads=1, patient=False)
    stack.push_async_callback(blobs.close)

    async def answers() -> None:
        ahead_s = 0.0
        with contextlib.suppress(StoreUnavailable):  # the store's own check reports this
            ahead_s = await blobs.ahead_s()
        if abs(ahead_s) > APART_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            raise ClocksApart(
                f"this machine's clock is {abs(ahead_s):.0f} s {side} that of the store at {settings.store.endpoint}: "
                f"synchronize both with NTP; at most {APART_S:g} s are tolerated"
            )

    return RequiredServer(name="clock", address=settings.store.endpoint, setting="[store] endpoint", answers=answers)


class GatewayAway(Unreachable):
    """The gateway did not answer, or answered with a 5xx."""


def _gateway(stack: contextlib.AsyncExitStack, settings: Settings) -> RequiredServer:
    import httpx

    url = settings.gateway.url.rstrip("/")
    http = direct(timeout=LOOK_S / 2, verify=trusting(url, settings.gateway.ca_file, "gateway"))
    stack.push_async_callback(http.aclose)

    async def answers() -> None:
        try:
            answer = await http.get(f"{url}/healthz")
        except httpx.TransportError as error:
            raise GatewayAway(str(error) or type(error).__name__) from error
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise GatewayAway(f"/healthz answered {answer.status_code}")

    return RequiredServer(name="gateway", address=url, setting="[gateway] url", answers=answers, later=True)
