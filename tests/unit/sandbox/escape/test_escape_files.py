"""Ways through files: names and links that lead out, traps for the next session, bombs in a restored workspace."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_workers.protocol import Command, FileRefused, Kind, QuotaExceeded
from turnlog.schemas.events import SandboxLimits, ToolStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("lab", ["installed"], indirect=True, scope="module"),
]

WORKSPACE = "/workspace"
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=32, disk_bytes=DISK)
MADE = """
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "folder")
os.symlink("../etc", "up")
os.symlink("/proc/1/environ", "environ")
os.symlink("/proc/self/fd/0", "stream")
os.symlink("loop", "loop")
os.symlink("/workspace/../etc/passwd", "around")
os.symlink("/workspace2", "beside")
os.mkfifo("fifo")
socket.socket(1).bind("socket")
os.mkdir("inner")
os.symlink("../..", "inner/up")
os.symlink("inner/up/etc/passwd", "twice")
"""
"""Traps in the workspace: links out of it, and what would hang whoever opens it."""
NAMES = (
    "../etc/passwd", "/etc/passwd", "inner/../../etc/passwd", "link", "folder/passwd", "up/passwd", "environ", "stream",
    "loop", "around", "beside/x", "fifo", "socket", "inner/up/etc/passwd", "twice", "", ".", "..", "a\0b", "x" * 300,
    "x/" * 3000, "inner", "\udcff\0",
)  # fmt: skip
REPLACED = ("link", "environ", "stream", "loop", "around", "twice", "fifo", "socket")
"""Names at which a write puts a plain file, without following or opening what stood there."""
TRAPS = (
    ".bashrc", ".bash_profile", ".profile", ".pythonrc.py", ".inputrc", ".pam_environment", "sitecustomize.py",
    "usercustomize.py", "json.py", ".local/lib/python{}.{}/site-packages/usercustomize.py".format(*sys.version_info),
    ".config/x", "ls", "sh", "turnlog/__init__.py", "pyvenv.cfg",
)  # fmt: skip
OURS = ("/opt/python/bin/python3", "/opt/init/turnlog/sandbox_workers/inside/init.py", "/usr/bin/env", "/etc/passwd")
UNWRITABLE = {
    "write": 'tried(open, path, "r+")',
    "replace": "tried(os.rename, 'mine', path)",
    "remove": "tried(os.unlink, path)",
    "link over": "tried(os.link, path, '/workspace/held')",
    "change the mode": "tried(os.chmod, path, 0o777)",
    "truncate": "tried(os.truncate, path, 0)",
    "set the time": "tried(os.utime, path)",
    "name with attributes": "tried(os.setxattr, path, 'user.x', b'x')",
}


def entry(path: str, kind: FileKind = FileKind.file, *, size: int = 0, target: str = "") -> FileEntry:
    """An entry of a workspace."""
    return FileEntry(path=path, kind=kind, mode=0o755, size=size, target=target)


WORKSPACES = {
    "a path upwards": [entry("../x")],
    "a path from the root": [entry("/etc/x")],
    "upwards in the middle": [entry("a", FileKind.folder), entry("a/../../x")],
    "no name": [entry("")],
    "the workspace itself": [entry(".", FileKind.link, target="/etc")],
    "NUL in a name": [entry("a\0b")],
    "through a link": [entry("out", FileKind.link, target="/tmp"), entry("out/x")],
    "twice, a link first": [entry("x", FileKind.link, target="/tmp/y"), entry("x")],
    "no folder above": [entry("a/b")],
    "a target for a file": [entry("x", target="/etc/passwd")],
}


@pytest.mark.parametrize("name", NAMES)
async def test_no_name_leads_a_read_or_a_write_out_or_hangs_it(lab: Any, name: str) -> None:
    sandbox = await lab.alive()
    if b"fifo" not in (await lab.shell("ls")).output:
        assert (await lab.python(MADE)).status is ToolStatus.ok
    with pytest.raises(FileRefused):
        await sandbox.read(name, most=1 << 20)
    if name in REPLACED:
        await sandbox.write(name, b"plain")
        assert (await lab.shell(f"stat -c %F {name}; cat {name}")).output == b"regular file\nplain"
    else:
        with pytest.raises(FileRefused):
            await sandbox.write(name, b"evil")
    assert await sandbox.healthy()
    said = await lab.shell("ls -A /tmp /dev/shm; cat /etc/passwd | head -c 7")
    assert said.output == b"/dev/shm:\n\n/tmp:\nsandbox"


@pytest.mark.parametrize("name", WORKSPACES)
async def test_a_workspace_with_a_trap_is_refused_and_the_old_one_stays(lab: Any, name: str) -> None:
    sandbox = await lab.alive()
    await sandbox.restore([entry("kept", size=2)], {"kept": b"ok"})
    entries = WORKSPACES[name]
    with pytest.raises(FileRefused):
        await sandbox.restore(entries, {one.path: b"" for one in entries if one.kind is FileKind.file})
    assert await sandbox.read("kept", most=9) == b"ok"
    assert (await lab.shell("ls -A /workspace /tmp")).output == b"/tmp:\n\n/workspace:\nkept\n"


async def test_a_small_workspace_that_unfolds_into_a_large_one_is_refused(lab: Any) -> None:
    """What is stored once may stand in the index many times: the bytes count as often as they would be written."""
    sandbox = await lab.alive()
    content = bytes(1 << 20)
    entries = [entry(f"{number:04}", size=len(content)) for number in range(64)]
    with pytest.raises(QuotaExceeded):
        await sandbox.restore(entries, {one.path: content for one in entries})
    many = [entry(f"{number:06}") for number in range(20_000)]
    with pytest.raises(FileRefused):
        await sandbox.restore(many, {one.path: b"" for one in many})
    assert await sandbox.healthy()


async def test_an_index_that_lies_about_sizes_is_refused(lab: Any) -> None:
    sandbox = await lab.alive()
    for size, content in ((1, bytes(100)), (100, b"x"), (1 << 50, b"x"), (-1, b"x")):
        with pytest.raises((FileRefused, ValueError)):
            await sandbox.restore([entry("x", size=size)], {"x": content})
    assert await sandbox.healthy()


async def test_traps_for_the_next_session_are_gone_after_a_reset(lab: Any) -> None:
    source = f"""
        for home in ("/workspace", "/tmp", "/dev/shm"):
            for name in {TRAPS!r}:
                path = os.path.join(home, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                open(path, "w").write("#!/bin/sh\\necho trapped\\n" if name in ("ls", "sh") else "print('trapped')")
                os.chmod(path, 0o755)
    """
    assert (await lab.python(source)).status is ToolStatus.ok
    sandbox = await lab.alive()
    assert await sandbox.reset()
    said = await lab.shell("ls -A /workspace /tmp /dev/shm; python3 -c 'import json; print(1)'; bash -lc 'echo 2'")
    assert said.output == b"/dev/shm:\n\n/tmp:\n\n/workspace:\n1\n2\n"
    assert await lab.words("import json; print(json.__file__.startswith('/opt/python'))") == ["True"]


async def test_the_environment_of_a_call_is_not_the_next_ones(lab: Any) -> None:
    sandbox = await lab.alive()
    env = {
        "LD_PRELOAD": "/workspace/evil.so", "BASH_ENV": "/workspace/evil.sh", "PYTHONSTARTUP": "/workspace/evil.py",
        "PYTHONPATH": "/workspace", "PATH": "/workspace", "EVIL": "1",
    }  # fmt: skip
    before = (await lab.shell("env | sort")).output
    for kind in (Kind.shell, Kind.python):
        source = "export EVIL2=1" if kind is Kind.shell else "import os; os.environ['EVIL2'] = '1'; os.putenv('X', '1')"
        await sandbox.exec(Command(kind=kind, source=source, env=env), LIMITS)
    assert (await lab.shell("env | sort")).output == before
    assert b"EVIL" not in before
    assert await lab.words("print([name for name in os.environ if 'EVIL' in name or name == 'LD_PRELOAD'])") == ["[]"]


@pytest.mark.parametrize("way", UNWRITABLE)
async def test_what_is_ours_cannot_be_changed(lab: Any, way: str) -> None:
    said = await lab.words(f"open('mine', 'w')\nfor path in {OURS!r}: {UNWRITABLE[way]}")
    assert set(said) <= {"EROFS", "EXDEV", "EPERM", "EACCES", "EBUSY", "EOPNOTSUPP", "ETXTBSY"}
    assert len(said) == len(OURS)


async def test_nothing_can_be_made_outside_the_three_folders(lab: Any) -> None:
    folders = ("/", "/usr", "/etc", "/opt", "/opt/python", "/opt/init", "/dev", "/proc", "/bin", "/usr/local")
    said = await lab.words(f"for folder in {folders!r}: tried(open, folder + '/made', 'w')")
    assert set(said) <= {"EROFS", "EACCES", "ENOENT", "EPERM"}
    assert len(said) == len(folders)


async def test_the_folders_themselves_can_be_neither_removed_nor_kept_from_a_reset(lab: Any) -> None:
    said = await lab.words("""
        import fcntl
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            tried(os.rmdir, folder)
            tried(os.rename, folder, folder + "2")
        os.makedirs("/workspace/a/b")
        open("/workspace/a/b/c", "w")
        flags = fcntl.fcntl
        tried(fcntl.ioctl, os.open("/workspace/a", os.O_RDONLY), 0x40086602, (0x10).to_bytes(8, "little"))
        for path in ("/workspace/a/b", "/workspace/a", "/workspace", "/tmp"):
            os.chmod(path, 0)
    """)
    assert set(said[:6]) <= {"EBUSY", "EROFS", "EACCES", "EPERM", "EXDEV"}
    assert said[6] in ("EPERM", "ENOTTY", "EOPNOTSUPP"), "a file that nobody can remove is root's to make"
    sandbox = await lab.alive()
    assert await sandbox.reset()
    assert (await lab.shell("ls -A /workspace /tmp; touch x; ls")).output == b"/tmp:\n\n/workspace:\nx\n"
    assert await sandbox.reset()


async def test_another_slots_workspace_is_out_of_sight(lab: Any) -> None:
    other = await lab.another(1)
    try:
        await other.write("mine", b"a-secret-of-another-session")
        await lab.python("open('/tmp/x', 'w'); open('/dev/shm/y', 'w')", sandbox=other)
        said = await lab.shell(
            f"grep -rs a-secret-of /workspace /tmp /dev/shm /etc /proc/[0-9]*/root{WORKSPACE}; "
            f"ls -A /workspace /tmp /dev/shm; ls -d /proc/[0-9]*/root{WORKSPACE}/mine"
        )
        assert b"secret" not in said.output.replace(b"a-secret-of /workspace", b"")
        assert b"mine" not in said.output.splitlines()
        assert (await lab.python("print(os.listdir('/workspace'))", sandbox=other)).output == b"['mine']\n"
    finally:
        await other.close()


async def test_the_hosts_disk_holds_nothing_of_a_sandbox(lab: Any) -> None:
    """Its files are memory of its own namespace: no path of the host leads to them."""
    sandbox = await lab.alive()
    await sandbox.write("a-name-of-its-own", b"x")
    assert not any(os.path.exists(f"{folder}/a-name-of-its-own") for folder in ("/workspace", "/tmp", "/dev/shm"))  # noqa: ASYNC240
