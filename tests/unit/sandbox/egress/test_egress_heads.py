"""Heads of requests that come in pieces: however they are cut, they read the same, and each byte is looked at once."""

from __future__ import annotations

import time

import anyio
import pytest
from anyio.abc import ByteStream
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.sandbox_workers.egress.client import Client, Head
from turnlog.sandbox_workers.egress.policy import RequestRefused

HEAD = b"GET http://host/a?b=c HTTP/1.1\r\nHost: host\r\nA: b\r\n\r\n"


class Pieces(ByteStream):
    """A connection whose bytes come as they were cut, then end."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece][::-1]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._pieces:
            raise anyio.EndOfStream
        return self._pieces.pop()

    async def send(self, item: bytes) -> None:
        raise AssertionError("nothing is answered here")

    async def send_eof(self) -> None:
        """See ByteStream."""

    async def aclose(self) -> None:
        """See ByteStream."""


def read(pieces: list[bytes]) -> Head | None:
    async def head() -> Head | None:
        client = Client(Pieces(pieces))
        await client.wait_for_request()
        try:
            return await client.head()
        except RequestRefused:
            return None

    return anyio.run(head)


def cut(content: bytes, places: set[int]) -> list[bytes]:
    ends = [*sorted(place % len(content) for place in places), len(content)]
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(deadline=None, database=None, derandomize=True)
@given(
    st.sets(st.integers(0, len(HEAD) - 1)), st.sampled_from(["", "\n", "\r", "\r\n x"]), st.integers(5, len(HEAD) - 6)
)
def test_a_head_reads_the_same_however_it_is_cut(places: set[int], planted: str, at: int) -> None:
    content = HEAD[:at] + planted.encode() + HEAD[at:]
    assert read(cut(content, places)) == read([content])


@pytest.mark.parametrize("pieces", [HEAD.splitlines(keepends=True), [HEAD[at : at + 1] for at in range(len(HEAD))]])
def test_a_head_that_comes_line_by_line_or_byte_by_byte_is_read(pieces: list[bytes]) -> None:
    head = read(pieces)
    assert head is not None
    assert head.values(b"a") == [b"b"]


def test_a_head_of_single_bytes_costs_as_much_per_byte_however_long_it_is() -> None:
    def seconds(size: int) -> float:
        pieces = [b"GET / HTTP/1.1\r\nA: ", *[b"x"] * size]
        began = time.thread_time()
        assert read(pieces) is None
        return time.thread_time() - began

    short, long = (min(seconds(size) for _ in range(3)) for size in (8_000, 32_000))
    assert long < 8 * short  # 4 times the bytes; a scan from the start each time takes 16 times as long
