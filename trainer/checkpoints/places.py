"""Storage of a run's checkpoints, below the rules of `cursor`: a folder, or an object store for ranks on several
machines that share no disk. Both implementations pass the same tests.

    PREFIX/step-00000010-i0/FILE            written by a rank on its machine's disk, then uploaded by that rank
    PREFIX/step-00000010-i0/MANIFEST.json   names, sizes and sha256 of all files: uploaded last, as the commit
    PREFIX/latest-i0-NONCE.json             the marker of generation 0

In a store, PREFIX is `checkpoints/` in the folder of the run's owner. A name carries its trainer generation, so that
nobody overwrites another's objects. Without its manifest a checkpoint never existed: the next generation removes its
remains, or `turnlog gc` if there is no next one.

Nothing relies on conditional puts. A process that claims a generation puts a marker that names nothing yet, then lists
the markers: of two that claim the same generation, the one that lists last sees the other and takes the next number.
Only a confirmed marker states what to resume from.

Each machine caches the files that its ranks have uploaded or fetched, of the previous checkpoint and of the one in
progress. A file is fetched when it is needed, once per machine, and verified on arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from turnlog.infra.blobs import CHECKPOINTS, MANIFEST, BlobCorrupt, BlobMissing, Blobs
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import folder_of
from turnlog.infra.run_folder import lock_file
from turnlog.infra.s3 import S3Blobs
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings, StoreSettings
from turnlog.trainer import CheckpointDamaged, CheckpointUnusable

SUMS = "SHA256SUMS"
PART = ".part"
MARKERS = "latest*.json"
"""`latest.json` is the single marker that releases before 0.2 wrote for all generations."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of a marker. `incarnation` is -1 if there is no marker."""

    incarnation: int
    folder: str | None
    """Checkpoint that the generation resumes from until it has written its own."""
    confirmed: bool = True
    """True if nobody else claims this generation, so that the marker is effective."""


Stored = Mapping[str, BlobRef]
"""Files of a checkpoint that ranks have written and hashed, and uploaded if it is to lie in a store, by name."""


class CheckpointStorage(Protocol):
    """The storage of a run's checkpoints. All methods block."""

    @property
    def where(self) -> str:
        """The address, for people."""
        ...

    def names(self) -> list[str]:
        """Return the names of complete checkpoints."""
        ...

    def open_folder(self, name: str) -> Path:
        """Return a local folder with the common values of a checkpoint, ready to restore from. Shards are verified by
        the ranks that load them. Raises CheckpointDamaged.
        """
        ...

    def all_of(self, name: str) -> Path:
        """Return a local folder with all files of a checkpoint, verified. Raises CheckpointDamaged."""
        ...

    def checkpoint_address(self, name: str) -> str:
        """Return the whole address of a checkpoint."""
        ...

    def markers(self) -> dict[str, Marker]:
        """Return all markers by name, including those that are being created.

        Raises CheckpointUnusable for an unreadable marker: the checkpoint that it named may be the only effective one.
        """
        ...

    def create_marker(self, marker: Marker) -> bool:
        """Create the marker of a generation. Return False if another process has it."""
        ...

    def mark(self, marker: Marker) -> None:
        """Overwrite the marker that was created."""
        ...

    def forget(self, marker: str) -> None:
        """Remove the marker of an earlier generation."""
        ...

    def create_folder(self, name: str) -> Path:
        """Return an empty local folder to write a checkpoint into."""
        ...

    def store_files(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        """Bring files to their final place, with their checksums; all files are written, and those of ranks are in
        `stored`.

        This takes long. For `about`, see `StorePlace`.
        """
        ...

    def seal(self, folder: Path) -> str:
        """Finalize a checkpoint and return its name."""
        ...

    def drop(self, name: str) -> None:
        """Remove a checkpoint."""
        ...

    def sweep(self) -> None:
        """Remove the remains of checkpoints that were never finalized."""
        ...


class FolderPlace:
    """Checkpoints in a folder on disk, which several machines must share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own: Path

    @property
    def where(self) -> str:
        return str(self._directory)

    def names(self) -> list[str]:
        return [path.name for path in self._directory.glob("step-*-i*") if path.suffix != PART]

    def open_folder(self, name: str) -> Path:
        """Return the folder of a checkpoint after verifying its files except the shards; one of a release that stored
        no checksums is accepted.
        """
        folder = self._directory / name
        if not folder.is_dir():
            raise CheckpointDamaged(f"{folder} is gone; restore it")
        check_files(folder, lambda file: not file.endswith(SHARDS))
        return folder

    def all_of(self, name: str) -> Path:
        folder = self.open_folder(name)
        check_shards(folder)
        return folder

    def checkpoint_address(self, name: str) -> str:
        return str(self._directory / name)

    def markers(self) -> dict[str, Marker]:
        return {path.name: _read(path) for path in self._directory.glob(MARKERS)}

    def create_marker(self, marker: Marker) -> bool:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._own = self._directory / MARKERS.replace("*", f"-i{marker.incarnation}")
        part = self._write_marker(marker)
        try:
            os.link(part, self._own)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def mark(self, marker: Marker) -> None:
        self._write_marker(marker).replace(self._own)

    def forget(self, marker: str) -> None:
        (self._directory / marker).unlink(missing_ok=True)

    def create_folder(self, name: str) -> Path:
        part = self._directory / f"{name}{PART}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def store_files(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        write_sums(folder, stored)

    def seal(self, folder: Path) -> str:
        whole = folder.with_suffix("")
        if whole.exists():
            shutil.rmtree(folder)
        else:
            folder.rename(whole)
        return whole.name

    def drop(self, name: str) -> None:
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def sweep(self) -> None:
        for part in self._directory.glob(f"*{PART}"):
            shutil.rmtree(part, ignore_errors=True)

    def _write_marker(self, marker: Marker) -> Path:
        part = self._directory / f"{self._own.name}.{os.getpid()}"
        with part.open("w") as file:
            json.dump({"incarnation": marker.incarnation, "folder": marker.folder}, file)
            file.flush()
            os.fsync(file.fileno())
        return part


def _read(path: Path) -> Marker:
    """Read a marker; an empty one if the successor of its owner has just removed it. Raises CheckpointUnusable."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Marker(-1, None)
    return read_marker(content, str(path))


def read_marker(content: bytes, where: str) -> Marker:
    """Parse the content of the marker at `where`. Raises CheckpointUnusable if it is malformed."""
    try:
        said = json.loads(content)
        folder, confirmed = said["folder"], said.get("confirmed", True)
        if isinstance(folder, str | None) and isinstance(confirmed, bool):
            return Marker(int(said["incarnation"]), folder, confirmed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _marker_error(where, repr(error)) from error
    raise _marker_error(where, repr(said))


def _marker_error(where: str, why: str) -> CheckpointUnusable:
    return CheckpointUnusable(
        f"{where} does not say which checkpoint to continue from ({why}): restore it, or remove it to continue from "
        "the checkpoint that the other markers beside it name, or from [model] path if there are none"
    )


def check_shards(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Verify every `ranks`-th shard of a checkpoint, from the one with number `rank`. Raises CheckpointDamaged."""
    shards = sorted(name for name in _sums(folder) if name.endswith(SHARDS))
    check_files(folder, frozenset(shards[rank::ranks]).__contains__)


def check_files(folder: Path, among: Callable[[str], bool]) -> None:
    """Verify the files of a checkpoint for whose names `among` is true, and that all others exist.

    Raises CheckpointDamaged for a file that is missing or was altered. A checkpoint of a release that stored no
    checksums is accepted.
    """
    for name, wanted in _sums(folder).items():
        if not (folder / name).is_file():
            raise CheckpointDamaged(f"{folder / name} is gone; restore it, or remove {folder}")
        if among(name) and (found := file_sha256(folder / name)) != wanted:
            raise CheckpointDamaged(
                f"{folder / name} was altered: sha256 {found}, {SUMS} says {wanted}; restore it, or remove {folder}"
            )


def _sums(folder: Path) -> dict[str, str]:
    """Return the recorded checksums of a checkpoint's files by name; none for a release that stored no checksums."""
    file = folder / SUMS
    found: dict[str, str] = {}
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        wanted, apart, name = line.partition("  ")
        if not apart:
            raise CheckpointDamaged(f"{file} does not list checksums of files; restore it, or remove {folder}")
        found[name] = wanted
    return found


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents_sha256(folder: Path, *patterns: str) -> str:
    """Return the hex sha256 over names and contents of the files that match, independently of the folder's path."""
    running = hashlib.sha256()
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        running.update(f"{file.name} {file_sha256(file)}\n".encode())
    return running.hexdigest()


def write_sums(folder: Path, known: Stored | None = None) -> None:
    """Write the checksums as the last file and sync it to disk: a folder without this file is not complete. Files in
    `known` are not read.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    sums = {name: ref.sha256 for name, ref in (known or {}).items()}
    text = "".join(f"{sums.get(name) or file_sha256(folder / name)}  {name}\n" for name in names)
    with (folder / SUMS).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


SHARDS = ".distcp"
"""Suffix of the files that ranks write. All other files describe these, and are few and small."""
AT_ONCE = 16
"""Maximum number of concurrent removals."""
LOCKS = ".locks"

T = TypeVar("T")


@dataclass(frozen=True)
class StorePlace:
    """Place in an object store. It is pickled to other processes of this machine, so it opens its client anew for each
    call.
    """

    settings: StoreSettings
    prefix: str
    """Prefix of object names, without the trailing slash."""
    cache: Path
    """Local cache folder of this machine."""
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    _sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Manifests that are not uploaded yet, by checkpoint."""

    @property
    def where(self) -> str:
        return f"s3://{self.settings.bucket}/{self.prefix}"

    def checkpoint_address(self, name: str) -> str:
        return f"{self.where}/{name}"

    def names(self) -> list[str]:
        found = self._run(lambda blobs: blobs.names(f"{self.prefix}/step-"))
        return [name.split("/")[-2] for name in found if name.endswith(f"/{MANIFEST}")]

    def open_folder(self, name: str) -> Path:
        """Check the sizes of all files and fetch all but the shards, which are read where they are needed."""
        files = self.manifest(name)
        there = self._run(lambda blobs: blobs.list_objects(f"{self.prefix}/{name}/")).objects
        sizes = {one.name.rpartition("/")[2]: one.size for one in there}
        for file, ref in files.items():
            if sizes.get(file) != ref.size:
                found = sizes.get(file, "no")
                raise CheckpointDamaged(
                    f"{self.checkpoint_address(name)}/{file} has {found} bytes, {MANIFEST} says {ref.size}; restore it"
                )
        return self._fetch_into_cache(name, files, [file for file in files if not file.endswith(SHARDS)])

    def cursor(self, name: str) -> dict[str, Any]:
        """Return the cursor values of a checkpoint. Raises CheckpointDamaged."""
        with self._read(name) as said:
            return dict(said["cursor"])

    def manifest(self, name: str) -> dict[str, BlobRef]:
        """Return the files of a checkpoint. Raises CheckpointDamaged."""
        with self._read(name) as said:
            return {file: BlobRef(ref["sha256"], ref["bytes"]) for file, ref in said["files"].items()}

    @contextlib.contextmanager
    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the content of a checkpoint's manifest. Raises CheckpointDamaged if it is missing or lacks what the
        block reads.
        """
        try:
            yield json.loads(self._run(lambda blobs: blobs.get_named(f"{self.prefix}/{name}/{MANIFEST}")))
        except (BlobMissing, ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(
                f"{self.checkpoint_address(name)}/{MANIFEST} is gone, or is not a manifest ({error})"
            ) from error

    def fetch_files(self, name: str, files: Collection[str]) -> Path:
        """Fetch files of a checkpoint and return its local folder; files that are already there are verified again.

        Raises CheckpointDamaged, NoRoom, StoreUnavailable.
        """
        return self._fetch_into_cache(name, self.manifest(name), files)

    def _fetch_into_cache(self, name: str, refs: Mapping[str, BlobRef], files: Collection[str]) -> Path:
        folder, locks = self.cache / name, self.cache / LOCKS
        for made in (folder, locks):
            made.mkdir(parents=True, exist_ok=True)
        for file in files:
            with lock_file(locks / file):  # one rank of this machine at a time
                self._fetch(name, file, refs.get(file), folder / file)
        return folder

    def all_of(self, name: str) -> Path:
        """Fetch all files of a checkpoint and return its local folder. Raises the errors of `fetch_files`."""
        refs = self.manifest(name)
        return self._fetch_into_cache(name, refs, refs)

    def _fetch(self, name: str, file: str, ref: BlobRef | None, path: Path) -> None:
        if ref is None:
            raise CheckpointDamaged(f"{self.checkpoint_address(name)}/{MANIFEST} names no {file}, which is needed")
        if path.exists() and path.stat().st_size == ref.size and file_sha256(path) == ref.sha256:
            return
        part = path.with_name(f".{path.name}")
        part.unlink(missing_ok=True)
        try:
            self._run(lambda blobs: blobs.get_named_file(f"{self.prefix}/{name}/{file}", ref, part))
        except (BlobMissing, BlobCorrupt) as error:
            raise CheckpointDamaged(f"{self.where}: {error}") from error
        part.replace(path)

    def put(self, folder: Path, file: str) -> BlobRef:
        """Upload a file of a checkpoint that is being written. Raises StoreUnavailable."""
        return self._run(lambda blobs: blobs.put_named_file(f"{self.prefix}/{folder.name}/{file}", folder / file))

    def here(self, name: str, keep: str) -> Path:
        """Return this machine's folder of a new checkpoint; remove all others except that of `keep`."""
        for old in self.cache.glob("step-*-i*"):
            if old.name not in (name, keep):
                shutil.rmtree(old, ignore_errors=True)
        folder = self.cache / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def create_folder(self, name: str) -> Path:
        assert name not in self.names(), "an incarnation saves a step once"
        shutil.rmtree(self.cache / name, ignore_errors=True)
        (self.cache / name).mkdir(parents=True)
        return self.cache / name

    def store_files(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        """Upload the remaining files and prepare the manifest. `about` holds the manifest's values beside the files."""
        left = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.name not in stored]
        files = {**stored, **{file: self.put(folder, file) for file in left}}
        sums = {file: {"bytes": ref.size, "sha256": ref.sha256} for file, ref in sorted(files.items())}
        self._sums[folder.name] = {**about, "files": sums}

    def seal(self, folder: Path) -> str:
        self._put(f"{folder.name}/{MANIFEST}", self._sums.pop(folder.name))
        return folder.name

    def drop(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so that it is never complete without all of its files."""
        self._remove_objects([f"{self.prefix}/{name}/{MANIFEST}"])
        self._remove_objects(self._run(lambda blobs: blobs.names(f"{self.prefix}/{name}/")))

    def sweep(self) -> None:
        whole = set(self.names())
        found = self._run(lambda blobs: blobs.names(f"{self.prefix}/step-"))
        self._remove_objects([name for name in found if name.split("/")[-2] not in whole])

    def markers(self) -> dict[str, Marker]:
        async def read(blobs: Blobs) -> dict[str, Marker]:
            found: dict[str, Marker] = {}
            for name in await blobs.names(f"{self.prefix}/latest-"):
                with contextlib.suppress(BlobMissing):  # its owner's successor has just removed it
                    found[name.rpartition("/")[2]] = read_marker(await blobs.get_named(name), name)
            return found

        return self._run(read)

    def create_marker(self, marker: Marker) -> bool:
        self._put(self._own(marker), {**asdict(marker), "confirmed": False})
        others = (one.incarnation for name, one in self.markers().items() if name != self._own(marker))
        if max(others, default=-1) >= marker.incarnation:
            self.forget(self._own(marker))
            return False
        self.mark(marker)
        return True

    def mark(self, marker: Marker) -> None:
        self._put(self._own(marker), asdict(marker))

    def forget(self, marker: str) -> None:
        self._remove_objects([f"{self.prefix}/{marker}"])

    def _own(self, marker: Marker) -> str:
        return f"latest-i{marker.incarnation}-{self._nonce}.json"

    def _put(self, name: str, said: Mapping[str, Any]) -> None:
        content = json.dumps(said, indent=1).encode()
        self._run(lambda blobs: blobs.put_named(f"{self.prefix}/{name}", content, media_type="application/json"))

    def _remove_objects(self, names: Collection[str]) -> None:
        async def remove(blobs: Blobs) -> None:
            left = list(names)
            for at in range(0, len(left), AT_ONCE):
                await asyncio.gather(*map(blobs.remove, left[at : at + AT_ONCE]))

        self._run(remove)

    def _run(self, work: Callable[[Blobs], Awaitable[T]]) -> T:
        async def call() -> T:
            blobs = S3Blobs(self.settings)
            try:
                return await work(blobs)
            finally:
                await blobs.close()

        return asyncio.run(call())


MEDIA = {
    ".json": "application/json",
    ".safetensors": "application/vnd.safetensors",
    ".delta": "application/vnd.turnlog.delta",
}
"""Media types of weights' files."""
UPLOADS = 4
"""Number of files of weights that a rank uploads concurrently."""


@dataclass(frozen=True, slots=True)
class RunBlobs:
    """Store of the weights that ranks publish. It is pickled to other processes of this machine, so it opens its client
    anew for each export.
    """

    settings: StoreSettings

    def put_files(self, files: Mapping[Path, str], folder: str) -> dict[str, BlobRef]:
        """Upload files, {path: sha256}, into the run's `folder` (see Blobs), and return references by name. Raises
        FileUnreadable, StoreUnavailable.
        """

        async def put_all() -> list[BlobRef]:
            blobs, limit = S3Blobs(self.settings), asyncio.Semaphore(UPLOADS)
            blobs.folder = folder

            async def one(path: Path, sha256: str) -> BlobRef:
                async with limit:
                    return await blobs.put_file(path, sha256=sha256, media_type=MEDIA[path.suffix])

            try:
                return await asyncio.gather(*(one(path, sha256) for path, sha256 in files.items()))
            finally:
                await blobs.close()

        return dict(zip((path.name for path in files), asyncio.run(put_all()), strict=True))


CACHE = "s3"
"""Name of the cache folder in `checkpoints/` of the run's directory."""


def checkpoints_directory(settings: Settings) -> Path:
    """Return the checkpoints folder of a run on this machine."""
    return Path(settings.run.directory).resolve() / CHECKPOINTS


async def store_place(role: Role, cache: Path, *, owned: bool = False) -> StorePlace:
    """Return the storage of the checkpoints of the role's run. If `owned`, the run's ownership is recorded in the
    store.

    Raises the errors of `folder_of`.
    """
    return StorePlace(role.settings.store, f"{await folder_of(role, owned=owned)}/{CHECKPOINTS}", cache)
