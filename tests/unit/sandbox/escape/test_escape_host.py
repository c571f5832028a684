"""Ways to the host's processes, files and secrets, and to the init that shares the sandbox with the agent's code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from turnlog.schemas.events import ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the-secret-of-the-worker"
ABSENT = (
    "/root", "/home", "/var", "/mnt", "/srv", "/boot", "/sys", "/run", "/media", "/etc/shadow", "/etc/sudoers",
    "/etc/machine-id", "/etc/hostname", "/etc/resolv.conf", "/etc/ssl/private", "/etc/ssh", "/etc/environment",
    "/.dockerenv", "/proc/2/root/root", "/etc/turnlog/ca.pem",
)  # fmt: skip
OF_THE_INIT = ("environ", "mem", "maps", "fd", "fdinfo/0", "root", "cwd", "exe", "io", "stack", "syscall", "auxv")
TOUCHED = {
    "attach to the init": ('call("ptrace", 16, 1, 0, 0)', "EPERM"),
    "seize the init": ('call("ptrace", 0x4206, 1, 0, 0)', "EPERM"),
    "be traced": ('call("ptrace", 0, 0, 0, 0)', "EPERM"),
    "read the init's memory": ('call("process_vm_readv", 1, 0, 0, 0, 0, 0)', "EPERM"),
    "write the init's memory": ('call("process_vm_writev", 1, 0, 0, 0, 0, 0)', "EPERM"),
    "take the init's descriptors": ('call("pidfd_getfd", os.pidfd_open(1), 3, 0)', "EPERM"),
    "compare with the init's files": ('call("kcmp", 1, os.getpid(), 2, 0, 0)', "EPERM"),
    "swap the init out": ('call("process_madvise", os.pidfd_open(1), 0, 0, 21, 0)', "EPERM"),
    "make the init the first to die": ('tried(open, "/proc/1/oom_score_adj", "w")', "EACCES"),
    "name the init": ('tried(open, "/proc/1/comm", "w")', "EACCES"),
    "let the init oversleep": ('tried(os.write, os.open("/proc/1/timerslack_ns", os.O_WRONLY), b"99999999")', "EPERM"),
    "raise the limit of processes": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_NPROC, (999, 999))", "EPERM"),
    "raise the limit of memory": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_AS, (-1, -1))", "EPERM"),
    "raise the limit of file sizes": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_FSIZE, (-1, -1))", "EPERM"),
    "raise the limit of CPU time": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_CPU, (-1, -1))", "EPERM"),
    "open more files": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_NOFILE, (4096, 4096))", "EPERM"),
    "write cores": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_CORE, (4096, 4096))", "EPERM"),
    "queue messages": ("import resource as r; tried(r.prlimit, 0, r.RLIMIT_MSGQUEUE, (4096, 4096))", "EPERM"),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def touched(lab: Any) -> dict[str, list[str]]:
    """What came of TOUCHED."""
    found: dict[str, list[str]] = await lab.each({name: source for name, (source, _) in TOUCHED.items()})
    return found


@pytest.mark.parametrize("name", TOUCHED)
async def test_the_init_and_its_limits_cannot_be_touched(touched: dict[str, list[str]], name: str) -> None:
    assert touched[name] == [TOUCHED[name][1]]


async def test_the_workers_environment_is_not_inside(lab: Any) -> None:
    said = (await lab.shell("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")).output.decode()
    assert os.environ["TURNLOG_STORE_SECRET_KEY"] == SECRET
    assert SECRET not in said
    assert "HOME=/workspace" in said
    names = {line.partition("=")[0] for line in said.splitlines() if "=" in line}
    assert names <= {
        "PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD", "SHLVL",
        "_", "OLDPWD", "LC_CTYPE", "TERM",
    }  # fmt: skip


async def test_files_of_the_host_are_absent(lab: Any) -> None:
    said = await lab.python(f"""
        for path in {ABSENT!r}:
            try:
                print(path, os.listdir(path) if os.path.isdir(path) else open(path).read())
            except OSError as error:
                assert error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR), error
        print(sorted(os.listdir("/")))
    """)
    (roots,) = said.output.decode().splitlines()
    assert set(eval(roots)) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "sbin", "tmp", "usr", "workspace",
    }  # fmt: skip


async def test_users_of_the_host_are_unknown(lab: Any) -> None:
    said = (await lab.shell("cat /etc/passwd /etc/group; id; getent passwd root")).output.decode()
    assert "root" not in said
    assert "uid=1000(sandbox)" in said


async def test_the_workers_own_folders_are_absent(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run folder, a socket folder, the code and its virtual environment."""
    run = tmp_path_factory.mktemp("run")
    (run / "secret").write_text(SECRET)
    paths = [str(run / "secret"), __file__, sys.prefix, str(Path.home() / ".bashrc"), os.getcwd()]
    outside = [path for path in paths if not path.startswith("/usr")]
    said = await lab.words(f"for path in {outside!r}: tried(os.stat, path)")
    assert said == ["ENOENT"] * len(outside)


@pytest.mark.parametrize("name", OF_THE_INIT)
async def test_nothing_of_the_init_can_be_read_in_proc(lab: Any, name: str) -> None:
    said = await lab.words(f"""
        path = "/proc/1/{name}"
        tried(lambda: os.listdir(path) if os.path.isdir(path) else os.open(path, os.O_RDONLY))
        tried(os.readlink, path)
    """)
    assert set(said) <= {"EACCES", "EPERM", "ENOENT", "EINVAL", "EIO", "ESRCH"}
    assert said[0] in ("EACCES", "EPERM", "ENOENT")


async def test_the_init_survives_every_signal(lab: Any) -> None:
    said = await lab.words("""
        for number in signal.valid_signals():
            os.kill(1, number)
        print("sent")
    """)
    assert said == ["sent"]
    assert await lab.words("print(os.getppid())") == ["1"]


async def test_processes_of_the_host_cannot_be_seen_or_signalled(lab: Any) -> None:
    with subprocess.Popen(  # noqa: ASYNC220 - it only waits
        [sys.executable, "-I", "-c", "input()"], stdin=subprocess.PIPE
    ) as bystander:
        said = await lab.python(f"""
            print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
            tried(os.kill, {bystander.pid}, 9)
            tried(os.pidfd_open, {bystander.pid})
            tried(os.sched_setaffinity, {bystander.pid}, [0])
            tried(os.setpriority, os.PRIO_PROCESS, {bystander.pid}, 19)
        """)
        assert said.output.decode().split() == ["True", "ESRCH", "ESRCH", "ESRCH", "ESRCH"]
        assert bystander.poll() is None
        bystander.communicate(b"\n")


async def test_kill_of_everybody_reaches_nobody_outside(lab: Any) -> None:
    other = await lab.another(1)
    try:
        answer = await lab.python("os.kill(-1, 9)")
        assert answer.status in (ToolStatus.ok, ToolStatus.tool_error)
        assert await other.healthy()
    finally:
        await other.close()


async def test_on_the_host_a_slot_is_a_user_of_its_own(lab: Any) -> None:
    sandbox = await lab.alive()
    other = await lab.another(1)
    try:
        users = []
        for one in (sandbox, other):
            outer = psutil.Process(one.process.pid)
            users.append({process.uids().real for process in (outer, *outer.children(recursive=True))})
            assert {tuple(process.gids()) for process in outer.children()} == {tuple(outer.gids())}
    finally:
        await other.close()
    if os.geteuid() == 0:
        assert users == [{220_000}, {220_001}]
    else:
        assert users == [{os.geteuid()}] * 2


async def test_the_control_socket_is_out_of_reach_and_answers_cannot_be_forged(lab: Any) -> None:
    """Whatever descriptors a call has, a frame written to each changes nothing of its answer."""
    answer = await lab.python("""
        import json, stat, struct
        head = json.dumps({"status": "ok", "reason": "", "exit_code": 0, "duration_s": 0.1, "cpu_s": 0.0}).encode()
        frame = struct.pack(">II", len(head), 0) + head
        kinds = []
        for number in range(3, 1024):
            try:
                kinds.append(stat.S_IFMT(os.fstat(number).st_mode))
                os.write(number, frame)
            except OSError:
                pass
        print([kind for kind in kinds if stat.S_ISSOCK(kind)])
        sys.exit(7)
    """)
    assert (answer.status, answer.exit_code, answer.output) == (ToolStatus.tool_error, 7, b"[]\n")


async def test_a_shell_has_its_three_streams_and_nothing_else(lab: Any) -> None:
    said = (await lab.shell("cd /proc/self/fd && echo *; cat <&3; cat <&4; cat <&1023")).output.decode()
    assert said.split("\n")[0] in ("0 1 2", "0 1 2 3"), "3 is that of the shell's own look"
    assert said.count("Bad file descriptor") >= 2


async def test_an_init_whose_priority_was_changed_is_not_given_to_the_next_session(lab: Any) -> None:
    sandbox = await lab.another(2)
    look = "print(os.getpriority(os.PRIO_PROCESS, 1))"
    try:
        assert (await lab.python(f"os.setpriority(os.PRIO_PROCESS, 1, 19); {look}", sandbox=sandbox)).output == b"19\n"
        assert await sandbox.reset()
        assert (await lab.python(look, sandbox=sandbox)).output != b"19\n"
    finally:
        await sandbox.close()


async def test_killing_bwrap_leaves_no_process(lab: Any) -> None:
    sandbox = await lab.another(3)
    running = asyncio.create_task(lab.shell("setsid sleep 60 & sleep 60", sandbox=sandbox))
    outer = psutil.Process(sandbox.process.pid)
    while len(outer.children(recursive=True)) < 3:  # noqa: ASYNC110 - the kernel offers no event for this
        await asyncio.sleep(0.01)
    inside = outer.children(recursive=True)
    outer.kill()
    await asyncio.gather(running, return_exceptions=True)
    await sandbox.close()
    _, alive = psutil.wait_procs(inside, timeout=5)
    assert alive == []
