"""The worker's end of a sandbox believes nothing that an init says, and knows what the kernel stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from tests.each import each
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.connection import (
    PATIENCE,
    HostUser,
    InitSandbox,
    InitTimeouts,
    KernelLimits,
    start_sandbox,
)
from turnlog.sandbox_workers.backends.init_wire import ControlChannel, call
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import (
    Command,
    FileRefused,
    Kind,
    SandboxDied,
    SandboxUnavailable,
    Shape,
    attribute_death,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

FIRST_UID = 262_500
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, output_bytes=100)
SAYS = """
import json, socket, struct, sys
worker = socket.socket(fileno=int(sys.argv[1]))
def say(head, body=b"", sizes=None):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    worker.sendall(struct.pack(">II", *(sizes or (len(text), len(body)))) + text + body)
def heard():
    head, body = struct.unpack(">II", worker.recv(8, socket.MSG_WAITALL))
    return worker.recv(head + body, socket.MSG_WAITALL)
"""
READY = SAYS + "say({'ready': True, 'pid': 1})\nheard()\n"
DONE = {"status": "ok", "reason": "", "exit_code": 0, "duration_s": 0.1, "cpu_s": 0.1, "interpreter": False}
ENTRY = {"path": "a", "kind": "file", "mode": 0o644, "size": 1, "target": "", "stamp": ""}


def about(**changes: Any) -> dict[str, Any]:
    """An entry of an index, with some of it changed."""
    return ENTRY | changes


async def saying(program: str, bounds: KernelLimits | None = None, patience: InitTimeouts = PATIENCE) -> InitSandbox:
    """A sandbox whose init is this program."""
    return await start_sandbox(
        lambda control: [sys.executable, "-c", program, str(control)],
        account=HostUser(None),
        env={},
        bounds=bounds,
        disk_bytes=1 << 20,
        patience=patience,
    )


async def run(sandbox: InitSandbox) -> Any:
    """Any call."""
    return await sandbox.exec(Command(kind=Kind.shell, source="true"), LIMITS)


FORGED_ANSWERS = {
    "a head without end": "say({}, sizes=(1 << 31, 0))",
    "output without end": "say({'output': 'stdout'}, sizes=(21, 1 << 31))",
    "more output than allowed": "say({'output': 'stdout'}, b'x' * 60); say({'output': 'stdout'}, b'x' * 60)",
    "empty output": "say({'output': 'stdout'})",
    "another stream": "say({'output': 'stdin'}, b'x')",
    "no JSON": "say(b'nonsense')",
    "deep JSON": "say(b'[' * 60000)",
    "a list": "say([1])",
    "an unknown status": f"say({DONE | {'status': 'great'}})",
    "that it was ours": f"say({DONE | {'status': 'infra_error'}})",
    "that it was refused": f"say({DONE | {'status': 'refused'}})",
    "that somebody cancelled it": f"say({DONE | {'status': 'cancelled'}})",
    "no number": f"say({DONE | {'exit_code': 'x'}})",
    "endless time": f"say(json.dumps({DONE}).replace('0.1', 'Infinity').encode())",
    "negative time": f"say({DONE | {'cpu_s': -1.0}})",
    "nothing": "sys.exit()",
    "a lost interpreter": "say({'lost': True})",
}


@each("program", FORGED_ANSWERS.values(), ids=FORGED_ANSWERS)
async def test_an_answer_that_no_init_gives_is_a_dead_sandbox(program: str) -> None:
    sandbox = await saying(READY + program)
    with pytest.raises(SandboxDied):
        await run(sandbox)
    assert not await sandbox.healthy()
    assert sandbox.process.returncode is not None


FORGED_INDICES = {
    "no list": "say({}, b'{}')",
    "no JSON": "say({}, b'[')",
    "too long": "say({}, sizes=(2, 1 << 30))",
    "too many": f"say({{}}, json.dumps([{ENTRY}] * 20001).encode())",
    "no entry": "say({}, b'[1]')",
    **{
        name: f"say({{}}, json.dumps([{entry}]).encode())"
        for name, entry in {
            "outside": about(path="../a"),
            "absolute": about(path="/etc/passwd"),
            "nul": about(path="a\0"),
            "no path": about(path=""),
            "a path that is a number": about(path=1),
            "negative": about(size=-1),
            "huge": about(size=1 << 60),
            "no number": about(size=1.5),
            "set-uid": about(mode=0o4755),
            "a device": about(kind="device"),
            "a link without a target": about(kind="link", size=0),
            "a file with a target": about(target="b"),
            "a folder with a size": about(kind="folder"),
            "below nothing": about(path="a/b"),
            "a stamp without end": about(stamp="x" * 1000),
        }.items()
    },
    "twice": f"say({{}}, json.dumps([{ENTRY}, {ENTRY}]).encode())",
    "below a link": f"say({{}}, json.dumps([{about(kind='link', target='/', size=0)}, {about(path='a/b')}]).encode())",
}


@each("program", FORGED_INDICES.values(), ids=FORGED_INDICES)
async def test_an_index_that_no_init_gives_is_a_dead_sandbox(program: str) -> None:
    sandbox = await saying(READY + program)
    with pytest.raises(SandboxDied):
        await sandbox.index()
    assert not await sandbox.healthy()


@pytest.mark.parametrize(
    ("ask", "program"),
    [
        (lambda sandbox: sandbox.read("a", most=10), "say({}, b'x' * 11)"),
        (lambda sandbox: sandbox.read_files(["a", "b"], most=10), "say({}, struct.pack('>II', 1, 1 << 31) + b'x')"),
        (lambda sandbox: sandbox.read_files(["a", "b"], most=10), "say({}, b'x')"),
        (lambda sandbox: sandbox.write("a", b""), "say({}, b'x')"),
    ],
    ids=["more than asked", "other sizes", "no sizes", "a body"],
)
async def test_file_answers_that_no_init_gives_are_a_dead_sandbox(
    ask: Callable[[InitSandbox], Awaitable[Any]], program: str
) -> None:
    sandbox = await saying(READY + program)
    with pytest.raises(SandboxDied):
        await ask(sandbox)
    assert not await sandbox.healthy()


async def test_a_refusal_is_the_calls_and_leaves_the_sandbox_as_it_is() -> None:
    sandbox = await saying(
        READY + "say({'refused': 'path', 'text': 'x' * 5000}); heard(); say({'clean': True}); heard()"
    )
    with pytest.raises(FileRefused) as refused:
        await sandbox.read("a", most=1)
    assert len(str(refused.value)) == 1000
    assert await sandbox.reset()
    await sandbox.close()


async def test_an_init_that_says_nothing_is_no_healthy_one() -> None:
    sandbox = await saying(READY + "heard()")
    assert not await sandbox.healthy(timeout_s=0.2)
    assert sandbox.process.returncode is not None


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit('it has a reason')",
        SAYS + "import os; socket.send_fds(worker, [struct.pack('>II', 14, 0) + b'{\"ready\":true}'], [1]); "
        "print('it has a reason', file=sys.stderr); heard()",
    ],
    ids=["it ends", "it passes something else than a socket"],
)
async def test_a_sandbox_that_does_not_come_up_says_why(program: str) -> None:
    with pytest.raises(SandboxUnavailable, match="it has a reason"):
        await saying(program)


class Kernel:
    """Bounds as the kernel would have met them."""

    def __init__(self, met: str | None) -> None:
        self.met = met
        self.beyond: str | None = None
        self.used_s = 0.0
        self.seen: list[Any] = []

    def adopt(self, pid: int) -> None:
        """See KernelLimits."""
        self.seen.append(pid)

    def begin(self, limits: SandboxLimits) -> None:
        """See KernelLimits."""
        self.seen.append(limits)

    def cpu_s(self) -> float:
        """See KernelLimits."""
        return self.used_s

    def overdrawn(self) -> str | None:
        """See KernelLimits."""
        return self.beyond

    def exceeded_limit(self) -> str | None:
        """See KernelLimits."""
        return self.met

    def close(self) -> None:
        """See KernelLimits."""
        self.seen.append("closed")


@pytest.mark.parametrize("program", [f"say({DONE})\nheard()", "sys.exit()"], ids=["a child of it", "the init itself"])
async def test_what_the_kernel_stopped_is_that_limit_whoever_it_killed(program: str) -> None:
    kernel = Kernel("memory_bytes")
    sandbox = await saying(READY + program, kernel)
    answer = await run(sandbox)
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.resource_limit, "memory_bytes", None)
    await sandbox.close()
    pid = sandbox.process.pid
    assert kernel.seen == [pid, pid, LIMITS, "closed"]


async def test_a_limit_that_the_kernel_met_by_killing_a_child_ends_the_interpreter_too() -> None:
    program = f"say({DONE | {'interpreter': True}})\nassert json.loads(heard())['op'] == 'end'; say({{}})\nheard()"
    sandbox = await saying(READY + program, kernel := Kernel("memory_bytes"))
    answer = await sandbox.exec(Command(kind=Kind.session, source="1"), LIMITS)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "memory_bytes")
    assert not sandbox.interpreter
    assert "closed" not in kernel.seen
    await sandbox.close()


async def test_bounds_that_cannot_be_set_are_no_calls_doing() -> None:
    class Gone(Kernel):
        def begin(self, limits: SandboxLimits) -> None:
            """See KernelLimits."""
            raise FileNotFoundError("no such group")

    sandbox = await saying(READY + "heard()", Gone(None))
    with pytest.raises(SandboxUnavailable, match="no such group"):
        await run(sandbox)
    assert not await sandbox.healthy()


@pytest.mark.parametrize("stalled", [False, True], ids=["the init is silent", "the worker stands still"])
async def test_a_time_out_is_the_calls_where_the_init_is_silent_and_ours_where_we_did_not_listen(
    stalled: bool,
) -> None:
    sandbox = await saying(READY + "heard()", patience=InitTimeouts(grace_s=0.1, stalled_s=0.5 if stalled else 60.0))
    limits = dataclasses.replace(LIMITS, wall_s=0.1)
    calling = asyncio.create_task(sandbox.exec(Command(kind=Kind.shell, source="true"), limits))
    if stalled:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 1.0)
        with pytest.raises(SandboxDied) as died:
            await calling
        assert attribute_death(died.value.evidence) is None
    else:
        answer = await calling
        assert (answer.status, answer.reason) == (ToolStatus.timeout, "wall_s")


async def test_a_call_that_used_more_cpu_than_its_init_knows_of_has_met_that_limit() -> None:
    kernel = Kernel(None)
    sandbox = await saying(READY + f"say({DONE})\nheard()\nsay({DONE})\nheard()", kernel)
    kernel.used_s = LIMITS.cpu_s + 0.05
    assert (await run(sandbox)).status is ToolStatus.ok, "as much may be the init's own"
    kernel.used_s = LIMITS.cpu_s + 0.5
    answer = await run(sandbox)
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.resource_limit, "cpu_s", None)
    await sandbox.close()


async def test_a_call_is_ended_at_the_cpu_time_that_the_kernel_counts() -> None:
    told = "said = json.loads(heard()); say({**DONE, 'status': 'resource_limit', 'reason': said['limit']})\nheard()"
    kernel = Kernel(None)
    kernel.used_s = 9.0
    sandbox = await saying(READY + f"DONE = {DONE}\n{told}", kernel)
    answer = await sandbox.exec(Command(kind=Kind.shell, source="true"), dataclasses.replace(LIMITS, cpu_s=0.1))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "cpu_s")
    await sandbox.close()


async def test_a_call_is_ended_at_what_the_kernel_counts_and_does_not_bound() -> None:
    told = "said = json.loads(heard()); say({**DONE, 'status': 'resource_limit', 'reason': said['limit']})\nheard()"
    kernel = Kernel(None)
    kernel.beyond = "memory_bytes"
    sandbox = await saying(READY + f"DONE = {DONE}\n{told}", kernel)
    answer = await run(sandbox)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "memory_bytes")
    await sandbox.close()


@pytest.mark.parametrize("status", ["ok", "resource_limit"])
async def test_the_cpu_time_of_a_call_is_the_kernels_count_where_its_init_knows_of_less(status: str) -> None:
    reason = "" if status == "ok" else "cpu_s"
    sandbox = await saying(
        READY + f"say({DONE | {'status': status, 'reason': reason}})\nheard()", kernel := Kernel(None)
    )
    kernel.used_s = 0.8
    assert (await run(sandbox)).cpu_s == 0.8
    await sandbox.close()


async def test_a_call_within_its_bounds_is_what_it_says() -> None:
    sandbox = await saying(READY + f"say({DONE})\nheard()", Kernel(None))
    assert (await run(sandbox)).status is ToolStatus.ok
    await sandbox.close()


async def test_a_sandbox_does_one_thing_at_a_time() -> None:
    sandbox = await saying(READY + "heard()")
    running = asyncio.create_task(run(sandbox))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one thing at a time"):
        await sandbox.index()
    await sandbox.close()
    with pytest.raises(SandboxDied):
        await running


async def test_an_interpreter_that_stands_still_dies_with_an_init_that_is_killed() -> None:
    provider = await Subprocess.open(SandboxSettings(cgroups="off", first_uid=FIRST_UID))
    sandbox = await provider.start(0, Shape(disk_bytes=1 << 20))
    assert isinstance(sandbox, InitSandbox)
    await sandbox.exec(Command(kind=Kind.session, source="x = 1"), SandboxLimits())
    (interpreter,) = psutil.Process(sandbox.process.pid).children()
    assert interpreter.status() == psutil.STATUS_STOPPED
    sandbox.process.kill()
    _, alive = psutil.wait_procs([interpreter], timeout=5)
    await sandbox.close()
    assert alive == []


def test_a_shell_command_with_half_of_a_surrogate_pair_is_refused_and_never_expanded() -> None:
    """In its place stood a ?, which the shell replaces by every name of one character."""
    with pytest.raises(ValueError, match=r"has '\\ud800' at 3: half of a surrogate pair"):
        call(Command(kind=Kind.shell, source="rm \ud800"), LIMITS, alive=False, prompt=False)
    _, source, _ = call(Command(kind=Kind.shell, source="echo ü字"), LIMITS, alive=False, prompt=False)
    assert source.decode() == "echo ü字"


async def test_a_frame_whose_body_is_empty_leaves_nothing_to_send() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel, greeting = ControlChannel(ours), json.dumps({"ready": True, "pid": 1}).encode()
        theirs.sendall(struct.pack(">II", len(greeting), 0) + greeting)
        await channel.receive_greeting()
        await channel.send({"op": "exec"}, b"", b"")
        async with asyncio.timeout(20):
            await channel.close()
        size, body = struct.unpack(">II", theirs.recv(8))
        assert (json.loads(theirs.recv(100)), body) == ({"op": "exec"}, 0)
        assert size > 0
        assert theirs.recv(1) == b""
