"""A published weight version as a folder: files are fetched in pieces, deltas are applied to their base, and everything
that the event states is verified, because an engine does not check it. WeightFolders is the disk that a machine's
loaders share.

BadWeights   SGLang would load wrong tensors and die of short files
├── TruncatedSafetensors   a file's length does not match its header, or it has no header
├── TensorsMismatch        names differ from those of the engine's model
├── ShapeMismatch          a tensor has another shape than in the engine's model
├── QuantizedModel         the engine's model is quantized, published weights never are
├── DtypeMismatch          a tensor has another dtype than the event states
├── BaseMissing            no event describes the base of a delta
├── WrongBase              a delta does not match the contents of its base
├── DigestMismatch         a tensor that training ranks sent is not the one that was announced
├── ChecksumMismatch       a file or tensor does not hash to the value in the event
└── UnsafeName             a file name that would leave the folder
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from turnlog.infra.blobs import BlobCorrupt, Blobs
from turnlog.infra.tensors import deltas
from turnlog.infra.tensors.files import CODES, SUFFIX, NotSafetensors, TensorSpec, read_checksums
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.events.weights import WeightFile

log = logging.getLogger(__name__)
Chain = Sequence[WeightVersionPublished]
AT_ONCE = 4
"""Number of a version's files that are fetched or hashed concurrently."""


class BadWeights(Exception):
    """Base class of all errors of weights; see the module docstring. The engine keeps its old weights."""


class TruncatedSafetensors(BadWeights):
    """The file is not a complete safetensors file."""


class TensorsMismatch(BadWeights):
    """A tensor is missing or unknown."""


class ShapeMismatch(BadWeights):
    """The shape of a tensor differs from the model's."""


class QuantizedModel(BadWeights):
    """The engine loaded quantized weights, and takes no others. Remedy: serve the model in bfloat16."""


class DtypeMismatch(BadWeights):
    """The type of a tensor differs from the event's."""


class BaseMissing(BadWeights):
    """A chain of deltas does not begin with full weights."""


class WrongBase(BadWeights):
    """The delta or its base is not the one expected."""


class ChecksumMismatch(BadWeights):
    """The bytes are not those that the trainer exported."""


class DigestMismatch(BadWeights):
    """An engine received other bytes than those that the trainer announced."""


class UnsafeName(BadWeights):
    """A file name in an event is not a plain name."""


def check_names(event: WeightVersionPublished, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Check that a version has the tensors `wanted` and no others. Raises TensorsMismatch."""
    if differing := sorted(set(found) ^ set(wanted)):
        raise TensorsMismatch(
            f"version {event.version}: {len(differing)} tensors are missing or unknown, the first is {differing[0]}"
        )


def chain_of(event: WeightVersionPublished, known: Mapping[int, WeightVersionPublished]) -> Chain:
    """Return the versions on which the event rests, oldest first, and the event itself. The first has full weights; the
    others are deltas, each of the previous one, or an adapter of it. Raises BaseMissing."""
    chain = [event]
    while (first := chain[0]).kind != "full":
        base = known.get(-1 if first.base_version is None else first.base_version)
        fits = first.kind == "delta" or (first.kind == "adapter" and base is not None and base.kind == "full")
        if not fits or base is None or base.version >= first.version:
            raise BaseMissing(
                f"version {event.version} builds on version {first.version} ({first.kind} of {first.base_version}), "
                "which is not available here; wait for the next full version"
            )
        chain.insert(0, base)
    return chain


@dataclass(slots=True)
class Timer:
    """Durations in seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, even if it fails."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add to the seconds of a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


async def nothing(_: Path) -> None:
    """Do nothing: for callers that wait until all files are fetched."""


async def obtain(
    event: WeightVersionPublished, blobs: Blobs, folder: Path, base: Path | None, timer: Timer
) -> tuple[TensorSpec, ...]:
    """Fetch the version's files into an empty folder, apply its deltas to `base`, verify everything against the event,
    and return its tensors.

    Files are verified while others are fetched. The time until the last file has arrived counts as "fetch", the time
    after it as "verify". Raises BadWeights, BlobError.
    """
    began = there = time.monotonic()
    verification = Verification(event, base)

    async def on_file(path: Path) -> None:
        nonlocal there
        there = time.monotonic()
        await verification.hash_file(path)

    try:
        await fetch(event, blobs, folder, on_file)
        return verification.check()
    finally:
        timer.add("fetch", there - began)
        timer.add("verify", time.monotonic() - there)


async def fetch(
    event: WeightVersionPublished, blobs: Blobs, folder: Path, landed: Callable[[Path], Awaitable[None]] = nothing
) -> None:
    """Fetch every file of the version into an empty folder. `landed` is called with each file as it arrives. Raises
    ChecksumMismatch, UnsafeName, BlobMissing, NoRoom, StoreUnavailable, and the errors of `landed`."""
    for file in event.files:
        if file.name != Path(file.name).name or file.name in ("", ".", ".."):
            raise UnsafeName(f"version {event.version} contains an unsafe file name: {file.name!r}")
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(file: WeightFile) -> None:
        async with limit:
            try:
                await blobs.get_file(file.blob, folder / file.name)
            except BlobCorrupt as error:
                raise ChecksumMismatch(f"version {event.version}, {file.name}: {error}") from error
        await landed(folder / file.name)

    results = await asyncio.gather(*map(one, event.files), return_exceptions=True)  # afterwards nothing writes there
    for failure in filter(None, results):
        raise failure


class Verification:
    """Verification of a version's files as they arrive."""

    def __init__(self, event: WeightVersionPublished, base: Path | None) -> None:
        """`base` is the folder to which deltas are applied."""
        self._event, self._base = event, base
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._found: list[tuple[TensorSpec, str]] = []

    async def hash_file(self, path: Path) -> None:
        """Hash the tensors of a file; a delta is first applied to its base. Raises TruncatedSafetensors, WrongBase."""
        async with self._limit:
            try:
                if path.suffix == SUFFIX:
                    self._found += await asyncio.to_thread(lambda: list(read_checksums(path)))
                elif path.suffix == deltas.SUFFIX and self._base is not None:
                    self._found += await asyncio.to_thread(rebuilt, self._base, path)
            except NotSafetensors as error:
                raise TruncatedSafetensors(str(error)) from error
            except deltas.BrokenDelta as error:
                raise WrongBase(str(error)) from error

    def check(self) -> tuple[TensorSpec, ...]:
        """Check that the files have exactly the version's tensors, byte for byte, and return them. Raises
        TensorsMismatch, DtypeMismatch, ChecksumMismatch."""
        event = self._event
        check_names(event, [spec.name for spec, _ in self._found], event.checksums)
        for spec, checksum in self._found:
            dtype = event.dtypes.get(spec.name, event.dtype)
            if spec.code != CODES.get(dtype):
                raise DtypeMismatch(f"version {event.version}: {spec.name} is {spec.code}, the event says {dtype}")
            if checksum != event.checksums[spec.name]:
                raise ChecksumMismatch(
                    f"version {event.version}: {spec.name} is {checksum}, published {event.checksums[spec.name]}"
                )
        return tuple(spec for spec, _ in self._found)


def rebuilt(base: Path, delta: Path) -> list[tuple[TensorSpec, str]]:
    """Replace a delta by the file that results from applying it to the base's, and return its tensors. Raises
    BrokenDelta."""
    name = delta.name.removesuffix(deltas.SUFFIX)
    found = deltas.apply_delta(base / name, delta, delta.with_name(name))
    delta.unlink()
    return found


@dataclass(slots=True)
class Held:
    """A locked folder. It is not removed until the lock is released or the process ends."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


PART, ALTERED = ".part", ".altered"
"""Suffixes of folders that must not be loaded."""
TURN, SEAL = ".fetching", ".verified"
LOOK_S, PATIENCE_S = 0.1, 5.0
KEPT = 2
"""Number of newest versions that are retained without a lock."""


class WeightFolders:
    """Weight versions on the disk of one machine.

    The first process that needs a version fetches it while the others wait. A folder is complete or absent, and its
    contents never change. Locks are kernel locks, so that those of a dead process are free.
    """

    def __init__(
        self, directory: Path, blobs: Blobs, *, patience_s: float = PATIENCE_S, beat: Callable[[], None] = lambda: None
    ) -> None:
        """`patience_s`: a fetching process that shows no sign of life for longer is not waited for. `beat` is called
        while waiting for other processes, and between versions."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._blobs, self._patience_s, self._beat = directory, blobs, patience_s, beat

    async def obtain_folder(self, chain: Chain, timer: Timer) -> Held:
        """Return the locked folder of the chain's last version, fetching what is missing. Raises BadWeights,
        BlobError."""
        began = time.monotonic()
        async with self._turn():
            timer.seconds |= {"fetch": time.monotonic() - began, "verify": 0.0}
            return self.find_folder(chain[-1]) or await self._make_folder(chain, timer)

    async def _make_folder(self, chain: Chain, timer: Timer) -> Held:
        at, base = self._nearest(chain)
        if base is None:
            return await self._build_chain(chain, None, timer)
        try:
            found = await self._build_chain(chain[at + 1 :], base, timer)
        except (ChecksumMismatch, WrongBase, TruncatedSafetensors) as error:
            self._disown(base, error)
            return await self._build_chain(chain, None, timer)
        except BaseException:
            base.release()
            raise
        base.release()
        return found

    def _nearest(self, chain: Chain) -> tuple[int, Held | None]:
        """Return the index and folder of the newest base that is on disk, or (-1, None)."""
        for at in reversed(range(len(chain) - 1)):
            if (found := self.find_folder(chain[at])) is not None:
                return at, found
        return -1, None

    async def _build_chain(self, chain: Chain, base: Held | None, timer: Timer) -> Held:
        """Build the chain's versions one by one on `base`, and return the last one's folder. `base` itself
        stays locked."""
        given = base
        for event in chain:
            self._beat()
            made = self._begin_folder(event.version)
            try:
                await obtain(event, self._blobs, made.path, None if base is None else base.path, timer)
                seal(made.path, event.event_id)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, made.path)
                made.release()
                if base is not None and base is not given:
                    base.release()
                raise
            if base is not None and base is not given:
                base.release()
            base = Held(made.path.rename(made.path.with_suffix("")), made.descriptor)
        assert base is not None, "a chain is not empty"
        await asyncio.to_thread(self._prune)
        return base

    def _begin_folder(self, version: int) -> Held:
        part = Path(tempfile.mkdtemp(prefix=f"{version}-", suffix=PART, dir=self._directory))
        part.chmod(0o755)
        descriptor = _open_locked(part, fcntl.LOCK_SH)
        assert descriptor is not None, "its name is nobody else's"
        return Held(part, descriptor)

    def find_folder(self, event: WeightVersionPublished) -> Held | None:
        """Return the locked folder of this version, or None. A folder of another run with the same version number is
        not used."""
        for path in self._directory.glob(f"{event.version}-*"):
            if path.suffix in (PART, ALTERED) or (held := hold(path)) is None:
                continue
            if is_finalized(path, event.event_id):
                return held
            self._disown(held, "its files were modified, or belong to another run")
        return None

    def _disown(self, held: Held, why: object) -> None:
        log.warning("%s has changed and is not used (%s)", held.path, why)
        held.path.rename(held.path.with_name(held.path.name + ALTERED))
        held.release()

    def _prune(self) -> None:
        """Remove folders that no process has locked: versions other than the KEPT newest, and folders that must not
        be loaded."""
        found = {path: int(path.name.partition("-")[0]) for path in self._directory.glob("[0-9]*-*")}
        newest = sorted({version for path, version in found.items() if not path.suffix})[-KEPT:]
        for path, version in found.items():
            if path.suffix or version not in newest:
                descriptor = _open_locked(path, fcntl.LOCK_EX)
                if descriptor is not None:
                    shutil.rmtree(path)
                    os.close(descriptor)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the right to fetch. One process fetches at a time, but one that shows no sign of life is not
        waited for."""
        descriptor = os.open(self._directory / TURN, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            moved, seen = time.monotonic(), -1
            while not _lock(descriptor, fcntl.LOCK_EX):
                self._beat()
                if (said := os.fstat(descriptor).st_mtime_ns) != seen:
                    moved, seen = time.monotonic(), said
                if time.monotonic() - moved > self._patience_s:
                    log.warning(
                        "the process that fetches into %s shows no sign of life: no longer waiting for it",
                        self._directory,
                    )
                    break
                await asyncio.sleep(LOOK_S)
            alive = asyncio.create_task(_alive(descriptor))
            try:
                yield
            finally:
                alive.cancel()
        finally:
            os.close(descriptor)


async def _alive(descriptor: int) -> None:
    """Update the file's modification time until cancelled, as a sign of life."""
    while True:
        os.utime(descriptor)
        await asyncio.sleep(LOOK_S)


def hold(folder: Path) -> Held | None:
    """Lock a folder against removal. Returns None if it is gone or being removed."""
    descriptor = _open_locked(folder, fcntl.LOCK_SH)
    return None if descriptor is None else Held(folder, descriptor)


def seal(folder: Path, event_id: str) -> None:
    """Record that the files in their present state are those of the WeightVersionPublished with that id."""
    (folder / SEAL).write_text(json.dumps({"event_id": event_id, "files": _state(folder)}))


def is_finalized(folder: Path, event_id: str) -> bool:
    """Return True if the files are those of that event, and none has changed since they were verified."""
    try:
        found: object = json.loads((folder / SEAL).read_bytes())
    except (OSError, ValueError):
        return False
    return found == {"event_id": event_id, "files": _state(folder)}


def _state(folder: Path) -> dict[str, list[int]]:
    """Return sizes and times of the files. The time of a file's last change (ctime) cannot be set by a program."""
    stats = {path.name: path.stat() for path in folder.iterdir() if path.name != SEAL}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in sorted(stats.items())}


def _open_locked(path: Path, kind: int) -> int | None:
    """Open a folder and lock it. Returns None if it is gone, or has a conflicting lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        if _lock(descriptor, kind) and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except FileNotFoundError:  # it was removed before the lock was obtained
        pass
    os.close(descriptor)
    return None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def assemble_version(chain: Chain, blobs: Blobs, folder: Path) -> tuple[TensorSpec, ...]:
    """Build the chain's last version in an empty folder and return its tensors; for an adapter, only the adapter's own
    files. Raises BadWeights, BlobError."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        base: Path | None = None
        for event in chain:
            into = folder if event is chain[-1] else Path(beside) / str(event.version)
            os.makedirs(into, exist_ok=True)
            found, base = await obtain(event, blobs, into, base, Timer()), into
    return found
