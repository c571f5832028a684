"""The bwrap command line of a sandbox: what is inside, and nothing else. Source: bwrap(1)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
"""The writable ones, each a tmpfs of at most `disk_bytes`."""
PYTHON_HOME = "/opt/python"
INIT_HOME = "/opt/init"
INNER_UID = 1000
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/mime.types")
"""The few files of the host's /etc that programs need and that name nobody."""
NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": f"{PYTHON_HOME}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": f"{PYTHON_HOME}/lib",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": INIT_HOME,
}
"""All of it. PYTHONPATH is taken away by the init before a call runs; the hash seed makes re-runs alike."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Host paths of what goes in."""

    bwrap: Path
    python_root: Path
    python: str
    """Name of the binary in python_root/bin."""
    init_root: Path


def command(parts: Parts, *, control: int, seccomp: int | None, disk_bytes: int) -> list[str]:
    """argv. `control` and `seccomp` are descriptors that the process inherits."""
    words = [str(parts.bwrap), *NAMESPACES, "--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += [*_system(), *_ours(parts), *_writable(disk_bytes)]
    if seccomp is not None:
        words += ["--seccomp", str(seccomp)]
    return [*words, "--", *init_command(f"{PYTHON_HOME}/bin/{parts.python}", control, "namespace", "own", *FOLDERS)]


def init_command(python: str, control: int, *arguments: str) -> list[str]:
    """argv of the init; its environment must name the program's folder in PYTHONPATH."""
    options = ["-s", "-P", "-X", "utf8"]
    return [python, *options, "-m", "turnlog.sandbox_workers.inside.init", str(control), *arguments]


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    for path in ETC:
        words += ["--ro-bind-try", path, path]
    return words


def _ours(parts: Parts) -> list[str]:
    words = [
        "--ro-bind",
        str(parts.python_root),
        PYTHON_HOME,
        "--ro-bind",
        f"{parts.init_root}/turnlog",
        f"{INIT_HOME}/turnlog",
    ]
    for name in ("passwd", "group", "hosts"):
        words += ["--ro-bind", f"{parts.init_root}/etc/{name}", f"/etc/{name}"]
    return words


def _writable(disk_bytes: int) -> list[str]:
    words = ["--proc", "/proc", "--dev", "/dev"]
    for folder in FOLDERS:
        words += ["--perms", "0700", "--size", str(disk_bytes), "--tmpfs", folder]
    # bwrap's own / and /dev are tmpfs without a size: left writable they would be a way around the limit.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]
