"""What rank 0 is asked to do every rank does: a call is a method of Learner and its arguments.

The arrays of a call, a batch's rows above all, lie in memory that rank 0 fills once and that each rank of its machine
maps. So none waits until they have come through a socket, and a machine holds them once. Where a rank cannot map them,
because it is on another machine, all get them by broadcast.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from turnlog.infra.tensors.files import Written
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.types import BlobRef
from turnlog.trainer import CheckpointDamaged
from turnlog.trainer.algorithms.objective import Floats, Numbers, Objective
from turnlog.trainer.learner import NONE, Learner, StepResult
from turnlog.trainer.weights import Of

Call = tuple[str, tuple[Any, ...]]
"""(method of Learner, arguments)"""
ALIGNMENT = 64
"""Bytes; of where an array begins."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """An object whose arrays lie in another process's memory."""

    path: str
    extents: tuple[tuple[int, int], ...]
    """(start, end) of each array."""
    rest: bytes
    """Pickle 5 without them."""

    def read(self) -> Any:
        """The object; its arrays are this process's to write to, which changes nobody else's. Raises OSError."""
        with open(self.path, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return pickle.loads(self.rest, buffers=[memory[start:end] for start, end in self.extents])


@contextmanager
def laid_out(value: object) -> Iterator[Mapped | None]:
    """While the block runs others on this machine can map it; what they have mapped stays. None: it has no arrays."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    if not any(array.nbytes for array in arrays):
        yield None
        return
    extents = []
    with open(os.memfd_create("turnlog-call"), "wb") as file:  # gone with the last process that holds it
        for array in arrays:
            start = file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
            extents.append((start, start + file.write(array)))
        file.flush()
        yield Mapped(f"/proc/{os.getpid()}/fd/{file.fileno()}", tuple(extents), rest)


def all_map(control: dist.ProcessGroup) -> bool:
    """Whether every rank can map what rank 0 lays out. Collective."""
    sent = pickle.PickleBuffer(secrets.token_bytes(ALIGNMENT))
    box: list[Any] = [None]
    with laid_out(sent) as there:
        if dist.get_rank(control) == 0:
            box = [(there, bytes(sent))]
        dist.broadcast_object_list(box, src=0, group=control)
        answers: list[bool] = [False] * dist.get_world_size(control)
        dist.all_gather_object(answers, _maps(*box[0]), group=control)
    return all(answers)


def _maps(there: Mapped, wanted: bytes) -> bool:
    try:
        return bytes(there.read()) == wanted
    except (OSError, ValueError):  # nothing there, or something else: this is another machine
        return False


class Ranks(ABC):
    """All of them as one learner. Not thread-safe: one thread makes all calls."""

    def step(
        self,
        rows: BatchRows,
        objective: Objective,
        learning_rate: float,
        numbers: Numbers = NONE,
        tell_tokens: bool = False,
        held: int | None = None,
    ) -> StepResult:
        """See Learner.step."""
        result: StepResult = self._everywhere("step", rows, objective, learning_rate, numbers, tell_tokens, held)
        return result

    def logprobs(self, rows: BatchRows) -> Floats:
        """See Learner.logprobs."""
        found: Floats = self._everywhere("logprobs", rows)
        return found

    def reference_logprobs(self, rows: BatchRows) -> Floats:
        """See Learner.reference_logprobs."""
        found: Floats = self._everywhere("reference_logprobs", rows)
        return found

    def teacher_logprobs(self, rows: BatchRows) -> Floats:
        """See Learner.teacher_logprobs."""
        found: Floats = self._everywhere("teacher_logprobs", rows)
        return found

    def values(self, rows: BatchRows) -> Floats:
        """See Learner.values."""
        found: Floats = self._everywhere("values", rows)
        return found

    def measure(self, rows: BatchRows, objective: Objective) -> StepResult:
        """See Learner.measure."""
        result: StepResult = self._everywhere("measure", rows, objective)
        return result

    def export_files(self, folder: Path, of: Of = "merged") -> Written:
        """See Learner.export_files."""
        written: Written = self._everywhere("export_files", folder, of)
        return written

    def free_cache(self) -> None:
        """See Learner.free_cache."""
        self._everywhere("free_cache")

    def begin_save(self, directory: Path, common: Mapping[str, Any], before: str = "") -> None:
        """See Learner.begin_save."""
        self._everywhere("begin_save", directory, dict(common), before)

    def saved(self, wait: bool) -> Mapping[str, BlobRef] | None:
        """See Learner.saved."""
        stored: Mapping[str, BlobRef] | None = self._everywhere("saved", wait)
        return stored

    def restore(self, directory: Path) -> None:
        """See Learner.restore."""
        self._everywhere("restore", directory)

    @abstractmethod
    def _everywhere(self, method: str, *arguments: Any) -> Any:
        """Call it on every rank: what it gives at rank 0."""


class RankZero(Ranks):
    """Its end of those that follow it."""

    def __init__(self, learner: Learner, control: dist.ProcessGroup, world_size: int) -> None:
        """`control`: a gloo group of all ranks. Collective, with `follow`."""
        self._learner, self._control, self._world_size = learner, control, world_size
        self.maps = world_size > 1 and all_map(control)
        """Whether all ranks map the arrays of a call."""

    def release(self) -> None:
        """Let the other ranks end."""
        if self._world_size > 1:
            dist.broadcast_object_list([None], src=0, group=self._control)

    def _everywhere(self, method: str, *arguments: Any) -> Any:
        call: Call = (method, arguments)
        if self.maps:
            with laid_out(call) as there:
                dist.broadcast_object_list([there or call], src=0, group=self._control)
                if there:
                    dist.barrier(self._control)  # all have mapped it
        elif self._world_size > 1:
            dist.broadcast_object_list([call], src=0, group=self._control)
        return getattr(self._learner, method)(*arguments)


def follow(learner: Learner, control: dist.ProcessGroup) -> None:
    """Every other rank's end: do what rank 0 does until it releases us. Raises RuntimeError when rank 0 dies."""
    all_map(control)
    while True:
        box: list[Call | Mapped | None] = [None]
        dist.broadcast_object_list(box, src=0, group=control)
        call = box[0]
        if call is None:
            return
        if isinstance(call, Mapped):
            call = call.read()
            dist.barrier(control)
        method, arguments = call
        with suppress(CheckpointDamaged):  # every rank raises it, and rank 0 names another
            getattr(learner, method)(*arguments)
