"""What an agent does to its own sandbox is the agent's: a typed answer, once, and the session goes on to its verdict.

Each attempt is a call in the middle of a session with files, on a worker with one slot: whatever it does, its answer is
no infra_error, the session's next call is run, and the next session finds a sandbox as new.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import resource
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.roots import remove_tree
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Evidence, attribute_death
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

LIMITS = SandboxLimits(cpu_s=2.0, wall_s=5.0, memory_bytes=96 << 20, pids=24, disk_bytes=4 << 20)
SPEC = SandboxSpec(durable_workspace=True, limits=LIMITS)
TYPED = {ToolStatus.ok, ToolStatus.tool_error, ToolStatus.timeout, ToolStatus.resource_limit}
PRELUDE = """
import ctypes, fcntl, os, resource, signal, socket, subprocess, sys, threading, time
init = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
def tried(act, *arguments):
    try:
        return act(*arguments)
    except (OSError, ValueError) as error:
        print(type(error).__name__, error)
"""
RLIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
SCRIPTS: dict[str, dict[str, str]] = {
    "limits of the init": {
        **{
            name: f"tried(resource.prlimit, init, resource.{name}, (0, 0)); time.sleep(0.2)"
            for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_NPROC")
        },
        "and an exit at once": "tried(resource.prlimit, init, resource.RLIMIT_CPU, (0, 0)); os._exit(0)",
        "all": "for number in range(16): tried(resource.prlimit, init, number, (0, 0))\ntime.sleep(0.2)",
    },
    "the init": {
        **{name: f"tried(os.kill, init, signal.{name}); time.sleep(0.2)" for name in ("SIGKILL", "SIGINT", "SIGXCPU")},
        "SIGSTOP": "tried(os.kill, init, signal.SIGSTOP)",
        "everything": "tried(os.kill, -1, signal.SIGKILL) if init == 1 or os.getuid() >= 200000 else None",
        "the lowest priority": "tried(os.setpriority, os.PRIO_PROCESS, init, 19); time.sleep(0.2)",
        "idle": "tried(os.sched_setscheduler, init, os.SCHED_IDLE, os.sched_param(0)); time.sleep(0.2)",
        "memory": "tried(open, f'/proc/{init}/mem', 'r+b')",
        "descriptors": """
            handle = tried(os.pidfd_open, init)
            for number in range(64):
                tried(os.open, f'/proc/{init}/fd/{number}', os.O_RDWR)
                if handle is not None: libc.syscall(438, handle, number, 0)
            """,
        "every descriptor of its own is closed": "os.closerange(0, 4096)",
        "frames for every descriptor": """
            frame = bytes(3) + b'\\x02' + bytes(4) + b'{}'
            for number in range(256): tried(os.write, number, frame)
            """,
    },
    "rights": {
        "the workspace is closed to all": "os.chmod('.', 0)",
        "every folder is closed to all": """
            os.makedirs('a/b/c'); open('a/b/c/f', 'w').write('x')
            for folder in ('a/b/c/f', 'a/b/c', 'a/b', 'a', '.', '/tmp', '/dev/shm'):
                if not folder.startswith('/') or init == 1: tried(os.chmod, folder, 0)
            """,
        "nothing can be read": "open('f', 'w').write('x'); os.system('chmod -R a-r .')",
        "nothing can be entered": "os.makedirs('a/b'); os.system('chmod -R a-x .')",
        "somebody else's": "tried(os.chown, '.', 65534, 65534); tried(os.chown, '.', 0, 0)",
    },
    "the workspace": {
        "renamed": "tried(os.rename, os.getcwd(), os.getcwd() + '-gone')",
        "removed": "here = os.getcwd(); os.system('rm -rf ./* .[!.]*'); tried(os.rmdir, here)",
        "a link": """
            here = os.getcwd()
            if tried(os.rename, here, here + '-gone') is None and not os.path.exists(here): os.symlink('/usr', here)
            """,
        "another one": "here = os.getcwd(); tried(os.rename, here, here + '-gone'); tried(os.mkdir, here)",
        "remounted": "os.system('mount -o remount,ro . ; umount -l . ; mount --bind /tmp . ; mount -t tmpfs none .')",
        "in another namespace": "os.system('unshare -Urpf true; unshare -m true; nsenter -t 1 -a true')",
    },
    "files": {
        "full": "os.system('cat /dev/zero > full; for n in $(seq 99); do : > e$n; done')",
        "full of files": "for number in range(1 << 20): os.close(os.open(f'f{number}', os.O_CREAT))",
        "holes": "os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 40)",
        "folders without end": "for number in range(3000): os.mkdir('d'); os.chdir('d')",
        "names that no text holds": r"""
            for name in (b'\xff\xfe', b'\n', b'a\x01b', b'"', b'\\', b'-rf', b' ', b'\xed\xa0\x80', b'.turnlog-part'):
                open(name, 'w').close()
            """,
        "links": "os.symlink('.', 'a'); os.symlink('/', 'b'); os.symlink('c', 'c'); os.symlink('x' * 4000, 'd')",
        "pipes and sockets": "os.mkfifo('p'); socket.socket(socket.AF_UNIX).bind('s')",
        "a lease": """
            number = os.open('f', os.O_CREAT | os.O_RDONLY)
            tried(fcntl.fcntl, number, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            """,
    },
    "bombs": {
        "forks": "while True: os.fork()",
        "threads": "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "memory": "found = []\nwhile True: found.append(bytearray(1 << 20))",
        "memory in many": """
            for _ in range(8):
                if not os.fork(): break
            found = []
            while True: found.append(b'x' * (1 << 20))
            """,
        "shared memory": "os.system('cat /dev/zero > /dev/shm/x' if init == 1 else 'true')",
        "output": "while True: os.write(1, b'x' * 65536)",
        "daemons": "os.system('for n in 1 2; do setsid -f sleep 60; done'); os.fork() or os.setsid() or time.sleep(60)",
    },
}  # fmt: skip
KEPT = 'import os\nprint(open("kept").read() if os.path.exists("kept") else "")'
KILLS_ONCE = """
import contextlib, os
beside = 0
for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):
        beside += open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1:2] == [str(os.getppid())]
if beside > 1:
    os.kill(os.getppid(), 9)
"""
"""Where an interpreter stands beside it, as in no new sandbox."""
AS_NEW = """
import json, os, resource
found = {"files": os.listdir("."), "mode": os.stat(".").st_mode, "owner": os.stat(".").st_uid == os.getuid()}
found["limits"] = [resource.prlimit(os.getppid(), number) for number in range(16)]
found["priority"] = os.getpriority(os.PRIO_PROCESS, os.getppid()), os.sched_getscheduler(os.getppid())
if os.getppid() == 1:
    found["processes"] = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    found["others"] = os.listdir("/tmp") + os.listdir("/dev/shm")
print(json.dumps(found, sort_keys=True))
"""


class Calls:
    """Calls of sessions to a worker with one slot."""

    def __init__(self, house: Any) -> None:
        self.house = house
        self.names = itertools.count()

    async def python(self, session: str, code: str, seq: int = 0, before: Any = None, tool: str = "python") -> Any:
        """The answer to one; `before`: the answer to the session's last."""
        arguments = json.dumps({"code": code}).encode()
        workspace = None if before is None else before.workspace
        request = self.house.call(
            f"{next(self.names)}",
            seq,
            session=session,
            tool=tool,
            arguments=arguments,
            sandbox=SPEC,
            workspace=workspace,
        )
        return await self.house.answer(request)


@pytest.fixture(
    params=[Bubblewrap, pytest.param(Subprocess, marks=pytest.mark.long)],  # the latter is no boundary
    ids=lambda kind: kind.name,
)
async def calls(request: pytest.FixtureRequest, house: Any) -> AsyncIterator[Calls]:
    """Each local backend in turn."""
    house.backend = request.param
    sandbox = dataclasses.replace(house.settings.sandbox, backend=request.param.name)
    house.settings = dataclasses.replace(house.settings, sandbox=sandbox)
    async with house.worker(slots=1):
        yield Calls(house)


@pytest.mark.parametrize("theme", SCRIPTS)
async def test_what_an_agent_does_to_its_sandbox_voids_nothing_and_reaches_nobody_else(
    calls: Calls, theme: str
) -> None:
    new = await calls.python("before", AS_NEW)
    assert new.status is ToolStatus.ok
    for name, script in SCRIPTS[theme].items():
        first = await calls.python(name, "open('kept', 'w').write('kept')")
        hostile = await calls.python(name, PRELUDE + textwrap.dedent(script), 1, first)
        assert hostile.status in TYPED, (name, hostile)
        assert hostile.attempt == 1 or calls.house.backend is Subprocess, (name, hostile)
        after = await calls.python(name, KEPT, 2, hostile)
        assert after.status in TYPED, (name, after)
        assert hostile.reason not in ("sandbox_changed", "sandbox_ended") or after.output == b"kept\n", (name, after)
        other = await calls.python(f"after {name}", AS_NEW)
        assert (other.status, other.output) == (ToolStatus.ok, new.output), name
        moved = await calls.python(name, KEPT, 3, after)  # its slot was needed: the files are put back from the store
        assert (moved.status, moved.output) == (ToolStatus.ok, after.output), (name, moved)


WAYS = (
    "if not os.fork(): exec({!r}, globals()); os._exit(0)",
    "threading.Thread(target=exec, args=({!r}, globals()), daemon=True).start()",
    "tried(exec, {!r}, globals())",
)
"""To do something beside something else."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
async def test_what_an_agent_does_all_at_once_voids_nothing_either(calls: Calls, seed: int) -> None:
    """Of 500 such calls none did, when this was written."""
    draw = random.Random(seed)
    scripts = {name: script for theme in SCRIPTS.values() for name, script in theme.items() if name != "SIGSTOP"}
    new = await calls.python("before", AS_NEW)
    for number in range(3):
        names, tool = draw.sample(sorted(scripts), 3), draw.choice(("python", "python_session"))
        code = "\n".join((PRELUDE, *(draw.choice(WAYS).format(textwrap.dedent(scripts[name])) for name in names)))
        session = f"session {number}"
        first = await calls.python(session, "x = 1", tool=tool)
        hostile = await calls.python(session, code, 1, first, tool=tool)
        after = await calls.python(session, "print(1)", 2, hostile, tool=tool)
        assert {hostile.status, after.status} <= TYPED, (names, tool, hostile, after)
        other = await calls.python(f"after {number}", AS_NEW)
        assert (other.status, other.output) == (ToolStatus.ok, new.output), names


@pytest.mark.parametrize("name", RLIMITS)
async def test_no_limit_of_the_init_is_a_calls_to_lower_unseen(calls: Calls, name: str) -> None:
    """The kernel refuses it where there is a filter; else the init finds it, unless RLIMIT_CPU kills it before."""
    code = f"import os, resource\nbefore = resource.prlimit(os.getppid(), resource.{name})\n"
    code += f"print(before)\nresource.prlimit(os.getppid(), resource.{name}, (0, 0))"
    answer = await calls.python("s", code)
    if b"PermissionError" in answer.output:
        assert (answer.status, answer.reason, calls.house.backend) == (ToolStatus.tool_error, "", Bubblewrap)
    elif answer.output != b"(0, 0)\n":
        reasons = {"sandbox_changed"} | ({"sandbox_ended"} if name == "RLIMIT_CPU" else set())
        assert (answer.status, answer.reason in reasons) == (ToolStatus.tool_error, True), answer
        assert b"the call has ended its sandbox" in answer.output


async def test_an_interpreter_that_went_with_its_sandbox_by_a_calls_doing_is_started_anew(house: Any) -> None:
    async with house.worker(slots=1):
        calls = Calls(house)
        first = await calls.python("s", "x = 1", tool="python_session")
        killer = "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))"
        second = await calls.python("s", killer, 1, first)
        assert (second.status, second.reason) == (ToolStatus.tool_error, "sandbox_changed")
        third = await calls.python("s", "x", 2, second, tool="python_session")
        assert (third.status, b"NameError" in third.output) == (ToolStatus.tool_error, True)
        fourth = await calls.python("s", "x = 2; x", 3, third, tool="python_session")
        assert (fourth.status, fourth.output) == (ToolStatus.ok, b"2\n")


async def test_an_interpreter_whose_sandbox_goes_away_under_a_call_is_no_failure_of_ours(house: Any) -> None:
    """Without evidence, by a call that kills or by one that kills but once, in the interpreter or beside it."""
    kills = "import os\nos.kill(os.getppid(), 9)"
    async with house.worker(slots=1):
        calls = Calls(house)
        for name, tool, code, status in (
            ("inside", "python_session", kills, ToolStatus.tool_error),
            ("beside", "python", kills, ToolStatus.tool_error),
            ("once", "python", KILLS_ONCE, ToolStatus.ok),
        ):
            first = await calls.python(name, "x = 1", tool="python_session")
            second = await calls.python(name, code, 1, first, tool=tool)
            assert second.status is status, second
            third = await calls.python(name, "x", 2, second, tool="python_session")
            assert (third.status, b"NameError" in third.output) == (ToolStatus.tool_error, True), third


async def test_an_interpreter_is_started_anew_after_a_call_whose_files_cannot_be_kept(calls: Calls) -> None:
    first = await calls.python("s", "x = 1", tool="python_session")
    second = await calls.python("s", "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')", 1, first)
    assert (second.status, second.reason) == (ToolStatus.resource_limit, "workspace")
    third = await calls.python("s", "x", 2, second, tool="python_session")
    assert (third.status, b"NameError" in third.output) == (ToolStatus.tool_error, True)


async def test_an_interpreter_that_ends_between_its_calls_ends_no_session(calls: Calls) -> None:
    """SIGKILL by a timer of its own, which reaches a process that stands still."""
    timer = """
import ctypes, os, signal, time
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("rest", ctypes.c_byte * 52)]
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(Event(None, signal.SIGKILL)), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 50_000_000), None) == 0
"""
    first = await calls.python("s", timer, tool="python_session")
    assert first.status is ToolStatus.ok, first
    second = await calls.python("s", "import time; time.sleep(0.3)", 1, first)
    third = await calls.python("s", "timer", 2, second, tool="python_session")
    fourth = await calls.python("s", "1 + 1", 3, third, tool="python_session")
    assert ToolStatus.infra_error not in (second.status, third.status)
    assert (fourth.status, fourth.output) == (ToolStatus.ok, b"2\n")


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        ({}, None),
        ({"deaths": 1}, None),
        ({"deaths": 2}, (ToolStatus.tool_error, "sandbox_ended")),
        ({"changed": "folders", "deaths": 1}, (ToolStatus.tool_error, "sandbox_changed")),
        ({"stateful": True}, (ToolStatus.tool_error, "sandbox_ended")),
        ({"silent": True}, (ToolStatus.timeout, "wall_s")),
        ({"silent": True, "stood": True, "deaths": 2}, None),
        ({"limit": "memory_bytes", "silent": True, "changed": "limits"}, (ToolStatus.resource_limit, "memory_bytes")),
    ],
)
def test_a_sandbox_s_end_is_the_agents_on_evidence_alone(evidence: dict[str, Any], verdict: object) -> None:
    assert attribute_death(Evidence(**evidence)) == verdict


def test_a_folder_is_removed_however_deep_and_locked_it_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(root)
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")
        Path("f").touch()
        Path("l").symlink_to(tmp_path)
        Path("../d").chmod(0)
    finally:
        os.fchdir(before)
        os.close(before)
    remove_tree(root)
    assert list(tmp_path.iterdir()) == []
