"""Authentication and encryption of connections to the cluster: TLS, SASL, tokens.

Certificates, passwords and tokens are read again for each connection and each re-authentication (KIP-368). A broker
that limits sessions closes a connection that is used after its session has ended, and aiokafka does not
re-authenticate. So its connection class is replaced by `ReauthenticatingConnection`, which does. No other part of
aiokafka stores a secret.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import aiokafka.conn
from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection, CloseReason, collect_hosts
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslAuthenticateRequest, SaslHandShakeRequest

from turnlog.infra.log import LoginRefused, LogUnreachable, TlsFailed, TokenUnavailable
from turnlog.infra.roles.http_clients import outside
from turnlog.infra.roles.probe import is_loopback
from turnlog.infra.run_folder import present
from turnlog.kafka_settings import KafkaSettings

log = logging.getLogger(__name__)
SPENT = 0.8
"""Share of the lifetime of a session or a token after which it is renewed, so that a slow answer still comes in
time."""
TOKEN_TIMEOUT_S = 10.0
"""Time-out in seconds for the answer of a token endpoint."""
CLEAR = "Sending username and password in the clear"
"""Warning that aiokafka logs at each connection, whatever the host."""
NO_LIFETIME_S = 60.0
"""Assumed lifetime in seconds of a token whose endpoint states none (RFC 6749, 5.1 only recommends to state it)."""


class Login(AbstractTokenProvider):  # type: ignore[misc]
    """Client side of [kafka] security_protocol. There is one per KafkaLog. Its only own connections go to a token
    endpoint."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self.refused: tuple[type[LogUnreachable], str] | None = None
        """(error class, reason) if the last connection attempt failed for another reason than an outage, else None."""
        self._token, self._fresh_until, self._valid_until = "", 0.0, 0.0

    def options(self) -> dict[str, Any]:
        """Return the security options of an aiokafka client. Raises TlsFailed if a file cannot be used."""
        if self.kafka.security_protocol == "PLAINTEXT":
            return {}
        return {
            "security_protocol": self.kafka.security_protocol,
            "ssl_context": self.context() if self.is_tls else None,
            "sasl_mechanism": self.kafka.sasl_mechanism or "PLAIN",
            "sasl_plain_username": "",  # Channel sets both for each login
            "sasl_plain_password": "",
            "sasl_oauth_token_provider": self,
        }

    @property
    def is_tls(self) -> bool:
        """True if connections are encrypted."""
        return self.kafka.security_protocol.endswith("SSL")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) pairs of `bootstrap`, parsed as aiokafka does."""
        return [(host, port) for host, port, _ in collect_hosts(self.kafka.bootstrap)]

    def context(self) -> ssl.SSLContext:
        """Create a TLS context from the current files. Raises TlsFailed."""
        kafka = self.kafka
        context = self._add_authorities(
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if kafka.ca_file else ssl.create_default_context()
        )
        if kafka.certificate_file:
            try:
                # The password is passed as a function, or OpenSSL would ask for one at the terminal.
                context.load_cert_chain(
                    kafka.certificate_file, kafka.key_file or None, password=lambda: present(kafka.key_password)
                )
            except (OSError, ValueError) as error:
                raise TlsFailed(_unusable("certificate_file", "key_file", kafka=kafka, error=error)) from error
        return context

    def _add_authorities(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Add the authorities of ca_file to those that the context trusts, and return it. Raises TlsFailed."""
        if self.kafka.ca_file:
            try:
                context.load_verify_locations(self.kafka.ca_file)
            except (OSError, ValueError) as error:
                raise TlsFailed(_unusable("ca_file", kafka=self.kafka, error=error)) from error
        return context

    def record_refusal(self, error: BaseException) -> None:
        """Record why a connection failed, in `refused`."""
        self.refused = next(filter(None, map(self._refusal, _chain(error))), None)

    def _refusal(self, error: BaseException) -> tuple[type[LogUnreachable], str] | None:
        kafka = self.kafka
        where = f"{kafka.bootstrap} ([kafka] security_protocol {kafka.security_protocol})"
        match error:
            case TlsFailed() | TokenUnavailable():
                return type(error), str(error)
            case SaslAuthenticationFailed() | UnsupportedSaslMechanismError() | IllegalSaslStateError():
                keys = "oauth_ settings" if kafka.sasl_mechanism == "OAUTHBEARER" else "username and password"
                return LoginRefused, (
                    f"{where} refused the login with {kafka.sasl_mechanism}: {error}; check [kafka] sasl_mechanism, "
                    f"{keys}: files are read again at each attempt"
                )
            case AuthenticationFailedError():
                return LoginRefused, f"{where}: {error}"
            case ssl.SSLCertVerificationError():
                return (
                    TlsFailed,
                    f"{where}: not trusted: {error.verify_message}; check [kafka] ca_file",
                )
            case ssl.SSLError():
                return TlsFailed, (
                    f"{where}: {error.reason or error}; check [kafka] security_protocol, ca_file and certificate_file"
                )
        return None

    def name_and_password(self) -> tuple[str, str]:
        """Read the current username and password."""
        return present(self.kafka.username), present(self.kafka.password)

    async def token(self) -> str:
        """Return a bearer token that is not about to expire. Raises TokenUnavailable."""
        if self.kafka.oauth_token_file:
            return self._token_of_file()
        now = time.monotonic()
        if now >= self._fresh_until:
            try:
                self._token, lifetime_s = await self._request_token()
                self._fresh_until, self._valid_until = now + SPENT * lifetime_s, now + lifetime_s
            except TokenUnavailable as error:
                if now >= self._valid_until:
                    raise
                log.warning("%s; the last token is used until it expires", error)
        return self._token

    def _token_of_file(self) -> str:
        path = self.kafka.oauth_token_file
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenUnavailable(f"[kafka] oauth_token_file {path} cannot be read: {_why(error)}") from None
        if not token:
            raise TokenUnavailable(
                f"[kafka] oauth_token_file {path} is empty: the process that rotates it must write a token"
            )
        return token

    async def _request_token(self) -> tuple[str, float]:
        """Request a token by the client credentials grant. Return it and its lifetime in seconds. Raises
        TokenUnavailable."""
        import httpx  # takes 80 ms, which no other login needs

        kafka, where = self.kafka, f"token endpoint {self.kafka.oauth_token_url}"
        form = {"grant_type": "client_credentials"} | ({"scope": kafka.oauth_scope} if kafka.oauth_scope else {})
        client = present(kafka.oauth_client_id), present(kafka.oauth_client_secret)
        trusted = self._add_authorities(ssl.create_default_context())
        try:
            async with outside(verify=trusted, timeout=TOKEN_TIMEOUT_S) as http:
                answer = await http.post(kafka.oauth_token_url, data=form, auth=client)
            body = answer.json() if answer.content else {}
            if answer.is_success:
                return str(body["access_token"]), float(body.get("expires_in", NO_LIFETIME_S))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TokenUnavailable(f"{where}: {error!r}; check [kafka] oauth_token_url") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenUnavailable(
                f"{where} answered {answer.status_code} without a token; is it a token endpoint?"
            ) from error
        raise TokenUnavailable(
            f"{where} refused a token: {answer.status_code} {body.get('error', '')}; check [kafka] oauth_client_id, "
            "oauth_client_secret and oauth_scope"
        )


class ReauthenticatingConnection(AIOKafkaConnection):  # type: ignore[misc]
    """Connection that logs in with the current credentials of its Login, and again before its session ends. Requests
    wait during a login, because the broker accepts no other request then."""

    renew_at = math.inf
    """Time on the loop's clock; the first request after it waits for another login."""
    _renewing: asyncio.Task[None] | None = None
    _left = False
    """True if the client closed the connection, so that a pending login counts as abandoned and not as failed."""

    @property
    def _login(self) -> Login | None:
        own = self._sasl_oauth_token_provider
        return own if isinstance(own, Login) else None

    async def connect(self) -> Any:
        """See AIOKafkaConnection. The outcome is recorded in its Login."""
        login = self._login
        if login is None:
            return await super().connect()
        try:
            if login.is_tls:
                self._ssl_context = login.context()
            streams = await super().connect()
        except (OSError, KafkaError, TimeoutError) as error:
            login.record_refusal(error)
            raise
        except (TlsFailed, TokenUnavailable) as error:  # aiokafka counts only errors of its own as a failed connection
            login.record_refusal(error)
            raise AuthenticationFailedError(str(error)) from error
        login.refused = None
        return streams

    async def _do_sasl_handshake(self) -> None:
        self.renew_at = math.inf
        if self._login is not None:
            self._sasl_plain_username, self._sasl_plain_password = self._login.name_and_password()
            in_clear = (self._security_protocol, self._sasl_mechanism) == ("SASL_PLAINTEXT", "PLAIN")
            if in_clear and not is_loopback(self.host):
                log.warning(
                    "%s:%s receives the password in the clear: see [kafka] sasl_mechanism", self.host, self.port
                )
        try:
            await super()._do_sasl_handshake()
        except ValueError as error:  # SCRAM is mutual: the broker must prove that it knows the password
            raise AuthenticationFailedError(f"the broker did not prove that it knows the password ({error})") from error

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        """See AIOKafkaConnection."""
        if isinstance(request, SaslAuthenticateRequest):
            return self._read_auth_response(super().send(Discreet(request._payload)))
        if isinstance(request, SaslHandShakeRequest):
            return super().send(request)  # type: ignore[no-any-return]
        if self._renewing is None and self._loop.time() >= self.renew_at:
            self._renewing = self._loop.create_task(self._renew())
        if self._renewing is None:
            return super().send(request, expect_response)  # type: ignore[no-any-return]
        return self._later(self._renewing, request, expect_response)

    async def _later(self, renewing: asyncio.Task[None], request: Any, expect_response: bool) -> Any:
        await asyncio.shield(renewing)
        return await super().send(request, expect_response)

    async def _read_auth_response(self, answer: Awaitable[Any]) -> Any:
        response = await answer
        if self._sasl_mechanism == "OAUTHBEARER" and response.sasl_auth_bytes:
            # A refusal (RFC 7628, 3.2.2), which aiokafka treats as success.
            raise SaslAuthenticationFailed(response.sasl_auth_bytes.decode(errors="replace"))
        lifetime_ms = getattr(response, "session_lifetime_ms", 0)
        if lifetime_ms > 0:
            self.renew_at = self._loop.time() + SPENT * lifetime_ms / 1000
        return response

    def close(self, reason: CloseReason | None = None, exc: Exception | None = None) -> Any:
        """See AIOKafkaConnection."""
        if self.connected():
            self._left = reason in (None, CloseReason.IDLE_DROP, CloseReason.SHUTDOWN)
        return super().close(reason, exc)

    async def _renew(self) -> None:
        try:
            await self._do_sasl_handshake()
        except (OSError, KafkaError, TimeoutError, TlsFailed, TokenUnavailable) as error:
            if self._left:
                return
            if self._login is not None:
                self._login.record_refusal(error)
            log.warning("%s:%s: the session could not be renewed: %s", self.host, self.port, error)
            self.close(reason=CloseReason.AUTH_FAILURE, exc=error)  # waiting requests fail, and the client reconnects
        finally:
            self._renewing = None


class Discreet(SaslAuthenticateRequest):  # type: ignore[misc]
    """Authentication request whose payload does not appear in aiokafka's debug log of requests."""

    def build(self, request_struct_class: Any) -> Any:
        """See Request."""

        class Unshown(request_struct_class):  # type: ignore[misc]
            def __repr__(self) -> str:
                return "SaslAuthenticateRequest(...)"

        return Unshown(self._payload)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _unusable(*keys: str, kafka: KafkaSettings, error: Exception) -> str:
    named = " and ".join(f"[kafka] {key} {getattr(kafka, key)}".rstrip() for key in keys)
    return f"{named} cannot be used: {_why(error)}"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


aiokafka.conn.AIOKafkaConnection = ReauthenticatingConnection
logging.getLogger("aiokafka.conn").addFilter(lambda record: record.msg != CLEAR)
