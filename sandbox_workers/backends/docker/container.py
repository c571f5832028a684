"""How a sandbox's container is made: what it may, what it may not, and whose it is. Source: Docker Engine API 1.41."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.docker.program import command
from turnlog.sandbox_workers.backends.leftovers import owned_prefix
from turnlog.sandbox_workers.inside.child import FORGETFUL
from turnlog.sandbox_workers.protocol import Shape

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
        "entrypoint": command(called),
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
