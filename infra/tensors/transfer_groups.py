"""Process groups of one training rank and the ranks of engines, in which buckets are broadcast by gloo or NCCL (see
transfer.py). shared_buckets.py has the groups that use shared memory instead.

Source: torch 2.13 `distributed/distributed_c10d.py` (how groups are made).
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

LOOK_S = 0.5
"""Seconds after which a wait for gloo looks whether it was aborted."""
LEAST_S = 0.05
"""Least time-out in seconds that a call of torch is given, so that an elapsed deadline is not endless."""


class TransferBroken(Exception):
    """The transfer ended early. Remedy: repeat it with groups of another name, without the member that the message
    names."""


class Deadline:
    """Point in time by which a transfer must be over."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least LEAST_S."""
        return max(LEAST_S, self._until - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until


class SentBucket(ABC):
    """A bucket that is being sent. Its memory must not change until `wait` has returned."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until the sender may change the bucket's memory: with shared memory, until all members have read it.
        Raises TransferBroken."""


class BucketSender(ABC):
    """The sender's end of one group. Not thread-safe, apart from `abort`."""

    has_own_memory: bool
    """Whether buckets must be in memory that `allocate` has returned."""

    @abstractmethod
    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for buckets to be sent, a uint8 tensor [nbytes]."""

    @abstractmethod
    def send(self, bucket: torch.Tensor, timeout_s: float) -> SentBucket:
        """Begin to send a uint8 tensor [bytes], which takes at most `timeout_s`. Raises TransferBroken."""

    @abstractmethod
    def abort(self) -> None:
        """End the group at once. Whoever waits gets TransferBroken. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group after the last bucket was waited for."""


class GroupSender(BucketSender):
    """Broadcasts in a process group."""

    has_own_memory = False

    def __init__(self, group: Any, name: str) -> None:
        self._group, self._name = group, name
        self._aborted = threading.Event()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See BucketSender."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def send(self, bucket: torch.Tensor, timeout_s: float) -> SentBucket:
        work = broadcast(self._group, bucket, self._name, timedelta(seconds=timeout_s))
        return _SentByGroup(work, self._name, bucket, self._aborted)

    def abort(self) -> None:
        self._aborted.set()
        self._group.abort()

    def close(self) -> None:
        leave(self._group)
        self._group = None


@dataclass(slots=True)
class _SentByGroup(SentBucket):
    work: Any
    name: str
    bucket: torch.Tensor
    """Reference that keeps the memory while the work is under way."""
    aborted: threading.Event

    def wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        # With NCCL, a wait that times out ends the group. With gloo it does not, and abort does not end a wait.
        look_s = LOOK_S if self.bucket.device.type == "cpu" else timeout_s
        with naming_member(f"an engine in {self.name}"):
            while not self.aborted.is_set():
                try:
                    self.work.wait(timedelta(seconds=min(look_s, deadline.left_s)))
                except RuntimeError:
                    if self.work.is_completed() or deadline.is_over:
                        raise
                else:
                    return
        raise TransferBroken(f"the transfer by {self.name} was aborted: begin another attempt")


def leave(group: Any) -> None:
    """Leave a process group at once. Gloo's destructor waits for running broadcasts, so a thread calls it."""
    group.abort()
    threading.Thread(target=lambda kept: kept.clear(), args=([group],), daemon=True).start()


class BucketSource(ABC):
    """The receiver's end of one group."""

    needs_memory: bool
    """Whether the receiver must provide the memory for buckets."""

    @abstractmethod
    def begin(self, into: torch.Tensor | None) -> None:
        """Begin to receive the next bucket, into a uint8 tensor [bytes] if `needs_memory`. Raises TransferBroken."""

    @abstractmethod
    def bucket(self, deadline: Deadline) -> torch.Tensor:
        """Return the bucket that was begun first, a uint8 tensor of its bytes. Raises TransferBroken."""

    @abstractmethod
    def free(self) -> None:
        """Tell the sender that the bucket that was returned last is no longer read. Raises TransferBroken."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group at once."""


class GroupSource(BucketSource):
    """Receives from a process group."""

    needs_memory = True

    def __init__(self, group: Any, name: str) -> None:
        self._group, self._name = group, name
        self._begun: list[tuple[Any, torch.Tensor]] = []

    def begin(self, into: torch.Tensor | None) -> None:
        assert into is not None
        self._begun.append((broadcast(self._group, into, self._name), into))

    def bucket(self, deadline: Deadline) -> torch.Tensor:
        """See BucketSource."""
        work, into = self._begun[0]
        with naming_member(f"the sender of {self._name}, or another engine in it,"):
            work.wait(timedelta(seconds=deadline.left_s))
        self._begun.pop(0)
        return into

    def free(self) -> None:
        """Do nothing: the memory is the receiver's own."""

    def close(self) -> None:
        leave(self._group)
        self._group = None
        threading.Thread(target=self._begun.clear, daemon=True).start()


def connect(address: str, port: int, deadline: Deadline) -> Store:
    """Return a client of the store of a TransferHost. Raises TransferBroken."""
    with naming_member(f"the trainer at {address}:{port}"):
        return TCPStore(
            address, port, None, is_master=False, timeout=timedelta(seconds=deadline.left_s), wait_for_workers=False
        )


def put(store: Store, key: str, value: bytes) -> None:
    """Set a key to bytes, which torch's annotations do not allow."""
    setting: Any = store.set
    setting(key, value)


def get(store: Store, key: str, deadline: Deadline) -> bytes:
    """Wait for a key, and return its value."""
    store.wait([key], timedelta(seconds=deadline.left_s))
    return bytes(store.get(key))


@contextmanager
def naming_member(who: str) -> Iterator[None]:
    """Raise TransferBroken in place of torch's errors, which do not say which member failed. `who` names it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        raise TransferBroken(
            f"{who} died, did not come, or did not answer in time ({reason}): begin another attempt without it"
        ) from error


def form_group(
    store: Store, address: str, port: int, name: str, rank: int, size: int, backend: str, deadline: Deadline
) -> Any:
    """Return a new process group `name`, which is not part of torch's global state. Raises TransferBroken."""
    limit = timedelta(seconds=deadline.left_s)
    store = PrefixStore(f"{name}/group/", store)
    store.set_timeout(limit)
    with naming_member(f"a member of {name}, of which this is rank {rank} of {size},"):
        if backend == "nccl":
            # NCCL itself meets at the first broadcast, and then without limit.
            store.set(f"here/{rank}", "")
            store.wait([f"here/{member}" for member in range(size)], limit)
            cuda = dist.ProcessGroupNCCL.Options()
            cuda._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, size, cuda)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address, port))]
        options._timeout = limit
        return dist.ProcessGroupGloo(store, rank, size, options)


def own_address(address: str, port: int) -> str:
    """Return this machine's address on the route to another. Sends nothing. Raises TransferBroken."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:
            route.connect(target)
            return str(route.getsockname()[0])
    except OSError as error:
        raise TransferBroken(f"this machine has no route to {address}: {error}") from error


def broadcast(group: Any, bucket: torch.Tensor, name: str, timeout: timedelta | None = None) -> Any:
    """Begin a broadcast from rank 0. Raises TransferBroken."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timeout
    with naming_member(f"a member of {name}"):
        return group.broadcast([bucket], options)
