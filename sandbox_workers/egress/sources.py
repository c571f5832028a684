"""Where answers come from: the network, the network and a recording, a recording, or one recorded call.

A source first admits a request by its head or refuses it, before its body is asked for, then answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from turnlog.infra.blobs import Blobs
from turnlog.sandbox_workers.egress.client import Client, Head
from turnlog.sandbox_workers.egress.policy import Authority, Policy, Reason, RequestRefused, Target
from turnlog.sandbox_workers.egress.recordings import Answer, Entry, Recordings, Repeats, Requests
from turnlog.sandbox_workers.egress.upstream import Upstream, backwards
from turnlog.schemas.events import EgressRequest, EgressSource
from turnlog.schemas.types import BlobRef


@dataclass(frozen=True, slots=True)
class Request:
    """A request, read to its end."""

    head: Head
    target: Target
    body: bytes
    entry: Entry


class Source(Protocol):
    """What admits a request by its head or refuses it, and answers it."""

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        """Raises RequestRefused for a request that nobody shall answer."""
        ...

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        """Raises RequestRefused for a CONNECT in which no request would be admitted; `blind`: not every one, since
        nobody will look at them."""
        ...

    async def answer(self, request: Request, client: Client) -> None:
        """Answer it and note what came of it. Raises RequestRefused, BlobError."""
        ...


class Ruled:
    """Admits what rules grant."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        if not self.policy.grants(method, target):
            raise RequestRefused(Reason.rule)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        if not self.policy.reaches(host):
            raise RequestRefused(Reason.rule)
        if blind and not self.policy.whole(host):
            raise RequestRefused(Reason.tls)


class Live(Ruled):
    """Passes answers on as they come."""

    def __init__(self, policy: Policy, upstream: Upstream, *, most: int) -> None:
        """`most`: response_bytes."""
        super().__init__(policy)
        self._upstream, self._most = upstream, most

    async def answer(self, request: Request, client: Client) -> None:
        async with self._upstream.asked(request.head, request.target, request.body) as response:
            headers = backwards(response.raw_headers)
            if (declared := _declared(response)) is not None:
                if declared > self._most and request.head.method != "HEAD":
                    raise RequestRefused(Reason.response_bytes)
                headers = (*headers, (b"content-length", b"%d" % declared))
            entry = request.entry
            entry.status, entry.source, entry.reason = response.status, EgressSource.live, ""
            await client.stream_answer(response.status, headers, _bounded(response, self._most))


HELD = 4
"""Recorded answers of one call that are in memory at once; more wait."""


class Recording(Ruled):
    """Keeps each answer before it is passed on: what a sandbox saw can be given again."""

    def __init__(
        self,
        policy: Policy,
        upstream: Upstream,
        recordings: Recordings,
        requests: Requests,
        *,
        call_seq: int,
        most: int,
    ) -> None:
        """Of one call; `most`: response_bytes."""
        super().__init__(policy)
        self._upstream, self._recordings, self._requests = upstream, recordings, requests
        self._call_seq, self._most = call_seq, most
        self._room = asyncio.Semaphore(HELD)

    async def answer(self, request: Request, client: Client) -> None:
        async with self._room:
            await self._answer(request, client)

    async def _answer(self, request: Request, client: Client) -> None:
        entry, head = request.entry, request.head
        async with self._upstream.asked(head, request.target, request.body) as response:
            status, headers = response.status, backwards(response.raw_headers)
            if (declared := _declared(response)) is not None and head.method == "HEAD":
                headers = (*headers, (b"content-length", b"%d" % declared))
            content = b"".join([chunk async for chunk in _bounded(response, self._most)])
        place = self._call_seq, self._requests.ordinal(entry.key)
        entry.answer, entry.response = await self._recordings.keep(
            entry.key, place, (head.method, request.target.url), status=status, headers=headers, content=content
        )
        entry.status, entry.source, entry.reason = status, EgressSource.recorded, ""
        await client.answer(status, headers, content)


class Replaying(Ruled):
    """Gives kept answers; nothing goes out, names are not resolved."""

    def __init__(
        self, policy: Policy, blobs: Blobs, recordings: Recordings, requests: Requests, *, call_seq: int
    ) -> None:
        super().__init__(policy)
        self._blobs, self._recordings, self._requests, self._call_seq = blobs, recordings, requests, call_seq
        self._room = asyncio.Semaphore(HELD)

    async def answer(self, request: Request, client: Client) -> None:
        entry = request.entry
        found = await self._recordings.find(entry.key, (self._call_seq, self._requests.ordinal(entry.key)))
        if found is None:
            raise RequestRefused(Reason.not_recorded)
        async with self._room:
            await _replay(*found, self._blobs, entry, client)


class Repeating:
    """Gives what one recorded call got, its refusals too; rules are not asked, since nothing goes out."""

    def __init__(self, blobs: Blobs, repeats: Repeats) -> None:
        self._blobs, self._repeats = blobs, repeats
        self._room = asyncio.Semaphore(HELD)

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        self._refuse_again(entry)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        self._refuse_again(entry)
        if blind:
            raise RequestRefused(Reason.not_recorded)

    async def answer(self, request: Request, client: Client) -> None:
        then = self._refuse_again(request.entry)
        if then is None or then.answer is None:
            raise RequestRefused(Reason.not_recorded)
        answer = Answer.parsed(await self._blobs.get(then.answer), then.answer.sha256)
        async with self._room:
            await _replay(answer, then.answer, self._blobs, request.entry, client)

    def _refuse_again(self, entry: Entry) -> EgressRequest | None:
        then = self._repeats.next(entry.key)
        if then is not None and then.source is EgressSource.refused:
            raise RequestRefused(Reason(then.reason))
        return then


async def _replay(answer: Answer, ref: BlobRef, blobs: Blobs, entry: Entry, client: Client) -> None:
    content = await blobs.get(answer.body)
    entry.status, entry.source, entry.reason = answer.status, EgressSource.replayed, ""
    entry.answer, entry.response = ref, answer.body
    await client.answer(answer.status, answer.headers, content)


def _declared(response: aiohttp.ClientResponse) -> int | None:
    lengths = [value for name, value in response.raw_headers if name.lower() == b"content-length"]
    return int(lengths[0]) if lengths else None


async def _bounded(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises RequestRefused(response_bytes)."""
    size = 0
    async for chunk in response.content.iter_any():
        if (size := size + len(chunk)) > most:
            raise RequestRefused(Reason.response_bytes)
        yield chunk
