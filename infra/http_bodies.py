"""Bodies of requests to our servers, held to a size while they come: what is larger is never in memory."""

from __future__ import annotations

from starlette.requests import Request


class BodyTooLarge(Exception):
    """Says the limit, and which setting it is."""


async def body_of(request: Request, most: int, setting: str) -> bytes:
    """The body of at most `most` bytes, `setting` naming the limit. A length that is declared is believed only where it
    is too large. Raises BodyTooLarge, starlette's ClientDisconnect. The server passes over what still comes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise _too_large(most, setting)
    parts, size = [], 0
    async for part in request.stream():
        if (size := size + len(part)) > most:
            raise _too_large(most, setting)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int, setting: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than {most:,} bytes: send less, or raise {setting}")
