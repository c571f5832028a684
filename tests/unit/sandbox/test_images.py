"""Images: another root than the host's, our interpreter in it whatever C library it has or has not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Command, ImageMissing, Kind, SandboxUnavailable, Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus

FIRST_UID = 221_000
LIMITS = SandboxLimits(memory_bytes=128 << 20, disk_bytes=8 << 20)


@pytest.fixture
def images() -> Iterator[Path]:
    """A folder that a slot's user can reach, with an image that has neither a shell nor a C library."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "bare/usr/share").mkdir(parents=True)
        (folder / "bare/usr/share/greeting").write_text("from the image")
        (folder / "bare/bin").symlink_to("usr/bin")
        (folder / "bare/etc").mkdir()
        (folder / "bare/etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
        (folder / "bare/etc/release").write_text("bare 1.0\n")
        (folder / "bare/opt/data").mkdir(parents=True)
        yield folder


@pytest.fixture
async def backend(images: Path) -> AsyncIterator[Bubblewrap]:
    """bubblewrap with these images."""
    ca = images / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    backend = await Bubblewrap.open(SandboxSettings(image_folder=str(images), first_uid=FIRST_UID), ca=ca)
    yield backend
    await backend.close()


def shape(image: str | None) -> Shape:
    """Of a small sandbox."""
    return Shape(image=image, disk_bytes=8 << 20)


async def test_python_runs_in_an_image_without_any_c_library(backend: Bubblewrap) -> None:
    sandbox = await backend.start(0, shape("bare"))
    source = """
import ctypes, decimal, hashlib, json, os, sqlite3, ssl, subprocess, sys, zlib
print(open("/usr/share/greeting").read(), open("/etc/release").read().strip(), os.listdir("/opt/data"))
print(open("/etc/passwd").read().split(":")[0], os.path.exists("/etc/shadow"), os.path.exists("/lib64"))
print(open("/etc/turnlog/ca.pem").read().strip())
"""
    try:
        answer = await sandbox.exec(Command(kind=Kind.python, source=source), LIMITS)
        told = await sandbox.exec(Command(kind=Kind.program, argv=("sh", "-c", "true")), LIMITS)
        assert await sandbox.reset()
    finally:
        await sandbox.close()
    said = answer.output.decode()
    assert (answer.status, said) == (
        ToolStatus.ok,
        "from the image bare 1.0 []\nsandbox False False\n-----BEGIN CERTIFICATE-----\n",
    ), said
    assert told.status is ToolStatus.tool_error, "nothing of the host's is there"


async def test_an_images_own_programs_come_first(backend: Bubblewrap, images: Path) -> None:
    shutil.copytree(images / "bare", images / "tools", symlinks=True)
    for path in ("/usr/bin/cat", *libraries("/usr/bin/cat")):
        target = images / "tools" / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    shutil.copy2("/usr/bin/cat", images / "tools/usr/bin/python3")
    sandbox = await backend.start(0, shape("tools"))
    try:
        answer = await sandbox.exec(Command(kind=Kind.program, argv=("python3", "/usr/share/greeting")), LIMITS)
    finally:
        await sandbox.close()
    assert (answer.status, answer.output) == (ToolStatus.ok, b"from the image")


def libraries(binary: str) -> list[str]:
    """What a program is linked with."""
    said = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    return [word for word in said.split() if word.startswith("/")]


async def test_an_environment_changes_with_the_image_and_with_nothing_else(backend: Bubblewrap, images: Path) -> None:
    before = await backend.environment(shape("bare"))
    host = await backend.environment(shape(None))
    assert {name for name in before if before[name] != host[name]} == {"root"}
    assert before == await backend.environment(Shape(image="bare", disk_bytes=1, network="allowlist"))
    (images / "bare/usr/share/greeting").write_text("another")
    after = await backend.environment(shape("bare"))
    assert {name for name in before if before[name] != after[name]} == {"root"}


async def test_a_missing_or_tricky_image_is_a_typed_refusal(backend: Bubblewrap) -> None:
    for name, why in (("absent", "there are: bare"), ("../../etc", "not a path"), ("ca.pem", "there are: bare")):
        with pytest.raises(ImageMissing, match=why):
            await backend.start(0, shape(name))
        with pytest.raises(ImageMissing, match=why):
            await backend.environment(shape(name))


async def test_an_image_that_the_slots_user_may_not_read_says_so(backend: Bubblewrap, images: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not started by root")
    os.chmod(images, 0o700)
    with pytest.raises(SandboxUnavailable, match="Permission denied"):
        await backend.start(0, shape("bare"))


async def test_the_subprocess_backend_has_no_images() -> None:
    backend = await Subprocess.open(SandboxSettings(first_uid=FIRST_UID))
    for asked in (backend.start(0, shape("bare")), backend.environment(shape("bare"))):
        with pytest.raises(ImageMissing, match="bubblewrap or docker"):
            await asked


async def test_folders_of_the_workspace_begin_with_what_the_image_has_there(backend: Bubblewrap, images: Path) -> None:
    app = images / "bare/app"
    (app / "src").mkdir(parents=True)
    (app / "src/run").write_text("code")
    (app / "src/run").chmod(0o755)
    (app / "link").symlink_to("src/run")
    placed = Shape(image="bare", disk_bytes=8 << 20, folders=("/app", "/logs"))
    sandbox = await backend.start(0, placed)
    try:
        entries = {entry.path: (entry.kind.value, entry.mode) for entry in await sandbox.index()}
        assert entries == {
            "app": ("folder", 0o700), "app/link": ("link", 0o777), "app/src": ("folder", 0o755),
            "app/src/run": ("file", 0o755), "logs": ("folder", 0o700),
        }  # fmt: skip
        await sandbox.write("src/run", b"changed")
        assert await sandbox.reset()
        assert await sandbox.read("src/run", most=100) == b"code"
    finally:
        await sandbox.close()
    assert (app / "src/run").read_text() == "code"


@pytest.mark.parametrize("folder", [".", "/etc", "/lib/x", "/opt"])
async def test_a_folder_that_bubblewrap_cannot_serve_is_refused_by_name(backend: Bubblewrap, folder: str) -> None:
    with pytest.raises(ImageMissing, match=f"cannot have '{folder}'"):
        await backend.start(0, Shape(image="bare", disk_bytes=8 << 20, folders=(folder,)))
