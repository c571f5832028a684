"""Asking E2B's SDK: what can go wrong there, as errors of ours, in which no key stands."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TypeVar

from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable

KEY = "E2B_API_KEY"
REQUEST_S = 30.0
ANSWERS = 403, 404
"""What the service says of a template that is not there, or is another team's."""

Answer = TypeVar("Answer")


def key() -> str:
    """From the environment, and from nowhere else. Raises BackendUnavailable."""
    found = os.environ.get(KEY, "")
    if not found:
        raise BackendUnavailable(f'[sandbox] backends = "e2b" needs the key of an E2B account in {KEY}')
    return found


def installed() -> None:
    """Raises BackendUnavailable without the extra."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "e2b" needs the SDK: pip install turnlog[e2b]') from error


async def asked(request: Awaitable[Answer]) -> Answer:
    """The SDK's answer. Raises SandboxUnavailable with the SDK's own error as its cause."""
    try:
        return await request
    except Exception as error:  # the SDK's errors share no base, and it raises Exception itself for odd answers
        raise SandboxUnavailable(f"E2B: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error of the SDK in one line, without the key should the service ever repeat it."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return text.replace(os.environ.get(KEY) or "\0", "<key>")


def template_missing(error: SandboxUnavailable, template: str) -> ImageMissing | None:
    """The service has no such template for this key; None: it was something else."""
    cause = error.__cause__
    status = getattr(cause, "status_code", None)
    if "template" in str(cause).lower() and (status in ANSWERS or str(cause)[:3] in map(str, ANSWERS)):
        return ImageMissing(f"E2B has no template {template!r} for this key ({error}): build it, or name another")
    return None
