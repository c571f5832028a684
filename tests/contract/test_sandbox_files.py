"""One contract for every sandbox backend: files of the workspace are read, written, listed and put back, and no name
leads out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_workers.protocol import Command, FileMissing, FileRefused, Kind, QuotaExceeded, Sandbox
from turnlog.schemas.events import SandboxLimits, ToolStatus

ODD = "line\nbreak \udcff 'quote' \N{SNOWMAN}"
"""A name with a byte that is no UTF-8 in it."""
TRICKS = (
    *("/etc/passwd", "../x", "a/../../x", "..", "", ".", "a\0b", "x" * 300, "y/" * 3000 + "z", "out/passwd", "loop/x"),
)
"""`out` and `loop` are links that the test makes."""


async def done(sandbox: Sandbox, limits: SandboxLimits, source: str) -> None:
    """Run Python that must succeed."""
    answer = await sandbox.exec(Command(kind=Kind.python, source=source), limits)
    assert answer.status is ToolStatus.ok, answer.output


def folder(path: str, mode: int = 0o755) -> FileEntry:
    """An entry."""
    return FileEntry(path=path, kind=FileKind.folder, mode=mode)


def file(path: str, size: int, mode: int = 0o644) -> FileEntry:
    """An entry."""
    return FileEntry(path=path, kind=FileKind.file, mode=mode, size=size)


def link(path: str, target: str) -> FileEntry:
    """An entry."""
    return FileEntry(path=path, kind=FileKind.link, mode=0o777, target=target)


def alike(entries: tuple[FileEntry, ...]) -> list[tuple[Any, ...]]:
    """What must be the same elsewhere: all but stamps, and the modes of links, which mean nothing."""
    return [
        (entry.path, entry.kind, entry.mode if entry.kind is not FileKind.link else 0, entry.size, entry.target)
        for entry in entries
    ]


async def contents(sandbox: Sandbox, entries: tuple[FileEntry, ...]) -> Mapping[str, bytes]:
    """All files."""
    paths = [entry.path for entry in entries if entry.kind is FileKind.file]
    return dict(zip(paths, await sandbox.read_files(paths, most=1 << 20), strict=True))


async def test_what_was_written_is_read_by_a_call_and_by_us(sandbox: Sandbox, limits: SandboxLimits) -> None:
    content = bytes(range(256)) * 300
    await sandbox.write("deep/er/file", content)
    assert await sandbox.read("deep/er/file", most=len(content)) == content
    await done(sandbox, limits, f"assert open('deep/er/file', 'rb').read() == {content!r}")
    await sandbox.write("./deep//er/file", b"", mode=0o755)
    await done(sandbox, limits, "import os; assert os.stat('deep/er/file').st_size == 0")
    assert await sandbox.read("deep/er/file", most=0) == b""


@pytest.mark.parametrize("name", [".turnlog-part", ".turnlog-part-"])
async def test_no_name_of_ours_stands_in_an_agents_way(sandbox: Sandbox, limits: SandboxLimits, name: str) -> None:
    await done(sandbox, limits, f"import os; os.mkdir({name!r}); open({name + 'x'!r}, 'w').write('kept')")
    await sandbox.write("report", b"written")
    await sandbox.write(f"{name}/inner", b"written")
    assert await sandbox.read("report", most=100) == b"written"
    assert await sandbox.read(f"{name}x", most=100) == b"kept"
    assert [entry.path for entry in await sandbox.index()] == [name, f"{name}/inner", f"{name}x", "report"]


async def test_what_cannot_be_read_is_refused_with_a_reason(sandbox: Sandbox) -> None:
    await sandbox.write("a/file", b"12345")
    with pytest.raises(FileMissing, match="no such file"):
        await sandbox.read("a/none", most=10)
    with pytest.raises(FileRefused, match="is a folder"):
        await sandbox.read("a", most=10)
    with pytest.raises(FileRefused, match=r"5 bytes.*4"):
        await sandbox.read("a/file", most=4)
    with pytest.raises(FileRefused):
        await sandbox.read("a/file/x", most=4)
    with pytest.raises(FileRefused):
        await sandbox.write("a", b"")
    with pytest.raises(FileRefused):
        await sandbox.write("a/file/x", b"")
    assert await sandbox.read("a/file", most=5) == b"12345"


async def test_no_name_leads_out_of_the_workspace(sandbox: Sandbox) -> None:
    await sandbox.restore((link("loop", "loop"), link("out", "/etc")), {})
    for path in TRICKS:
        with pytest.raises(FileRefused):
            await sandbox.read(path, most=1 << 20)
        with pytest.raises(FileRefused):
            await sandbox.write(path, b"x")
        with pytest.raises(FileRefused):
            await sandbox.read_files([path], most=1 << 20)
    assert await sandbox.healthy()


async def test_a_write_replaces_a_link_or_the_file_that_it_leads_to(sandbox: Sandbox) -> None:
    links = (link("around", "around"), link("first", "second"), link("new", "deep/new"), link("out", "../out"))
    await sandbox.restore((*links, link("second", "x"), file("x", 3, mode=0o750)), {"x": b"old"})
    await sandbox.write("first", b"through", follow=True)
    await sandbox.write("new", b"made", follow=True)
    await sandbox.write("plain", b"plain", mode=0o600, follow=True)
    assert {entry.path: (entry.kind, entry.mode) for entry in await sandbox.index() if entry.kind is FileKind.file} == {
        "deep/new": (FileKind.file, 0o644), "plain": (FileKind.file, 0o600), "x": (FileKind.file, 0o750),
    }  # fmt: skip
    assert await sandbox.read("x", most=10) == b"through"
    for path in ("around", "out"):
        with pytest.raises(FileRefused):
            await sandbox.write(path, b"", follow=True)
    await sandbox.write("first", b"itself")
    assert (await sandbox.read("first", most=10), await sandbox.read("x", most=10)) == (b"itself", b"through")


@pytest.mark.needs("shell")
async def test_links_are_followed_as_far_as_they_stay_inside(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = """
import os
os.makedirs("v2/data")
open("v2/data/file", "w").write("found")
os.symlink("v2", "current")
os.symlink("../../v2/data/file", "v2/data/around")
os.symlink(os.getcwd() + "/v2/data/file", "absolute")
os.symlink("../" * 20 + "etc/passwd", "far")
os.symlink("/dev/zero", "device")
os.mkfifo("pipe")
"""
    await done(sandbox, limits, source)
    for path in ("current/data/file", "v2/data/around", "absolute"):
        assert await sandbox.read(path, most=10) == b"found"
    for path in ("far", "device", "pipe"):
        with pytest.raises(FileRefused):
            await sandbox.read(path, most=1 << 20)
    await sandbox.write("current/data/file", b"other")
    assert await sandbox.read("v2/data/file", most=10) == b"other"


async def test_a_write_beyond_the_quota_is_refused_and_leaves_nothing(sandbox: Sandbox, disk_bytes: int) -> None:
    await sandbox.write("kept", b"kept")
    with pytest.raises(QuotaExceeded):
        await sandbox.write("big", bytes(disk_bytes + 1))
    await sandbox.write("half", bytes(disk_bytes // 2))
    with pytest.raises(QuotaExceeded):
        await sandbox.write("half", bytes(disk_bytes * 3 // 4))
    assert [entry.path for entry in await sandbox.index()] == ["half", "kept"]
    assert (await sandbox.index())[0].size == disk_bytes // 2


@pytest.mark.needs("shell")
async def test_a_workspace_goes_there_and_back_again(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = f"""
import os, sys
os.makedirs("empty/inner"); os.mkdir("closed"); open("closed/file", "w").write("1")
odd = {ODD!r}
os.mkdir(odd); open(os.path.join(odd, odd), "wb").write(bytes(5000))
open("-rf", "w").close(); open(".hidden", "w").write("x")
os.symlink("nowhere", "dangling"); os.symlink("/etc/passwd", "outward")
os.chmod("-rf", 0o755); os.chmod(".hidden", 0o000); os.chmod("closed", 0o000); os.chmod("empty/inner", 0o555)
os.mkfifo("pipe")
"""
    await done(sandbox, limits, source)
    entries = await sandbox.index()
    paths = [entry.path for entry in entries]
    assert paths == sorted(paths)
    assert "pipe" not in paths
    assert f"{ODD}/{ODD}" in paths
    await done(sandbox, limits, "import os; os.chmod('.hidden', 0o400); os.chmod('closed', 0o700)")
    kept = await contents(sandbox, entries)
    assert await sandbox.reset()
    assert await sandbox.index() == ()
    await sandbox.restore(entries, kept)
    assert alike(await sandbox.index()) == alike(entries)
    source = f"import os; assert os.path.getsize(os.path.join({ODD!r}, {ODD!r})) == 5000; assert os.listdir('empty')"
    await done(sandbox, limits, source)


async def test_the_stamp_tells_when_bytes_have_changed(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await sandbox.write("same", b"12345")
    await sandbox.write("other", b"12345")
    before = {entry.path: entry.stamp for entry in await sandbox.index()}
    again = {entry.path: entry.stamp for entry in await sandbox.index()}
    await done(sandbox, limits, "open('other', 'r+').write('54321')")
    after = {entry.path: entry.stamp for entry in await sandbox.index()}
    assert before == again
    assert before["same"] == after["same"]
    assert before["other"] != after["other"] or not after["other"]


async def test_restore_replaces_what_was_there(sandbox: Sandbox) -> None:
    await sandbox.write("old/file", b"old")
    await sandbox.restore((folder("new", 0o500), file("new/file", 3, 0o400)), {"new/file": b"new"})
    assert alike(await sandbox.index()) == alike((folder("new", 0o500), file("new/file", 3, 0o400)))
    assert await sandbox.read("new/file", most=3) == b"new"
    await sandbox.restore((), {})
    assert await sandbox.index() == ()


REFUSED = (
    (file("/etc/x", 1),),
    (file("../x", 1),),
    (file("a/./b", 1),),
    (file("a\0b", 1),),
    (file("x" * 300, 1),),
    (file("", 1),),
    (file("a", 1), file("a", 1)),
    (file("a/b", 1),),
    (link("a", "/etc"), file("a/b", 1)),
    (file("a", 1), file("a/b", 1)),
    (folder("a", 0o4755),),
    (link("a", ""),),
)


async def test_a_workspace_with_tricks_in_it_is_refused_and_nothing_is_written(sandbox: Sandbox) -> None:
    await sandbox.write("kept", b"kept")
    for entries in REFUSED:
        with pytest.raises(FileRefused):
            await sandbox.restore(entries, {entry.path: b"1" for entry in entries if entry.kind is FileKind.file})
    assert [entry.path for entry in await sandbox.index()] == ["kept"]


async def test_a_workspace_that_does_not_fit_is_refused_and_nothing_is_written(
    sandbox: Sandbox, disk_bytes: int
) -> None:
    await sandbox.write("kept", b"kept")
    content = bytes(disk_bytes // 4)
    bomb = tuple(file(f"{number}", len(content)) for number in range(5))
    with pytest.raises(QuotaExceeded):
        await sandbox.restore(bomb, dict.fromkeys([entry.path for entry in bomb], content))
    with pytest.raises(FileRefused):
        await sandbox.restore(tuple(folder(f"{number:06}") for number in range(20_001)), {})
    with pytest.raises(FileRefused):
        await sandbox.restore((file("short", 5),), {"short": b"1"})
    assert [entry.path for entry in await sandbox.index()] == ["kept"]


@pytest.mark.needs("shell")
@pytest.mark.parametrize(
    "source",
    [
        "open('sparse', 'wb').truncate(1 << 22); open('other', 'wb').truncate(5 << 20)",
        "import os\nfor n in range(300):\n    os.mkdir('d'); os.chdir('d')",
    ],
    ids=["longer than the workspace", "too deep"],
)
async def test_more_than_can_be_kept_is_refused(sandbox: Sandbox, limits: SandboxLimits, source: str) -> None:
    await done(sandbox, limits, source)
    with pytest.raises(FileRefused):
        await sandbox.index()
    assert await sandbox.reset()
    assert await sandbox.index() == ()
