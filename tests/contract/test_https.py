"""Registry, store, gateway and engine over https, with logins and roles as companies have them: the real servers behind
a front that speaks TLS, and certificates that are swapped meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.secured import Authority, Secured
from turnlog.consumers.lag import expires, tls_servers
from turnlog.infra.blobs import BucketMissing, StoreUnavailable, StoreUnreachable
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.engines.protocol import EngineUnreachable
from turnlog.infra.engines.sglang import SGLangControl
from turnlog.infra.event_log import schema_ids
from turnlog.infra.registry import HttpRegistry, RegistryRefused, RegistryUnreachable, SchemaNotRegistered
from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.infra.roles.tls import TlsFileUnusable, serving, trusting
from turnlog.infra.s3 import S3Blobs, client
from turnlog.schemas.avsc import stored_schema
from turnlog.settings import RegistrySettings, Settings, SettingsError, StoreSettings, from_tables, load

Answer = Callable[[Request], Any]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    (tmp_path / "tls").mkdir()
    return Authority(tmp_path / "tls")


@asynccontextmanager
async def front(url: str, certificate: Path) -> AsyncIterator[str]:
    """An https address whose every byte goes to the plain server at `url`."""
    there = urlsplit(url)

    under_way: set[asyncio.Task[None]] = set()

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(1 << 16):
                sink.write(piece)
                await sink.drain()
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(there.hostname, there.port)
        pipes = [asyncio.create_task(pipe(reader, far_writer)), asyncio.create_task(pipe(far_reader, writer))]
        under_way.update(pipes)
        await asyncio.wait(pipes)
        for one in (writer, far_writer):
            one.close()
            with contextlib.suppress(OSError):
                await one.wait_closed()

    server = await asyncio.start_server(connected, HOST, 0, ssl=serving(str(certificate), "", "gateway"))
    async with server:
        yield f"https://{HOST}:{server.sockets[0].getsockname()[1]}"
        if under_way:
            await asyncio.wait(under_way)


@asynccontextmanager
async def served(answer: Answer, path: str = "/{path:path}", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address of a server that answers everything by `answer`."""
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"])])
    with closing(listening(HOST, 0, "a test")) as listener:
        async with QuietServer(uvicorn_config(app, tls=tls)).running(listener):
            yield f"{'https' if tls else 'http'}://{HOST}:{listener.getsockname()[1]}"


async def test_a_registry_is_trusted_by_its_authority_alone(registry_url: str, authority: Authority) -> None:
    async with front(registry_url, authority.issue("registry")) as url:
        friend = HttpRegistry(RegistrySettings(url=url, ca_file=str(authority.file)))
        assert await friend.register("RunConfigured", stored_schema("RunConfigured")) > 0
        stranger = HttpRegistry(RegistrySettings(url=url))
        with pytest.raises(RegistryUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.schema(1)
        for registry in (friend, stranger):
            await registry.close()


@pytest.mark.parametrize("login", [{"username": "ada", "password": "p"}, {"token": "t"}])
async def test_a_registry_is_logged_into(registry_url: str, login: dict[str, str], tmp_path: Path) -> None:
    wanted = "Bearer t" if "token" in login else "Basic YWRhOnA="

    async def answer(request: Request) -> Response:
        if request.headers.get("authorization") != wanted:
            return PlainTextResponse("who are you?", 401)
        async with httpx.AsyncClient(base_url=registry_url) as http:
            path, body = request.url.path, await request.body()
            real = await http.request(request.method, path, content=body, headers={"content-type": "application/json"})
        return Response(real.content, real.status_code)

    async with served(answer) as url:
        secret = tmp_path / "secret"
        secret.write_text("another")
        key = "TOKEN" if "token" in login else "PASSWORD"
        env = {"TURNLOG_REGISTRY_URL": url, f"TURNLOG_REGISTRY_{key}_FILE": str(secret)}
        named = {"TURNLOG_REGISTRY_USERNAME": "ada"} if key == "PASSWORD" else {}
        registry = HttpRegistry(load(None, env | named).registry)
        with pytest.raises(
            RegistryRefused, match=r"401: check \[registry\] username and password, or token"
        ) as refused:
            await registry.schema(1)
        assert "another" not in str(refused.value)
        secret.write_text(login[key.lower()])
        assert await registry.register("RunConfigured", stored_schema("RunConfigured")) > 0
        await registry.close()


async def test_who_may_only_look_schemas_up_waits_for_who_registers_them(registry_url: str) -> None:
    prefix = f"team-{uuid4().hex}."
    reads = HttpRegistry(RegistrySettings(url=registry_url, subject_prefix=prefix, auto_register=False))
    writes = HttpRegistry(RegistrySettings(url=registry_url, subject_prefix=prefix))
    with pytest.raises(SchemaNotRegistered, match=rf"{prefix}[.\w]+, and \[registry\] auto_register .* run configure"):
        await schema_ids(reads)
    assert await schema_ids(writes) == await schema_ids(reads)
    async with httpx.AsyncClient(base_url=registry_url) as http:
        subjects = [name for name in (await http.get("/subjects")).json() if name.startswith(prefix)]
    assert len(subjects) == len(await schema_ids(reads))
    for registry in (reads, writes):
        await registry.close()


async def test_a_store_is_trusted_by_its_authority_alone(store: StoreSettings, authority: Authority) -> None:
    async with front(store.endpoint, authority.issue("store")) as url:
        friend = S3Blobs(dataclasses.replace(store, endpoint=url, ca_file=str(authority.file)))
        assert await friend.get(await friend.put(b"over TLS")) == b"over TLS"
        stranger = S3Blobs(dataclasses.replace(store, endpoint=url), patient=False)
        with pytest.raises(StoreUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.put(b"x")
        for blobs in (friend, stranger):
            await blobs.close()


async def test_keys_of_a_role_are_asked_for(store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: Request) -> Response:
        keys = {"AccessKeyId": store.access_key, "SecretAccessKey": store.secret_key, "Token": None}
        return JSONResponse(keys | {"Expiration": "2099-01-01T00:00:00Z"})

    async with served(answer) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
        blobs = S3Blobs(dataclasses.replace(store, credentials="role", access_key="", secret_key=""))
        assert await blobs.get(await blobs.put(b"by a role")) == b"by a role"
        await blobs.close()


async def test_a_web_identity_is_changed_into_keys(
    store: StoreSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    async def answer(request: Request) -> Response:
        asked.append(dict(request.query_params))
        keys = f"<AccessKeyId>{store.access_key}</AccessKeyId><SecretAccessKey>{store.secret_key}</SecretAccessKey>"
        keys += "<SessionToken>of-an-hour</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
        action, space = "AssumeRoleWithWebIdentity", "https://sts.amazonaws.com/doc/2011-06-15/"
        within = f"<{action}Result><Credentials>{keys}</Credentials></{action}Result>"
        return Response(f"<{action}Response xmlns='{space}'>{within}</{action}Response>", media_type="text/xml")

    token = tmp_path / "token"
    token.write_text("of-the-pod")
    async with served(answer, "/") as url:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/turnlog")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        blobs = S3Blobs(dataclasses.replace(store, credentials="role", access_key="", secret_key=""))
        assert await blobs.get(await blobs.put(b"by an identity")) == b"by an identity"
        await blobs.close()
    assert asked[0]["Action"] == "AssumeRoleWithWebIdentity"
    assert asked[0]["WebIdentityToken"] == "of-the-pod"


def test_a_session_token_and_a_virtual_host_are_in_what_is_signed() -> None:
    endpoint = "https://s3.example.com"
    keys = StoreSettings(endpoint=endpoint, access_key="a", secret_key="s", session_token="of-an-hour")
    assert client(keys).presigned_get_object("turnlog", "k").startswith(f"{endpoint}/turnlog/k?")
    assert "X-Amz-Security-Token=of-an-hour" in client(keys).presigned_get_object("turnlog", "k")
    virtual = client(dataclasses.replace(keys, address_style="virtual"))
    assert virtual.presigned_get_object("turnlog", "k").startswith("https://turnlog.s3.example.com/k?")


async def test_who_may_make_no_bucket_waits_for_who_does(store: StoreSettings) -> None:
    bucket = f"made-{uuid4().hex}"
    reads = S3Blobs(dataclasses.replace(store, bucket=bucket, make_bucket=False))
    with pytest.raises(BucketMissing, match=rf"{bucket}, and \[store\] make_bucket is false: .* run configure"):
        await reads.put(b"x")
    writes = S3Blobs(dataclasses.replace(store, bucket=bucket))
    await writes.names("none/")
    await reads.put(b"x")
    for blobs in (reads, writes):
        await blobs.close()


async def test_an_engine_is_trusted_by_its_authority_alone(authority: Authority) -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"weight_version": "7", "model_path": "/m"})

    async with served(answer, tls=serving(str(authority.issue("engine")), "", "engine")) as url:
        friend = SGLangControl(url, ca_file=str(authority.file))
        assert (await friend.model_info()).weight_version == "7"
        stranger = SGLangControl(url)
        with pytest.raises(EngineUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.model_info()
        for control in (friend, stranger):
            await control.close()


async def test_certificates_and_authorities_are_read_again_when_they_are_swapped(tmp_path: Path) -> None:
    async def answer(_: Request) -> Response:
        return PlainTextResponse("here")

    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    shown, trusted = tmp_path / "shown.pem", tmp_path / "trusted.pem"
    shown.write_bytes(old.issue("first").read_bytes())
    trusted.write_bytes(old.file.read_bytes())
    async with served(answer, tls=serving(str(shown), "", "gateway")) as url:
        context = trusting(url, str(trusted), "gateway")

        async def handshake() -> None:
            _, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port, ssl=context)
            writer.close()
            await writer.wait_closed()

        await handshake()
        shown.write_bytes(b"half of")
        await handshake()  # what was read before stays in use
        shown.write_bytes(new.issue("second").read_bytes())
        with pytest.raises(ssl.SSLCertVerificationError):
            await handshake()
        trusted.write_bytes(old.file.read_bytes() + new.file.read_bytes())
        await handshake()


async def test_the_end_of_each_servers_certificate_is_told(
    store: StoreSettings, authority: Authority, secured: Secured
) -> None:
    async with front(store.endpoint, authority.issue("store", days=5)) as url:
        behind = dataclasses.replace(store, endpoint=url, ca_file=str(authority.file))
        kafka = secured.scram("alice")
        settings = dataclasses.replace(Settings(), store=behind, kafka=kafka)
        bare = dataclasses.replace(kafka, bootstrap="kafka-0, kafka-1:9093")
        named = tls_servers(dataclasses.replace(settings, kafka=bare))
        assert {(host, port) for name, host, port, _ in named if name == "kafka"} == {
            ("kafka-0", 9092),
            ("kafka-1", 9093),
        }
        ends = {name: await expires(*where) for name, *where in tls_servers(settings)}
    assert {name: round((end - time.time()) / 86_400) for name, end in ends.items() if end} == {"store": 5, "kafka": 1}
    async with front(store.endpoint, authority.issue("late", days=-1)) as url:
        expired = dataclasses.replace(settings, store=dataclasses.replace(behind, endpoint=url))
        [(_, *where), _] = tls_servers(expired)
        assert await expires(*where) == 0.0
    assert await expires(*where) is None, "nobody is there any more"


@pytest.mark.parametrize("what", ["missing", "garbage"])
def test_a_file_that_cannot_be_used_is_named_with_its_setting(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ca.pem"
    if what == "garbage":
        path.write_text("no certificate")
    with pytest.raises(TlsFileUnusable, match=rf"\[registry\] ca_file: {path} cannot be used"):
        HttpRegistry(RegistrySettings(url="https://registry", ca_file=str(path)))
    with pytest.raises(TlsFileUnusable, match=r"\[gateway\] certificate_file, key_file"):
        serving(str(path), "", "gateway")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"registry": {"username": "a"}}, "registry.username and registry.password go together"),
        ({"registry": {"username": "a", "password": "p", "token": "t"}}, "registry.token and registry.username"),
        ({"store": {"credentials": "role", "secret_key": "s"}}, "store.credentials is role and store.secret_key"),
        ({"gateway": {"key_file": "k"}}, "gateway.key_file is set without gateway.certificate_file"),
        ({"gateway": {"certificate_file": "c", "own_url": "http://a:1"}}, "gateway.own_url is http://a:1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        from_tables(tables, {}, source="here")


def test_a_store_without_keys_says_which(store: StoreSettings) -> None:
    with pytest.raises(StoreUnavailable, match="secret_key is empty"):
        client(dataclasses.replace(store, secret_key=""))
