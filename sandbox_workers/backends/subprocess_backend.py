"""The backend for trusted code: the same init with rlimits and its own user under root, but no namespaces.

It ends process trees and enforces limits as bubblewrap does; it hides nothing: network, processes and readable files
of the host are there. A process that leaves the tree by other means than forking (a daemon that it asks) survives.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from turnlog.sandbox_workers.backends.bubblewrap_command import INNER_UID, init_command
from turnlog.sandbox_workers.backends.connection import InitSandbox, own_account, started
from turnlog.sandbox_workers.backends.interpreter_cache import cache_directory, init_program, interpreter
from turnlog.sandbox_workers.protocol import SandboxUnavailable

EXIT_S = 2.0
"""Time for an init to end its tree once its socket is closed."""


class Subprocess:
    """See Provider."""

    name = "subprocess"

    def __init__(self, python: Path, init_root: Path, *, first_uid: int) -> None:
        self._python = python
        self._init_root = init_root
        self._first_uid = first_uid

    @classmethod
    async def open(cls, *, first_uid: int, cache: Path | None = None) -> Subprocess:
        """Fill the cache. Raises SandboxUnavailable."""
        cache = cache or cache_directory()
        found = interpreter(cache)
        return cls(found.root / "bin" / found.python, init_program(cache, INNER_UID), first_uid=first_uid)

    async def start(self, slot: int, disk_bytes: int) -> InitSandbox:
        """See Provider. `disk_bytes` is enforced per call, by counting."""
        account = own_account(self._first_uid, slot)
        try:
            workspace = tempfile.mkdtemp(prefix="turnlog-sandbox-")
            if account.uid is not None:
                os.chown(workspace, account.uid, account.uid)
        except OSError as error:
            raise SandboxUnavailable(
                f"no workspace in {tempfile.gettempdir()}: {error}; free space or set TMPDIR"
            ) from error
        user = "shared" if account.uid is None else "own"
        return await started(
            lambda control: init_command(str(self._python), control, "plain", user, workspace),
            account=account,
            env=self._environment(workspace),
            ended=lambda: shutil.rmtree(workspace, ignore_errors=True),
            exit_s=EXIT_S,
        )

    def _environment(self, workspace: str) -> dict[str, str]:
        root = self._python.parent.parent
        return {
            "PATH": f"{root}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": workspace,
            "TMPDIR": workspace,
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": f"{root}/lib",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self._init_root),
        }
