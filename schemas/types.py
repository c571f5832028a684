"""Types shared by event records, and the annotations that map Python types to Avro types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logical:
    """Names the `logicalType` of a `bytes` field: a packed little-endian array (docs/decisions/0005)."""

    name: str


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Immutable bytes in the object store, named by what they are; the object's key is derived from the hash.

    The key in the run's bucket is RunConfigured.blob_folder followed by "/" (if it names a folder), "blobs/", the first
    two hex digits of sha256, "/" and the whole sha256. A reader that finds nothing there looks without the folder.
    """

    sha256: str
    """Hex sha256 of the bytes; readers verify it."""
    size: int
    """Length in bytes."""
    media_type: str = "application/octet-stream"
    """Media type of the bytes, for people."""


@dataclass(frozen=True, slots=True)
class TurnId:
    """(epoch, index): an epoch is one gateway's tenure of a session, named by the event_id that opened it."""

    epoch: str
    """event_id of the SessionStarted or SessionAdopted that opened it; epochs are in the order of those records."""
    index: int
    """Index of the turn in its epoch, from 0."""


Int32s = Annotated[bytes, Logical("turnlog-int32-le")]
"""Packed little-endian int32 array."""
Float32s = Annotated[bytes, Logical("turnlog-float32-le")]
"""Packed little-endian float32 array."""
Json = Annotated[bytes, Logical("turnlog-json")]
"""UTF-8 JSON."""

Payload = bytes | BlobRef
"""Bytes inline up to the catalogue's inline limit, else in the object store."""
Int32Payload = Int32s | BlobRef
Float32Payload = Float32s | BlobRef
JsonPayload = Json | BlobRef


CONTENT: Final = "content"
"""Key of a field's metadata that marks it as content: what a session said, saw or computed. Runs with [erasure] encrypt
these fields (schemas/content.py)."""


def content(erased: bytes | None = None) -> Mapping[str, bytes | None]:
    """Return the metadata of a content field: `field(metadata=content(b"[]"))`. `erased` is what readers get in its
    place once the session is erased; None gives zeros of the same length, for packed arrays."""
    return MappingProxyType({CONTENT: erased})


INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
"""Created once, since numpy parses a type name at every call."""


def int32s(data: bytes) -> NDArray[np.int32]:
    """Return a read-only view of packed int32s. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, INT32)


def float32s(data: bytes) -> NDArray[np.float32]:
    """Return a read-only view of packed float32s. Raises ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, FLOAT32)


def pack_int32s(values: object) -> bytes:
    """Pack a sequence or array of integers as little-endian int32. Raises OverflowError beyond int32."""
    if isinstance(values, np.ndarray) and values.dtype == INT32:
        return values.tobytes()
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
        raise OverflowError("a token id does not fit int32")
    return array.astype("<i4").tobytes()


def pack_float32s(values: object) -> bytes:
    """Pack a sequence or array of floats as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """First fields of every event; docs/events.md describes them under "Fields that many records have"."""

    event_id: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(RunEvent):
    """First fields of an event of a group."""

    group_id: str
    floor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent(RunEvent):
    """First fields of an event of a session."""

    group_id: str
    session_id: str
    floor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent(SessionEvent):
    """First fields of an event of a tool call."""

    rollout_id: str
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent(RunEvent):
    """First fields of an event of an engine."""

    engine_id: str
    url: str
    kind: str = "sglang"
    """Kind of the engine: sglang or vllm."""
