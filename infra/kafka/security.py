"""Authentication and encryption of connections to the cluster: TLS, SASL, tokens.

Certificates, passwords and tokens are read again for each connection and each re-authentication, which
`infra.kafka.aiokafka_changes.ReauthenticatingConnection` does. No other part of aiokafka stores a secret.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import collect_hosts
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from turnlog.infra.log import LoginRefused, LogUnreachable, TlsFailed, TokenUnavailable
from turnlog.infra.roles.http_clients import outside
from turnlog.infra.roles.tls import machine_authorities
from turnlog.infra.run_folder import present
from turnlog.kafka_settings import KafkaSettings

log = logging.getLogger(__name__)
SPENT = 0.8
"""Share of the lifetime of a session or a token after which it is renewed, so that a slow answer still comes in
time."""
TOKEN_TIMEOUT_S = 10.0
"""Time-out in seconds for the answer of a token endpoint."""
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
            "sasl_plain_username": "",  # ReauthenticatingConnection sets both for each login
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
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if kafka.ca_file else machine_authorities()
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
        trusted = self._add_authorities(machine_authorities())
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
