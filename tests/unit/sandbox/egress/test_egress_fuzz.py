"""Any bytes at all: the proxy hangs up in the end, passes on only what rules grant, and never trips."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PIECES = [
    b"GET ", b"POST ", b"CONNECT ", b"HEAD ", b"%s/public/x", b"%s/secret", b"%s/public/..%%2fsecret", b"%s",
    b"/secret",
    b"http://", b"https://", b"origin.test", b"127.0.0.1", b":80", b"@", b"#", b" HTTP/1.1", b" HTTP/1.0", b"\r\n",
    b"\r\n",
    b"\n", b"\r", b"\r\n\r\n", b"\r\n\r\n", b"Host: x", b"Host: origin.test", b"Content-Length: 3",
    b"Content-Length: 99",
    b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Connection: close", b"Connection: upgrade",
    b"Upgrade: h2c",
    b"3\r\nabc\r\n", b"0\r\n\r\n", b"abc", b" ", b"\t", b"\0", b"\xff", b"\x16\x03\x01", b":", b"%%2e", b"..", b"//",
    b"\\",
]  # fmt: skip
WHOLE = b"GET %s/public/x HTTP/1.1\r\nHost: x\r\n\r\n"
REQUESTS = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from(PIECES), max_size=24).map(b"".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.just(WHOLE)), max_size=8).map(b"".join),
    st.tuples(st.integers(0, 60), st.binary(max_size=3)).map(lambda cut: WHOLE[: cut[0]] + cut[1] + WHOLE[cut[0] :]),
)


async def test_any_bytes_are_answered_or_refused_and_the_connection_ends(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    loop = asyncio.get_running_loop()
    async with serving(allow=("GET http://origin.test:*/public/*",), requests=100_000, timeout_s=1.0) as served:
        origin = f"http://origin.test:{served.origin.port}".encode()

        @settings(deadline=None, suppress_health_check=list(HealthCheck))
        @given(REQUESTS)
        def sent(data: bytes) -> None:
            """From a thread, so that one event loop serves every example."""
            data = data.replace(b"%s", origin).replace(b"%%", b"%")
            got = asyncio.run_coroutine_threadsafe(asyncio.wait_for(served.raw(data), 10.0), loop).result()
            assert not got or got.startswith(b"HTTP/1.1 ")

        await asyncio.to_thread(sent)
        assert (await served.raw(WHOLE.replace(b"%s", origin))).startswith(b"HTTP/1.1 200 ")
    assert {what for what, _, _ in served.origin.seen} <= {"GET /public/x"} | {
        what for what, _, _ in served.origin.seen if what.startswith("GET /public/") and ".." not in what
    }
    assert not caplog.records
