"""Bodies of requests to our servers, held to a size while they come: what is larger is never in memory."""

from __future__ import annotations

from starlette.requests import Request


class BodyTooLarge(Exception):
    """Says the limit, and what to do."""


async def body_of(request: Request, most: int, remedy: str) -> bytes:
    """The body, of at most `most` bytes. A length that is declared is believed only where it is too large. Raises
    BodyTooLarge, starlette's ClientDisconnect. The server passes over what still comes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise _too_large(most, remedy)
    parts, size = [], 0
    async for part in request.stream():
        if (size := size + len(part)) > most:
            raise _too_large(most, remedy)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int, remedy: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than {most:,} bytes: {remedy}")
