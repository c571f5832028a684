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
from turnlog.sandbox_workers.egress.ledger import Entry, Requests
from turnlog.sandbox_workers.egress.recordings import Answer, Recordings, Repeats
from turnlog.sandbox_workers.egress.refusals import Reason, Refused
from turnlog.sandbox_workers.egress.rules import Policy
from turnlog.sandbox_workers.egress.targets import Authority, Target
from turnlog.sandbox_workers.egress.upstream import Upstream, backwards
from turnlog.schemas.events import EgressRequest, EgressSource
from turnlog.schemas.types import BlobRef


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read to its end."""

    head: Head
    target: Target
    body: bytes
    entry: Entry


class Source(Protocol):
    """See the module."""

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        """Raises Refused for a request that nobody shall answer."""
        ...

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        """Raises Refused for a CONNECT in which no request would be admitted; `blind`: not every one, since nobody
        will look at them."""
        ...

    async def answer(self, asked: Asked, client: Client) -> None:
        """Answer it and note what came of it. Raises Refused, BlobError."""
        ...


class Ruled:
    """Admits what rules grant."""

    def __init__(self, policy: Policy) -> None:
        """Those of the call."""
        self.policy = policy

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        if not self.policy.grants(method, target):
            raise Refused(Reason.rule)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        if not self.policy.reaches(host):
            raise Refused(Reason.rule)
        if blind and not self.policy.whole(host):
            raise Refused(Reason.tls)


class Live(Ruled):
    """Passes answers on as they come."""

    def __init__(self, policy: Policy, upstream: Upstream, *, most: int) -> None:
        """`most`: response_bytes."""
        super().__init__(policy)
        self._upstream, self._most = upstream, most

    async def answer(self, asked: Asked, client: Client) -> None:
        async with self._upstream.asked(asked.head, asked.target, asked.body) as response:
            headers = backwards(response.raw_headers)
            if (declared := _declared(response)) is not None:
                if declared > self._most and asked.head.method != "HEAD":
                    raise Refused(Reason.response_bytes)
                headers = (*headers, (b"content-length", b"%d" % declared))
            entry = asked.entry
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

    async def answer(self, asked: Asked, client: Client) -> None:
        async with self._room:
            await self._answer(asked, client)

    async def _answer(self, asked: Asked, client: Client) -> None:
        entry, head = asked.entry, asked.head
        async with self._upstream.asked(head, asked.target, asked.body) as response:
            status, headers = response.status, backwards(response.raw_headers)
            if (declared := _declared(response)) is not None and head.method == "HEAD":
                headers = (*headers, (b"content-length", b"%d" % declared))
            content = b"".join([chunk async for chunk in _bounded(response, self._most)])
        place = self._call_seq, self._requests.ordinal(entry.key)
        entry.answer, entry.response = await self._recordings.keep(
            entry.key, place, (head.method, asked.target.url), status=status, headers=headers, content=content
        )
        entry.status, entry.source, entry.reason = status, EgressSource.recorded, ""
        await client.answer(status, headers, content)


class Replaying(Ruled):
    """Gives kept answers; nothing goes out, names are not resolved."""

    def __init__(
        self, policy: Policy, blobs: Blobs, recordings: Recordings, requests: Requests, *, call_seq: int
    ) -> None:
        """Of one call."""
        super().__init__(policy)
        self._blobs, self._recordings, self._requests, self._call_seq = blobs, recordings, requests, call_seq
        self._room = asyncio.Semaphore(HELD)

    async def answer(self, asked: Asked, client: Client) -> None:
        entry = asked.entry
        found = await self._recordings.find(entry.key, (self._call_seq, self._requests.ordinal(entry.key)))
        if found is None:
            raise Refused(Reason.not_recorded)
        async with self._room:
            await _replay(*found, self._blobs, entry, client)


class Repeating:
    """Gives what one recorded call got, its refusals too; rules are not asked, since nothing goes out."""

    def __init__(self, blobs: Blobs, repeats: Repeats) -> None:
        """Of one call."""
        self._blobs, self._repeats = blobs, repeats
        self._room = asyncio.Semaphore(HELD)

    def admit(self, method: str, target: Target, entry: Entry) -> None:
        self._refuse_again(entry)

    def admit_tunnel(self, host: Authority, entry: Entry, *, blind: bool) -> None:
        self._refuse_again(entry)
        if blind:
            raise Refused(Reason.not_recorded)

    async def answer(self, asked: Asked, client: Client) -> None:
        then = self._refuse_again(asked.entry)
        if then is None or then.answer is None:
            raise Refused(Reason.not_recorded)
        answer = Answer.parsed(await self._blobs.get(then.answer), then.answer.sha256)
        async with self._room:
            await _replay(answer, then.answer, self._blobs, asked.entry, client)

    def _refuse_again(self, entry: Entry) -> EgressRequest | None:
        then = self._repeats.next(entry.key)
        if then is not None and then.source is EgressSource.refused:
            raise Refused(Reason(then.reason))
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
    """The body as it comes. Raises Refused(response_bytes)."""
    size = 0
    async for chunk in response.content.iter_any():
        if (size := size + len(chunk)) > most:
            raise Refused(Reason.response_bytes)
        yield chunk
