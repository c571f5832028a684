"""Types shared by event records, and how a Python annotation says its Avro type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Logical:
    """Names the `logicalType` of a `bytes` field: a packed little-endian array (docs/decisions/0005)."""

    name: str


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Immutable bytes in the object store, named by what they are; the object's key is derived from the hash.

    Key in the run's bucket: RunConfigured.blob_folder and "/" where it names one, "blobs/", the first two hex digits of
    sha256, "/", all of them. Who finds nothing there looks without the folder.
    """

    sha256: str
    """Hex, of the bytes: whoever fetches them checks it."""
    size: int
    """Bytes."""
    media_type: str = "application/octet-stream"
    """Of the bytes, for people."""


@dataclass(frozen=True, slots=True)
class TurnId:
    """(epoch, index): an epoch is one gateway's tenure of a session, named by the event_id that opened it."""

    epoch: str
    """event_id of the SessionStarted or SessionAdopted that opened it; epochs are in the order of those records."""
    index: int
    """Of the turn in its epoch, from 0."""


Int32s = Annotated[bytes, Logical("turnlog-int32-le")]
"""Packed little-endian int32 array."""
Float32s = Annotated[bytes, Logical("turnlog-float32-le")]
"""Packed little-endian float32 array."""
Json = Annotated[bytes, Logical("turnlog-json")]
"""UTF-8 JSON."""

Payload = bytes | BlobRef
"""Inline up to the catalogue's inline limit, else in the object store."""
Int32Payload = Int32s | BlobRef
Float32Payload = Float32s | BlobRef
JsonPayload = Json | BlobRef


INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
"""Made once: numpy parses a name at every call."""


def int32s(data: bytes) -> NDArray[np.int32]:
    """A read-only view of packed int32s. Raises ValueError when the length is no multiple of 4."""
    return np.frombuffer(data, INT32)


def float32s(data: bytes) -> NDArray[np.float32]:
    """A read-only view of packed float32s. Raises ValueError when the length is no multiple of 4."""
    return np.frombuffer(data, FLOAT32)


def pack_int32s(values: object) -> bytes:
    """Little-endian int32 bytes of a sequence or array of integers. Raises OverflowError beyond int32."""
    if isinstance(values, np.ndarray) and values.dtype == INT32:
        return values.tobytes()
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
        raise OverflowError("a token id does not fit int32")
    return array.astype("<i4").tobytes()


def pack_float32s(values: object) -> bytes:
    """Little-endian float32 bytes of a sequence or array of floats."""
    return np.asarray(values, dtype="<f4").tobytes()
