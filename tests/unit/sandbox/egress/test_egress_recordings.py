"""What was recorded comes out again, byte for byte, when nobody is there to ask."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest

from turnlog.infra.blobs import BlobError, BlobMissing, MemoryBlobs, StoreUnavailable
from turnlog.sandbox_workers.egress.recordings import request_key


async def exchanged(served: Any, *paths: str, tls: bool = False, **options: Any) -> list[tuple[int, bytes, Any]]:
    """Status, body and headers of GETs, in order."""
    async with served.client(**options) as client:
        answers = [await client.get(served.url(path, tls=tls)) for path in paths]
    return [(answer.status_code, answer.content, answer.headers.multi_items()) for answer in answers]


async def test_a_replay_gives_the_recorded_bytes_without_the_network(serving: Any, origin: Any) -> None:
    paths = ("/count", "/count", "/a?b", "/redirect?to=/a", "/size?bytes=70000")
    async with serving(mode="record") as served:
        plain, secure = await exchanged(served, *paths), await exchanged(served, *paths, tls=True)
    made = served.requests.recorded_requests()
    assert [(r.source, r.reason) for r in made] == [("recorded", "")] * 10
    assert all(r.response and r.answer and r.response.size == r.response_bytes for r in made)
    assert plain[0][1] != plain[1][1]
    await origin.stop()
    origin.names.clear()
    async with serving(mode="replay") as served:
        assert await exchanged(served, *paths) == plain
        assert await exchanged(served, *paths, tls=True) == secure
        assert [status for status, _, _ in await exchanged(served, "/never")] == [504]
    again = served.requests.recorded_requests()
    assert [(r.source, r.request_sha256, r.response) for r in again[:10]] == [
        ("replayed", r.request_sha256, r.response) for r in made
    ]
    assert (again[10].source, again[10].reason) == ("refused", "not_recorded")
    assert origin.names == []


async def test_requests_that_differ_in_what_selects_an_answer_are_told_apart(serving: Any, origin: Any) -> None:
    async with serving(mode="record") as served, served.client() as client:
        url = served.url("/count")
        for body in (b"1", b"2"):
            await client.post(url, content=body)
        for accept in ("text/html", "text/plain"):
            await client.get(url, headers={"Accept": accept, "Authorization": f"Bearer {accept}", "Cookie": accept})
    keys = [r.request_sha256 for r in served.requests.recorded_requests()]
    assert len(set(keys)) == 4
    head = ((b"accept", b"text/html"), (b"host", b"x"))
    assert request_key("GET", url, head, b"") == request_key("GET", url, (*head, (b"authorization", b"y")), b"")


async def test_polling_across_calls_comes_out_in_the_recorded_order(serving: Any, origin: Any) -> None:
    for call_seq in (1, 4):
        async with serving(mode="record", call_seq=call_seq) as served:
            await exchanged(served, "/count", "/count")
    seen = {}
    for call_seq in (0, 1, 2, 4, 9):
        async with serving(mode="replay", call_seq=call_seq) as served:
            seen[call_seq] = [int(body) for _, body, _ in await exchanged(served, "/count", "/count", "/count")]
    assert seen == {0: [1, 1, 1], 1: [1, 2, 2], 2: [2, 2, 2], 4: [3, 4, 4], 9: [4, 4, 4]}


async def test_the_first_recorded_answer_stays(serving: Any, origin: Any) -> None:
    seen = []
    for mode in ("record", "record", "replay"):
        async with serving(mode=mode) as served:
            seen += [int(body) for _, body, _ in await exchanged(served, "/count")]
    assert seen == [1, 2, 1]


async def test_a_recorded_call_is_given_again_exactly_with_its_refusals(serving: Any, origin: Any) -> None:
    rule = ("* *://origin.test:*/*",)
    async with serving(mode="record") as served:
        await exchanged(served, "/count")
    async with serving(mode="record", allow=rule) as served:
        paths = ("/count", "/size?bytes=20000000", "/count")
        then = await exchanged(served, *paths)
        async with served.client() as client:
            refused = await client.get("http://open.test/x")
    made = served.requests.recorded_requests()
    assert [(r.status, r.reason) for r in made] == [(200, ""), (502, "response_bytes"), (200, ""), (403, "rule")]
    await origin.stop()
    async with serving(allow=(), answers=made) as served:
        assert await exchanged(served, *paths) == then
        async with served.client() as client:
            assert (await client.get("http://open.test/x")).content == refused.content
        assert [status for status, _, _ in await exchanged(served, "/count")] == [504]
    assert [r.reason for r in served.requests.recorded_requests()] == ["", "response_bytes", "", "rule", "not_recorded"]


async def test_no_secret_is_kept(serving: Any, blobs: MemoryBlobs) -> None:
    secret = {"Authorization": "Bearer hunter2", "Cookie": "hunter2", "Proxy-Authorization": "hunter2"}
    async with serving(mode="record") as served:
        assert (await exchanged(served, "/a", headers=secret))[0][0] == 200
    kept = [*blobs.objects.values(), *blobs.named.values(), repr(served.requests.recorded_requests()).encode()]
    assert len(kept) == 4
    assert not any(b"hunter2" in content for content in kept)


class Failing(MemoryBlobs):
    """A store that is there no longer."""

    async def put(self, content: bytes, *, media_type: str = "") -> Any:
        raise StoreUnavailable("gone")


@pytest.mark.parametrize("lost", ["recording", "body"])
async def test_a_store_that_fails_fails_the_call_and_not_the_agent(serving: Any, blobs: MemoryBlobs, lost: str) -> None:
    expected: type[BlobError] = StoreUnavailable
    if lost == "recording":
        blobs.__class__ = Failing
        mode = "record"
    else:
        async with serving(mode="record") as served:
            await exchanged(served, "/a")
        blobs.objects.clear()
        mode, expected = "replay", BlobMissing

    async def call() -> Any:
        async with serving(mode=mode) as served:
            with pytest.raises(httpx.NetworkError):
                await exchanged(served, "/a")
            noted.append(served.requests)

    noted: list[Any] = []
    with pytest.raises(expected):
        await call()
    assert [r.reason for r in noted[0].recorded_requests()] == ["call_ended"]


def test_an_entry_is_small_however_long_its_url() -> None:
    from turnlog.sandbox_workers.egress.recordings import URL_CHARACTERS, Requests

    requests = Requests(1)
    requests.begin().url = "http://x.test/" + "y" * 9000
    assert len(requests.recorded_requests()[0].url) == URL_CHARACTERS
    assert dataclasses.asdict(requests.recorded_requests()[0])["reason"] == "call_ended"
