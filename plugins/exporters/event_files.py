"""TensorBoard's event files. A step is one record with a checksum, so a file contains it completely or not at all; the
step's offset on the log is one of its values. TensorBoard itself purges steps that are taken back, at the same marker
that its own writers use (SessionLog START, "purge_step"). Source: tensorboard,
event_processing/event_accumulator.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnlog.plugins.exporters import library, one_writer
from turnlog.plugins.exporters.history import OFFSET, Point, StepHistory

EXTRA = "trackers"
VERSION = "brain.Event:2"
"""First file version for which readers honour a SessionLog."""
NAMED = "events.out.tfevents."


class EventFiles:
    """Event files of one run in a folder. Each process writes a new file that sorts after the existing ones."""

    def __init__(self, folder: Path) -> None:
        """Use `event_files` instead, which takes the lock."""
        self._folder = folder
        self._pb = library("tensorboard.compat.proto.event_pb2", EXTRA)
        self._summary = library("tensorboard.compat.proto.summary_pb2", EXTRA)
        self._tensor = library("tensorboard.compat.proto.tensor_pb2", EXTRA)
        self._types = library("tensorboard.compat.proto.types_pb2", EXTRA)
        self.there = max(self._offsets(), default=-1)
        self._life = 0
        self._writer: Any = None

    def take(self, history: StepHistory) -> None:
        point, went_back = history.points[-1], history.life != self._life
        self._life = history.life
        if point.offset <= self.there:
            return
        if went_back:
            start = self._pb.SessionLog(status=self._pb.SessionLog.START)
            self._write(point, session_log=start)
        self._write(point, summary=self._values(point))
        self.there = point.offset

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, point: Point, **what: Any) -> None:
        if self._writer is None:
            record_writer = library("tensorboard.summary.writer.record_writer", EXTRA)
            self._writer = record_writer.RecordWriter(self._next().open("xb"))
            self._writer.write(self._pb.Event(wall_time=point.time_s, file_version=VERSION).SerializeToString())
        event = self._pb.Event(wall_time=point.time_s, step=point.step.step, **what)
        self._writer.write(event.SerializeToString())

    def _next(self) -> Path:
        """Return the name of a new file. It sorts last, because readers take files in the order of their names."""
        last = max((int(path.name.removeprefix(NAMED).partition(".")[0]) for path in self._files()), default=0)
        return self._folder / f"{NAMED}{max(int(time.time()), last + 1):010d}.turnlog"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{NAMED}*.turnlog"))

    def _values(self, point: Point) -> Any:
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars().items()]
        exact = self._tensor.TensorProto(dtype=self._types.DT_DOUBLE, double_val=[float(point.offset)])
        return self._summary.Summary(value=[*values, self._summary.Summary.Value(tag=OFFSET, tensor=exact)])

    def _offsets(self) -> Iterator[int]:
        """Yield the offset of every complete record. A torn record at the end of a file, left by a killed process, is
        skipped."""
        loader = library("tensorboard.backend.event_processing.event_file_loader", EXTRA)
        for path in self._files():
            for raw in loader.RawEventFileLoader(str(path)).Load():
                event = self._pb.Event.FromString(raw)
                yield from (int(value.tensor.double_val[0]) for value in event.summary.value if value.tag == OFFSET)


@contextlib.contextmanager
def event_files(folder: Path, run_id: str) -> Iterator[EventFiles]:
    """Open the event files of a run below `folder`, which is TensorBoard's --logdir. Raises BusyOutlet, NoLibrary,
    OSError."""
    with one_writer(folder / run_id / "turnlog.lock"), contextlib.closing(EventFiles(folder / run_id)) as files:
        yield files
