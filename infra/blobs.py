"""Immutable objects named by their sha256. `infra.s3` is the real store; MemoryBlobs passes the same contract test.
Payloads that are too large for an event are stored here and fetched where they are needed.

  owned/CLUSTER/prefix=P/run=R/blobs/aa/SHA256     a blob written by a role of the run; RunConfigured names the folder
  owned/.../run=R/checkpoints/STEP/FILE            a file of a checkpoint, which its MANIFEST.json finalizes
  owners/CLUSTER/prefix=P/run=R.json               an Owner: states whose folder that is
  blobs/aa/SHA256                                  blobs of tools, and of runs that an earlier release began
  trash/NAME                                       objects that `turnlog gc` found unreachable, for a grace period

BlobError
├── BlobMissing       no object under that hash (yet): retried, then a typed end where it is needed
├── BlobCorrupt       the bytes do not hash to their name
├── NoRoom            the file into which a blob is fetched cannot be written
├── FileUnreadable    the file that is to be stored cannot be read
├── ImageUnreadable   the bytes are not an image in one of IMAGE_FORMATS
└── StoreUnavailable      credentials, quota
    ├── StoreUnreachable  transport or TLS
    │   └── StoreBusy     a temporary refusal: throttled, full, failing, clocks differ, a token expired
    └── BucketMissing     [store] make_bucket is false and nobody has made the bucket yet: waited for
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol, TypeVar, Union, cast, get_args, get_origin
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.roles import Explained, Unreachable
from turnlog.processors.core.experts import assemble_experts, unpack_experts
from turnlog.schemas.avsc import field_types
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import Event, SegmentSample
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef

if TYPE_CHECKING:
    import PIL.Image

log = logging.getLogger(__name__)
T = TypeVar("T")
OWNED, OWNERS, TRASH = "owned/", "owners/", "trash/"
BINARY = "application/octet-stream"
REUSED_S = 3600.0
"""Seconds after its last put for which a writer may reference a blob without storing it again. `turnlog gc` collects
older blobs that no record references."""


class BlobError(Exception):
    """Base class of all errors of the store; see the module docstring."""


class BlobMissing(BlobError):
    """The store has no such object."""


class BlobCorrupt(BlobError):
    """Length or sha256 differ from the reference."""


class NoRoom(BlobError):
    """A file cannot be written to this machine's disk; the store is not the cause."""


class FileUnreadable(BlobError):
    """A file on this machine's disk cannot be read; the store is not the cause."""


class ImageUnreadable(BlobError):
    """An image cannot be decoded; the message is Pillow's."""


class StoreUnavailable(BlobError):
    """The store did not answer, or refused the request; the message names [store] settings to check."""


class StoreUnreachable(StoreUnavailable, Unreachable):
    """The store did not answer, or failed."""


class StoreBusy(StoreUnreachable, Explained):
    """The store refuses for a temporary reason, which the message states."""


class BucketMissing(StoreUnavailable, Explained):
    """The bucket does not exist. Remedy: `turnlog run configure`, which creates it."""


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """The log whose roles write blobs into a folder."""

    cluster: str
    """Kafka's cluster id."""
    prefix: str
    """The log's [kafka] prefix."""
    run: str

    @property
    def folder(self) -> str:
        """The folder of its blobs. The run is part of the name, because clusters that earlier releases embedded share
        an id, and topics of a prefix may be created anew."""
        return (
            f"{OWNED}{quote(self.cluster, safe='')}/prefix={quote(self.prefix, safe='')}/run={quote(self.run, safe='')}"
        )

    @property
    def name(self) -> str:
        """Name of the object that records the owner."""
        return f"{OWNERS}{self.folder.removeprefix(OWNED)}.json"

    def json(self) -> bytes:
        """Return the content of that object."""
        return canonical_text(dataclasses.asdict(self), spaces=True).encode()

    @classmethod
    def parse(cls, name: str, content: bytes) -> Owner:
        """Parse such an object. Raises BlobCorrupt if `json` did not write it under this name."""
        try:
            found = cls(**{key: str(value) for key, value in json.loads(content).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise BlobCorrupt(
                f"{name} does not say which run owns its folder ({error}): restore it from a copy"
            ) from error
        if found.name != name:
            raise BlobCorrupt(f"{name} describes {found.folder}: restore it from a copy")
        return found


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing of the store."""

    name: str
    size: int
    """Size in bytes."""
    modified: float
    """Time of its last put by the store's clock, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects, and the time of the store's clock before they were listed, in seconds since 1970."""

    now: float
    objects: tuple[Listed, ...]


def key(sha256: str, folder: str = "") -> str:
    """Return the key of a blob in the owner's `folder`, if it has one. The first two hex digits spread objects
    over folders."""
    return f"{folder}{'/' if folder else ''}blobs/{sha256[:2]}/{sha256}"


KEY = re.compile(rf"({TRASH})?(?:({OWNED}[^/]+/prefix=[^/]*/run=[^/]*)/)?blobs/[0-9a-f]{{2}}/([0-9a-f]{{64}})")
"""Matches the results of `key`, also in the trash: (trash, folder, sha256)."""


CHECKPOINTS, MANIFEST = "checkpoints", "MANIFEST.json"
CHECKPOINT = re.compile(rf"(({OWNED}[^/]+/prefix=[^/]*/run=[^/]*)/{CHECKPOINTS}/step-[^/]+)/[^/]+")
"""Matches a file of a checkpoint: (name of the checkpoint, folder of its owner)."""


class Blobs(Protocol):
    """A store of blobs. Put always writes, so that a reused blob becomes young again. Get always verifies length and
    hash, and searches every folder in which a blob may be."""

    folder: str
    """Folder into which `put` writes: that of the run's owner as soon as the role knows it (`runs.claimed`); empty
    means `blobs/`."""

    async def put(self, content: bytes, *, media_type: str = BINARY) -> BlobRef:
        """Store `content`; its key is derived from its sha256. Raises StoreUnavailable."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """Return the verified bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
        ...

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str = BINARY) -> BlobRef:
        """Like `put`, for the contents of a file, in pieces. `sha256`: its hash, if the writer has already computed it.
        Raises FileUnreadable, StoreUnavailable."""
        ...

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        """Like `get`, into a new file, in pieces. The file is removed if it does not verify. Raises BlobMissing,
        BlobCorrupt, NoRoom, StoreUnavailable."""
        ...

    async def put_named(self, name: str, content: bytes, *, media_type: str = BINARY) -> None:
        """Store `content` under a name of the writer's choice (the archive: files that people look for by name). The
        write is atomic and replaces an existing object. Raises StoreUnavailable."""
        ...

    async def get_named(self, name: str) -> bytes:
        """Return the bytes under a name, unverified: whoever chooses names also stores the hashes. Raises BlobMissing,
        StoreUnavailable."""
        ...

    async def put_named_file(self, name: str, path: Path) -> BlobRef:
        """Like `put_named`, for the contents of a file, in pieces and hashed while they are sent. Return the reference
        for `get_named_file`. Raises StoreUnavailable."""
        ...

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        """Fetch the object under a name into a new file, in pieces. The file is removed if it does not verify. Raises
        BlobMissing, BlobCorrupt, NoRoom, StoreUnavailable."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`, sorted. Raises StoreUnavailable."""
        ...

    async def list_objects(self, prefix: str) -> Listing:
        """Return the objects whose names begin with `prefix`, with their ages. Raises StoreUnavailable."""
        ...

    async def copy(self, name: str, to: str) -> None:
        """Copy the object under `name` to another name. The copy is as young as a new object. Raises BlobMissing,
        StoreUnavailable."""
        ...

    async def remove(self, name: str) -> None:
        """Delete the object under a name, if there is one. Raises StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileUnreadable(f"{path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class UploadSource:
    """A file that is being uploaded. Its read errors are raised as FileUnreadable, so that they are not taken for an
    outage of the store."""

    path: Path
    file: BufferedReader

    def read(self, size: int = -1, /) -> bytes:
        """See BinaryIO. Raises FileUnreadable."""
        with _readable(self.path):
            return self.file.read(size)


@contextmanager
def _reading(path: Path) -> Iterator[tuple[UploadSource, int]]:
    """Open a file and yield it with its size in bytes. Raises FileUnreadable."""
    with _readable(path):
        file = path.open("rb")
    with file:
        with _readable(path):
            size = os.fstat(file.fileno()).st_size
        yield UploadSource(path, file), size


class Folders(ABC):
    """See Blobs. Rules for where blobs are written and searched, common to all stores. The methods with an underscore
    block."""

    def __init__(self) -> None:
        self.folder = ""
        self._last = ""
        """Folder in which a blob was last found. Blobs that are read together mostly lie together."""

    async def put(self, content: bytes, *, media_type: str = BINARY) -> BlobRef:
        return await self._run(lambda: self._put(content, media_type))

    async def get(self, ref: BlobRef) -> bytes:
        return await self._run(lambda: self._get(ref))

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str = BINARY) -> BlobRef:
        return await self._run(lambda: self._put_file(path, sha256, media_type))

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        await self._run(lambda: self._get_file(ref, path))

    async def put_named(self, name: str, content: bytes, *, media_type: str = BINARY) -> None:
        await self._run_effect(lambda: self._write(name, content, media_type))

    async def get_named(self, name: str) -> bytes:
        return await self._run(lambda: self._read(name))

    async def put_named_file(self, name: str, path: Path) -> BlobRef:
        return await self._run_effect(lambda: self._put_named_file(name, path))

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        await self._run(lambda: self._get_named_file(name, ref, path))

    async def names(self, prefix: str) -> list[str]:
        return await self._run(lambda: self._names(prefix))

    async def list_objects(self, prefix: str) -> Listing:
        return await self._run_effect(lambda: self._list_objects(prefix))

    async def copy(self, name: str, to: str) -> None:
        await self._run_effect(lambda: self._copy(name, to))

    async def remove(self, name: str) -> None:
        await self._run_effect(lambda: self._remove(name))

    @abstractmethod
    async def _run(self, call: Callable[[], T]) -> T:
        """Run a blocking call of this store."""

    async def _run_effect(self, call: Callable[[], T]) -> T:
        """Like `_run`, for a call before and after which the death of the process makes a difference."""
        return await self._run(call)

    @abstractmethod
    def _read(self, name: str) -> bytes: ...

    @abstractmethod
    def _write(self, name: str, content: bytes, media_type: str) -> None: ...

    @abstractmethod
    def _pieces(self, name: str) -> AbstractContextManager[Iterable[bytes]]:
        """Like `_read`, in pieces."""

    @abstractmethod
    def _write_file(self, name: str, file: Readable, size: int, media_type: str) -> None: ...

    @abstractmethod
    def _copy(self, name: str, to: str) -> None: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    @abstractmethod
    def _names(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def _list_objects(self, prefix: str) -> Listing: ...

    def _put_file(self, path: Path, sha256: str, media_type: str) -> BlobRef:
        with _reading(path) as (reading, size):
            if not sha256:
                with _readable(path):
                    sha256 = hashlib.file_digest(reading.file, "sha256").hexdigest()
                    reading.file.seek(0)
            self._write_file(key(sha256, self.folder), reading, size, media_type)
        return BlobRef(sha256, size, media_type)

    def _put_named_file(self, name: str, path: Path) -> BlobRef:
        with _reading(path) as (reading, size):
            running = _Hashing(reading)
            self._write_file(name, running, size, BINARY)
        return BlobRef(running.sha256.hexdigest(), size)

    def _get_file(self, ref: BlobRef, path: Path) -> None:
        with _appearing(path) as file:
            self._find_blob(ref, lambda name: self._copy_to_file(name, file))

    def _get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        with _appearing(path) as file:
            _check(name, self._copy_to_file(name, file), ref)

    def _copy_to_file(self, name: str, file: BinaryIO) -> tuple[int, str]:
        """Write the object under `name` to `file` and return (bytes, sha256) of it. Raises NoRoom if the file
        cannot be written."""
        running = hashlib.sha256()
        with self._pieces(name) as pieces:
            file.seek(0)
            file.truncate()
            for piece in pieces:
                running.update(piece)
                left = memoryview(piece)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError as error:
                    raise NoRoom(f"{file.name}: {error.strerror}; free space there") from error
        return file.tell(), running.hexdigest()

    def _put(self, content: bytes, media_type: str) -> BlobRef:
        sha256 = hashlib.sha256(content).hexdigest()
        self._write(key(sha256, self.folder), content, media_type)
        return BlobRef(sha256, len(content), media_type)

    def _get(self, ref: BlobRef) -> bytes:
        content = b""

        def take(name: str) -> tuple[int, str]:
            nonlocal content
            content = self._read(name)
            return len(content), hashlib.sha256(content).hexdigest()

        self._find_blob(ref, take)
        return content

    def _find_blob(self, ref: BlobRef, take: Callable[[str], tuple[int, str]]) -> None:
        """Call `take` for the first place that has the blob. `take` returns (bytes, sha256) of what it read. Raises
        BlobMissing, BlobCorrupt."""
        missing: BlobMissing | None = None
        for folder, name in self._places(ref.sha256):
            try:
                taken = take(name)
            except BlobMissing as error:
                missing = missing or error
                continue
            _check(name, taken, ref)
            if name.startswith(TRASH):
                log.warning("%s was in the trash but is needed: moved it back", name)
                self._copy(name, name.removeprefix(TRASH))
            self._last = folder
            return
        assert missing is not None, "there is one place at least"
        raise missing

    def _places(self, sha256: str) -> Iterator[tuple[str, str]]:
        """Yield (folder, name) of every place where a blob may be. The likely ones come first, because they need no
        listing. A recording, an archive or a fork may reference blobs of another owner."""
        likely = dict.fromkeys((self._last, self.folder, ""))
        yield from _both(sha256, likely)
        owners = (name.removeprefix(OWNERS).removesuffix(".json") for name in self._names(OWNERS))
        yield from _both(sha256, [folder for owner in owners if (folder := OWNED + owner) not in likely])


def _check(name: str, taken: tuple[int, str], ref: BlobRef) -> None:
    """Compare `taken`, the (bytes, sha256) of an object, with `ref`. Raises BlobCorrupt if they differ."""
    if taken != (ref.size, ref.sha256):
        raise BlobCorrupt(
            f"{name}: {taken[0]} bytes do not hash to {ref.sha256} (expected {ref.size}); restore the object from a "
            "copy, or remove it and let its writer write it again"
        )


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """Create a new file, and remove it again if the block fails."""
    with path.open("xb", buffering=0) as file:  # unbuffered: a full disk fails the write that it affects
        try:
            yield cast(BinaryIO, file)
        except BaseException:
            path.unlink()
            raise


class Readable(Protocol):
    """Source of an upload."""

    def read(self, size: int = -1, /) -> bytes: ...


class _Hashing:
    """A file whose bytes are hashed while they are read, once, from its beginning."""

    def __init__(self, file: Readable) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(size)
        self.sha256.update(piece)
        return piece


def _both(sha256: str, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    for trash in ("", TRASH):
        yield from ((folder, trash + key(sha256, folder)) for folder in folders)


class MemoryBlobs(Folders):
    """See Blobs. `objects` maps the sha256 of blobs below `blobs/` to bytes, `named` all other names, for tests that
    corrupt them."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.named: dict[str, bytes] = {}
        self.clock: Callable[[], float] = time.time
        self.times: dict[str, float] = {}
        """Name -> time of its last put."""
        self.point: Callable[[], None] = _nothing
        """Called before and after each put of a named object, copy, removal and listing: a point at which a test may
        let the process die (`MemoryLog.point`)."""

    async def _run(self, call: Callable[[], T]) -> T:
        return call()

    async def _run_effect(self, call: Callable[[], T]) -> T:
        self.point()
        found = call()
        self.point()
        return found

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def _locate(self, name: str) -> tuple[dict[str, bytes], str]:
        """Return the dictionary that stores a name, and the key in it."""
        sha256 = name.rpartition("/")[2]
        return (self.objects, sha256) if name == key(sha256) else (self.named, name)

    def _read(self, name: str) -> bytes:
        held, at = self._locate(name)
        try:
            return held[at]
        except KeyError:
            raise BlobMissing(f"the store holds no object {name}") from None

    @contextmanager
    def _pieces(self, name: str) -> Iterator[Iterable[bytes]]:
        yield (self._read(name),)

    def _write_file(self, name: str, file: Readable, size: int, media_type: str) -> None:
        self._write(name, file.read(size), media_type)

    def _copy(self, name: str, to: str) -> None:
        self._write(to, self._read(name), "")

    def _remove(self, name: str) -> None:
        held, at = self._locate(name)
        held.pop(at, None)

    def _list_objects(self, prefix: str) -> Listing:
        now = self.clock()
        names = self._names(prefix)
        return Listing(now, tuple(Listed(name, len(self._read(name)), self.times.get(name, now)) for name in names))

    def _write(self, name: str, content: bytes, media_type: str) -> None:
        held, at = self._locate(name)
        held[at] = content
        self.times[name] = self.clock()

    def _names(self, prefix: str) -> list[str]:
        return sorted(name for name in (*self.named, *map(key, self.objects)) if name.startswith(prefix))


def _nothing() -> None: ...


@functools.cache
def payload_fields(record: type) -> tuple[str, ...]:
    """Return the fields of a record type that hold bytes or a reference to them."""
    return tuple(name for name, kind in field_types(record).items() if _is_payload(kind))


async def inlined(event: Event, blobs: Blobs) -> Event:
    """Return the event with every payload as bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
    fetched: dict[str, Any] = {}
    for name in payload_fields(event.__class__):
        value = getattr(event, name)
        if isinstance(value, BlobRef):
            fetched[name] = await blobs.get(value)
    return dataclasses.replace(event, **fetched) if fetched else event


async def externalize_payloads(event: Event, blobs: Blobs, *, limit: int = INLINE_LIMIT_BYTES) -> Event:
    """Return the event with payloads above `limit` bytes moved to the store. Blobs are stored before the event that
    references them is written. Raises StoreUnavailable."""
    stored: dict[str, Any] = {}
    for name in payload_fields(event.__class__):
        value = getattr(event, name)
        if isinstance(value, bytes) and len(value) > limit:
            stored[name] = await blobs.put(value)
    return dataclasses.replace(event, **stored) if stored else event


def _is_payload(kind: Any) -> bool:
    if get_origin(kind) not in (Union, UnionType):
        return False
    arms = {get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in get_args(kind)}
    return bytes in arms and BlobRef in arms


async def expert_rows(sample: SegmentSample, blobs: Blobs) -> NDArray[np.int32]:
    """Return expert ids by position, int32 [tokens - 1, layers, top_k]. Row i was chosen when token i + 1 was
    predicted. Each blob is fetched once.

    Raises NoExperts, BrokenExperts, ExpertsDoNotCover (processors.core.experts). Raises BlobMissing, BlobCorrupt,
    StoreUnavailable.
    """
    refs = list(dict.fromkeys(piece.rows for piece in sample.experts))
    contents = await asyncio.gather(*(blobs.get(ref) for ref in refs))
    return assemble_experts(sample, {ref: unpack_experts(content) for ref, content in zip(refs, contents, strict=True)})


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Image formats that are decoded. Pillow knows many more, and starts other programs for some."""


def opened_image(content: bytes, *, whole: bool = False) -> PIL.Image.Image:
    """Open an image. Its header is read now, its pixels when they are needed or, with `whole`, at once. Raises
    ImageUnreadable."""
    import PIL.Image  # installed with the engine's extra: a gateway of text needs no image library

    try:
        with warnings.catch_warnings(action="ignore", category=PIL.Image.DecompressionBombWarning):
            image = PIL.Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        if whole:
            image.load()
    except PIL.Image.DecompressionBombError as error:
        raise ImageUnreadable(f"an image of {len(content)} bytes is too large: {error}") from None
    except Exception as error:  # Pillow raises many kinds of errors for malformed bytes
        raise ImageUnreadable(
            f"an image of {len(content)} bytes cannot be read ({error}); {', '.join(IMAGE_FORMATS)} are served"
        ) from None
    return image
