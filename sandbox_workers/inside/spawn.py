"""Starting a program without a fork of this interpreter, whose pages a fork has to copy: by vfork(2), in two thirds of
the time.

Limits that a program may not lift have to be on before it runs: prlimit(1) of util-linux puts them on and becomes it.
Where that is missing, or the environment could lead the dynamic linker astray before they are on, there is the fork.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess

from turnlog.sandbox_workers.inside.child import killed_first

PRLIMIT = "/usr/bin/prlimit"
OPTIONS = {
    resource.RLIMIT_FSIZE: "fsize",
    resource.RLIMIT_AS: "as",
    resource.RLIMIT_NPROC: "nproc",
    resource.RLIMIT_CPU: "cpu",
    resource.RLIMIT_CORE: "core",
    resource.RLIMIT_MSGQUEUE: "msgqueue",
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_SIGPENDING: "sigpending",
}
LINKER = "LD_"
"""Variables of ld.so(8)."""


def possible(argv: list[bytes], env: dict[str, str], folder: int) -> bool:
    """`argv` can be started so, with this added to the environment."""
    return _served() and not any(name.startswith(LINKER) for name in env) and _found(argv[0], env, folder)


@functools.lru_cache(maxsize=1)
def _served() -> bool:
    """There is prlimit, and the kernel has all of the limits (gVisor has not)."""
    try:
        for name in OPTIONS:
            resource.setrlimit(name, resource.getrlimit(name))
    except (OSError, ValueError):
        return False
    return os.access(PRLIMIT, os.X_OK)


def _found(name: bytes, env: dict[str, str], folder: int) -> bool:
    """What is not there is for the fork to say; prlimit would say it in its own words."""
    if b"/" in name:
        return os.access(name, os.X_OK, dir_fd=folder)
    path = env.get("PATH") or os.environ.get("PATH") or os.defpath
    return any(os.access(os.path.join(part, name), os.X_OK, dir_fd=folder) for part in os.fsencode(path).split(b":"))


def spawned(
    argv: list[bytes], env: dict[str, str], folder: int, streams: list[int], limits: dict[int, tuple[int, int]]
) -> int:
    """Pid of `argv` in `folder`, with `streams` as 0, 1 and 2. Raises OSError, ValueError."""
    options = [f"--{OPTIONS[name]}={soft}:{hard}" for name, (soft, hard) in limits.items()]
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(folder)
    try:
        process = subprocess.Popen(
            [PRLIMIT, *options, "--", *argv],
            env={**os.environ, **env},
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
            umask=0o022,
        )
    finally:
        os.fchdir(here)
        os.close(here)
    process.returncode = 0  # it is reaped with all the others
    killed_first(process.pid)
    return process.pid
