"""Groups of a refold on local disk: appended as they complete, read back for the dataset and for draws.

One file per unit. What stands behind the length that the state names was not counted yet: a successor cuts it off.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from turnlog.schemas.codec import Codec
from turnlog.schemas.events import Event

LENGTH = struct.Struct("<I")


class Spool:
    """Events of one unit, group by group: samples, then the score."""

    def __init__(self, path: Path, codec: Codec, *, length: int = 0) -> None:
        """Opens the file and cuts it to `length`."""
        self.path = path
        self._codec = codec
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, length)
        self._file = path.open("r+b")
        self._file.seek(length)

    @property
    def length(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def append(self, events: Sequence[Event]) -> int:
        """Where the group begins."""
        at = self._file.tell()
        values = [self._codec.encode(event) for event in events]
        self._file.write(LENGTH.pack(len(values)))
        for value in values:
            self._file.write(LENGTH.pack(len(value)))
            self._file.write(value)
        return at

    def sync(self) -> int:
        """Everything is on the disk; the length."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.length

    def groups(self) -> Iterator[tuple[int, list[Event]]]:
        """(where it begins, its events) of every group, in order."""
        self._file.flush()
        at, end = 0, self.length
        while at < end:
            events = self.group(at)
            yield at, events
            at = self._read_end

    def group(self, at: int) -> list[Event]:
        """The group that begins there."""
        self._file.flush()
        with self.path.open("rb") as file:
            file.seek(at)
            (count,) = LENGTH.unpack(file.read(LENGTH.size))
            events = []
            for _ in range(count):
                (size,) = LENGTH.unpack(file.read(LENGTH.size))
                events.append(self._codec.decode(file.read(size)))
            self._read_end = file.tell()
        return events

    def close(self) -> None:
        """The file stays."""
        self._file.close()

    def remove(self) -> None:
        """The dataset is written."""
        self._file.close()
        self.path.unlink(missing_ok=True)
