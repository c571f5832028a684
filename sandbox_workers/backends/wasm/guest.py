"""The forked child of a call in a wasm sandbox: limits and filter on, one guest, and what its end means."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from turnlog.sandbox_workers.backends.wasm import filter as wasm_filter
from turnlog.sandbox_workers.backends.wasm.command import (
    WORKSPACE,
    Engines,
    Unrunnable,
    asked,
    configured,
    descriptors,
)
from turnlog.sandbox_workers.inside.child import MOST_DESCRIPTORS, NOTE_FD, bounds, expendable, prctl, wear
from turnlog.sandbox_workers.inside.processes import Place

if TYPE_CHECKING:
    from wasmtime import Linker, Module, Store, Trap

PR_SET_PDEATHSIG = 1
TRAPPED = 128 + signal.SIGABRT
"""Exit code of a guest that broke a rule of WebAssembly."""
THREADS = 16
"""Of one guest's process: its own and its clock's, with room for wasmtime's."""
MOST_ELEMENTS, MOST_TABLES = 1 << 20, 16
"""Of a guest's tables, which are not part of its memory."""


def become(
    engines: Engines, place: Place, head: dict[str, Any], source: bytes, folder: int, streams: list[int], _: int
) -> None:
    """In the forked child: limits on, then the guest. Never returns. See inside.child.become."""
    code = 126
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != engines.template:
            return  # it died just before
        os.setsid()
        os.fchdir(folder)
        wear(streams)
        _close_others(engines.descriptors)
        os.umask(0o022)
        _limit(place, head["limits"])
        expendable()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the guest is told EFBIG
        if engines.filter:
            wasm_filter.load(engines.filter)
        code = run(engines, place, head, source)
    except Unrunnable as error:
        os.write(2, f"{error}\n".encode(errors="backslashreplace"))
        code = error.code
    except BaseException as error:  # whatever it is, this child must not go on as a second init
        os.write(2, f"the call could not start: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def run(engines: Engines, place: Place, head: dict[str, Any], source: bytes) -> int:
    """Exit code of the guest. Raises Unrunnable."""
    from wasmtime import ExitTrap, Store, Trap, WasmtimeError

    module, argv = asked(engines, place, head, source)
    store = Store(engines.engine)
    if engines.fuel:
        store.set_fuel(engines.fuel)
    store.set_limits(head["limits"]["memory_bytes"], table_elements=MOST_ELEMENTS, tables=MOST_TABLES, memories=1)
    store.set_epoch_deadline(1)
    tail = bytearray()
    python = head["kind"] == "python"
    here = f"{WORKSPACE}/{head['cwd']}" if python else "/"
    wasi = configured(engines, place, argv, {**head["env"], "PWD": here}, tail)
    if not python:
        wasi.preopen_dir(".", here, True)
    store.set_wasi(wasi)
    ticker = threading.Timer(head["limits"]["wall_s"], engines.engine.increment_epoch)
    ticker.daemon = True
    ticker.start()
    try:
        return _driven(engines.linker, store, module, tail)
    except ExitTrap as end:
        return _ended(end.code & 0xFF, tail)
    except Trap as trap:
        return _trapped(trap)
    except WasmtimeError as error:
        raise Unrunnable(f"{argv[0]}: {str(error).splitlines()[0]}", 126) from error


def _driven(linker: Linker, store: Store, module: Module, tail: bytearray) -> int:
    """Run a reactor's `run`, as the Python's, or a command's `_start`."""
    exports = linker.instantiate(store, module).exports(store)
    start: Callable[..., Any]
    if "_start" in exports:
        start = exports["_start"]  # type: ignore[assignment]
        start(store)
        return _ended(0, tail)
    if "run" not in exports:
        raise Unrunnable("the module exports neither _start nor run: it is a library", 126)
    if "_initialize" in exports:
        exports["_initialize"](store)  # type: ignore[operator]
    return _ended(int(exports["run"](store)) & 0xFF, tail)  # type: ignore[operator]


def _ended(code: int, tail: bytearray) -> int:
    """A guest's memory that may not grow is no trap: Python says so by an exception, and ends with it."""
    last = tail.rstrip().rpartition(b"\n")[2]
    if code and last.split(b":")[0] == b"MemoryError":
        _note(b"memory_bytes")
    elif code and last.startswith(b"OSError:") and (b"File too large" in last or b"No space left" in last):
        _note(b"disk_bytes")
    return code


def _trapped(trap: Trap) -> int:
    """Which limit a trap stands for; its first line is for the agent."""
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
    """Above all the sandbox's own control socket."""
    for number in descriptors() - kept - {0, 1, 2, NOTE_FD}:
        os.close(number)


def _note(name: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(NOTE_FD, name)


def _limit(place: Place, limits: dict[str, Any]) -> None:
    """As inside.child.limit, less RLIMIT_AS: wasmtime reserves address space by the gigabyte, touching little."""
    wanted = {name: (bound, bound) for name, bound in bounds(place, limits, THREADS).items()}
    del wanted[resource.RLIMIT_AS]
    wanted[resource.RLIMIT_CORE] = (0, 0)
    wanted[resource.RLIMIT_NOFILE] = (MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    seconds = math.ceil(limits["cpu_s"])
    wanted[resource.RLIMIT_CPU] = (seconds, seconds + 1)  # at the first a signal that names it, at the second SIGKILL
    for name, pair in wanted.items():
        most = resource.getrlimit(name)[1]
        soft, hard = (bound if most == resource.RLIM_INFINITY else min(bound, most) for bound in pair)
        resource.setrlimit(name, (soft, hard))
