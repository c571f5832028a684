"""Every client of the log against a Kafka that asks who they are: TLS, SASL, swapped secrets, sessions that end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import pytest
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from tests.secured import PASSWORD, SESSION_MS, SUPER, Authority, Secured
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.aiokafka_changes import create_connection
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import (
    Commit,
    LoginRefused,
    LogUnreachable,
    Partition,
    TlsFailed,
    TokenUnavailable,
    TopicSpec,
)
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.starting import servers_of
from turnlog.secret_files import FileSecret
from turnlog.settings import KafkaSettings, Settings, load

pytestmark = pytest.mark.kafka
IN, OUT = Partition("in", 0), Partition("out", 0)
WORKS_S = float(os.environ.get("TURNLOG_TEST_SESSIONS_S", 1.2 * SESSION_MS / 1000))
"""Above the life of a session; `make test-secured` lets it be three."""
CLIENT, SECRET, EXPIRES_S = "turnlog", "a secret: with/odd characters", 5


class TokenEndpoint(ThreadingHTTPServer):
    """RFC 6749, 4.4, for one client; tokens are unsecured JWS (RFC 7515, A.5) of the broker's test validator."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Grant)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.granted = 0
        self.refuses = False

    @property
    def url(self) -> str:
        """Of the endpoint."""
        return f"https://127.0.0.1:{self.server_port}/token"


class _Grant(BaseHTTPRequestHandler):
    server: TokenEndpoint

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        basic = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
        if self.server.refuses or basic != f"{CLIENT}:{SECRET}" or form["grant_type"] != ["client_credentials"]:
            return self._answer(401, {"error": "invalid_client"})
        self.server.granted += 1
        return self._answer(200, {"access_token": jws(SUPER, EXPIRES_S), "expires_in": EXPIRES_S})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def jws(subject: str, expires_s: float) -> str:
    """An unsecured one."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": subject, "iat": now, "exp": now + expires_s})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


@pytest.fixture
def endpoint(secured: Secured) -> Iterator[TokenEndpoint]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(secured.authority.issue("tokens"))
    server = TokenEndpoint(context)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


@contextlib.asynccontextmanager
async def opened(kafka: KafkaSettings) -> AsyncIterator[KafkaLog]:
    log = KafkaLog.of(replace(kafka, prefix=kafka.prefix or f"t{uuid4().hex[:8]}-"))
    try:
        yield log
    finally:
        await log.close()


async def work(log: KafkaLog, until: Callable[[int], bool]) -> int:
    """Through every kind of client: a consumer in a group, one in none, a producer, a transaction with offsets, the
    admin's. Rounds, each of which is whole."""
    await log.create_topics([TopicSpec(name, 1, 1, {}) for name in ("in", "out")])

    async def nothing(_: frozenset[int]) -> None:
        reader.seek(IN, 0)

    async with (
        log.appender() as appender,
        log.transactor("t") as transactor,
        log.group_reader("g", ["in"], assigned=nothing, revoked=lambda _: asyncio.sleep(0)) as reader,
    ):
        rounds = 0
        while not until(rounds):
            rounds += 1
            value = str(rounds).encode()
            await appender.append("in", b"k", value)
            records = await reader.poll(timeout_s=5.0) or await reader.poll(timeout_s=5.0)
            assert [record.value for record in records] == [value]
            await transactor.begin()
            await transactor.send("out", 0, b"k", value)
            await transactor.offsets("positions", {IN: Commit(rounds)})
            await transactor.commit()
            assert (await log.commits("positions", [IN]))[IN].offset == rounds
        assert (await log.end_offsets([OUT]))[OUT] == 2 * rounds  # with markers
    return rounds


def logins(secured: Secured, endpoint: TokenEndpoint, tmp_path: Path) -> dict[str, KafkaSettings]:
    token = tmp_path / "token"
    token.write_text(jws(SUPER, 3600) + "\n")
    by_token = {"oauth_token_url": endpoint.url, "oauth_client_id": CLIENT, "oauth_client_secret": SECRET}
    locked = secured.authority.issue(f"{SUPER}-locked", password=b"opens")
    return {
        "PLAIN": secured.by("PLAIN", username=SUPER, password=PASSWORD),
        "SCRAM-SHA-512": secured.scram(SUPER),
        "OAUTHBEARER": secured.by("OAUTHBEARER", **by_token),
        "OAUTHBEARER by file": secured.by("OAUTHBEARER", oauth_token_file=str(token)),
        "mTLS": secured.mutual(SUPER),
        "mTLS with a locked key": secured.mutual(SUPER, certificate_file=str(locked), key_password="opens"),
    }


async def test_every_login_does_all_work_past_the_ends_of_its_sessions(
    secured: Secured, endpoint: TokenEndpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    caplog.set_level(logging.DEBUG)

    async def one(kafka: KafkaSettings) -> None:
        async with opened(kafka) as log:
            await work(log, lambda rounds: rounds > 10 and time.monotonic() - began > WORKS_S)

    wanted = logins(secured, endpoint, tmp_path)
    wanted.pop("mTLS with a locked key")
    await asyncio.gather(*map(one, wanted.values()))
    took = time.monotonic() - began
    assert took / EXPIRES_S - 1 <= endpoint.granted < 3 * took, "refreshed before each expiry, not at each connection"
    assert not [
        line.getMessage()
        for line in caplog.records
        if line.levelno >= logging.WARNING and line.name.startswith(("aiokafka.conn", "aiokafka.client", "turnlog"))
    ], "no connection was ever lost"
    for secret in (PASSWORD, SECRET, base64.b64encode(SECRET.encode()).decode(), "Bearer ey"):
        assert secret not in caplog.text


async def test_a_client_that_closes_amid_a_login_has_not_failed(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = secured.by("PLAIN", username=SUPER, password=PASSWORD)
    login = Login(kafka)
    ((host, port),) = login.addresses
    channel = await create_connection(host, port, **login.options())
    channel.renew_at = 0.0
    asked = asyncio.ensure_future(channel.send(MetadataRequest([])))
    await asyncio.sleep(0)  # the login is begun
    await channel.close(CloseReason.SHUTDOWN)
    with pytest.raises(KafkaConnectionError):
        await asked
    assert login.refused is None
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


async def test_a_key_may_be_locked(secured: Secured, endpoint: TokenEndpoint, tmp_path: Path) -> None:
    kafka = logins(secured, endpoint, tmp_path)["mTLS with a locked key"]
    async with opened(kafka) as log:
        assert await log.topics() == {}
    async with opened(replace(kafka, key_password="stays shut")) as log:
        with pytest.raises(TlsFailed, match=r"\[kafka\] certificate_file .* cannot be used"):
            await log.topics()


def refused(secured: Secured, endpoint: TokenEndpoint, tmp_path: Path) -> dict[str, tuple[KafkaSettings, Any, str]]:
    """What is wrong -> settings, error, what it says."""
    stranger = Authority(tmp_path, "stranger")
    expired = secured.authority.issue("expired", days=-1)
    gone = {"oauth_token_file": str(tmp_path / "absent")}
    token = {"oauth_token_url": endpoint.url, "oauth_client_id": CLIENT}
    (tmp_path / "old").write_text(jws(SUPER, -1))
    return {
        "a wrong password": (secured.scram("alice", password="guess"), LoginRefused, "username and password"),
        "a stranger": (secured.scram("mallory"), LoginRefused, "SCRAM-SHA-512"),
        "another mechanism": (secured.by("SCRAM-SHA-256", username="a", password="b"), LoginRefused, "sasl_mechanism"),
        "an authority of its own": (secured.scram("alice", ca_file=str(stranger.file)), TlsFailed, "ca_file"),
        "no authority file": (secured.scram("alice", ca_file="/absent"), TlsFailed, r"ca_file /absent .* No such file"),
        "another's certificate": (
            secured.mutual("alice", certificate_file=str(stranger.issue("alice"))), TlsFailed, "certificate_file",
        ),
        "an expired certificate": (secured.mutual("alice", certificate_file=str(expired)), TlsFailed, "certificate"),
        "no token file": (secured.by("OAUTHBEARER", **gone), TokenUnavailable, "oauth_token_file .* No such file"),
        "an old token": (
            secured.by("OAUTHBEARER", oauth_token_file=str(tmp_path / "old")), LoginRefused, "oauth_ settings",
        ),
        "a wrong client": (
            secured.by("OAUTHBEARER", **token, oauth_client_secret="no"), TokenUnavailable, "401 invalid_client; check",
        ),
        "another protocol": (
            KafkaSettings(bootstrap=secured.sasl), LogUnreachable, r"security_protocol \(PLAINTEXT\)",
        ),
        "no TLS there": (secured.scram("alice", bootstrap=secured.plain), LogUnreachable, "security_protocol"),
    }  # fmt: skip


async def test_a_login_that_fails_says_what_to_change(
    secured: Secured, endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    for what, (kafka, error, said) in refused(secured, endpoint, tmp_path).items():
        async with opened(kafka) as log:
            with pytest.raises(LogUnreachable, match=said) as found:
                await log.topics()
        assert type(found.value) is error, what
        assert "guess" not in str(found.value)


async def test_a_password_and_a_certificate_that_were_swapped_serve_at_the_next_login(
    secured: Secured, tmp_path: Path
) -> None:
    held, certificate = tmp_path / "password", tmp_path / "client.pem"
    held.write_text("not this one\n")
    certificate.write_bytes(Authority(tmp_path, "stranger").issue("alice").read_bytes())
    trusted = await asyncio.to_thread(Path(secured.mutual(SUPER).certificate_file).read_bytes)
    scram, tls = secured.scram("alice"), secured.mutual(SUPER, certificate_file=str(certificate))
    tables = {"bootstrap": scram.bootstrap, "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512"}
    settings = tmp_path / "settings.toml"
    settings.write_text("[kafka]\n" + "".join(f'{key} = "{value}"\n' for key, value in tables.items()))
    given = {"TURNLOG_KAFKA_USERNAME": "alice", "TURNLOG_KAFKA_CA_FILE": scram.ca_file}
    by_file = load(settings, given | {"TURNLOG_KAFKA_PASSWORD_FILE": str(held)}).kafka
    async with opened(by_file) as log, opened(tls) as other:
        with pytest.raises(LoginRefused):
            await log.topics()
        with pytest.raises(TlsFailed):
            await other.topics()
        held.write_text(PASSWORD + "\n")
        certificate.write_bytes(trusted)
        assert await log.topics() == {}
        assert await other.topics() == {}


async def test_a_role_waits_for_its_secret_with_the_reason_on_readyz(secured: Secured, tmp_path: Path) -> None:
    held, health = tmp_path / "password", Health("registry")
    held.write_text("not this one")
    secret = FileSecret.read("TURNLOG_KAFKA_PASSWORD_FILE", held)
    settings = Settings(kafka=secured.scram(SUPER, password=secret))
    async with servers_of("registry", settings, health) as servers, asyncio.timeout(60):
        waiting = asyncio.create_task(servers.there())
        for _ in itertools.count():
            if "refused the login with SCRAM-SHA-512" in (said := health.waiting.get("Kafka", "")):
                break
            await asyncio.sleep(0.05)  # /readyz is looked at: there is nothing to await
        assert "username and password" in said
        assert "not this one" not in said
        held.write_text(PASSWORD)
        await waiting
        assert "Kafka" not in health.waiting
