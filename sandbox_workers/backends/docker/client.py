"""The daemon, by the SDK: found as `docker` finds it (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH).

Every call of the SDK blocks, so it is made in a thread.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable

Answer = TypeVar("Answer")
TIMEOUT_S = 60.0
"""For one answer of the daemon."""
REMEDY = (
    "start it, or set DOCKER_HOST to where it listens (unix:///..., tcp://... with DOCKER_TLS_VERIFY and "
    "DOCKER_CERT_PATH); `docker info` must answer for the worker's user"
)


def connect() -> Any:
    """The SDK's low-level client of a daemon that answers. Raises BackendUnavailable."""
    try:
        import docker  # type: ignore[import-untyped]
        from docker.utils import kwargs_from_env  # type: ignore[import-untyped]
    except ImportError as error:
        raise BackendUnavailable(f"the docker backend needs its SDK: pip install turnlog[docker] ({error})") from error
    try:
        client = docker.APIClient(**kwargs_from_env(), timeout=TIMEOUT_S)
    except docker.errors.DockerException as error:
        release(error)
        raise BackendUnavailable(f"no Docker daemon answers: {error}; {REMEDY}") from error
    if str(client.base_url).startswith("http+docker://ssh"):
        client.close()
        raise BackendUnavailable("DOCKER_HOST=ssh://... cannot carry a sandbox's stream: forward the socket by ssh -L")
    return client


async def asked(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """An answer of the daemon, off the loop. Raises SandboxUnavailable, ImageMissing."""
    return await asyncio.to_thread(answered, call, *arguments, **named)


def answered(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """As `asked`, in this thread."""
    import requests
    from docker.errors import DockerException, ImageNotFound  # type: ignore[import-untyped]

    try:
        return call(*arguments, **named)
    except ImageNotFound as error:
        raise ImageMissing(str(error.explanation or error)) from error
    except (DockerException, requests.RequestException, OSError) as error:
        release(error)
        raise SandboxUnavailable(f"the Docker daemon refused or is gone: {error}") from error


def release(error: BaseException) -> None:
    """Let go of what the frames of an error hold: the SDK does not close a unix socket that it could not connect."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
