"""`turnlog role egress`: judges again what workers hand on, and alone connects to origins."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.sandbox.egress.conftest import Origin, Served
from turnlog.infra.roles.health import Health, listening
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress import EgressUnavailable, ProxyUnusable
from turnlog.sandbox_workers.egress.apart import Apart, EgressTokens
from turnlog.sandbox_workers.egress.certificates import CertificateAuthority
from turnlog.sandbox_workers.egress.policy import rules
from turnlog.schemas.events import EgressSource

KEY = "a-key-that-both-know"
Serving = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def apart(settings: EgressSettings, origin: Origin) -> AsyncIterator[str]:
    """The process's inside, on a port of its own: host:port."""
    stopping, bound = asyncio.Event(), listening("127.0.0.1", 0, "")
    bound.listen()  # as of now nobody is refused
    address = f"127.0.0.1:{bound.getsockname()[1]}"
    server = asyncio.create_task(Apart(settings, origin.resolve).serve(bound, stopping, Health("egress")))
    try:
        yield address
    finally:
        stopping.set()
        await server


@pytest.fixture
async def outer(settings: EgressSettings, origin: Origin) -> AsyncIterator[str]:
    async with apart(dataclasses.replace(settings, signing_key=KEY, timeout_s=1.0), origin) as address:
        yield f"http://{address}"


def through(url: str, **more: Any) -> dict[str, Any]:
    """Settings of a worker that has no way out of its own: its own list of private hosts names nobody."""
    return {"proxy": url, "signing_key": KEY, "private_hosts": (), **more}


async def test_requests_go_out_there_and_are_recorded_here(serving: Serving, outer: str, origin: Origin) -> None:
    async with serving(**through(outer, mode="record", upstream_ca="")) as served, served.client() as client:
        for tls in (False, True):
            answer = await client.post(served.url("/a?b=%2F", tls=tls), content=b"body", headers={"X-Of": "agent"})
            assert (answer.status_code, answer.text) == (200, "POST /a?b=%2F 4")
    assert [entry.source for entry in served.requests.recorded_requests()] == [EgressSource.recorded] * 2
    for request, headers, body in origin.seen:
        assert (request, headers["x-of"], body) == ("POST /a?b=%2F", "agent", b"body")
        assert not {name for name in headers if name.lower().startswith("proxy-")}


async def test_what_a_worker_would_let_pass_is_refused_by_the_rules_of_both(
    settings: EgressSettings, origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    """As one would that agents' code has taken over: it has the key, and asks as it likes."""
    allow = (f"GET http://origin.test:{origin.port}/public/*", "GET http://inside.test/*")
    token = EgressTokens(KEY).make_token(
        "call", rules([f"GET http://origin.test:{origin.port}/public/mine*", allow[1]])
    )
    there = dataclasses.replace(settings, allow=allow, signing_key=KEY, timeout_s=1.0)
    async with apart(there, origin) as address:
        for method, url, reason in (
            ("GET", f"http://origin.test:{origin.port}/public/mine", None),
            ("GET", f"http://origin.test:{origin.port}/public/yours", "rule"),
            ("POST", f"http://origin.test:{origin.port}/public/mine", "rule"),
            ("GET", f"https://origin.test:{origin.tls_port}/public/mine", "rule"),
            ("GET", "http://inside.test/", "private_address"),
        ):
            said = await asked(address, f"{method} {url} HTTP/1.1", token)
            assert (b"turnlog-egress: " in said, (reason or "200").encode() in said.split(b"\r\n")[0]) == (
                reason is not None,
                True,
            ), said
        assert b"(turnlog egress: tls)" in await asked(
            address, f"CONNECT origin.test:{origin.tls_port} HTTP/1.1", token
        )
    assert [request for request, _, _ in origin.seen] == ["GET /public/mine"]
    assert f"refused (rule): GET origin.test:{origin.port} of call call" in caplog.text
    assert "/public" not in caplog.text, "paths are content of a session"


async def asked(address: str, line: str, token: str) -> bytes:
    """The answer to a request of a connection of its own."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = f"{line}\r\nHost: any\r\nProxy-Authorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    writer.write_eof()
    said = await reader.read()
    writer.close()
    return said


async def test_only_tokens_of_a_key_that_is_shared_are_taken(settings: EgressSettings, origin: Origin) -> None:
    line = f"GET http://origin.test:{origin.port}/ HTTP/1.1"
    rotated = dataclasses.replace(settings, signing_key=f"the next\n{KEY}", timeout_s=1.0)
    async with apart(rotated, origin) as address:
        for key, status in ((KEY, b"200"), ("the next", b"200"), ("another", b"407")):
            said = await asked(address, line, EgressTokens(key).make_token("call", None))
            assert said.split()[1] == status, said
        old = EgressTokens(KEY)._signer().encrypt_at_time(b'["call",null]', 0).decode()
        assert (await asked(address, line, old)).split()[1] == b"407"
        assert (await asked(address, line, "")).split()[1] == b"407"


async def test_a_refusal_there_is_the_agents_answer_here(serving: Serving, outer: str, origin: Origin) -> None:
    everything = through(outer, allow=("* *://*:*/*",))
    async with serving(**everything) as served, served.client() as client:
        answer = await client.get("http://inside.test/")
        assert (answer.status_code, answer.reason_phrase) == (403, "Forbidden (turnlog egress: rule)")
    (entry,) = served.requests.recorded_requests()
    assert (entry.source, entry.reason) == (EgressSource.refused, "rule")
    assert origin.names == []


@pytest.mark.parametrize("spoilt", [{"signing_key": "another"}, {"proxy": "http://127.0.0.1:1"}])
async def test_no_way_out_is_not_the_calls_doing(serving: Serving, outer: str, spoilt: dict[str, str]) -> None:
    with pytest.raises(ProxyUnusable, match="signing_key" if "signing_key" in spoilt else "proxy"):
        await hung_up_on(serving(**(through(outer) | spoilt)))


async def hung_up_on(call: contextlib.AbstractAsyncContextManager[Served]) -> None:
    """The agent's program gets no answer; the call's end says why."""
    async with call as served, served.client() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(served.url("/"))


async def test_workers_reach_it_over_tls(
    serving: Serving, settings: EgressSettings, origin: Origin, tmp_path: Path
) -> None:
    authority = CertificateAuthority.make()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    shown = served_by(authority, tmp_path)
    there = dataclasses.replace(settings, signing_key=KEY, certificate_file=str(shown), timeout_s=1.0)
    async with apart(there, origin) as address:
        believed = through(f"https://{address}", ca_file=str(tmp_path / "ca.pem"))
        async with serving(**believed) as served, served.client() as client:
            assert (await client.get(served.url("/a", tls=True))).status_code == 200
        with pytest.raises(ProxyUnusable):
            await hung_up_on(serving(**through(f"https://{address}")))


def served_by(authority: CertificateAuthority, folder: Path) -> Path:
    """Certificate and key of 127.0.0.1."""
    path = folder / "shown.pem"
    path.write_bytes(authority.leaf("127.0.0.1"))
    return path


@pytest.mark.parametrize("changed", [{"signing_key": ""}, {"tls": "tunnel", "allow": ("* https://origin.test/*",)}])
async def test_a_worker_that_cannot_use_it_does_not_start(serving: Serving, changed: dict[str, Any]) -> None:
    with pytest.raises(EgressUnavailable, match=r"signing_key|hides requests from"):
        await serving(**(through("http://127.0.0.1:1") | changed)).__aenter__()


@pytest.mark.parametrize("changed", [{"signing_key": ""}, {"allow": ()}])
def test_it_does_not_start_where_nobody_could_use_it(settings: EgressSettings, changed: dict[str, Any]) -> None:
    with pytest.raises(EgressUnavailable, match=next(iter(changed))):
        Apart(dataclasses.replace(settings, **({"signing_key": KEY} | changed)))


async def test_the_role_tells_its_address_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    env = {"TURNLOG_EGRESS_SIGNING_KEY_FILE": str(tmp_path / "key"), "TURNLOG_EGRESS_PORT": "0",
           "TURNLOG_EGRESS_ALLOW": "GET http://*/*", "PATH": os.environ["PATH"]}  # fmt: skip
    role = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", "role", "egress", env=env, stderr=asyncio.subprocess.PIPE
    )
    assert role.stderr is not None
    said = b""
    while b"egress proxy on " not in said:
        said = await role.stderr.readline()
        assert said, "it ended"
    address = said.split()[-1].decode()
    answer = await asked(
        address, "GET http://169.254.169.254/latest HTTP/1.1", EgressTokens(KEY).make_token("call", None)
    )
    assert b"turnlog-egress: private_address" in answer
    role.terminate()
    _, rest = await role.communicate()
    assert (role.returncode, b"private_address" in rest) == (0, True)
