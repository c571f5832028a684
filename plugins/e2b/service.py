"""The key, the SDK and its errors. Errors of the SDK become errors of ours, which never contain the key."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from http import HTTPStatus
from typing import TypeVar

from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable

KEY = "E2B_API_KEY"
REQUEST_S = 30.0

Answer = TypeVar("Answer")


def key() -> str:
    """Return the key from the environment, its only source. Raises BackendUnavailable."""
    found = os.environ.get(KEY, "")
    if not found:
        raise BackendUnavailable(f'[sandbox] backends = "e2b" needs the key of an E2B account in {KEY}')
    return found


def check_installed() -> None:
    """Check that the extra is installed. Raises BackendUnavailable if it is not."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "e2b" needs the SDK: pip install turnlog[e2b]') from error


async def await_answer(request: Awaitable[Answer]) -> Answer:
    """Return the SDK's answer. Raises SandboxUnavailable with the SDK's own error as its cause."""
    try:
        return await request
    except Exception as error:  # the SDK's errors share no base, and it raises Exception itself for odd answers
        raise SandboxUnavailable(f"E2B: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an error of the SDK in one line, without the key, in case the service ever repeats it."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    return text.replace(os.environ.get(KEY) or "\0", "<key>")


def list_remedy(error: SandboxUnavailable) -> str:
    """Return what to do about a service that did not list its machines; it names the key only if the key was
    refused."""
    from e2b.exceptions import AuthenticationException

    cause = error.__cause__
    if isinstance(cause, AuthenticationException) or getattr(cause, "status_code", None) == HTTPStatus.FORBIDDEN:
        return f"check the key in {KEY}"
    return "the service did not refuse the key: try again once it answers, or see E2B_DOMAIN and E2B_API_URL"


def template_missing(error: SandboxUnavailable, template: str) -> ImageMissing | None:
    """Return ImageMissing if the error means that the service has no such template for this key, else None. Valid only
    for errors of a start."""
    cause = error.__cause__
    status = getattr(cause, "status_code", None)
    # SDK 2.63.0 has a status but no type or code: only the message tells that a 403 is about another team's template.
    if status == HTTPStatus.NOT_FOUND or (status == HTTPStatus.FORBIDDEN and "template" in str(cause).lower()):
        return ImageMissing(f"E2B has no template {template!r} for this key ({error}): build it, or name another")
    return None
