"""Immutable objects named by their sha256. `infra.s3` is the real store; MemoryBlobs passes the same contract.
Payloads that are too large for an event are put here, and fetched where they are needed.

  owned/CLUSTER/prefix=P/run=R/blobs/aa/SHA256     a blob that a role of the run has put; RunConfigured names the folder
  owned/.../run=R/checkpoints/STEP/FILE            of a checkpoint, which its MANIFEST.json makes whole
  owners/CLUSTER/prefix=P/run=R.json               an Owner: whose folder that is
  blobs/aa/SHA256                                  of runs that an earlier release began, and of tools
  trash/NAME                                       what `turnlog gc` found unreachable, for a grace

BlobError
├── BlobMissing       nothing under that hash (yet): retried, then a typed end where it is needed
├── BlobCorrupt       the bytes do not hash to their name
├── NoRoom            the file that a blob was to be fetched into cannot be written
├── FileUnreadable    the file that was to be put cannot be read
├── ImageUnreadable   the bytes are no image of IMAGE_FORMATS
└── StoreUnavailable      credentials, quota
    ├── StoreUnreachable  transport or TLS
    │   └── StoreBusy     it answers that it cannot now: throttled, full, failing, clocks apart, a token expired
    └── BucketMissing     [store] make_bucket is false and nobody has made it yet: waited for
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
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol, Union, cast, get_args, get_origin
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.roles import Explained, Unreachable
from turnlog.processors.core.experts import assembled, unpacked
from turnlog.schemas.avsc import field_types
from turnlog.schemas.events import Event, SegmentSample
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef

if TYPE_CHECKING:
    import PIL.Image

log = logging.getLogger(__name__)
OWNED, OWNERS, TRASH = "owned/", "owners/", "trash/"
BINARY = "application/octet-stream"
REUSED_S = 3600.0
"""Seconds after its last put for which a writer may name a blob without putting it again: what lies for longer without
a record that names it is garbage to `turnlog gc`."""


class BlobError(Exception):
    """Base of the tree above."""


class BlobMissing(BlobError):
    """The store holds no such object."""


class BlobCorrupt(BlobError):
    """Length or sha256 differ from the reference."""


class NoRoom(BlobError):
    """Of this machine's disk, not of the store."""


class FileUnreadable(BlobError):
    """Of this machine's disk, not of the store."""


class ImageUnreadable(BlobError):
    """Says what Pillow said."""


class StoreUnavailable(BlobError):
    """The store did not answer, or refused us; names [store] settings to check."""


class StoreUnreachable(StoreUnavailable, Unreachable):
    """The store did not answer, or failed."""


class StoreBusy(StoreUnreachable, Explained):
    """The store answers, and what it says passes; says what it is."""


class BucketMissing(StoreUnavailable, Explained):
    """Nobody has made it. Remedy: `turnlog run configure`, which does."""


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """The one log whose roles put blobs into a folder."""

    cluster: str
    """Kafka's own id of it."""
    prefix: str
    """[kafka] prefix."""
    run: str

    @property
    def folder(self) -> str:
        """The run is part of it: clusters that earlier releases embedded share an id, and topics of a prefix may be
        made anew."""
        return (
            f"{OWNED}{quote(self.cluster, safe='')}/prefix={quote(self.prefix, safe='')}/run={quote(self.run, safe='')}"
        )

    @property
    def name(self) -> str:
        """Of the object that says so."""
        return f"{OWNERS}{self.folder.removeprefix(OWNED)}.json"

    def json(self) -> bytes:
        """What stands there."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def parsed(cls, name: str, content: bytes) -> Owner:
        """Raises BlobCorrupt for what `json` did not write."""
        try:
            found = cls(**{key: str(value) for key, value in json.loads(content).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise BlobCorrupt(f"{name} says of no folder whose it is ({error}): restore it from a copy") from error
        if found.name != name:
            raise BlobCorrupt(f"{name} is about {found.folder}: restore it from a copy")
        return found


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as the store lists it."""

    name: str
    size: int
    """Bytes."""
    modified: float
    """When it was last put, by the store's clock: seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects, and what the store's clock said before they were listed: seconds since 1970."""

    now: float
    objects: tuple[Listed, ...]


def key(sha256: str, folder: str = "") -> str:
    """The object's key: the first two hex digits spread objects over folders. `folder`: of its owner, if it has one."""
    return f"{folder}{'/' if folder else ''}blobs/{sha256[:2]}/{sha256}"


KEY = re.compile(rf"({TRASH})?(?:({OWNED}[^/]+/prefix=[^/]*/run=[^/]*)/)?blobs/[0-9a-f]{{2}}/([0-9a-f]{{64}})")
"""What `key` makes, also in the trash: (trash, folder, sha256)."""


CHECKPOINTS, MANIFEST = "checkpoints", "MANIFEST.json"
CHECKPOINT = re.compile(rf"(({OWNED}[^/]+/prefix=[^/]*/run=[^/]*)/{CHECKPOINTS}/step-[^/]+)/[^/]+")
"""A file of a checkpoint: (name of the checkpoint, folder of its owner)."""


class Blobs(Protocol):
    """Put always writes (so that a re-used blob becomes young); get always verifies length and hash, and looks
    wherever a blob may lie."""

    folder: str
    """Where `put` writes: of the run's owner, as soon as the role knows it (`runs.claimed`); empty: `blobs/`."""

    async def put(self, content: bytes, *, media_type: str = BINARY) -> BlobRef:
        """Store `content`; its key is derived from its sha256. Raises StoreUnavailable."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """The verified bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
        ...

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str = BINARY) -> BlobRef:
        """`put` of what a file holds, a piece at a time. `sha256`: of it, where the writer has hashed it on its way.
        Raises FileUnreadable, StoreUnavailable."""
        ...

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        """`get` into a new file, a piece at a time. What does not verify is removed again. Raises BlobMissing,
        BlobCorrupt, NoRoom, StoreUnavailable."""
        ...

    async def put_named(self, name: str, content: bytes, *, media_type: str = BINARY) -> None:
        """Store `content` under a name of the writer's choice (the archive: files that people look for by name), in
        one piece or not at all; what stood there is replaced. Raises StoreUnavailable."""
        ...

    async def get_named(self, name: str) -> bytes:
        """The bytes under a name, unverified: whoever names objects keeps their hashes. Raises BlobMissing,
        StoreUnavailable."""
        ...

    async def put_named_file(self, name: str, path: Path) -> BlobRef:
        """`put_named` of what a file holds, a piece at a time, hashed on its way: what `get_named_file` takes. Raises
        StoreUnavailable."""
        ...

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        """What is under a name into a new file, a piece at a time. What does not verify is removed again. Raises
        BlobMissing, BlobCorrupt, NoRoom, StoreUnavailable."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, sorted; empty when there is none. Raises StoreUnavailable."""
        ...

    async def listed(self, prefix: str) -> Listing:
        """Objects whose names begin with `prefix`, with their ages. Raises StoreUnavailable."""
        ...

    async def copy(self, name: str, to: str) -> None:
        """Put what is under `name` under another name, too, where it is as young as if it was put. Raises BlobMissing,
        StoreUnavailable."""
        ...

    async def remove(self, name: str) -> None:
        """Delete what is under a name; nothing is there: nothing happens. Raises StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileUnreadable(f"{path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that is being put: what it cannot give is not the store's silence."""

    path: Path
    file: BufferedReader

    def read(self, size: int = -1, /) -> bytes:
        """See BinaryIO. Raises FileUnreadable."""
        with _readable(self.path):
            return self.file.read(size)


@contextmanager
def _reading(path: Path) -> Iterator[tuple[Reading, int]]:
    """A file and how many bytes it has. Raises FileUnreadable."""
    with _readable(path):
        file = path.open("rb")
    with file:
        with _readable(path):
            size = os.fstat(file.fileno()).st_size
        yield Reading(path, file), size


class Folders(ABC):
    """Where a blob is put, and where it is looked for: the same over every store. Calls block."""

    def __init__(self) -> None:
        self.folder = ""
        self._last = ""
        """The folder in which a blob was found last: what is read together mostly lies together."""

    @abstractmethod
    def _read(self, name: str) -> bytes: ...

    @abstractmethod
    def _write(self, name: str, content: bytes, media_type: str) -> None: ...

    @abstractmethod
    def _pieces(self, name: str) -> AbstractContextManager[Iterable[bytes]]:
        """What `_read` gives, a piece at a time."""

    @abstractmethod
    def _write_file(self, name: str, file: Readable, size: int, media_type: str) -> None: ...

    @abstractmethod
    def _copy(self, name: str, to: str) -> None: ...

    @abstractmethod
    def _names(self, prefix: str) -> list[str]: ...

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
            self._found(ref, lambda name: self._saved(name, file))

    def _get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        with _appearing(path) as file:
            _check(name, self._saved(name, file), ref)

    def _saved(self, name: str, file: BinaryIO) -> tuple[int, str]:
        """(bytes, sha256) of what lies there, which is in the file then."""
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
                    raise NoRoom(f"{file.name}: {error.strerror}; make room there") from error
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

        self._found(ref, take)
        return content

    def _found(self, ref: BlobRef, take: Callable[[str], tuple[int, str]]) -> None:
        """`take` what is there first; it says (bytes, sha256) of what it took."""
        missing: BlobMissing | None = None
        for folder, name in self._places(ref.sha256):
            try:
                taken = take(name)
            except BlobMissing as error:
                missing = missing or error
                continue
            _check(name, taken, ref)
            if name.startswith(TRASH):
                log.warning("%s was in the trash and is needed: it is put back", name)
                self._copy(name, name.removeprefix(TRASH))
            self._last = folder
            return
        assert missing is not None, "there is one place at least"
        raise missing

    def _places(self, sha256: str) -> Iterator[tuple[str, str]]:
        """(folder, name) of every place where a blob may lie, the likely ones first: none of those needs a listing. A
        recording, an archive, a fork may name what another owner has put."""
        likely = dict.fromkeys((self._last, self.folder, ""))
        yield from _both(sha256, likely)
        owners = (name.removeprefix(OWNERS).removesuffix(".json") for name in self._names(OWNERS))
        yield from _both(sha256, [folder for owner in owners if (folder := OWNED + owner) not in likely])


def _check(name: str, taken: tuple[int, str], ref: BlobRef) -> None:
    """`taken`: (bytes, sha256) of what lies there. Raises BlobCorrupt."""
    if taken != (ref.size, ref.sha256):
        raise BlobCorrupt(
            f"{name}: {taken[0]} bytes do not hash to {ref.sha256} (expected {ref.size}); restore the object "
            "from a copy, or remove it and let its writer put it again"
        )


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which goes again when the block fails."""
    with path.open("xb", buffering=0) as file:  # what does not fit is known at its own write
        try:
            yield cast(BinaryIO, file)
        except BaseException:
            path.unlink()
            raise


class Readable(Protocol):
    """What an upload reads from."""

    def read(self, size: int = -1, /) -> bytes: ...


class _Hashing:
    """A file whose bytes are hashed as they are read, once, from its beginning."""

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
    """See Blobs. `objects` maps the sha256 of what lies below `blobs/`, `named` all other names to bytes, for tests
    that damage them."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.named: dict[str, bytes] = {}
        self.clock: Callable[[], float] = time.time
        self.times: dict[str, float] = {}
        """Name -> when it was last put."""
        self.point: Callable[[], None] = _nothing
        """Called before and after each put of a named object, copy, removal and listing: a place where a process may
        die (`MemoryLog.point`)."""

    async def put(self, content: bytes, *, media_type: str = BINARY) -> BlobRef:
        return self._put(content, media_type)

    async def get(self, ref: BlobRef) -> bytes:
        return self._get(ref)

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str = BINARY) -> BlobRef:
        return self._put_file(path, sha256, media_type)

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        self._get_file(ref, path)

    async def put_named(self, name: str, content: bytes, *, media_type: str = BINARY) -> None:
        self.point()
        self._write(name, content, media_type)
        self.point()

    async def get_named(self, name: str) -> bytes:
        return self._read(name)

    async def put_named_file(self, name: str, path: Path) -> BlobRef:
        self.point()
        ref = self._put_named_file(name, path)
        self.point()
        return ref

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        self._get_named_file(name, ref, path)

    async def names(self, prefix: str) -> list[str]:
        return self._names(prefix)

    async def listed(self, prefix: str) -> Listing:
        self.point()
        now = self.clock()
        names = self._names(prefix)
        found = tuple(Listed(name, len(self._read(name)), self.times.get(name, now)) for name in names)
        self.point()
        return Listing(now, found)

    async def copy(self, name: str, to: str) -> None:
        self.point()
        self._copy(name, to)
        self.point()

    async def remove(self, name: str) -> None:
        self.point()
        held, at = self._held(name)
        held.pop(at, None)
        self.point()

    async def close(self) -> None:
        """Nothing to release."""

    def _held(self, name: str) -> tuple[dict[str, bytes], str]:
        """Where a name stands."""
        sha256 = name.rpartition("/")[2]
        return (self.objects, sha256) if name == key(sha256) else (self.named, name)

    def _read(self, name: str) -> bytes:
        held, at = self._held(name)
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

    def _write(self, name: str, content: bytes, media_type: str) -> None:
        held, at = self._held(name)
        held[at] = content
        self.times[name] = self.clock()

    def _names(self, prefix: str) -> list[str]:
        return sorted(name for name in (*self.named, *map(key, self.objects)) if name.startswith(prefix))


def _nothing() -> None: ...


@functools.cache
def payload_fields(record: type) -> tuple[str, ...]:
    """Fields of a record that hold bytes or a reference to them."""
    return tuple(name for name, kind in field_types(record).items() if _is_payload(kind))


async def inlined(event: Event, blobs: Blobs) -> Event:
    """The event with every payload as bytes. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
    fetched: dict[str, Any] = {}
    for name in payload_fields(event.__class__):
        value = getattr(event, name)
        if isinstance(value, BlobRef):
            fetched[name] = await blobs.get(value)
    return dataclasses.replace(event, **fetched) if fetched else event


async def externalized(event: Event, blobs: Blobs, *, limit: int = INLINE_LIMIT_BYTES) -> Event:
    """The event with payloads above `limit` bytes in the store: blob first, then the event that names it."""
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
    """Expert ids by position, int32 [tokens - 1, layers, top_k]; row i was chosen where token i + 1 was predicted. Each
    blob is fetched once.

    Raises NoExperts, BrokenExperts, ExpertsDoNotCover (processors.core.experts); BlobMissing, BlobCorrupt,
    StoreUnavailable.
    """
    refs = list(dict.fromkeys(piece.rows for piece in sample.experts))
    contents = await asyncio.gather(*(blobs.get(ref) for ref in refs))
    return assembled(sample, {ref: unpacked(content) for ref, content in zip(refs, contents, strict=True)})


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow knows many more, and starts other programs for some."""


def opened_image(content: bytes, *, whole: bool = False) -> PIL.Image.Image:
    """Its head is read, and its pixels when they are asked for, or at once (`whole`). Raises ImageUnreadable."""
    import PIL.Image  # with the engine's extra: a gateway of text needs no image library

    try:
        with warnings.catch_warnings(action="ignore", category=PIL.Image.DecompressionBombWarning):
            image = PIL.Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        if whole:
            image.load()
    except PIL.Image.DecompressionBombError as error:
        raise ImageUnreadable(f"an image of {len(content)} bytes is too large: {error}") from None
    except Exception as error:  # it falls over foreign bytes in ways of its own
        raise ImageUnreadable(
            f"an image of {len(content)} bytes cannot be read ({error}); {', '.join(IMAGE_FORMATS)} are served"
        ) from None
    return image
