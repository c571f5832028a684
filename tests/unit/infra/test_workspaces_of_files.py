"""Workspaces that are made of files, or of other workspaces, without a sandbox."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.workspaces import (
    FilesUnusable,
    NotAWorkspace,
    fetch_manifest,
    join_trees,
    put,
    read,
    store_files,
)
from turnlog.sandbox_workers.workspaces import Workspaces
from turnlog.sandbox_workers.workspaces.folder import Folder, stored
from turnlog.schemas.types import BlobRef

FILES: dict[str, Any] = {
    "calc.py": "x = 1\n",
    "run": {"text": "#!/bin/sh\n", "mode": 0o755},
    "data/deep/blob": {"base64": base64.b64encode(bytes(3 << 20)).decode()},
    "data/more": {"base64": base64.b64encode(os.urandom(2 << 20)).decode()},
    "data/link": {"link": "../calc.py"},
    "empty": "",
}


async def restored(blobs: MemoryBlobs, ref: BlobRef, folder: Path) -> Path:
    await asyncio.to_thread(folder.mkdir)
    await Workspaces(blobs).restore(Folder(folder), ref, disk_bytes=1 << 30)
    return folder


async def test_files_become_the_workspace_that_a_worker_would_have_stored(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    ref = await store_files(FILES, blobs)
    folder = await restored(blobs, ref, tmp_path / "a")
    assert (folder / "data/link").read_text() == "x = 1\n"
    assert os.access(folder / "run", os.X_OK)
    assert (folder / "data/deep/blob").read_bytes() == bytes(3 << 20)
    again = await fetch_manifest(await stored(folder, blobs), blobs)
    assert again.tree_sha256 == (await fetch_manifest(ref, blobs)).tree_sha256
    assert await store_files(dict(reversed(FILES.items())), blobs) != await store_files({**FILES, "calc.py": ""}, blobs)
    assert (await read(again, blobs))["calc.py"] == b"x = 1\n"


async def test_workspaces_are_joined_below_folders_without_reading_a_file(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    first, second = [await fetch_manifest(await store_files(files, blobs), blobs) for files in (FILES, {"d/new": "1"})]
    there = len(blobs.objects)
    ref = await put(join_trees({"before": first.files, "after/x": second.files, "": second.files}), blobs)
    assert len(blobs.objects) == there + 1
    folder = await restored(blobs, ref, tmp_path / "a")
    assert (folder / "before/calc.py").read_text() == "x = 1\n"
    assert (folder / "after/x/d/new").read_text() == (folder / "d/new").read_text() == "1"


async def test_a_little_of_much_is_packed_anew_since_no_worker_would_fetch_all_of_it(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    files: dict[str, Any] = {}
    for number in range(24):
        files[f"{number}.small"] = "x"
        files[f"{number}.large"] = {"base64": base64.b64encode(os.urandom(1 << 20)).decode()}
    whole = await fetch_manifest(await store_files(files, blobs), blobs)
    few = join_trees({"d": [file for file in whole.files if file.entry.size == 1]})
    assert few.is_bloated
    ref = await put(few, blobs)
    assert sum(pack.size for pack in (await fetch_manifest(ref, blobs)).packs) == 24
    assert (await restored(blobs, ref, tmp_path / "a") / "d/3.small").read_text() == "x"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../x": ""}, "no \\.\\."),
        ({"/etc/passwd": ""}, "no empty part"),
        ({"x": 3}, "'x'"),
        ({"x": {"base64": "%"}}, "'x'"),
        ({"x": {"mode": 1}}, "'x'"),
        ({"x": {"text": "", "mode": 0o4755}}, "'x'"),
        ({"x": "", "x/y": ""}, "'x/y'"),
    ],
)
async def test_files_that_no_workspace_can_hold_are_refused_by_path(files: dict[str, Any], said: str) -> None:
    with pytest.raises(FilesUnusable, match=said):
        await store_files(files, MemoryBlobs())


async def test_what_is_no_workspace_or_is_gone_is_not_opened() -> None:
    blobs = MemoryBlobs()
    ref = await store_files(FILES, blobs)
    with pytest.raises(NotAWorkspace, match="version 1"):
        await fetch_manifest(await blobs.put(b"{}"), blobs)
    whole = await fetch_manifest(ref, blobs)
    blobs.objects.clear()
    with pytest.raises(NotAWorkspace, match="cannot be had"):
        await fetch_manifest(ref, blobs)
    with pytest.raises(NotAWorkspace, match="cannot be had"):
        await read(whole, blobs)
