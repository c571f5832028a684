"""Deltas between two safetensors files with the same tensors. Their bytes are XORed and compressed by zstd; the first
bytes of all values precede the second bytes, and so on, because small steps leave the high bytes unchanged.

A delta consists of its frames one after another, JSON, the length of the JSON as u64, and MAGIC. The JSON is {"header":
the new file's header, "frames": {tensor: [bytes of each piece's frame, 0 if unchanged]}}. Neither side has more than a
few pieces in memory.

BrokenDelta   not a delta, or not a delta of this base
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnlog.infra.tensors.files import WIDTHS, ShardFile, TensorPosition, TensorSpec, pieces, places, tensor_places
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than

SUFFIX = ".delta"
MAGIC = b"TLDELTA1"
ZSTD = pa.Codec("zstd", compression_level=1)


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

    def count(self, code: str, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Count one more piece."""
        kind = np.dtype(f"<u{WIDTHS[code]}")
        old, new = before.view(kind), after.view(kind)
        self.values += len(new)
        self.same += int(np.count_nonzero(old == new))
        if code == "F32":
            self.float32 += len(new)
            self.as_bfloat16 += int(np.count_nonzero(_round_bfloat16(old) == _round_bfloat16(new)))

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
    frames: dict[str, list[int]] = {}
    with base.open("rb") as old, new.open("rb") as current, out.open("wb") as file:
        for left, right in zip(before, after, strict=True):
            frames[right.spec.name] = found = []
            for one, other in zip(_arrays(old, left), _arrays(current, right), strict=True):
                unchanged.count(right.spec.code, one, other)
                frame = _frame(one ^ other, WIDTHS[right.spec.code])
                found.append(len(frame))
                file.write(frame)
        current.seek(0)
        (length,) = struct.unpack("<Q", current.read(8))
        index = json.dumps({"header": current.read(length).decode(), "frames": frames}).encode()
        file.write(index + struct.pack("<Q", len(index)) + MAGIC)


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
            file.seek(0)
            with ShardFile(out, specs) as made:
                for spec in specs:
                    made.add(spec, _apply_frames(old, before[spec.name], file, frames[spec.name]))
            return [(spec, made.checksums[spec.name]) for spec in specs]
    except BrokenDelta:
        raise
    # An index of other types, a frame that is not zstd and an empty header each raise a different exception.
    except Exception as error:
        raise BrokenDelta(f"{delta.name} on {base}: {type(error).__name__}: {error}") from error


def _apply_frames(old: BinaryIO, place: TensorPosition, file: BinaryIO, frames: list[int]) -> Iterator[memoryview]:
    for before, size in zip(_arrays(old, place), frames, strict=True):
        change = _unpack_frame(file.read(size), len(before), WIDTHS[place.spec.code]) if size else np.uint8(0)
        yield (before ^ change).data


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


def _arrays(file: BinaryIO, place: TensorPosition) -> Iterator[NDArray[np.uint8]]:
    for content in pieces(file, place.begin, place.end):
        yield np.frombuffer(content, np.uint8)


def _frame(changed: NDArray[np.uint8], width: int) -> bytes:
    if not changed.any():
        return b""
    planes = np.ascontiguousarray(changed.reshape(-1, width).T)
    return bytes(ZSTD.compress(planes.tobytes(), asbytes=True))


def _unpack_frame(frame: bytes, size: int, width: int) -> NDArray[np.uint8]:
    planes = np.frombuffer(ZSTD.decompress(frame, decompressed_size=size, asbytes=True), np.uint8)
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)
