"""What stands in for one E2B machine on a local server: a home folder, and each process in a bubblewrap of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnlog.sandbox_workers.backends.leftovers import owned_prefix

HOME = "/user"
PYTHON = "/opt/python"
UID = 1000
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64")
PASSWD = f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n"


@dataclass(frozen=True, slots=True)
class Parts:
    """Host paths of what every machine is made of."""

    bwrap: Path
    python_root: Path
    """A prefix with bin/python3 and the standard library."""


class Machine:
    """One running sandbox of the local server."""

    def __init__(self, parts: Parts, *, identity: str, uid: int | None, metadata: Mapping[str, str]) -> None:
        """`uid`: host user of its processes; None: ours."""
        self.identity = identity
        self.metadata = dict(metadata)
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.expiry: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        """Nothing of it is left."""
        self._parts = parts
        self._uid = uid
        self._folder = Path(tempfile.mkdtemp(prefix=owned_prefix()))
        for name, mode in (("home", 0o700), ("etc", 0o755)):
            (self._folder / name).mkdir(mode=mode)
        (self._folder / "etc" / "passwd").write_text(PASSWD)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile("/etc/ld.so.cache", self._folder / "etc" / "ld.so.cache")
        self._folder.chmod(0o755)
        if uid is not None:
            os.chown(self._folder / "home", uid, uid)

    async def start(self, words: list[str], env: Mapping[str, str], *, stdin: bool) -> asyncio.subprocess.Process:
        """Run `words` inside."""
        account = {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        process = await asyncio.create_subprocess_exec(
            *self._bwrap(env),
            *words,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            **account,  # type: ignore[arg-type]
        )
        self.processes[process.pid] = process
        return process

    async def kill(self) -> None:
        """End every process and remove the folder."""
        if self.expiry is not None:
            self.expiry.cancel()
        for process in list(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in list(self.processes.values()):
            await process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self.ended.set()

    def _bwrap(self, env: Mapping[str, str]) -> list[str]:
        words = [str(self._parts.bwrap), "--unshare-all", "--uid", str(UID), "--gid", str(UID), "--die-with-parent"]
        words += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr"]
        for folder in SYSTEM_FOLDERS:
            if os.path.islink(folder):
                words += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                words += ["--ro-bind", folder, folder]
        words += ["--ro-bind", str(self._parts.python_root), PYTHON]
        words += ["--ro-bind", str(self._folder / "etc"), "/etc"]
        words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
        words += ["--bind", str(self._folder / "home"), HOME, "--chdir", HOME]
        own = {
            "PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{PYTHON}/lib",
            "HOME": HOME,
            "USER": "user",
        }
        for name, value in {**own, **env}.items():
            words += ["--setenv", name, value]
        return [*words, "--"]
