"""The backend for trusted code: the same init, rlimits, control group and, under root, user, but no namespaces.

It ends process trees and enforces limits as bubblewrap does, but hides nothing: network, processes and readable files
of the host are accessible, and `network` is advice that code may ignore. A process that leaves the tree by other means
than forking (a daemon that it asks) survives; where there are control groups, nothing else does."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import roots
from turnlog.sandbox_workers.backends.cgroups import Cgroups, bounds_of
from turnlog.sandbox_workers.backends.connection import HostUser, InitSandbox, init_command, own_account, start_sandbox
from turnlog.sandbox_workers.backends.roots import discard, init_program, interpreter, no_workspace, workspace_folder
from turnlog.sandbox_workers.inside.child import FORGETFUL
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable, Shape

EXIT_S = 2.0
"""Seconds that an init gets to end its tree once its socket is closed."""


class Subprocess:
    """Starts each sandbox's init as a plain process of the slot's user."""

    name = "subprocess"
    costly = False
    places = False
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none", "allowlist"})
    """Networks served, though both are advice here: proxy variables point to the proxy, but nothing prevents other
    connections."""

    def __init__(self, settings: SandboxSettings, python: Path, init_root: Path, cgroups: Cgroups | None) -> None:
        self._settings = settings
        self._python = python
        self._init_root = init_root
        self._cgroups = cgroups

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """Open the backend and fill the cache. `ca` is not used: /etc is the host's. Raises BackendUnavailable."""
        cache = cache or cache_directory()
        cgroups = Cgroups.open(settings)
        try:
            found = await asyncio.to_thread(interpreter, cache)
            init = await asyncio.to_thread(init_program, cache)
        except SandboxUnavailable as error:
            raise BackendUnavailable(f'[sandbox] backend = "subprocess" does not work here: {error}') from error
        return cls(settings, found.root / "bin" / found.python, init, cgroups)

    async def start(self, slot: int, shape: Shape) -> InitSandbox:
        """See Provider. `disk_bytes` is enforced per call, by counting."""
        _refuse_image(shape)
        account = own_account(self._settings.first_uid, slot)
        try:
            root, workspace = _workspace(account, shape.disk_bytes)
        except OSError as error:
            raise no_workspace(error) from error
        user = "shared" if account.uid is None else "own"
        return await start_sandbox(
            lambda control: init_command([str(self._python)], control, "plain", user, shape.network, workspace),
            account=account,
            env=self._environment(workspace),
            ended=lambda: discard(root),
            exit_s=EXIT_S,
            bounds=bounds_of(self._cgroups),
            disk_bytes=shape.disk_bytes,
            shares=Path(workspace),
        )

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        _refuse_image(shape)
        return {
            "root": await roots.root_hash("", None),
            "python": platform.python_version(),
            "interpreter": await roots.tree_hash(self._python.parent.parent),
            "init": await roots.tree_hash(self._init_root),
            "machine": platform.machine(),
        }

    async def close(self) -> None:
        """See Provider. There is nothing to release."""

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
            **FORGETFUL,
        }


def _workspace(account: HostUser, disk_bytes: int) -> tuple[Path, str]:
    """Create a folder of ours with the workspace in it. The workspace belongs to the slot's user, who can empty it but,
    unless that is our own user, neither move nor replace it. Raises OSError, SandboxUnavailable."""
    root = workspace_folder(disk_bytes)
    workspace = root / "workspace"
    workspace.mkdir(mode=0o700)
    if account.uid is not None:
        os.chown(workspace, account.uid, account.uid)
        root.chmod(0o711)
    return root, str(workspace)


def _refuse_image(shape: Shape) -> None:
    if shape.image is not None:
        raise ImageMissing(f"image {shape.image!r}: the subprocess backend has no images; use bubblewrap or docker")
