"""How clients of a cluster show who they are, and how they know whom they talk to: TLS, SASL, tokens.

Certificates, passwords and tokens are read anew for each connection, and for each time that one is authenticated again
(KIP-368): a broker that limits sessions closes a connection that is used after its session's end, and aiokafka asks for
no second one. Its connections are replaced by ones that do; nothing else of aiokafka holds a secret.
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
"""Share of a session's or a token's life after which the next one is asked for, so that a slow answer comes in time."""
TOKEN_TIMEOUT_S = 10.0
"""Of a token endpoint's answer."""
CLEAR = "Sending username and password in the clear"
"""What aiokafka warns of at each connection, to whatever host."""
NO_LIFETIME_S = 60.0
"""How long a token is used whose endpoint does not say how long it lives (RFC 6749, 5.1 only recommends it)."""


class Login(AbstractTokenProvider):  # type: ignore[misc]
    """The clients' side of [kafka] security_protocol. One per KafkaLog; makes no connection of its own but to a token
    endpoint."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self.kafka = kafka
        self.refused: tuple[type[LogUnreachable], str] | None = None
        """Why the last connection was not made, if that was no outage."""
        self._token, self._fresh_until, self._valid_until = "", 0.0, 0.0

    def options(self) -> dict[str, Any]:
        """What an aiokafka client takes. Raises TlsFailed for a file that cannot be used."""
        if self.kafka.security_protocol == "PLAINTEXT":
            return {}
        return {
            "security_protocol": self.kafka.security_protocol,
            "ssl_context": self.context() if self.is_tls else None,
            "sasl_mechanism": self.kafka.sasl_mechanism or "PLAIN",
            "sasl_plain_username": "",  # of each connection's moment: Channel
            "sasl_plain_password": "",
            "sasl_oauth_token_provider": self,
        }

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.kafka.security_protocol.endswith("SSL")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of `bootstrap`, as every client reads it."""
        return [(host, port) for host, port, _ in collect_hosts(self.kafka.bootstrap)]

    def context(self) -> ssl.SSLContext:
        """With the files of this moment. Raises TlsFailed."""
        kafka = self.kafka
        context = self._vouched(
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if kafka.ca_file else ssl.create_default_context()
        )
        if kafka.certificate_file:
            try:
                # A password given as a function, or OpenSSL would ask for one at the terminal.
                context.load_cert_chain(
                    kafka.certificate_file, kafka.key_file or None, password=lambda: present(kafka.key_password)
                )
            except (OSError, ValueError) as error:
                raise TlsFailed(_unusable("certificate_file", "key_file", kafka=kafka, error=error)) from error
        return context

    def _vouched(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """With ca_file's authorities beside those that it knows."""
        if self.kafka.ca_file:
            try:
                context.load_verify_locations(self.kafka.ca_file)
            except (OSError, ValueError) as error:
                raise TlsFailed(_unusable("ca_file", kafka=self.kafka, error=error)) from error
        return context

    def said(self, error: BaseException) -> None:
        """Note why a connection was not made, or could not go on."""
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
                    f"{where} refused the login by {kafka.sasl_mechanism}: {error}; check [kafka] sasl_mechanism, "
                    f"{keys}: what files hold is read again at each attempt"
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
        """Of this moment."""
        return present(self.kafka.username), present(self.kafka.password)

    async def token(self) -> str:
        """A bearer token that is not about to expire. Raises TokenUnavailable."""
        if self.kafka.oauth_token_file:
            return self._token_of_file()
        now = time.monotonic()
        if now >= self._fresh_until:
            try:
                self._token, lifetime_s = await self._granted()
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
            raise TokenUnavailable(f"[kafka] oauth_token_file {path} is empty: whoever rotates it must write a token")
        return token

    async def _granted(self) -> tuple[str, float]:
        """Token and lifetime in seconds, by the client credentials grant."""
        import httpx  # 80 ms that no other login needs

        kafka, where = self.kafka, f"token endpoint {self.kafka.oauth_token_url}"
        form = {"grant_type": "client_credentials"} | ({"scope": kafka.oauth_scope} if kafka.oauth_scope else {})
        client = present(kafka.oauth_client_id), present(kafka.oauth_client_secret)
        trusted = self._vouched(ssl.create_default_context())
        try:
            async with outside(verify=trusted, timeout=TOKEN_TIMEOUT_S) as http:
                answer = await http.post(kafka.oauth_token_url, data=form, auth=client)
            body = answer.json() if answer.content else {}
            if answer.is_success:
                return str(body["access_token"]), float(body.get("expires_in", NO_LIFETIME_S))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TokenUnavailable(f"{where}: {error!r}; check [kafka] oauth_token_url") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenUnavailable(f"{where} answered {answer.status_code} without a token; is it one?") from error
        raise TokenUnavailable(
            f"{where} refused a token: {answer.status_code} {body.get('error', '')}; check [kafka] oauth_client_id, "
            "oauth_client_secret and oauth_scope"
        )


class Channel(AIOKafkaConnection):  # type: ignore[misc]
    """A connection that logs in with what its Login has at that moment, and again before its session ends. What is sent
    meanwhile waits: the broker takes no other request during a login."""

    renew_at = math.inf
    """Seconds of the loop's clock: the first request after it waits for another login."""
    _renewing: asyncio.Task[None] | None = None
    _left = False
    """It was closed by its client: what was under way then has not failed."""

    @property
    def _login(self) -> Login | None:
        own = self._sasl_oauth_token_provider
        return own if isinstance(own, Login) else None

    async def connect(self) -> Any:
        """See AIOKafkaConnection. Its Login is told how it went."""
        login = self._login
        if login is None:
            return await super().connect()
        try:
            if login.is_tls:
                self._ssl_context = login.context()
            streams = await super().connect()
        except (OSError, KafkaError, TimeoutError) as error:
            login.said(error)
            raise
        except (TlsFailed, TokenUnavailable) as error:  # aiokafka takes its own errors for a connection that failed
            login.said(error)
            raise AuthenticationFailedError(str(error)) from error
        login.refused = None
        return streams

    async def _do_sasl_handshake(self) -> None:
        self.renew_at = math.inf
        if self._login is not None:
            self._sasl_plain_username, self._sasl_plain_password = self._login.name_and_password()
            in_clear = (self._security_protocol, self._sasl_mechanism) == ("SASL_PLAINTEXT", "PLAIN")
            if in_clear and not is_loopback(self.host):
                log.warning("%s:%s is told the password in the clear: see [kafka] sasl_mechanism", self.host, self.port)
        try:
            await super()._do_sasl_handshake()
        except ValueError as error:  # SCRAM is mutual
            raise AuthenticationFailedError(f"the broker does not know the password either ({error})") from error

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        """See AIOKafkaConnection."""
        if isinstance(request, SaslAuthenticateRequest):
            return self._noted(super().send(Discreet(request._payload)))
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

    async def _noted(self, answer: Awaitable[Any]) -> Any:
        response = await answer
        if self._sasl_mechanism == "OAUTHBEARER" and response.sasl_auth_bytes:
            # A refusal (RFC 7628, 3.2.2), which aiokafka takes for success.
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
                self._login.said(error)
            log.warning("%s:%s: the session could not be renewed: %s", self.host, self.port, error)
            self.close(reason=CloseReason.AUTH_FAILURE, exc=error)  # whoever waits is told, and connects anew
        finally:
            self._renewing = None


class Discreet(SaslAuthenticateRequest):  # type: ignore[misc]
    """aiokafka logs each request at its debug level: not what is in this one."""

    def build(self, request_struct_class: Any) -> Any:
        """See Request."""

        class Unshown(request_struct_class):  # type: ignore[misc]
            def __repr__(self) -> str:
                return "SaslAuthenticateRequest(...)"

        return Unshown(self._payload)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """It and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _unusable(*keys: str, kafka: KafkaSettings, error: Exception) -> str:
    named = " and ".join(f"[kafka] {key} {getattr(kafka, key)}".rstrip() for key in keys)
    return f"{named} cannot be used: {_why(error)}"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


aiokafka.conn.AIOKafkaConnection = Channel
logging.getLogger("aiokafka.conn").addFilter(lambda record: record.msg != CLEAR)
