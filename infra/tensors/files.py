"""Streaming of safetensors files. Tensors are written one after another behind a header that states their positions in
advance, and are read back one at a time, so that no file is ever in memory as a whole.

The safetensors library takes all tensors of a file at once, in copies. Only its checks of a header are used.

NotSafetensors   a file's length does not match its header, or it has no header
NoWeights        a folder does not state which files have its weights, or lacks one of them
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from safetensors import SafetensorError, safe_open

SUFFIX = ".safetensors"
MODEL = "model"
"""Prefix of the names of files."""
SHARD_BYTES = 4 << 30
PIECE = 4 << 20
"""Bytes that are read at once; a whole number of values of any type."""
METADATA = {"format": "pt"}
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of types in torch -> in safetensors."""
DTYPES = {code: name for name, code in CODES.items()}
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value."""


class NotSafetensors(Exception):
    """The file is not a valid safetensors file; the message states why."""


class NoWeights(Exception):
    """The folder's weights cannot be found; the message names the folder and what is missing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a tensor."""

    name: str
    code: str
    """Type, as a value of CODES."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.code]


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """Position of a tensor in its file."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Written:
    """Contents of a folder of weights."""

    sha256: dict[str, str]
    """File name -> sha256."""
    checksums: dict[str, str]
    """Tensor name -> checksum; see `checksum`."""
    specs: tuple[TensorSpec, ...]
    """All tensors, in order."""

    @property
    def dtypes(self) -> set[str]:
        """Set of the types, by torch's names."""
        return {DTYPES[spec.code] for spec in self.specs}

    @property
    def parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)


def checksum(digest: str, shape: Sequence[int]) -> str:
    """Return a checksum in the format of WeightVersionPublished: "<hex>:2x3"."""
    return f"{digest}:{'x'.join(map(str, shape))}"


def places(path: Path) -> tuple[TensorPosition, ...]:
    """Return every tensor of the file, in the order of their bytes. Raises NotSafetensors, also if the header does not
    cover all bytes."""
    size = path.stat().st_size
    try:
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise NotSafetensors(f"{path.name} of {size} bytes: {error}") from error
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return tensor_places(file.read(length))


def tensor_places(header: bytes) -> tuple[TensorPosition, ...]:
    """Return every tensor of a valid header, in the order of their bytes."""
    behind = 8 + len(header)
    found = [
        TensorPosition(
            TensorSpec(name, entry["dtype"], tuple(entry["shape"])),
            *(behind + offset for offset in entry["data_offsets"]),
        )
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    ]
    return tuple(sorted(found, key=lambda place: (place.begin, place.end)))


def header_of(specs: Sequence[TensorSpec]) -> bytes:
    """Return the header of a file with these tensors in this order. The same tensors give the same bytes."""
    entries: dict[str, object] = {"__metadata__": METADATA}
    offset = 0
    for spec in specs:
        ends = [offset, offset := offset + spec.nbytes]
        entries[spec.name] = {"dtype": spec.code, "shape": list(spec.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `begin` to `end`, PIECE at a time. Raises NotSafetensors if the file ends
    early."""
    file.seek(begin)
    while begin < end:
        content = file.read(min(PIECE, end - begin))
        if not content:
            raise NotSafetensors(f"{file.name} ended at byte {begin} while it was read")
        begin += len(content)
        yield content


class ShardFile:
    """A safetensors file that is being written, as a context manager. Its tensors are added in the order of `specs`,
    each in one piece or several."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._file = path.open("wb")
        self._running = hashlib.sha256()
        self._beside = ThreadPoolExecutor(1, "sha256")
        """Thread that hashes the file while the caller's thread hashes a tensor and writes."""
        self.checksums: dict[str, str] = {}
        header = header_of(specs)
        self._put(struct.pack("<Q", len(header)) + header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._beside.shutdown()
        self._file.close()

    def _put(self, content: bytes | memoryview, of_tensor: Any = None) -> None:
        hashed = self._beside.submit(self._running.update, content)
        if of_tensor is not None:
            of_tensor.update(content)
        self._file.write(content)
        hashed.result()

    def add(self, spec: TensorSpec, content: Iterable[bytes | memoryview]) -> None:
        """Write the next tensor. Raises ValueError if its size is wrong."""
        of_tensor, count = hashlib.sha256(), 0
        for piece in content:
            self._put(piece, of_tensor)
            count += len(piece)
        if count != spec.nbytes:
            raise ValueError(f"{spec.name} has {count} bytes, but the header gives it {spec.nbytes}")
        self.checksums[spec.name] = checksum(of_tensor.hexdigest(), spec.shape)

    @property
    def sha256(self) -> str:
        """Hash of all bytes written so far."""
        return self._running.hexdigest()


Shards = list[tuple[str, list[TensorSpec]]]
"""(file name, tensors) of each file, in order."""


def shards(groups: Sequence[Sequence[TensorSpec]], shard_bytes: int = SHARD_BYTES, stem: str = MODEL) -> Shards:
    """Distribute tensors over files in the given order; no file has tensors of two groups."""
    found: list[list[TensorSpec]] = []
    for group in groups:
        size = sys.maxsize
        for spec in group:
            if size + spec.nbytes > shard_bytes:
                found.append([])
                size = 0
            found[-1].append(spec)
            size += spec.nbytes
    if len(found) == 1:
        return [(f"{stem}{SUFFIX}", found[0])]
    return [(f"{stem}-{number:05}-of-{len(found):05}{SUFFIX}", shard) for number, shard in enumerate(found, start=1)]


def index_of(planned: Shards) -> dict[str, bytes]:
    """Return the content of the index by its name, or nothing for a single file."""
    if len(planned) == 1:
        return {}
    weight_map = {spec.name: name for name, shard in planned for spec in shard}
    total = sum(spec.nbytes for _, shard in planned for spec in shard)
    return {INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, sort_keys=True).encode()}


def write_weights(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterator[tuple[str, memoryview]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write a folder's safetensors files, with an index if there are several. `tensors` yields (name, bytes) in the
    order of `specs`; none is retained after it has been written. Raises ValueError if the order differs."""
    planned, sha256, checksums = shards([specs], shard_bytes), dict[str, str](), dict[str, str]()
    for name, shard in planned:
        with ShardFile(folder / name, shard) as file:
            for spec in shard:
                found, content = next(tensors)
                if found != spec.name:
                    raise ValueError(f"{found} was given in place of {spec.name}")
                file.add(spec, (content,))
        sha256[name] = file.sha256
        checksums |= file.checksums
    for name, index in index_of(planned).items():
        (folder / name).write_bytes(index)
        sha256[name] = hashlib.sha256(index).hexdigest()
    return Written(sha256, checksums, tuple(specs))


INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return the files with a model's weights, as transformers and engines find them, and the names of the
    tensors in each.

    A file model.safetensors has no list of names; otherwise the index names the files and their tensors. All other
    files in the folder are ignored. Raises NoWeights.
    """
    single, index = folder / f"{MODEL}{SUFFIX}", folder / INDEX
    if not index.is_file():
        if single.is_file():
            return {single: None}
        raise NoWeights(f"{folder} has neither {single.name} nor {INDEX}; convert the checkpoint, or fetch it again")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        placed_in = {name: sorted(key for key, at in weight_map.items() if at == name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoWeights(f"{index} is not an index of weights ({error!r}): fetch the file again") from error
    if single.is_file() and single.name not in placed_in:
        raise NoWeights(
            f"{folder} has {single.name} and {INDEX}, which names other files: transformers reads the first, engines "
            "the others; remove those that are not the model's"
        )
    if missing := [name for name in sorted(placed_in) if Path(name).name != name or not (folder / name).is_file()]:
        raise NoWeights(f"{folder} lacks {', '.join(missing)}, which {INDEX} names: fetch the files again")
    return {folder / name: frozenset(placed_in[name]) for name in sorted(placed_in)}


def read_checksums(path: Path) -> Iterator[tuple[TensorSpec, str]]:
    """Yield each tensor of the file with the checksum of its bytes. Raises NotSafetensors."""
    with path.open("rb") as file:
        for place in places(path):
            running = hashlib.sha256()
            for piece in pieces(file, place.begin, place.end):
                running.update(piece)
            yield place.spec, checksum(running.hexdigest(), place.spec.shape)
