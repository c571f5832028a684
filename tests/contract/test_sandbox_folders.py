"""A workspace of folders of the image, at the paths that the image's own programs expect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_workers.protocol import Command, FileRefused, Kind, Provider, Sandbox, Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus

pytestmark = pytest.mark.needs("places")
FOLDERS = ("/app/deep", "/logs", "/place", "/app")


@pytest.fixture
async def placed(provider: Provider, disk_bytes: int) -> Sandbox:
    """A sandbox whose workspace is in these folders."""
    return await provider.start(0, Shape(disk_bytes=disk_bytes, folders=FOLDERS))


async def output(sandbox: Sandbox, limits: SandboxLimits, command: str) -> str:
    """What a shell command prints."""
    done = await sandbox.exec(Command(kind=Kind.shell, source=command), limits)
    assert done.status is ToolStatus.ok, done.output
    return done.output.decode()


async def test_calls_find_the_folders_at_their_own_paths(placed: Sandbox, limits: SandboxLimits) -> None:
    await placed.write("here", b"1")
    await placed.write("/logs/verifier/reward.txt", b"0.5")
    said = await output(placed, limits, "pwd; cat here /logs/verifier/reward.txt; echo 2 >/app/new; echo 3 >/place/x")
    assert said == "/app/deep\n10.5"
    assert await placed.read("/app/new", most=10) == b"2\n"
    paths = [entry.path for entry in await placed.index()]
    assert paths == ["app", "app/deep", "app/deep/here", "app/new", "logs", "logs/verifier",
                     "logs/verifier/reward.txt", "place", "place/x"]  # fmt: skip
    assert await placed.read_files(["app/new", "place/x"], most=100) == (b"2\n", b"3\n")
    for path in ("/etc/passwd", "/", "/tmp/x", "/app/../etc/x", "/application"):
        with pytest.raises(FileRefused):
            await placed.write(path, b"x")
    await placed.close()


async def test_a_workspace_goes_on_in_another_sandbox(
    provider: Provider, placed: Sandbox, limits: SandboxLimits, disk_bytes: int
) -> None:
    await output(placed, limits, "mkdir -p /app/a; echo one >/app/a/one; echo two >/logs/two; chmod 750 /app/a/one")
    entries = await placed.index()
    files = [entry.path for entry in entries if entry.kind is FileKind.file]
    contents = dict(zip(files, await placed.read_files(files, most=1 << 20), strict=True))
    await placed.close()
    other = await provider.start(1, Shape(disk_bytes=disk_bytes, folders=FOLDERS))
    await other.write("/app/old", b"gone")
    await other.write("/place/old", b"gone")
    await other.restore(entries, contents)
    assert await output(other, limits, "cat /app/a/one /logs/two; ls /app /place; stat -c %a /app/a/one") == (
        "one\ntwo\n/app:\na\ndeep\n\n/place:\n750\n"
    )
    assert [entry.path for entry in await other.index()] == [entry.path for entry in entries]
    await other.close()


async def test_a_folder_that_a_workspace_does_not_name_stays_as_it_is(placed: Sandbox) -> None:
    await placed.write("/app/kept", b"1")
    await placed.write("/logs/gone", b"1")
    folder = FileEntry(path="logs", kind=FileKind.folder, mode=0o755)
    await placed.restore(
        (folder, FileEntry(path="logs/new", kind=FileKind.file, mode=0o644, size=1)), {"logs/new": b"2"}
    )
    assert [entry.path for entry in await placed.index()] == [
        "app",
        "app/deep",
        "app/kept",
        "logs",
        "logs/new",
        "place",
    ]
    outside = FileEntry(path="srv", kind=FileKind.folder, mode=0o755)
    with pytest.raises(FileRefused, match="lies in none of the folders"):
        await placed.restore((outside,), {})
    await placed.close()


async def test_a_call_that_fills_a_folder_meets_its_limit(
    placed: Sandbox, limited: Callable[..., SandboxLimits]
) -> None:
    command = Command(kind=Kind.shell, source="while head -c 100000 /dev/zero >>/app/big; do :; done; sleep 5")
    done = await placed.exec(command, limited(disk_bytes=2 << 20))
    assert (done.status, done.reason) == (ToolStatus.resource_limit, "disk_bytes")
    await placed.close()


@pytest.mark.parametrize("folder", ["/tmp", "/tmp/deep/er"])
async def test_the_temporary_folder_may_be_part_of_the_workspace(
    provider: Provider, limits: SandboxLimits, disk_bytes: int, folder: str
) -> None:
    sandbox = await provider.start(0, Shape(disk_bytes=disk_bytes, folders=(folder, "/logs")))
    assert await output(sandbox, limits, "pwd; echo 1 >x; echo 2 >/tmp/y; cat /tmp/y") == f"{folder}\n2\n"
    assert f"{folder[1:]}/x" in [entry.path for entry in await sandbox.index()]
    assert await sandbox.read("x", most=10) == b"1\n"
    await sandbox.close()
