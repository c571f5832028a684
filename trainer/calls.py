"""Calls from rank 0 to all ranks: a call is a method of their learner, by name, and its arguments.

The arrays of a call, above all a batch's rows, lie in memory that rank 0 fills once and that each rank of its machine
maps. So no rank waits until they have come through a socket, and a machine holds them once. If any rank cannot map
them, because it is on another machine, all ranks get them by broadcast.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from turnlog.trainer import CheckpointDamaged
from turnlog.trainer.learner import Learner
from turnlog.trainer.tenants import TenantError, TenantLearner

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", Learner, TenantLearner)
"""The learner of the ranks: that of a run's policy, or that of tenants."""
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""(method of the learner, positional arguments, keyword arguments)."""
ALIGNMENT = 64
"""Alignment in bytes of the start of each array."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """An object whose arrays lie in another process's memory."""

    path: str
    extents: tuple[tuple[int, int], ...]
    """(start, end) of each array, in bytes."""
    rest: bytes
    """The object pickled with protocol 5, without its arrays."""

    def read(self) -> Any:
        """Return the object. Its arrays are private to this process, which may write to them. Raises OSError."""
        with open(self.path, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return pickle.loads(self.rest, buffers=[memory[start:end] for start, end in self.extents])


@contextmanager
def laid_out(value: object) -> Iterator[Mapped | None]:
    """Yield a value that others on this machine can map while the block runs; None if `value` has no arrays.

    What they have mapped stays valid after the block.
    """
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    if not any(array.nbytes for array in arrays):
        yield None
        return
    extents = []
    with open(os.memfd_create("turnlog-call"), "wb") as file:  # freed with the last process that maps it
        for array in arrays:
            start = file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
            extents.append((start, start + file.write(array)))
        file.flush()
        yield Mapped(f"/proc/{os.getpid()}/fd/{file.fileno()}", tuple(extents), rest)


def all_map(control: dist.ProcessGroup) -> bool:
    """Return whether every rank can map what rank 0 lays out. Collective."""
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
    except (OSError, ValueError):  # missing, or another file: this is another machine
        return False


class Ranks(ABC):
    """All ranks as one learner. Not thread-safe: one thread must make all calls."""

    @abstractmethod
    def call(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a method of the learner on every rank and return its result at rank 0."""

    @abstractmethod
    def call_beside(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a method of the learner that is not collective at rank 0 alone, also from another thread while `call` is
        in progress."""


class RanksCall(Protocol):
    """`Ranks.call` for a coroutine: the ranks compute elsewhere."""

    def __call__(
        self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs
    ) -> Awaitable[R]: ...


class RankZero(Ranks):
    """Rank 0, which broadcasts its calls to the ranks that run `follow`."""

    def __init__(self, learner: Learner | TenantLearner, control: dist.ProcessGroup, world_size: int) -> None:
        """`control` is a gloo group of all ranks. Collective with `follow`."""
        self._learner: Any = learner
        self._control, self._world_size = control, world_size
        self.maps = world_size > 1 and all_map(control)
        """Whether all ranks map the arrays of a call."""

    def release(self) -> None:
        """Let the other ranks end."""
        if self._world_size > 1:
            dist.broadcast_object_list([None], src=0, group=self._control)

    def call(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Broadcast the call, and make it at this rank too."""
        call: Call = (method.__name__, arguments, named)
        if self.maps:
            with laid_out(call) as there:
                dist.broadcast_object_list([there or call], src=0, group=self._control)
                if there:
                    dist.barrier(self._control)  # all have mapped it
        elif self._world_size > 1:
            dist.broadcast_object_list([call], src=0, group=self._control)
        return method(self._learner, *arguments, **named)

    def call_beside(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call the method here."""
        return method(self._learner, *arguments, **named)


def follow(learner: Learner | TenantLearner, control: dist.ProcessGroup) -> None:
    """Execute the calls of rank 0 on another rank until it releases this one. Raises RuntimeError if rank 0 dies."""
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
        method, arguments, named = call
        # Every rank raises these. Rank 0 chooses another checkpoint, or answers whoever asked for the call.
        with suppress(CheckpointDamaged, TenantError):
            getattr(learner, method)(*arguments, **named)
