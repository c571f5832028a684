"""The egress of one worker: for each call, a proxy on the listening socket of its sandbox, as [egress] says."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from turnlog.infra.blobs import Blobs
from turnlog.infra.roles.tls import machine_authorities, trusting
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.backends.roots import owned_prefix
from turnlog.sandbox_workers.egress.apart import EgressTokens
from turnlog.sandbox_workers.egress.certificates import CertificateAuthority, public_roots, write_certificate
from turnlog.sandbox_workers.egress.client import forget_waiting
from turnlog.sandbox_workers.egress.mcp_relay import PathService
from turnlog.sandbox_workers.egress.policy import EgressUnavailable, NetworkRule, NetworkRuleSet, rules
from turnlog.sandbox_workers.egress.proxy import CONNECTIONS, Proxy, Tls
from turnlog.sandbox_workers.egress.recordings import RecordedRequests, Recordings, Requests
from turnlog.sandbox_workers.egress.sources import (
    Addresses,
    Live,
    Onwards,
    Recording,
    Repeating,
    Replaying,
    Resolve,
    ResponseSource,
    Upstream,
    trust,
)
from turnlog.sandbox_workers.egress.way_out import WayOut, read_credentials
from turnlog.sandbox_workers.protocol import Provider
from turnlog.schemas.events import EgressRequest

CA_INSIDE = "/etc/turnlog/ca.pem"
"""Path at which sandboxes see `Egress.ca`."""
PORT = 3128
"""Port of the proxy on a sandbox's own loopback."""
_OWN = "localhost,127.0.0.1,::1"
"""Addresses of a sandbox's own servers, which bypass the proxy."""
_CA_VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "GIT_SSL_CAINFO",
)  # fmt: skip
"""OpenSSL (and Python's ssl), requests, curl, Node.js, pip, git."""


class Egress:
    """The egress proxies of one worker."""

    def __init__(
        self, settings: EgressSettings, blobs: Blobs, *, operator: tuple[NetworkRule, ...], addresses: Addresses,
        trust: ssl.SSLContext, ca: Path | None, tls: Tls, tokens: EgressTokens | None,
    ) -> None:  # fmt: skip
        self.ca = ca
        """PEM file with the certificates that sandboxes trust; None if https is refused."""
        self._settings, self._blobs, self._operator = settings, blobs, operator
        self._addresses, self._trust, self._tls, self._tokens = addresses, trust, tls, tokens
        self._recordings = Recordings(blobs, settings.cache)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: EgressSettings, blobs: Blobs, folder: Path, *, resolve: Resolve | None = None
    ) -> AsyncIterator[Self]:
        """Open the egress. `folder` gets ca.pem, which every sandbox may read. `resolve` replaces the worker's
        resolver. Raises EgressUnavailable, RuleInvalid."""
        operator = rules(settings.allow)
        _consistent(settings, operator)
        read_credentials(settings.credentials_file)
        addresses = Addresses(settings.private_hosts, resolve)
        tls, pem = Tls(), b""
        if settings.tls == "intercept":
            authority = CertificateAuthority.make()
            tls, pem = Tls(authority=authority), authority.pem
        elif settings.tls == "tunnel":
            tls, pem = Tls(addresses=addresses), public_roots() + _extra_roots(settings)
        ca = await asyncio.to_thread(write_certificate, folder, pem) if pem else None
        trusted = trusting(settings.proxy, settings.ca_file, "egress")
        if trusted is None:
            trusted = await asyncio.to_thread(trust, settings.upstream_ca)
        tokens = EgressTokens(settings.signing_key) if settings.proxy and settings.mode != "replay" else None
        yield cls(settings, blobs, operator=operator, addresses=addresses, trust=trusted, ca=ca, tls=tls, tokens=tokens)

    @classmethod
    def without_rules(cls, settings: EgressSettings, blobs: Blobs) -> Self:
        """Create an egress without rules, for workers whose [egress] allow is empty: a call reaches at most the
        gateway."""
        return cls(
            settings, blobs, operator=(), addresses=Addresses(()), trust=machine_authorities(), ca=None, tls=Tls(),
            tokens=None,
        )  # fmt: skip

    @classmethod
    @asynccontextmanager
    async def open_temporary(cls, settings: EgressSettings, blobs: Blobs) -> AsyncIterator[Self]:
        """Run `open` with a folder of its own. If we are killed, it is swept as our sandboxes' folders are."""
        with tempfile.TemporaryDirectory(prefix=owned_prefix()) as name:
            os.chmod(name, 0o755)  # sandboxes of every user may read the certificate in it
            async with cls.open(settings, blobs, Path(name)) as egress:
                yield egress

    def environment_of(self, proxy: socket.socket, provider: Provider) -> Mapping[str, str]:
        """Return `environment` for a sandbox of that backend with this listening socket. A subprocess has the host's
        loopback, where the port is any free one, and the host's files; all others have their own. A backend that shows
        the certificates elsewhere than at CA_INSIDE has an attribute `ca_inside`."""
        if provider.name == "subprocess":
            host, port = proxy.getsockname()[:2]
            return self.environment(ca=str(self.ca), host=host, port=port)
        return self.environment(ca=getattr(provider, "ca_inside", CA_INSIDE))

    def environment(
        self, *, ca: str | None = CA_INSIDE, host: str = "127.0.0.1", port: int = PORT
    ) -> Mapping[str, str]:
        """Return variables by which programs in a sandbox find the proxy at host:port and trust the certificates in
        `ca`, a path as the sandbox sees it. curl knows http_proxy in lower case only, others in upper case only."""
        proxy = f"http://{host}:{port}"
        names = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), proxy) | {"no_proxy": _OWN}
        trusted = dict.fromkeys(_CA_VARIABLES, ca) if ca and self.ca is not None else {}
        return names | {name.upper(): value for name, value in names.items()} | trusted

    def way_out(self, allow: Iterable[str] = (), *, call_id: str = "") -> WayOut:
        """Return a way out for requests of the worker itself, under [egress] allow and a task's own rules. The caller
        closes it. Raises RuleInvalid, EgressUnavailable."""
        task, tokens, onwards = rules(allow) or None, self._tokens, None
        if tokens is not None:
            onwards = Onwards(self._settings.proxy, lambda: tokens.make_token(call_id, task))
        policy = NetworkRuleSet(self._operator, task)
        return WayOut(
            policy, self._addresses, self._trust, onwards=onwards, live=self._settings.mode != "replay",
            credentials=read_credentials(self._settings.credentials_file),
        )  # fmt: skip

    @asynccontextmanager
    async def serving(
        self,
        listener: socket.socket,
        *,
        allow: Iterable[str] = (),
        call_seq: int = 0,
        call_id: str = "",
        answers: Iterable[EgressRequest] | None = None,
        gateway: PathService | None = None,
    ) -> AsyncIterator[Requests]:
        """Serve one call on the sandbox's listening socket, which stays the caller's.

        `allow` has the task's own rules. `call_seq` is the call's place in its session, by which recordings tell
        repeated requests apart. `call_id` is the call's name in the log of [egress] proxy. `answers` is what a recorded
        call got (ToolCallCompleted.requests), to be given again instead of anything else. `gateway` is the endpoint
        that an agent's program uses; such a call reaches in the rest of the network what `allow` names, and nothing if
        that is empty.

        Enter before the command starts; `made()` is complete after the block. Raises RuleInvalid on entry. At the end
        raises BlobError if the object store failed one of the requests, or ProxyUnusable: then that call's output
        cannot be trusted."""
        requests = Requests(self._settings.requests)
        task = rules(allow) if gateway is not None else rules(allow) or None
        async with self._source(requests, task, (call_id, call_seq), answers) as source:
            proxy = Proxy(self._settings, source, requests, self._tls, gateway)
            with listener.dup() as own:  # if the sandbox dies, it closes its own while we accept
                forget_waiting(own)
                accepting = asyncio.create_task(proxy.accept(own))
                try:
                    yield requests
                finally:
                    accepting.cancel()
                    await asyncio.wait([accepting])
                    await proxy.close()
                    forget_waiting(own)
        if proxy.failed is not None:
            raise proxy.failed

    @asynccontextmanager
    async def _source(
        self, requests: Requests, task: tuple[NetworkRule, ...] | None, call: tuple[str, int],
        answers: Iterable[EgressRequest] | None,
    ) -> AsyncIterator[ResponseSource]:  # fmt: skip
        settings, policy = self._settings, NetworkRuleSet(self._operator, task)
        call_id, call_seq = call
        if answers is not None:
            yield Repeating(self._blobs, RecordedRequests(answers))
            return
        if settings.mode == "replay":
            yield Replaying(policy, self._blobs, self._recordings, requests, call_seq=call_seq)
            return
        tokens, onwards, most = self._tokens, None, settings.response_bytes
        if tokens is not None:
            onwards = Onwards(settings.proxy, lambda: tokens.make_token(call_id, task))
        upstream = Upstream(self._addresses, self._trust, connections=CONNECTIONS, onwards=onwards)
        try:
            if settings.mode == "record":
                yield Recording(policy, upstream, self._recordings, requests, call_seq=call_seq, most=most)
            else:
                yield Live(policy, upstream, most=most)
        finally:
            await upstream.close()


def _consistent(settings: EgressSettings, operator: tuple[NetworkRule, ...]) -> None:
    """Raise EgressUnavailable for settings that contradict each other."""
    if settings.mode not in ("live", "record", "replay") or settings.tls not in ("intercept", "tunnel", "refuse"):
        raise EgressUnavailable(
            "[egress] mode must be live, record or replay, and tls must be intercept, tunnel or refuse"
        )
    if settings.tls != "tunnel":
        return
    if settings.proxy:
        raise EgressUnavailable(
            '[egress] tls = "tunnel" hides requests from [egress] proxy, which must check them: set tls = '
            '"intercept" or "refuse"'
        )
    if settings.mode != "live":
        raise EgressUnavailable('[egress] tls = "tunnel" hides requests: record and replay need tls = "intercept"')
    for rule in operator:
        if "https" in rule.schemes and not rule.whole:
            raise EgressUnavailable(
                f'[egress] tls = "tunnel" hides method and path, so {rule.text!r} cannot be enforced: write `* '
                'https://HOST/*`, or set tls = "intercept"'
            )


def _extra_roots(settings: EgressSettings) -> bytes:
    try:
        return Path(settings.upstream_ca).read_bytes() if settings.upstream_ca else b""
    except OSError as error:
        raise EgressUnavailable(f"[egress] upstream_ca: {error}") from error
