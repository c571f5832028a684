"""Requests through the proxy: what reaches an origin, what is refused, and what the sandbox is told."""

from __future__ import annotations

import asyncio
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest

from turnlog.infra.blobs import MemoryBlobs
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress import Egress, EgressUnavailable
from turnlog.sandbox_workers.egress.policy import RuleInvalid
from turnlog.sandbox_workers.egress.proxy import CONNECTIONS
from turnlog.schemas.events import EgressSource


async def test_a_granted_request_reaches_its_origin_with_and_without_tls(serving: Any) -> None:
    async with serving() as served, served.client() as client:
        for tls in (False, True):
            answer = await client.get(served.url("/a?b=c", tls=tls))
            assert (answer.status_code, answer.text, answer.headers["x-of"]) == (200, "GET /a?b=c 0", "origin")
            assert (await client.post(served.url("/a", tls=tls), content=b"12345")).text == "POST /a 5"
            assert (await client.head(served.url("/size?bytes=7", tls=tls))).headers["content-length"] == "7"
    made = served.requests.recorded_requests()
    assert len(made) == 6
    assert [(r.method, r.url, r.status, r.source, r.reason) for r in made[3:5]] == [
        ("GET", served.url("/a?b=c", tls=True), 200, EgressSource.live, ""),
        ("POST", served.url("/a", tls=True), 200, EgressSource.live, ""),
    ]
    assert (made[1].request_bytes, made[1].response_bytes, made[1].response) == (5, 9, None)


@pytest.mark.parametrize("tls", [False, True])
async def test_what_no_rule_grants_is_refused_with_words_and_noted(serving: Any, tls: bool) -> None:
    async with serving(allow=("GET *://origin.test:*/public/*",)) as served, served.client() as client:
        for method, path in (("POST", "/public/x"), ("GET", "/secret"), ("GET", "/public/%2e%2e%2fsecret")):
            answer = await client.request(method, served.url(path, tls=tls), content=b"x" * 70_000)
            assert answer.status_code == 403, answer.text
            assert "(rule): no rule grants it; one of [egress] allow must" in answer.text
        assert (await client.get(served.url("/public/x", tls=tls))).status_code == 200  # the same connection goes on
    assert [what for what, _, _ in served.origin.seen] == ["GET /public/x"]
    assert [(r.status, r.source, r.reason) for r in served.requests.recorded_requests()[:3]] == [
        (403, "refused", "rule")
    ] * 3


async def test_a_tunnel_to_a_host_without_a_rule_is_refused_before_it_opens(serving: Any) -> None:
    async with serving() as served:
        proxy = urllib.request.ProxyHandler({"https": f"http://127.0.0.1:{served.port}"})
        with pytest.raises(urllib.error.URLError, match=r"403 Forbidden \(turnlog egress: rule\)"):
            await asyncio.to_thread(urllib.request.build_opener(proxy).open, "https://open.test/x")
    assert [(r.method, r.url, r.status, r.reason) for r in served.requests.recorded_requests()] == [
        ("CONNECT", "open.test:443", 403, "rule")
    ]
    assert served.origin.names == []


async def test_a_task_narrows_what_the_operator_grants(serving: Any) -> None:
    async with serving(task=["GET *://origin.test:*/a"]) as served, served.client() as client:
        assert (await client.get(served.url("/a"))).status_code == 200
        assert (await client.get(served.url("/b"))).status_code == 403
    with pytest.raises(RuleInvalid, match="'GET nowhere'"):
        async with serving(task=["GET nowhere"]):
            pass


@pytest.mark.parametrize("host", ["inside.test", "127.0.0.1", "[::ffff:127.0.0.1]", "169.254.169.254"])
async def test_a_private_address_is_refused_also_when_a_redirect_leads_there(
    serving: Any, host: str, origin: Any
) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        return [name] if name not in ("origin.test", "inside.test") else ["127.0.0.1"]

    origin.resolve = resolve
    async with serving(allow=("* *://*:*/*",)) as served, served.client() as client:
        answer = await client.get(served.url("/redirect"), params={"to": served.url("/x", host=host)})
        said = await served.raw(f"GET {answer.headers['location']} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert said.startswith(b"HTTP/1.1 403 ")
    assert b"[egress] private_hosts does not name it" in said
    assert [(r.status, r.reason) for r in served.requests.recorded_requests()] == [(302, ""), (403, "private_address")]
    assert len(origin.seen) == 1


async def test_a_host_that_is_not_there_is_told_from_one_that_is_refused(serving: Any, free_port: int) -> None:
    everything = serving(allow=("* *://*:*/*",), private_hosts=(f"origin.test:{free_port}",))
    closed = f"origin.test:{free_port}"
    async with everything as served, served.client() as client:
        for url in ("http://nowhere.test/", f"http://{closed}/", f"https://{closed}/"):
            answer = await client.get(url)
            assert (answer.status_code, "(unreachable)" in answer.text) == (502, True)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def test_an_origin_that_nobody_vouches_for_is_not_believed(serving: Any) -> None:
    async with serving(upstream_ca="") as served, served.client() as client:
        answer = await client.get(served.url("/", tls=True))
    assert (answer.status_code, "[egress] upstream_ca" in answer.text) == (502, True)
    assert [r.reason for r in served.requests.recorded_requests()] == ["certificate"]
    assert served.origin.seen == []


async def test_only_what_is_the_origins_business_is_passed_on(serving: Any) -> None:
    headers = {
        "Proxy-Authorization": "Basic x", "X-Forwarded-For": "1.2.3.4", "Forwarded": "for=x", "Via": "x",
        "TE": "trailers",
        "Connection": "x-hop", "X-Hop": "1", "Authorization": "Bearer kept", "User-Agent": "me", "Upgrade": "h2c",
    }  # fmt: skip
    async with serving() as served, served.client(headers=headers) as client:
        await client.get(served.url("/"))
        raw = f"GET {served.url('/')} HTTP/1.1\r\nHost: elsewhere.test\r\n\r\n".encode()
        assert b" 200 OK" in await served.raw(raw)
    got, later = ({name.lower(): value for name, value in headers.items()} for _, headers, _ in served.origin.seen)
    assert set(got) <= {"host", "accept", "accept-encoding", "authorization", "user-agent"}
    assert (got["authorization"], got["user-agent"]) == ("Bearer kept", "me")
    assert later["host"] == f"origin.test:{served.origin.port}"


async def test_bodies_over_the_limit_are_refused_however_they_are_framed(serving: Any) -> None:
    async with serving(request_bytes=1000) as served, served.client() as client:
        url = served.url("/")
        assert (await client.post(url, content=b"x" * 1000)).status_code == 200
        answer = await client.post(url, content=b"x" * 1001)
        assert (answer.status_code, "[egress] request_bytes" in answer.text) == (403, True)
        chunked = f"POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + b"400\r\n"
        assert b" 403 " in await served.raw(chunked + b"x" * 1024 + b"\r\n0\r\n\r\n")
        expecting = f"POST {url} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: "
        assert (await served.raw(expecting.encode() + b"1001\r\n\r\n", end=False)).startswith(b"HTTP/1.1 403 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(expecting.encode() + b"3\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
        writer.write(b"abc")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert [len(body) for _, _, body in served.origin.seen] == [1000, 3]
    assert [r.reason for r in served.requests.recorded_requests()] == ["", *["request_bytes"] * 3, ""]


async def test_answers_over_the_limit_are_refused_or_cut(serving: Any) -> None:
    async with serving(response_bytes=100_000) as served, served.client() as client:
        assert len((await client.get(served.url("/size?bytes=100000"))).content) == 100_000
        answer = await client.get(served.url("/size?bytes=100001"))
        assert (answer.status_code, "[egress] response_bytes" in answer.text) == (502, True)
        with pytest.raises(httpx.HTTPError):
            await client.get(served.url("/endless"))
        assert (await client.head(served.url("/size?bytes=100001"))).status_code == 200
    made = served.requests.recorded_requests()
    assert [(r.status, r.source, r.reason) for r in made[1:3]] == [
        (502, "refused", "response_bytes"),
        (200, "live", "response_bytes"),
    ]
    assert made[2].response_bytes <= 100_000


async def test_a_call_has_so_many_requests_and_one_entry_tells_that_it_wanted_more(serving: Any) -> None:
    async with serving(requests=3) as served, served.client() as client:
        statuses = [(await client.get(served.url("/", tls=True))).status_code for _ in range(3)]
        answers = [await client.get(served.url("/")) for _ in range(3)]
    assert statuses == [200] * 3
    assert {answer.status_code for answer in answers} == {403}
    assert "[egress] requests" in answers[0].text
    assert [r.reason for r in served.requests.recorded_requests()] == ["", "", "", "requests"]


async def test_a_slow_origin_and_a_slow_client_run_into_the_same_time_out(serving: Any) -> None:
    async with serving(timeout_s=0.2) as served, served.client(timeout=None) as client:
        answer = await client.get(served.url("/silent"))
        assert (answer.status_code, "[egress] timeout_s" in answer.text) == (504, True)
        assert b" 504 " in await served.raw(b"GET http://origin.te", end=False)
        slow = f"POST {served.url('/')} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc".encode()
        assert b" 504 " in await served.raw(slow, end=False)
    assert [(r.status, r.reason) for r in served.requests.recorded_requests()] == [(504, "timeout_s")] * 3


MALFORMED = {
    "both lengths": "POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    "length twice": "POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "lengths in one": "POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
    "signed length": "POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
    "length as a superscript": "POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: \xb3\r\n\r\nabc",
    "two codings": "POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": "POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before colon": "POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "bare LF": "GET {url} HTTP/1.1\nHost: x\n\n",
    "bare LF in a header": "GET {url} HTTP/1.1\r\nHost: x\r\nA: b\nC: d\r\n\r\n",
    "bare CR": "GET {url} HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    "folded": "GET {url} HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "two hosts": "GET {url} HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "bad chunk": "POST {url} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcXX0\r\n\r\n",
    "origin form": "GET / HTTP/1.1\r\nHost: origin.test\r\n\r\n",
    "asterisk": "OPTIONS * HTTP/1.1\r\nHost: origin.test\r\n\r\n",
    "userinfo": "GET http://u:pw@origin.test/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "no port": "CONNECT origin.test HTTP/1.1\r\nHost: x\r\n\r\n",
    "another scheme": "GET ftp://origin.test/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "long head": "GET {url} HTTP/1.1\r\nA: " + "x" * 40_000,
    "long target": "GET {url}" + "x" * 9_000 + " HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a request": "GET {url} HTTP/1.1\r\nHost:",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
async def test_what_two_readers_may_read_differently_is_refused(serving: Any, text: str) -> None:
    async with serving() as served:
        smuggled = f"GET {served.url('/smuggled')} HTTP/1.1\r\nHost: x\r\n\r\n"
        got = await served.raw((text.replace("{url}", served.url("/")) + smuggled).encode("latin-1"))
    assert got.startswith(b"HTTP/1.1 400 Bad Request (turnlog egress: malformed)\r\n")
    assert got.count(b"HTTP/1.1 ") == 1
    assert served.origin.seen == []
    (entry,) = served.requests.recorded_requests()
    assert (entry.status, entry.reason) == (400, "malformed")
    assert "pw" not in entry.url


async def test_an_upgrade_is_refused(serving: Any) -> None:
    upgrade = "GET {} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with serving() as served:
        assert b"403 Forbidden (turnlog egress: upgrade)" in await served.raw(upgrade.format(served.url("/")).encode())
    assert served.origin.seen == []


async def test_pipelined_requests_are_answered_in_order_and_old_clients_are_served(serving: Any) -> None:
    async with serving() as served:
        first = f"POST {served.url('/1')} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
        second = f"\r\nGET {served.url('/2')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        got = await served.raw((first + second).encode())
        assert got.index(b"POST /1 2") < got.index(b"GET /2 0")
        old = await served.raw(f"GET {served.url('/endless')} HTTP/1.0\r\n\r\n".encode(), end=False)
        assert old.partition(b"\r\n\r\n")[2] == b"x" * 65536 * 64


async def test_idle_connections_make_room_for_new_ones(serving: Any) -> None:
    async with serving(requests=1000) as served:
        writers = []
        for _ in range(2 * CONNECTIONS + 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(f"HEAD {served.url('/')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writers.append(writer)
        for writer in writers:
            writer.close()
    assert len(served.requests.recorded_requests()) == len(writers)


async def test_a_host_behind_the_same_front_is_refused_inside_a_tunnel(serving: Any) -> None:
    async with serving() as served, served.client() as client:
        answer = await client.get(served.url("/", tls=True), headers={"Host": "behind.test"})
    assert (answer.status_code, "Host is another than the tunnel's" in answer.text) == (400, True)
    assert served.origin.seen == []


async def test_a_client_that_does_not_trust_us_is_noted(serving: Any) -> None:
    async with serving() as served:
        proxy = f"http://127.0.0.1:{served.port}"
        async with httpx.AsyncClient(proxy=proxy, verify=ssl.create_default_context(), trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(served.url("/", tls=True))
    (entry,) = served.requests.recorded_requests()
    assert (entry.method, entry.source, entry.reason) == ("CONNECT", "refused", "tls")


async def test_a_tunnel_is_opened_to_granted_hosts_and_bounded(serving: Any, origin: Any) -> None:
    rule = f"* https://origin.test:{origin.tls_port}/*"
    async with serving(tls="tunnel", allow=(rule,), response_bytes=50_000) as served, served.client() as client:
        assert (await client.get(served.url("/a", tls=True))).text == "GET /a 0"
        assert (await client.get(served.url("/a", tls=False))).status_code == 403
        with pytest.raises(httpx.HTTPError):
            await client.get(served.url("/size?bytes=60000", tls=True))
    tunnel = served.requests.recorded_requests()[0]
    assert (tunnel.method, tunnel.url) == ("CONNECT", f"origin.test:{origin.tls_port}")
    assert tunnel.reason == "response_bytes"
    assert tunnel.request_bytes > 0


async def test_an_idle_tunnel_ends(serving: Any, origin: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tls="tunnel", allow=("* https://origin.test:*/*",), timeout_s=0.2) as served:
        opened = await served.raw(
            f"CONNECT origin.test:{origin.tls_port} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), end=False
        )
    assert opened.startswith(b"HTTP/1.1 200 ")
    assert [(r.status, r.reason) for r in served.requests.recorded_requests()] == [(200, "")]
    assert not caplog.records


async def test_a_rule_for_a_path_grants_no_tunnel(serving: Any, origin: Any) -> None:
    rule = f"* https://origin.test:{origin.tls_port}/"
    async with serving(tls="tunnel", allow=(rule + "*",), task=(rule + "a",)) as served, served.client() as client:
        with pytest.raises(httpx.ProxyError, match="turnlog egress: tls"):
            await client.get(served.url("/a", tls=True))


async def test_tls_can_be_refused(serving: Any) -> None:
    async with serving(tls="refuse") as served, served.client() as client:
        assert served.ca is None
        with pytest.raises(httpx.ProxyError, match="turnlog egress: tls"):
            await client.get(served.url("/", tls=True))
        plainly = f"GET {served.url('/', tls=True)} HTTP/1.1\r\nHost: x\r\n\r\n"
        assert b"[egress] tls" in await served.raw(plainly.encode())
    assert [r.reason for r in served.requests.recorded_requests()] == ["tls", "tls"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(tls="tunnel", mode="record"), 'record and replay need tls = "intercept"'),
        (dict(tls="tunnel", allow=("GET https://h.test/*",)), "'GET https://h.test/\\*' cannot be enforced"),
        (dict(mode="offline"), "mode must be live, record or replay"),
        (dict(cache="../other"), "cache may only have letters"),
        (dict(upstream_ca="/nowhere.pem"), "upstream_ca: /nowhere.pem"),
    ],
)
async def test_settings_that_cannot_be_kept_are_refused_at_the_start(serving: Any, changed: Any, said: str) -> None:
    with pytest.raises(EgressUnavailable, match=said):
        async with serving(**changed):
            pass


async def test_the_end_of_a_call_ends_its_requests_and_leaves_none_to_the_next(
    settings: EgressSettings, origin: Any, blobs: MemoryBlobs, tmp_path: Any
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    request = f"GET http://origin.test:{origin.port}/silent HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with listener, socket.socket() as under_way:
        async with Egress.open(settings, blobs, tmp_path, resolve=origin.resolve) as egress:
            async with egress.serving(listener) as requests:
                under_way.connect(("127.0.0.1", port))
                under_way.sendall(request)
                await origin.arrived.wait()
            with socket.create_connection(("127.0.0.1", port)) as waiting:
                waiting.sendall(request)
                async with egress.serving(listener) as later:
                    pass
                with pytest.raises(ConnectionResetError):
                    waiting.recv(1)
            with pytest.raises(ConnectionResetError):
                under_way.recv(1)
    assert [(r.url[-7:], r.reason) for r in requests.recorded_requests()] == [("/silent", "call_ended")]
    assert later.recorded_requests() == ()


async def test_a_sandbox_that_dies_in_the_middle_of_a_call_takes_only_its_own_socket_along(
    settings: EgressSettings, origin: Any, blobs: MemoryBlobs, tmp_path: Any
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    async with Egress.open(settings, blobs, tmp_path, resolve=origin.resolve) as egress:
        async with egress.serving(listener) as requests:
            listener.close()
            await asyncio.sleep(0)
        with socket.create_server(("127.0.0.1", 0)) as another:  # gets the number of the closed one
            async with egress.serving(another):
                pass
    assert requests.recorded_requests() == ()


async def test_programs_learn_of_the_proxy_and_whom_to_trust(
    settings: EgressSettings, blobs: MemoryBlobs, tmp_path: Any
) -> None:
    async with Egress.open(settings, blobs, tmp_path) as egress:
        env = egress.environment(ca="/x/ca.pem", port=81)
        assert egress.ca is not None
        assert b"PRIVATE" not in egress.ca.read_bytes()
        assert egress.ca.stat().st_mode & 0o777 == 0o644
    assert env["http_proxy"] == env["HTTPS_PROXY"] == "http://127.0.0.1:81"
    assert env["SSL_CERT_FILE"] == env["GIT_SSL_CAINFO"] == "/x/ca.pem"
