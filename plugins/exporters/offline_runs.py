"""Weights & Biases, offline: folders that the user can upload with `wandb sync`. Nothing here connects to a server.

wandb writes in a process of its own, which ends with ours and loses what it has not flushed. Therefore the position of
a run is read from its files. Their format is LevelDB's log format (its doc/log_format.md) after a header of 7 bytes,
with CRC-32 instead of masked CRC-32C, and a protobuf `Record` in each record (wandb/proto/wandb_internal.proto). What
was not flushed is logged again, into another folder of the same run: wandb syncs the folders of a run in order.

wandb cannot take a step back. If steps are taken back, a new wandb run begins with the steps that it continues, and the
folders of the previous one move to replaced/, where `wandb sync` does not look.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from turnlog.plugins.exporters import BusyOutlet, library, one_writer
from turnlog.plugins.exporters.history import OFFSET, Point, StepHistory

EXTRA = "trackers"
IDENT = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
RECORD = struct.Struct("<LHB")
BLOCK = 1 << 15
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
ENDING_S = 30.0
"""Seconds to wait for the wandb-core of a killed tracker to end."""
FLUSH_S = 1.0


class OfflineRuns:
    """The wandb folders of a run, and the wandb run that is being written."""

    def __init__(self, folder: Path, run_id: str, project: str) -> None:
        """Use `offline_runs` instead, which takes the lock."""
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        os.environ["WANDB_CACHE_DIR"] = str(folder / "cache")
        self._wandb = library("wandb", EXTRA)
        self._record = library("wandb.proto.wandb_internal_pb2", EXTRA).Record
        self._folder, self._run_id, self._project = folder, run_id, project
        self._life = 0
        self._run: Any = None
        self._let_go_empty()
        self.there = self._highest()

    def take(self, history: StepHistory) -> None:
        points = history.points[-1:]
        if history.life != self._life:
            self._replace(history.life)
            points = history.points
        for point in points:
            if point.offset > self.there:
                self._log(point)
                self.there = point.offset

    def flush(self) -> None:
        """Do nothing: wandb flushes by itself, once a second."""

    def close(self) -> None:
        """Wait until wandb has written everything and its process has ended."""
        self._finish()
        self._wandb.teardown()

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _name(self) -> str:
        return self._run_id if self._life == 0 else f"{self._run_id}-{self._life}"

    def _log(self, point: Point) -> None:
        if self._run is None:
            quiet = self._wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_S,
            )  # fmt: skip
            self._run = self._wandb.init(
                mode="offline", dir=str(self._folder), project=self._project, group=self._run_id, id=self._name,
                name=self._name, config={"run": self._run_id, "life": self._life}, settings=quiet,
            )  # fmt: skip
        values = point.scalars() | {OFFSET: point.offset, "log/time_s": point.time_s}
        self._run.log(values, step=point.step.step, commit=True)

    def _replace(self, life: int) -> None:
        self._finish()
        (self._folder / "replaced").mkdir(exist_ok=True)
        for path in self._folders(self._folder / "wandb"):
            path.rename(self._folder / "replaced" / path.name)
        self._life = life
        self.there = self._highest()

    def _folders(self, parent: Path) -> list[Path]:
        """Return the folders of the current wandb run."""
        return sorted(path.parent for path in parent.glob(f"offline-run-*/run-{self._name}.wandb"))

    def _highest(self) -> int:
        found = [*self._folders(self._folder / "replaced"), *self._folders(self._folder / "wandb")]
        return max((offset for each in found for offset in self._offsets(each)), default=-1)

    def _let_go_empty(self) -> None:
        """Remove folders of this run in which a killed process left no step."""
        for path in self._folder.glob("wandb/offline-run-*/run-*.wandb"):
            name = path.stem.removeprefix("run-").removeprefix(self._run_id)
            ours = name == "" or (name[0] == "-" and name[1:].isdecimal())
            if ours and not any(True for _ in self._offsets(path.parent)):
                shutil.rmtree(path.parent)

    def _offsets(self, folder: Path) -> Iterator[int]:
        for path in folder.glob("run-*.wandb"):
            for content in whole_records(path.read_bytes()):
                record = self._record.FromString(content)
                yield from (
                    int(float(json.loads(item.value_json))) for item in record.history.item
                    if OFFSET in (item.key, *item.nested_key)
                )  # fmt: skip


def whole_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a .wandb file in order, up to a torn one that a killed process may have left."""
    at, parts = len(IDENT), b""
    if data[:at] != IDENT:
        return
    while True:
        left = BLOCK - at % BLOCK
        at += left if left < RECORD.size else 0
        if at + RECORD.size > len(data):
            return
        checksum, length, kind = RECORD.unpack_from(data, at)
        body = data[at + RECORD.size : at + RECORD.size + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(body) < length or zlib.crc32(body, CRC[kind]) != checksum:
            return
        at += RECORD.size + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts


CRC = {kind: zlib.crc32(bytes([kind])) for kind in (FULL, FIRST, MIDDLE, LAST)}


@contextlib.contextmanager
def offline_runs(folder: Path, run_id: str, *, project: str = "turnlog") -> Iterator[OfflineRuns]:
    """Open the wandb folders of a run below `folder`/wandb. Raises BusyOutlet, NoLibrary, OSError."""
    lock = folder / f"{run_id}.lock"
    with one_writer(lock) as last:
        _wait_until_ended(last)
        lock.write_text(str(os.getpid()))
        with contextlib.closing(OfflineRuns(folder, run_id, project)) as runs:
            yield runs
        lock.write_text("")


def _wait_until_ended(pid: str) -> None:
    """Wait until the wandb-core of a killed tracker has ended, so that it cannot write the steps that are about to be
    logged again. Raises BusyOutlet."""

    def of_it(process: psutil.Process) -> bool:
        line = process.info["cmdline"] or [""]
        return line[0].endswith("wandb-core") and ("--pid", pid) in itertools.pairwise(line)

    _, alive = psutil.wait_procs([each for each in psutil.process_iter(["cmdline"]) if of_it(each)], ENDING_S)
    if alive:
        raise BusyOutlet(f"wandb-core {alive[0].pid} still writes for process {pid}, which has ended: stop it")
