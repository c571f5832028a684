"""The standalone egress proxy: the process `turnlog role egress` connects to origins, and workers connect only to it.

A worker's proxy still checks, intercepts and records. It forwards admitted requests to [egress] proxy in absolute form
(RFC 9112 3.2.2; https, too, so that method and path are visible), with a token that names the call and its task's
rules. This process checks everything again, by its own [egress] allow and the token's rules; it resolves and checks
addresses and makes TLS to the origin. So a worker that agents' code has taken over reaches no more than the operator
granted, and never an internal address. The number of requests of a call is counted by the worker.

This process has access to neither log nor store, and its only key is the one that tokens are made with."""

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
from turnlog.infra.roles.starting import run_until_stopped, stop_on_signals
from turnlog.infra.roles.tls import serving
from turnlog.infra.run_folder import present
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress.client import Head
from turnlog.sandbox_workers.egress.policy import (
    Authority,
    CanonicalUrl,
    EgressUnavailable,
    NetworkRule,
    NetworkRuleSet,
    Reason,
    RequestRefused,
    RuleInvalid,
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
"""Lifetime of a token in seconds. A token is made for each request; cryptography adds as much for clocks that are
ahead."""
WORKERS_CONNECTIONS = 1024
"""Maximum number of connections of all workers together; more wait."""
REQUESTS = Counter(
    "turnlog_egress_requests", "Requests of workers by outcome: passed, or the reason for refusal", ["outcome"]
)


class EgressTokens:
    """Fernet tokens of [egress] signing_key, which is read again for each token because its file may change. Nobody
    else reads or makes them."""

    def __init__(self, keys: str) -> None:
        """Create the tokens. The first key signs, every key is accepted. Raises EgressUnavailable without a key, or
        without `cryptography`."""
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError:
            raise EgressUnavailable("[egress] proxy needs tokens: pip install turnlog[sandbox]") from None
        if not keys.split():
            raise EgressUnavailable(
                "[egress] signing_key is empty: set TURNLOG_EGRESS_SIGNING_KEY_FILE for workers "
                "and `turnlog role egress`"
            )
        self._keys, self._fernet, self._many, self._invalid = keys, Fernet, MultiFernet, InvalidToken

    def make_token(self, call_id: str, task: tuple[NetworkRule, ...] | None) -> str:
        """Make the token of a call with its task's rules; None if the task has none."""
        allow = None if task is None else [rule.text for rule in task]
        token: bytes = self._signer().encrypt(orjson.dumps([call_id, allow]))
        return token.decode()

    def read(self, head: Head) -> tuple[str, tuple[NetworkRule, ...] | None]:
        """Return the arguments of `make_token` from the token in a request. Raises RequestRefused(token)."""
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
    """A request of a worker, counted by outcome. A worker forwards nothing that it would refuse itself, so a refusal by
    rules or addresses is logged."""

    call_id: str = ""

    def note_end(self, sent: int) -> None:
        Entry.note_end(self, sent)
        REQUESTS.labels(self.reason or "passed").inc()
        if self.reason in (Reason.rule, Reason.private_address, Reason.token):
            log.warning(
                "refused (%s): %s %s of call %s", self.reason, self.method, self.host, self.call_id or "unknown"
            )


class _TransientRequests(Requests):
    """Requests of a connection. They are not stored, because the worker writes them to the log."""

    def begin(self) -> Entry:
        return _Counted(over=False)


class _Passing(Live):
    """Grants what both this process's rules and those of the token grant."""

    def __init__(
        self, operator: tuple[NetworkRule, ...], tokens: EgressTokens, upstream: Upstream, *, most: int
    ) -> None:
        """Create the source. `most` is response_bytes."""
        super().__init__(NetworkRuleSet(operator), upstream, most=most)
        self._tokens = tokens

    def admit(self, head: Head, target: CanonicalUrl, entry: Entry) -> None:
        assert isinstance(entry, _Counted)
        entry.call_id, task = self._tokens.read(head)
        self.policy = NetworkRuleSet(self.policy.operator, task)
        super().admit(head, target, entry)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        """Refuse the tunnel: a worker of ours opens none."""
        raise RequestRefused(Reason.tls)


class Apart:
    """The egress proxy for workers."""

    def __init__(self, settings: EgressSettings, resolve: Resolve | None = None) -> None:
        """Create the proxy. `resolve` replaces this machine's resolver. Raises EgressUnavailable, RuleInvalid,
        TlsFileUnusable."""
        if not settings.allow:
            raise EgressUnavailable("[egress] allow is empty: no request would be let through")
        self._settings = settings
        self._operator, self._tokens = rules(settings.allow), EgressTokens(settings.signing_key)
        self._addresses, self._trust = Addresses(settings.private_hosts, resolve), trust(settings.upstream_ca)
        self._shown = serving(settings.certificate_file, settings.key_file, "egress")
        self._room = asyncio.Semaphore(WORKERS_CONNECTIONS)

    async def serve(self, bound: socket.socket, stopping: asyncio.Event, health: Health) -> None:
        """Serve on a socket, which this takes over, until `stopping`. Then requests in progress get [egress] timeout_s
        to end."""
        bound.listen()
        log.info("egress proxy on %s:%d", *bound.getsockname()[:2])
        doors: Listener[ByteStream] = await SocketListener.from_socket(bound)
        if self._shown is not None:
            doors = TLSListener(doors, self._shown, standard_compatible=False)
        async with anyio.create_task_group() as connections:
            async with anyio.create_task_group() as accepting:
                accepting.start_soon(doors.serve, self._serve_connection, connections)
                health.mark_started()
                await stopping.wait()
                accepting.cancel_scope.cancel()
            await doors.aclose()
            connections.cancel_scope.deadline = anyio.current_time() + self._settings.timeout_s

    async def _serve_connection(self, stream: ByteStream) -> None:
        async with stream, self._room:
            # Each connection gets its own upstream, as each call does: a login at an origin must not be shared.
            upstream = Upstream(self._addresses, self._trust, connections=CONNECTIONS)
            source = _Passing(self._operator, self._tokens, upstream, most=self._settings.response_bytes)
            try:
                await Proxy(self._settings, source, _TransientRequests(0), Tls(of_workers=True)).serve(stream)
            finally:
                await upstream.close()


def serve_egress(settings: Settings) -> int:
    """Run the role until SIGTERM or SIGINT; return 0. Raises EgressError, CannotListen, SettingsError."""
    asyncio.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    stopping, health = stop_on_signals(), Health("egress")

    async def life() -> None:
        apart = Apart(settings.egress)
        bound = listening(settings.egress.host, settings.egress.port, "[egress] host or port")
        await apart.serve(bound, stopping, health)

    async with serve_health(health, health_address(os.environ)):
        await run_until_stopped(life(), stopping, health)
