"""The daemon, by the SDK, and the containers that it makes for sandboxes: what they may, what they may not, whose they
are, which of them nobody owns any more. Source: Docker Engine API 1.41.

The daemon is found as `docker` finds it (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH). Every call of the SDK
blocks, so it is made in a thread. A container's first process is python3 of its image, with the init program sent over
its input.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.leftovers import noted, owned_prefix, ownerless
from turnlog.sandbox_workers.backends.roots import loader_command, sent_program
from turnlog.sandbox_workers.inside.child import FORGETFUL
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable, Shape

Answer = TypeVar("Answer")
TIMEOUT_S = 60.0
"""For one answer of the daemon."""
REMEDY = (
    "start it, or set DOCKER_HOST to where it listens (unix:///..., tcp://... with DOCKER_TLS_VERIFY and "
    "DOCKER_CERT_PATH); `docker info` must answer for the worker's user"
)

FIRST_UID = 20_000
"""User of slot 0 in its container, slot n being the n-th from there: RLIMIT_NPROC counts a user's processes in all
containers of a daemon. Below 65,536, since a daemon with user namespaces or without root maps no more."""
WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
"""The writable ones, each a tmpfs of at most `disk_bytes`."""
CA = "/etc/turnlog/ca.pem"
BASELINE_BYTES = 64 << 20
"""For the init and the kernel's own, beside what calls may use."""
BASELINE_PIDS = 4
"""For the init, what a runtime adds, and one more, so that `pids` is exceeded before it is exhausted."""
LABEL = "turnlog.sandbox"
"""On every container of ours: the boot id of the machine whose worker made it."""
IPC = {"kernel.msgmni": "0", "kernel.shmmni": "0", "kernel.sem": "0 0 0 0", "fs.mqueue.queues_max": "0"}
"""No System V or POSIX queue, semaphore or segment can be made: they would outlive a reset."""
ENVIRONMENT = {
    "HOME": WORKSPACE,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **FORGETFUL,
}
"""Added to the image's own; the hash seed makes re-runs alike."""


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


def boot_id() -> str:
    """Of this machine since it was started (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def name(slot: int) -> str:
    """A new one; it says whose the container is, as names of all our things do."""
    return f"{owned_prefix()}{slot}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Daemon:
    """What makes containers."""

    client: Any
    """The SDK's."""
    about: Mapping[str, Any]
    """Its /info."""
    runtime: str | None
    """By its name for it; None: its default."""


def described(daemon: Daemon, settings: SandboxSettings, slot: int, shape: Shape, ca: Path | None) -> dict[str, Any]:
    """Arguments of the SDK's create_container. `ca`: a file of the daemon's machine to be seen as CA."""
    uid, called = FIRST_UID + slot, name(slot)
    return {
        "image": shape.image or settings.docker_image,
        "name": called,
        "hostname": "sandbox",
        "entrypoint": entrypoint(called),
        "user": f"{uid}:{uid}",
        "working_dir": WORKSPACE,
        "environment": ENVIRONMENT,
        "stdin_open": True,
        "labels": {LABEL: boot_id()},
        "healthcheck": {"Test": ["NONE"]},
        "host_config": daemon.client.create_host_config(**confinement(daemon, settings, uid, shape, ca)),
    }


def confinement(daemon: Daemon, settings: SandboxSettings, uid: int, shape: Shape, ca: Path | None) -> dict[str, Any]:
    """Arguments of the SDK's create_host_config."""
    # noexec is Docker's default for a tmpfs; a workspace is for programs too.
    options = f"rw,exec,nosuid,nodev,size={shape.disk_bytes},mode=0700,uid={uid},gid={uid}"
    memory = settings.memory_bytes + shape.disk_bytes + BASELINE_BYTES  # a tmpfs is charged to its container
    bounds: dict[str, Any] = {"mem_limit": memory, "memswap_limit": memory}
    if daemon.about.get("CpuCfsQuota"):
        bounds["nano_cpus"] = int(settings.cpus * 1e9)
    return bounds | {
        "cap_drop": ["ALL"],
        "ipc_mode": "private",
        "log_config": {"Type": "none"},  # else the daemon would keep every frame on its disk
        "mounts": [{"Type": "bind", "Source": str(ca), "Target": CA, "ReadOnly": True}] if ca else [],
        "network_mode": "none",
        "pids_limit": settings.pids + BASELINE_PIDS,
        "read_only": True,
        "restart_policy": {"Name": "no"},
        "runtime": daemon.runtime,
        "security_opt": ["no-new-privileges"],
        "sysctls": IPC,
        "tmpfs": dict.fromkeys(FOLDERS, options),
    }


async def sweep(client: Any) -> int:
    """Remove containers of this machine's dead workers, and ended ones of workers anywhere; how many are gone.
    Raises SandboxUnavailable when the daemon does not answer."""
    gone = 0
    for found in await asked(client.containers, all=True, filters={"label": [LABEL]}):
        name = next((name.lstrip("/") for name in found.get("Names") or ()), "")
        here = found["Labels"][LABEL] == boot_id()
        if not (found["State"] in ("exited", "dead") or (here and ownerless(name))):
            continue
        with contextlib.suppress(SandboxUnavailable):  # another worker removes it too
            await asked(client.remove_container, found["Id"], force=True)
            noted("container", name)
            gone += 1
    return gone


def entrypoint(name: str) -> list[str]:
    """argv, the image's PATH deciding on python3; `name` is there for the worker to know the process by."""
    return loader_command(name)


def program(denied: bytes, *folders: str) -> bytes:
    """What to send first: for `inside.attached.main` a seccomp filter (or nothing) and the writable folders."""
    return sent_program("attached", base64.b64encode(denied).decode(), *folders)


def fingerprint() -> str:
    """sha256 of the init program."""
    return hashlib.sha256(program(b"")).hexdigest()
