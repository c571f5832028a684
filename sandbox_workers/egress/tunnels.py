"""What follows a granted CONNECT: TLS that ends here (intercept), or bytes that nobody looks at (tunnel)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Coroutine

import anyio
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSStream

from turnlog.sandbox_workers.egress.addresses import Addresses
from turnlog.sandbox_workers.egress.client import READ_BYTES
from turnlog.sandbox_workers.egress.ledger import Entry
from turnlog.sandbox_workers.egress.refusals import Reason, Refused
from turnlog.sandbox_workers.egress.targets import Authority


async def intercepted(stream: ByteStream, early: bytes, context: ssl.SSLContext) -> ByteStream:
    """The sandbox's side of TLS. `early`: what came before it. Raises Refused(tls) when the sandbox does not speak TLS
    or does not trust us."""
    behind = BufferedByteStream(stream)
    behind.feed_data(early)
    try:
        return await TLSStream.wrap(behind, server_side=True, ssl_context=context, standard_compatible=False)
    except (ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError) as error:
        raise Refused(Reason.tls) from error


async def connected(host: Authority, addresses: Addresses) -> SocketStream:
    """A connection to one of the host's checked addresses. Raises Refused (private_address, unreachable)."""
    for address in await addresses.checked(host):
        with contextlib.suppress(OSError):
            return await anyio.connect_tcp(address, host.port)
    raise Refused(Reason.unreachable)


async def relay(
    near: ByteStream,
    far: ByteStream,
    early: bytes,
    entry: Entry,
    *,
    request_bytes: int,
    response_bytes: int,
    idle_s: float,
) -> None:
    """Pass bytes on in both directions until both have ended. Raises Refused (request_bytes, response_bytes),
    TimeoutError when nothing came for `idle_s`."""
    entry.request_bytes = len(early)
    await far.send(early)
    async with asyncio.timeout(idle_s) as idle:

        def passed() -> None:
            idle.reschedule(asyncio.get_running_loop().time() + idle_s)
            if entry.request_bytes > request_bytes:
                raise Refused(Reason.request_bytes)
            if entry.response_bytes > response_bytes:
                raise Refused(Reason.response_bytes)

        async def out() -> None:
            async for data in _received(near):
                entry.request_bytes += len(data)
                passed()
                await far.send(data)
            await far.send_eof()

        async def back() -> None:
            async for data in _received(far):
                entry.response_bytes += len(data)
                passed()
                await near.send(data)
            await near.send_eof()

        await _both(out(), back())


async def _both(*directions: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _received(stream: ByteStream) -> AsyncIterator[bytes]:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            yield await stream.receive(READ_BYTES)
