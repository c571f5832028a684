"""The way out as a process of its own: `turnlog egress` connects to origins, and workers to nothing beyond it.

A worker's proxy judges, intercepts and records as ever. What it admits it hands on to [egress] proxy in absolute form
(RFC 9112 3.2.2; https, too, so that method and path are seen), with a token that says whose call it is and which rules
its task has. Here all of it is judged again, by this process's [egress] allow and the token's rules, addresses are
resolved and checked, and TLS to the origin is made. So a worker that agents' code has taken over reaches what the
operator granted and no more, and an address inside never. How many requests a call may make, the worker counts.

This process knows neither log nor store: it has no key but the one that tokens are made with.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import orjson
from anyio.abc import ByteStream, Listener, SocketListener
from anyio.streams.tls import TLSListener
from prometheus_client import Counter

from turnlog.infra.roles.health import Health, listening, serve_health
from turnlog.infra.roles.probe import health_address
from turnlog.infra.roles.starting import asked, lived
from turnlog.infra.roles.tls import serving
from turnlog.infra.run_folder import present
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress.client import Head
from turnlog.sandbox_workers.egress.policy import (
    Authority,
    EgressUnavailable,
    Policy,
    Reason,
    RequestRefused,
    Rule,
    RuleInvalid,
    Target,
    rules,
)
from turnlog.sandbox_workers.egress.proxy import CONNECTIONS, Proxy, Tls
from turnlog.sandbox_workers.egress.recordings import Entry, Requests
from turnlog.sandbox_workers.egress.sources import Addresses, Live, Resolve, Upstream, trust
from turnlog.settings import Settings

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

log = logging.getLogger(__name__)
TOKEN_S = 60
"""A token is made for each request; cryptography adds as much for clocks that are ahead."""
WORKERS_CONNECTIONS = 1024
"""Of all workers at once; more wait."""
REQUESTS = Counter(
    "turnlog_egress_requests", "Requests of workers by what came of them: passed, or a reason", ["outcome"]
)


class Tokens:
    """Fernet tokens of [egress] signing_key as it is now, for its file may change: nobody else reads or makes them."""

    def __init__(self, keys: str) -> None:
        """The first signs, every one is accepted. Raises EgressUnavailable without one, or without `cryptography`."""
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError:
            raise EgressUnavailable("[egress] proxy needs tokens: pip install turnlog[sandbox]") from None
        if not keys.split():
            raise EgressUnavailable(
                "[egress] signing_key is empty: set TURNLOG_EGRESS_SIGNING_KEY_FILE for workers and `turnlog egress`"
            )
        self._keys, self._fernet, self._many, self._invalid = keys, Fernet, MultiFernet, InvalidToken

    def made(self, call_id: str, task: tuple[Rule, ...] | None) -> str:
        """Of a call and its task's rules; None: it has none."""
        allow = None if task is None else [rule.text for rule in task]
        token: bytes = self._signer().encrypt(orjson.dumps([call_id, allow]))
        return token.decode()

    def read(self, head: Head) -> tuple[str, tuple[Rule, ...] | None]:
        """What `made` was given, of a request that carries it. Raises RequestRefused(token)."""
        try:
            (given,) = head.values(b"proxy-authorization")
            said = self._signer().decrypt(given.removeprefix(b"Bearer "), ttl=TOKEN_S)
            call_id, allow = orjson.loads(said)
            return call_id, None if allow is None else rules(allow)
        except (self._invalid, RuleInvalid, ValueError) as error:
            raise RequestRefused(Reason.token) from error

    def _signer(self) -> MultiFernet:
        keys = (hashlib.sha256(key.encode()).digest() for key in present(self._keys).split())
        return self._many([self._fernet(base64.urlsafe_b64encode(key)) for key in keys])


@dataclass(slots=True, eq=False)
class _Counted(Entry):
    """A worker asks for nothing that it would have refused itself: a refusal of rules or addresses is news."""

    call_id: str = ""

    def ended(self, sent: int) -> None:
        Entry.ended(self, sent)
        REQUESTS.labels(self.reason or "passed").inc()
        if self.reason in (Reason.rule, Reason.private_address, Reason.token):
            log.warning("refused (%s): %s %s of call %s", self.reason, self.method, self.url, self.call_id or "unknown")


class _Asked(Requests):
    """Kept nowhere: the worker tells the log of them."""

    def begin(self) -> Entry:
        return _Counted(over=False)


class _Passing(Live):
    """Grants what this process's rules do, and those of the token."""

    def __init__(self, operator: tuple[Rule, ...], tokens: Tokens, upstream: Upstream, *, most: int) -> None:
        """`most`: response_bytes."""
        super().__init__(Policy(operator), upstream, most=most)
        self._tokens = tokens

    def admit(self, head: Head, target: Target, entry: Entry) -> None:
        assert isinstance(entry, _Counted)
        entry.call_id, task = self._tokens.read(head)
        self.policy = Policy(self.policy.operator, task)
        super().admit(head, target, entry)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        """A worker that is ours opens none."""
        raise RequestRefused(Reason.tls)


class Apart:
    """Serves workers."""

    def __init__(self, settings: EgressSettings, resolve: Resolve | None = None) -> None:
        """`resolve` stands in for this machine's resolver. Raises EgressUnavailable, RuleInvalid, TlsFileUnusable."""
        if not settings.allow:
            raise EgressUnavailable("[egress] allow names nothing: nobody would get out")
        self._settings = settings
        self._operator, self._tokens = rules(settings.allow), Tokens(settings.signing_key)
        self._addresses, self._trust = Addresses(settings.private_hosts, resolve), trust(settings.upstream_ca)
        self._shown = serving(settings.certificate_file, settings.key_file, "egress")
        self._room = asyncio.Semaphore(WORKERS_CONNECTIONS)

    async def serve(self, bound: socket.socket, stopping: asyncio.Event, health: Health) -> None:
        """On a socket that it takes over, until `stopping`; then requests under way have [egress] timeout_s to end."""
        bound.listen()
        log.info("egress proxy on %s:%d", *bound.getsockname()[:2])
        doors: Listener[ByteStream] = await SocketListener.from_socket(bound)
        if self._shown is not None:
            doors = TLSListener(doors, self._shown, standard_compatible=False)
        async with anyio.create_task_group() as connections:
            async with anyio.create_task_group() as accepting:
                accepting.start_soon(doors.serve, self._served, connections)
                health.started()
                await stopping.wait()
                accepting.cancel_scope.cancel()
            await doors.aclose()
            connections.cancel_scope.deadline = anyio.current_time() + self._settings.timeout_s

    async def _served(self, stream: ByteStream) -> None:
        async with stream, self._room:
            # Of its own, as calls are: who has logged in over a connection to an origin has done so for himself.
            upstream = Upstream(self._addresses, self._trust, connections=CONNECTIONS)
            source = _Passing(self._operator, self._tokens, upstream, most=self._settings.response_bytes)
            try:
                await Proxy(self._settings, source, _Asked(0), Tls(of_workers=True)).serve(stream)
            finally:
                await upstream.close()


def serve_egress(settings: Settings) -> int:
    """The role: serve until SIGTERM or SIGINT; 0. Raises EgressError, CannotListen, SettingsError."""
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    stopping, health = asked(), Health("egress")

    async def life() -> None:
        apart = Apart(settings.egress)
        bound = listening(settings.egress.host, settings.egress.port, "[egress] host or port")
        await apart.serve(bound, stopping, health)

    async with serve_health(health, health_address(os.environ)):
        await lived(life(), stopping, health)
