"""Workspaces in the object store: what a chain of snapshots restores to, what it costs, and what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.workspaces import MEDIA_TYPE, FileEntry, FileKind
from turnlog.sandbox_workers.protocol import FileRefused, QuotaExceeded, WorkspaceCorrupt, WorkspaceLost
from turnlog.sandbox_workers.workspaces import Workspaces
from turnlog.sandbox_workers.workspaces.folder import Folder, stored
from turnlog.schemas.types import BlobRef

MIB = 1 << 20
DISK = 256 * MIB


class Puts(MemoryBlobs):
    """A store that tells what was put."""

    def __init__(self) -> None:
        super().__init__()
        self.put_bytes: list[int] = []

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        """See Blobs."""
        self.put_bytes.append(len(content))
        return await super().put(content, media_type=media_type)


class HeldTree:
    """A tree in memory. Its stamps change with every write; `stamped` False: it cannot tell."""

    def __init__(self, *, stamped: bool = True) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.contents: dict[str, bytes] = {}
        self.interpreter = False
        self.read_paths: list[str] = []
        self._stamped = stamped
        self._writes = 0

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file."""
        self._writes += 1
        stamp = str(self._writes) if self._stamped else ""
        self._put(FileEntry(path=path, kind=FileKind.file, mode=mode, size=len(content), stamp=stamp))
        self.contents[path] = content

    def folder(self, path: str, mode: int = 0o755) -> None:
        """Make a folder, or change its mode."""
        self._put(FileEntry(path=path, kind=FileKind.folder, mode=mode))

    def link(self, path: str, target: str) -> None:
        """Make a link."""
        self._put(FileEntry(path=path, kind=FileKind.link, mode=0o777, target=target))

    def remove(self, path: str) -> None:
        """With all that is below it."""
        self.entries = {at: entry for at, entry in self.entries.items() if at != path and not at.startswith(path + "/")}
        self.contents = {at: content for at, content in self.contents.items() if at in self.entries}

    def shape(self) -> object:
        """All that a restored tree must share."""
        paths = sorted(self.entries)
        return [(dataclasses.replace(self.entries[path], stamp=""), self.contents.get(path)) for path in paths]

    def _put(self, entry: FileEntry) -> None:
        if entry.kind is not FileKind.folder or entry.path in self.contents:
            self.remove(entry.path)
        self.entries[entry.path] = entry

    async def index(self) -> tuple[FileEntry, ...]:
        """See Sandbox."""
        return tuple(self.entries[path] for path in sorted(self.entries))

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        """See Sandbox."""
        self.read_paths += paths
        found = tuple(self.contents[path] for path in paths)
        assert sum(map(len, found)) <= most
        return found

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        """See Sandbox."""
        self.entries, self.contents, self.interpreter = {}, {}, False
        for entry in entries:
            if entry.kind is FileKind.file:
                self.file(entry.path, contents[entry.path], entry.mode)
            else:
                self._put(entry)


NAMES = st.sampled_from(["a", "b", "a.b", "ä", "\udcff", "x y"])
CONTENTS = st.builds(
    lambda byte, size: bytes([byte]) * size,
    st.integers(0, 3),
    st.sampled_from([0, 1, 7, 5000, MIB, MIB + 1, 2 * MIB]),
)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0])
EDITS = st.lists(
    st.tuples(st.sampled_from("fffdlrm"), st.lists(NAMES, min_size=1, max_size=3), CONTENTS, MODES), max_size=6
)


def edit(tree: HeldTree, what: str, parts: list[str], content: bytes, mode: int) -> None:
    """One change; folders above come with it."""
    path = "/".join(parts)
    for length in range(1, len(parts)):
        above = "/".join(parts[:length])
        if above not in tree.entries or tree.entries[above].kind is not FileKind.folder:
            tree.remove(above)
            tree.contents.pop(above, None)
            tree.folder(above)
    if what == "f":
        tree.file(path, content, mode)
    elif what == "d":
        tree.remove(path)
        tree.folder(path, mode)
    elif what == "l":
        tree.link(path, "../" + parts[0])
    elif what == "r":
        tree.remove(path)
    elif path in tree.contents:
        tree.file(path, tree.contents[path], mode)


@given(chain=st.lists(st.tuples(EDITS, st.booleans(), st.booleans()), min_size=1, max_size=5), stamped=st.booleans())
async def test_every_snapshot_of_a_chain_restores_to_the_tree_that_it_was_taken_from(
    chain: list[tuple[list[tuple[str, list[str], bytes, int]], bool, bool]], stamped: bool
) -> None:
    """Some steps are another worker's, which has restored the tree first; some come with an interpreter."""
    blobs = MemoryBlobs()
    workers = [Workspaces(blobs), Workspaces(blobs, pieces=3, trees=1)]
    worker, tree = workers[0], HeldTree(stamped=stamped)
    ref: BlobRef | None = None
    taken: list[tuple[BlobRef, object, bool]] = []
    for edits, moves, interpreter in chain:
        if moves and ref is not None:
            worker = workers[1 - workers.index(worker)]
            tree = HeldTree(stamped=stamped)
            await worker.restore(tree, ref, disk_bytes=DISK)
        for one in edits:
            edit(tree, *one)
        tree.interpreter = interpreter
        ref = await worker.snapshot(tree, ref)
        taken.append((ref, tree.shape(), interpreter))
        assert await worker.snapshot(tree, ref) == ref
    hashes: dict[str, object] = {}
    for ref, shape, interpreter in taken:
        again = HeldTree()
        manifest = await Workspaces(blobs).restore(again, ref, disk_bytes=DISK)
        assert again.shape() == shape
        assert manifest.interpreter == interpreter
        assert hashes.setdefault(manifest.tree_sha256, shape) == shape
    assert len(hashes) == len({str(shape) for _, shape, _ in taken})


async def test_an_unchanged_workspace_is_the_same_reference_and_nothing_is_read_or_put() -> None:
    blobs, tree = Puts(), HeldTree()
    tree.file("f", b"1")
    workspaces = Workspaces(blobs)
    first = await workspaces.snapshot(tree)
    puts, tree.read_paths = len(blobs.put_bytes), []
    assert await workspaces.snapshot(tree, first) == first
    assert (len(blobs.put_bytes), tree.read_paths) == (puts, [])
    tree.file("f", b"1")  # written again, with the bytes that it had
    assert await workspaces.snapshot(tree, first) == first
    assert (len(blobs.put_bytes), tree.read_paths) == (puts, ["f"])


async def test_one_changed_block_of_a_large_file_costs_one_piece() -> None:
    blobs, tree = Puts(), HeldTree()
    content = bytearray(os.urandom(16 * MIB))
    tree.file("large", bytes(content))
    tree.file("other", b"o" * 5000)
    workspaces = Workspaces(blobs)
    first = await workspaces.snapshot(tree)
    assert max(blobs.put_bytes) <= 4 * MIB
    blobs.put_bytes, tree.read_paths = [], []
    content[5 * MIB + 17] ^= 1
    tree.file("large", bytes(content))
    second = await workspaces.snapshot(tree, first)
    assert tree.read_paths == ["large"]
    assert MIB <= sum(blobs.put_bytes) < MIB + 8192
    again = HeldTree()
    await Workspaces(blobs).restore(again, second, disk_bytes=DISK)
    assert again.contents["large"] == content


async def test_what_another_session_has_stored_is_not_stored_again() -> None:
    blobs, trees = Puts(), [HeldTree(), HeldTree()]
    workspaces = Workspaces(blobs)
    content = os.urandom(3 * MIB)
    for number, tree in enumerate(trees):
        tree.file("data", content)
        tree.file("own", b"%d" % number)
        await workspaces.snapshot(tree)
    assert sum(blobs.put_bytes) < len(content) + 4096


async def test_equal_trees_have_equal_hashes_however_they_came_to_be() -> None:
    blobs, ways = MemoryBlobs(), [HeldTree(), HeldTree()]
    for tree, order in zip(ways, ("ab", "ba"), strict=True):
        for name in order:
            tree.file(name, name.encode())
    ways[1].file("c", b"")
    workspaces = Workspaces(blobs)
    before = await workspaces.snapshot(ways[1])
    ways[1].remove("c")
    refs = [await workspaces.snapshot(ways[0]), await workspaces.snapshot(ways[1], before)]
    manifests = [await workspaces.open(ref) for ref in refs]
    assert manifests[0].tree_sha256 == manifests[1].tree_sha256
    ways[0].file("a", b"a", mode=0o755)
    changed = await workspaces.open(await workspaces.snapshot(ways[0]))
    assert changed.tree_sha256 != manifests[0].tree_sha256


async def test_a_long_chain_is_packed_anew_before_it_lies_in_too_many_packs() -> None:
    blobs, tree = MemoryBlobs(), HeldTree()
    workspaces = Workspaces(blobs, pieces=1)
    ref: BlobRef | None = None
    packs = []
    for number in range(140):
        tree.file(f"f{number:03}", b"%d" % number)
        ref = await workspaces.snapshot(tree, ref)
        packs.append(len((await workspaces.open(ref)).packs))
    assert ref is not None
    assert max(packs) == 128
    assert packs[-1] < 20
    again = HeldTree()
    await Workspaces(blobs).restore(again, ref, disk_bytes=DISK)
    assert again.shape() == tree.shape()


async def test_a_folder_of_this_machine_becomes_a_workspace_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "from/deep").mkdir(parents=True)
    (tmp_path / "from/deep/run.sh").write_text("echo")
    (tmp_path / "from/deep/run.sh").chmod(0o755)
    (tmp_path / "from/link").symlink_to("/etc/passwd")
    (tmp_path / "to/old").mkdir(parents=True)
    blobs = MemoryBlobs()
    ref = await stored(tmp_path / "from", blobs)
    await Workspaces(blobs).restore(Folder(tmp_path / "to"), ref, disk_bytes=DISK)
    assert await stored(tmp_path / "to", blobs) == ref
    assert (tmp_path / "to/deep/run.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(tmp_path / "to/link") == "/etc/passwd"


async def test_what_a_sandbox_lists_is_stored_only_when_it_is_a_tree_within_its_quota() -> None:
    tree, workspaces = HeldTree(), Workspaces(MemoryBlobs())
    tree.file("f", b"12345")
    with pytest.raises(QuotaExceeded, match="5 bytes, 4 are allowed"):
        await workspaces.snapshot(tree, most=4)
    tree.file("../f", b"")
    with pytest.raises(FileRefused, match="no \\.\\."):
        await workspaces.snapshot(tree)


# -- what is refused at a restore


@pytest.fixture
async def whole() -> tuple[MemoryBlobs, BlobRef]:
    """A stored workspace."""
    blobs, tree = MemoryBlobs(), HeldTree()
    tree.folder("d")
    tree.file("d/f", b"first" * 1000)
    tree.file("g", b"second")
    tree.link("l", "d")
    return blobs, await Workspaces(blobs).snapshot(tree)


def reforged(blobs: MemoryBlobs, ref: BlobRef, change: Callable[[dict[str, Any]], None]) -> BlobRef:
    """A manifest as somebody else might store it: changed, its tree hash computed anew."""
    datum = json.loads(blobs.objects[ref.sha256])
    change(datum)
    about = hashlib.sha256()
    for line in datum["entries"]:
        keys = [line["path"], line["kind"], line["mode"], line.get("target", ""), line.get("sha256", "")]
        about.update(json.dumps(keys, separators=(",", ":")).encode() + b"\n")
    datum["tree_sha256"] = about.hexdigest()
    return put(blobs, json.dumps(datum).encode())


def put(blobs: MemoryBlobs, content: bytes) -> BlobRef:
    """Any bytes as a blob that calls itself a workspace."""
    sha256 = hashlib.sha256(content).hexdigest()
    blobs.objects[sha256] = content
    return BlobRef(sha256, len(content), MEDIA_TYPE)


def entry(datum: dict[str, Any], path: str) -> dict[str, Any]:
    """One line of a manifest."""
    return next(line for line in datum["entries"] if line["path"] == path)


EMPTY_FILE = {"kind": "file", "mode": 0o644, "size": 0, "sha256": hashlib.sha256().hexdigest(), "pieces": []}


def more(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """One file more."""
    return lambda datum: datum["entries"].append({**EMPTY_FILE, **fields})


def made(path: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """An entry changed."""
    return lambda datum: entry(datum, path).update(fields)


def piece(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """A field of g's piece: pack, offset, length, sha256."""

    def change(datum: dict[str, Any]) -> None:
        entry(datum, "g")["pieces"][0][place] = value

    return change


NO_TREES = {
    "parent": ("no \\.\\.", more(path="z/../../etc/passwd")),
    "absolute": ("relative", lambda datum: datum["entries"].insert(0, {**EMPTY_FILE, "path": "/etc/passwd"})),
    "nul": ("NUL", more(path="z\0")),
    "half-a-surrogate": ("text", more(path="z\ud800")),
    "below-a-link": ("no folder", more(path="l/f")),
    "no-folder": ("no folder", more(path="z/f")),
    "twice": ("does not come after", lambda datum: datum["entries"].append(datum["entries"][-1])),
    "unsorted": ("does not come after", lambda datum: datum["entries"].reverse()),
    "long-name": ("255", more(path="z" * 256)),
    "setuid": ("no number from 0 to 511", made("g", mode=0o4755)),
    "device": ("device", made("g", kind="device")),
    "link-nowhere": ("with target ''", made("l", target="")),
    "size": ("do not make up", made("g", size=10**18)),
    "negative": ("no number", made("g", size=-1)),
    "true": ("no number", made("g", mode=True)),
    "pack-index": ("IndexError", piece(0, 7)),
    "negative-offset": ("no number", piece(1, -1)),
    "out-of-its-pack": ("does not lie in its pack", piece(1, 5001)),
    "overlap": ("overlap", piece(1, 4998)),
    "same-place-other-hash": ("overlap", piece(1, 0)),
    "hash": ("no sha256", piece(3, "../../x")),
    "long-pack": ("no number from 0 to 4194304", lambda datum: datum["packs"][0].__setitem__(1, 5 * MIB)),
    "version": ("version 1", lambda datum: datum.update(version=2)),
    "no-packs": ("TypeError", lambda datum: datum.update(packs=None)),
}
"""What is wrong -> what the refusal says, how to get there."""


@pytest.mark.parametrize(("says", "change"), NO_TREES.values(), ids=NO_TREES)
async def test_a_manifest_that_is_no_tree_of_its_packs_is_refused_before_anything_is_fetched(
    whole: tuple[MemoryBlobs, BlobRef], says: str, change: Callable[[dict[str, Any]], None]
) -> None:
    blobs, ref = whole
    forged = reforged(blobs, ref, change)
    blobs.objects = {forged.sha256: blobs.objects[forged.sha256]}
    tree = HeldTree()
    tree.file("mine", b"")
    with pytest.raises(WorkspaceCorrupt, match=says):
        await Workspaces(blobs).restore(tree, forged, disk_bytes=DISK)
    assert list(tree.entries) == ["mine"]


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"hello", b"[]", b"{}", b"null", b"[" * 100_000, b'{"version": 1}', b"PK\x03\x04"]
)
async def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    blobs = MemoryBlobs()
    with pytest.raises(WorkspaceCorrupt):
        await Workspaces(blobs).open(put(blobs, content))


async def test_a_bomb_is_refused_by_its_sizes(whole: tuple[MemoryBlobs, BlobRef]) -> None:
    """A thousand names for one piece are as large as they would be on disk; few bytes of many packs are not fetched."""
    blobs, ref = whole

    def repeat(datum: dict[str, Any]) -> None:
        datum["entries"] += [{**entry(datum, "g"), "path": f"z{number:04}"} for number in range(1000)]

    with pytest.raises(QuotaExceeded, match="11006 bytes, 11000 are allowed"):
        await Workspaces(blobs).restore(HeldTree(), reforged(blobs, ref, repeat), disk_bytes=11_000)

    def spread(datum: dict[str, Any]) -> None:
        datum["packs"] += [[f"{number:064x}", 4 * MIB] for number in range(6)]
        line = entry(datum, "g")
        sha256 = line["pieces"][0][3]
        datum["entries"] += [
            {**line, "path": f"z{number}", "pieces": [[1 + number, 0, 6, sha256]]} for number in range(6)
        ]

    with pytest.raises(WorkspaceCorrupt, match="many times"):
        await Workspaces(blobs).restore(HeldTree(), reforged(blobs, ref, spread), disk_bytes=DISK)


async def test_a_part_that_is_gone_damaged_or_not_what_the_manifest_says_is_told_apart(
    whole: tuple[MemoryBlobs, BlobRef],
) -> None:
    blobs, ref = whole
    (pack,) = (await Workspaces(blobs).open(ref)).packs
    tree = HeldTree()

    def lie(datum: dict[str, Any]) -> None:
        wrong = hashlib.sha256(b"other").hexdigest()
        entry(datum, "g").update(sha256=wrong, pieces=[[0, 5000, 6, wrong]])

    with pytest.raises(WorkspaceCorrupt, match="'g' does not hash to"):
        await Workspaces(blobs).restore(tree, reforged(blobs, ref, lie), disk_bytes=DISK)
    content = blobs.objects[pack.sha256]
    blobs.objects[pack.sha256] = content[:-1] + b"x"
    with pytest.raises(WorkspaceCorrupt, match="damaged"):
        await Workspaces(blobs).restore(tree, ref, disk_bytes=DISK)
    del blobs.objects[pack.sha256]
    with pytest.raises(WorkspaceLost, match="gone"):
        await Workspaces(blobs).restore(tree, ref, disk_bytes=DISK)
    with pytest.raises(WorkspaceCorrupt, match="cannot be a workspace"):
        await Workspaces(blobs).open(BlobRef("../../etc/passwd", 10))
    with pytest.raises(WorkspaceCorrupt, match="cannot be a workspace"):
        await Workspaces(blobs).open(BlobRef("0" * 64, 2**40))
    with pytest.raises(WorkspaceLost):
        await Workspaces(blobs).open(BlobRef("0" * 64, 10))
    assert tree.entries == {}


async def test_a_workspace_whose_predecessor_is_gone_is_stored_as_a_whole(whole: tuple[MemoryBlobs, BlobRef]) -> None:
    blobs, ref = whole
    tree = HeldTree()
    await Workspaces(blobs).restore(tree, ref, disk_bytes=DISK)
    blobs.objects.clear()
    later = await Workspaces(blobs).snapshot(tree, ref)
    again = HeldTree()
    await Workspaces(blobs).restore(again, later, disk_bytes=DISK)
    assert again.shape() == tree.shape()


class ManyFiles:
    """A tree of ten thousand small files, which costs nothing itself."""

    interpreter = False

    def __init__(self) -> None:
        names = [f"file{number:05}" for number in range(10_000)]
        self.entries = tuple(
            FileEntry(path=name, kind=FileKind.file, mode=0o644, size=len(name), stamp=name) for name in names
        )

    async def index(self) -> tuple[FileEntry, ...]:
        """See Tree."""
        return self.entries

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        """See Tree."""
        return tuple(path.encode() for path in paths)

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        """See Tree."""
        assert len(entries) == len(self.entries)


async def test_a_workspace_of_very_many_files_leaves_the_loop_to_others() -> None:
    tree, store, longest = ManyFiles(), MemoryBlobs(), 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    watching = asyncio.create_task(watch())
    first = await Workspaces(store).snapshot(tree)
    await asyncio.sleep(0)
    began, longest = time.process_time(), 0.0
    again = Workspaces(store)
    await again.restore(tree, first, disk_bytes=DISK)
    assert await again.snapshot(tree, first) == first
    await asyncio.sleep(0)
    watching.cancel()
    assert longest < (time.process_time() - began) / 3
