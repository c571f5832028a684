"""Weight files, fetched and checked before an engine sees them: SGLang loads wrong tensors and dies of short files.

BadWeights
├── TruncatedSafetensors   a file's length is not what its header says, or it has no header
├── TensorsMismatch        names differ from those of the engine's model
├── ShapeMismatch          a tensor has another shape than in the engine's model
├── DtypeMismatch          a tensor has another dtype than the event says
├── ChecksumMismatch       a file or tensor does not hash to what the event says
└── UnsafeName             a file name that would leave the folder
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.infra.blobs import BlobCorrupt, Blobs
from turnlog.schemas.events import WeightVersionPublished

HEADER_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}
TORCH_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
SUFFIX = ".safetensors"
PART = ".part"
KEPT = 2
"""Versions that stay on the engine's disk: the one served and the one before."""


class BadWeights(Exception):
    """Base of the tree above: the engine keeps its old weights."""


class TruncatedSafetensors(BadWeights):
    """Not a whole safetensors file."""


class TensorsMismatch(BadWeights):
    """A tensor is missing or unknown."""


class ShapeMismatch(BadWeights):
    """A tensor does not fit."""


class DtypeMismatch(BadWeights):
    """A tensor is of another type."""


class ChecksumMismatch(BadWeights):
    """The bytes are not those that the trainer exported."""


class UnsafeName(BadWeights):
    """File names in an event are plain names."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    content: memoryview


def parse_safetensors(name: str, content: bytes) -> dict[str, TensorEntry]:
    """Tensors of a file. Raises TruncatedSafetensors. Format: 8-byte little-endian header length, JSON header, data.

    Offsets must tile the data without gaps, as the reference implementation (safetensors, Rust) demands.
    """
    if len(content) < HEADER_LENGTH.size:
        raise TruncatedSafetensors(f"{name} has {len(content)} bytes")
    (length,) = HEADER_LENGTH.unpack_from(content)
    start = HEADER_LENGTH.size + length
    if length > MAX_HEADER_BYTES or start > len(content):
        raise TruncatedSafetensors(f"{name}: a header of {length} bytes in a file of {len(content)}")
    try:
        header: dict[str, Any] = json.loads(content[HEADER_LENGTH.size : start])
        entries = {key: value for key, value in header.items() if key != "__metadata__"}
        return _entries(name, entries, memoryview(content)[start:])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TruncatedSafetensors(f"{name}: the header cannot be read ({error!r})") from error


def _entries(name: str, header: Mapping[str, Any], data: memoryview) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    position = 0
    for key, value in sorted(header.items(), key=lambda item: int(item[1]["data_offsets"][0])):
        begin, end = value["data_offsets"]
        shape = tuple(int(size) for size in value["shape"])
        if begin != position or end - begin != math.prod(shape) * ITEM_BYTES[value["dtype"]]:
            raise TruncatedSafetensors(f"{name}: {key} of shape {shape} lies at {begin}..{end}, expected {position}")
        entries[key] = TensorEntry(value["dtype"], shape, data[begin:end])
        position = end
    if position != len(data):
        raise TruncatedSafetensors(f"{name} holds {len(data)} bytes of data, its header speaks of {position}")
    return entries


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of the engine's model folder. Reads headers only. Raises FileNotFoundError."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"{folder} has no {SUFFIX} file; [model] path must be the folder that engines serve")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as stream:
            (length,) = HEADER_LENGTH.unpack(stream.read(HEADER_LENGTH.size))
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(value["shape"]) for name, value in header.items()}
    return shapes


async def fetch(event: WeightVersionPublished, blobs: Blobs) -> dict[str, bytes]:
    """Every file of the version by name. Raises ChecksumMismatch, UnsafeName, BlobMissing, StoreUnavailable."""
    contents: dict[str, bytes] = {}
    for file in event.files:
        if file.name != Path(file.name).name or file.name in ("", ".", ".."):
            raise UnsafeName(f"version {event.version} names a file {file.name!r}")
        try:
            contents[file.name] = await blobs.get(file.blob)
        except BlobCorrupt as error:
            raise ChecksumMismatch(f"version {event.version}, {file.name}: {error}") from error
    return contents


def verify(
    event: WeightVersionPublished, contents: Mapping[str, bytes], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Everything that SGLang does not check. `expected`: names and shapes of the engine's model. Raises BadWeights."""
    tensors: dict[str, TensorEntry] = {}
    for name, content in contents.items():
        if name.endswith(SUFFIX):
            tensors |= parse_safetensors(name, content)
    differing = sorted(tensors.keys() ^ expected.keys()) or sorted(tensors.keys() ^ event.checksums.keys())
    if differing:
        raise TensorsMismatch(
            f"version {event.version}: {len(differing)} tensors are missing or unknown, the first is {differing[0]}"
        )
    wanted_dtype = TORCH_NAMES.get(event.dtype)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            raise ShapeMismatch(f"version {event.version}: {name} is {tensor.shape}, the model has {expected[name]}")
        if tensor.dtype != wanted_dtype:
            raise DtypeMismatch(f"version {event.version}: {name} is {tensor.dtype}, the event says {event.dtype}")
        found = f"{hashlib.sha256(tensor.content).hexdigest()}:{'x'.join(map(str, tensor.shape))}"
        if found != event.checksums[name]:
            raise ChecksumMismatch(f"version {event.version}: {name} is {found}, published {event.checksums[name]}")


def write(contents: Mapping[str, bytes], directory: Path, version: int) -> Path:
    """A folder of the version under `directory`, complete or absent; those of all versions but the KEPT newest go.

    Its name is nobody else's: another loader of the engine, dead or not, never changes what the engine is reading."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{version}-", suffix=PART, dir=directory))
    folder.chmod(0o755)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    folder = folder.rename(folder.with_suffix(""))
    found = {path: int(path.name.partition("-")[0]) for path in directory.iterdir() if path.name[0].isdecimal()}
    newest = sorted({*found.values()} - {version})[1 - KEPT :]
    for path, of_version in found.items():
        if of_version not in (*newest, version):
            shutil.rmtree(path, ignore_errors=True)
    return folder
