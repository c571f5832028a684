"""Deltas between two safetensors files with the same tensors. Their bytes are XORed and compressed by zstd; the first
bytes of all values precede the second bytes, and so on, because small steps leave the high bytes unchanged.

A delta consists of its frames one after another, JSON, the length of the JSON as u64, and MAGIC. The JSON is {"header":
the new file's header, "frames": {tensor: [bytes of each piece's frame, 0 if unchanged]}}. Neither side has more than a
few pieces in memory.

BrokenDelta   not a delta, or not a delta of this base
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnlog.infra.tensors.files import (
    PIECE,
    WIDTHS,
    NotSafetensors,
    ShardFile,
    TensorPosition,
    TensorSpec,
    places,
    tensor_places,
)
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than

SUFFIX = ".delta"
MAGIC = b"TLDELTA1"
ZSTD = pa.Codec("zstd", compression_level=1)


Bytes = NDArray[np.uint8]
S = TypeVar("S")
T = TypeVar("T")
THREADS = 4
"""Number of pieces that are computed at once."""
BLOCK = 1 << 18
"""Bytes that are computed at once within a piece, so that they stay in a core's cache."""


class BrokenDelta(Exception):
    """The delta cannot be applied; the message names the file and the reason."""


@dataclass(slots=True)
class Unchanged:
    """Counts of values that are identical in two files, bit for bit."""

    values: int = 0
    same: int = 0
    as_bfloat16: int = 0
    """Number of float32 values that would be identical after rounding to bfloat16."""
    float32: int = 0

    def count(self, code: str, before: Bytes, changed: Bytes) -> int:
        """Count one more piece, given its bytes before and the XOR of these with those after. Return the number of
        values that differ."""
        kind = np.dtype(f"<u{WIDTHS[code]}")
        differ = np.count_nonzero(changed.view(kind))
        self.values += changed.nbytes // kind.itemsize
        self.same += changed.nbytes // kind.itemsize - int(differ)
        if code == "F32":
            old = before.view(kind)
            self.float32 += len(old)
            self.as_bfloat16 += int(np.count_nonzero(_round_bfloat16(old) == _round_bfloat16(old ^ changed.view(kind))))
        return int(differ)

    def __iadd__(self, other: Unchanged) -> Unchanged:
        self.values += other.values
        self.same += other.same
        self.as_bfloat16 += other.as_bfloat16
        self.float32 += other.float32
        return self

    def shares(self) -> dict[str, float]:
        """Return the shares of identical values. "published": among all, in their own types; "bfloat16": among the
        float32 values, if they were published as bfloat16."""
        found = {"published": self.same / self.values} if self.values else {}
        return found | ({"bfloat16": self.as_bfloat16 / self.float32} if self.float32 else {})


def _round_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    """Round float32 bits to bfloat16: to the nearest value, ties to even."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


class _Index(msgspec.Struct):
    """The JSON after the frames."""

    header: str
    frames: dict[str, list[Annotated[int, msgspec.Meta(ge=0)]]]


def write_delta(base: Path, new: Path, out: Path, unchanged: Unchanged) -> None:
    """Write the delta that turns `base` into `new`. Raises BrokenDelta if they do not have the same tensors. Raises
    NotSafetensors."""
    before, after = places(base), places(new)
    if [place.spec for place in before] != [place.spec for place in after]:
        raise BrokenDelta(f"{new} has other tensors than {base}")
    frames: dict[str, list[int]] = {place.spec.name: [] for place in after}
    with base.open("rb") as old, new.open("rb") as current, out.open("wb") as file:

        def frame_of(piece: tuple[TensorSpec, int, int, int]) -> tuple[str, bytes, Unchanged]:
            spec, begin, at, size = piece
            before, changed, planes = (_buffer(name, size) for name in ("before", "changed", "planes"))
            _read_into(old, begin, before)
            _read_into(current, at, changed)
            return spec.name, *_compress(spec.code, before, changed, planes)

        pieces = (
            (right.spec, left.begin + at, right.begin + at, min(PIECE, left.end - left.begin - at))
            for left, right in zip(before, after, strict=True)
            for at in range(0, left.end - left.begin, PIECE)
        )
        for name, frame, counts in _in_threads(frame_of, pieces):
            frames[name].append(len(frame))
            file.write(frame)
            unchanged += counts
        current.seek(0)
        (length,) = struct.unpack("<Q", current.read(8))
        index = json.dumps({"header": current.read(length).decode(), "frames": frames}).encode()
        file.write(index + struct.pack("<Q", len(index)) + MAGIC)


def _compress(code: str, before: Bytes, changed: Bytes, planes: Bytes) -> tuple[bytes, Unchanged]:
    """Return the frame of a piece and its counts. `changed` holds the bytes after; `planes` is filled."""
    counts, width = Unchanged(), WIDTHS[code]
    of_plane = planes.reshape(width, -1)
    differ = 0
    for at in range(0, len(changed), BLOCK):
        block = changed[at : at + BLOCK]
        np.bitwise_xor(block, before[at : at + BLOCK], out=block)
        differ += counts.count(code, before[at : at + BLOCK], block)
        values = block.view(f"<u{width}")
        for plane in of_plane[:, at // width : at // width + len(values)]:
            np.copyto(plane, values, casting="unsafe")  # the lowest byte
            np.right_shift(values, np.array(8, values.dtype), out=values)
    return bytes(ZSTD.compress(pa.py_buffer(planes), asbytes=True)) if differ else b"", counts


def apply_delta(base: Path, delta: Path, out: Path) -> list[tuple[TensorSpec, str]]:
    """Write the new file and return its tensors with the checksums of the bytes written. The caller must compare the
    checksums to know that it is the intended file. Raises BrokenDelta."""
    try:
        with base.open("rb") as old, delta.open("rb") as file:
            header, frames = _index(file)
            specs = [place.spec for place in header]
            before = {place.spec.name: place for place in places(base)}
            if {place.spec for place in before.values()} != set(specs):
                raise BrokenDelta(f"{delta.name} was made from other tensors than those of {base}")
            with ShardFile(out, specs) as made, ThreadPoolExecutor(THREADS, "delta") as pool:
                offset = 0
                for spec in specs:
                    made.add(spec, _apply_frames(pool, old, before[spec.name], file, offset, frames[spec.name]))
                    offset += sum(frames[spec.name])
            return [(spec, made.checksums[spec.name]) for spec in specs]
    except BrokenDelta:
        raise
    # An index of other types, a frame that is not zstd and an empty header each raise a different exception.
    except Exception as error:
        raise BrokenDelta(f"{delta.name} on {base}: {type(error).__name__}: {error}") from error


def _apply_frames(
    pool: Executor, old: BinaryIO, place: TensorPosition, file: BinaryIO, offset: int, frames: list[int]
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor piece by piece; its frames begin at `offset` of the delta."""
    starts = range(place.begin, place.end, PIECE)
    offsets = itertools.accumulate(frames, initial=offset)

    def rebuild(piece: tuple[int, int, int]) -> memoryview:
        at, begin, size = piece
        content = np.empty(min(PIECE, place.end - begin), np.uint8)
        _read_into(old, begin, content)
        if size:
            frame = np.empty(size, np.uint8)
            _read_into(file, at, frame)
            _apply_frame(frame, content, WIDTHS[place.spec.code])
        return content.data

    if len(starts) != len(frames):
        raise ValueError(f"{place.spec.name} has {len(frames)} frames, its bytes {len(starts)} pieces")
    yield from _in_threads(rebuild, zip(offsets, starts, frames, strict=False), pool)


def _apply_frame(frame: Bytes, content: Bytes, width: int) -> None:
    """Change a piece in place."""
    found = ZSTD.decompress(pa.py_buffer(frame), decompressed_size=len(content))
    planes = np.frombuffer(found, np.uint8).reshape(width, -1)
    values = content.view(f"<u{width}")
    block = BLOCK // width
    changed, more = (np.empty(min(block, len(values)), values.dtype) for _ in range(2))
    for at in range(0, len(values), block):
        of_block = planes[:, at : at + block]
        count = of_block.shape[1]
        changed[:count] = of_block[-1]
        for plane in of_block[-2::-1]:
            np.left_shift(changed[:count], np.array(8, values.dtype), out=changed[:count])
            more[:count] = plane
            np.bitwise_or(changed[:count], more[:count], out=changed[:count])
        np.bitwise_xor(values[at : at + count], changed[:count], out=values[at : at + count])


def _in_threads(work: Callable[[S], T], items: Iterable[S], pool: Executor | None = None) -> Iterator[T]:
    """Yield results in order, with few of them in memory."""
    with ExitStack() as stack:
        pool = pool or stack.enter_context(ThreadPoolExecutor(THREADS, "delta"))
        begun: deque[Future[T]] = deque()
        for item in items:
            if len(begun) == THREADS:
                yield begun.popleft().result()
            begun.append(pool.submit(work, item))
        while begun:
            yield begun.popleft().result()


_memory = threading.local()


def _buffer(name: str, size: int) -> Bytes:
    """Return memory that this thread uses again and again: new memory costs a fault for each page."""
    if not hasattr(_memory, name):
        setattr(_memory, name, np.empty(PIECE, np.uint8))
    found: Bytes = getattr(_memory, name)[:size]
    return found


def _read_into(file: BinaryIO, begin: int, content: Bytes) -> None:
    """Read the bytes of a file from `begin`. Raises NotSafetensors if the file ends early."""
    left = content.data
    while left:
        count = os.preadv(file.fileno(), [left], begin)
        if not count:
            raise NotSafetensors(f"{file.name} ended at byte {begin} while it was read")
        left, begin = left[count:], begin + count


def _index(file: BinaryIO) -> tuple[tuple[TensorPosition, ...], dict[str, list[int]]]:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 16))
    length, magic = struct.unpack("<Q8s", file.read(16))
    if magic != MAGIC or length > end - 16:
        raise ValueError("it does not end as a delta file does")
    file.seek(end - 16 - length)
    text = file.read(length)
    if deeper_than(text):
        raise ValueError(f"its index is nested deeper than {MAX_DEPTH} levels")
    index = msgspec.json.decode(text, type=_Index)
    held = sum(size for frames in index.frames.values() for size in frames)
    if held != end - 16 - length:
        raise ValueError(f"its index says that its frames take {held} bytes, but they take {end - 16 - length}")
    if deeper_than(index.header):
        raise ValueError(f"its header is nested deeper than {MAX_DEPTH} levels")
    return tensor_places(index.header.encode()), index.frames
