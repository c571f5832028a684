"""Groups of transfer.py whose engines are on the sender's machine and map its memory.

The sender has two buffers, called halves. It writes a bucket into one of them and announces it in the store. Each
engine reads the bucket there, and notes in the store that it has. On a CPU a half is a file without a name, which
engines open at /proc/PID/fd, so that it disappears with the last process that maps it. On a device engines open it by
CUDA IPC. Each half is opened once. Each end holds pidfds of the other's processes, and so sees when one of them dies.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import select
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import reduce_tensor

from turnlog.infra.tensors.transfer_groups import (
    BucketSender,
    BucketSource,
    Deadline,
    SentBucket,
    TransferBroken,
    naming_member,
    put,
)

LOOK_S = 1.0
"""Seconds after which a wait checks whether the other end is alive."""
DEVICE_OF_STORAGE = 6
"""Place of the device's index among the arguments of torch's rebuild_cuda_tensor."""


class Peers:
    """The other processes of a group, all on this machine."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._descriptors: dict[int, str] = {}
        """pidfd -> name of the process in messages."""
        self._aborted = threading.Event()

    def add(self, key: str, who: str, deadline: Deadline) -> None:
        """Wait for the process whose id is at the key. Raises TransferBroken."""
        self.wait([key], who, deadline)
        pid = int(self._store.get(key))
        try:
            self._descriptors[os.pidfd_open(pid)] = f"{who} (process {pid})"
        except OSError as error:
            raise TransferBroken(
                f"{who} of {self._name} is no process of this machine ({error}): colocated engines need the trainer's "
                "process namespace; without one, join a group of gloo or NCCL"
            ) from error

    def wait(self, keys: Sequence[str], who: str, deadline: Deadline) -> None:
        """Wait until all keys are in the store. Raises TransferBroken when `who` did not set them in time, when a
        process died, and after `abort`."""
        while True:
            with naming_member("the trainer's rank 0"):
                if self._store.check(list(keys)):
                    return
            if self._aborted.is_set():
                raise TransferBroken(f"the transfer by {self._name} was aborted: begin another attempt")
            if self._descriptors and (dead := select.select(list(self._descriptors), [], [], 0)[0]):
                raise TransferBroken(
                    f"{self._descriptors[dead[0]]} of {self._name} died: begin another attempt without it"
                )
            if deadline.is_over:
                raise TransferBroken(f"{who} of {self._name} did not answer in time: begin another attempt without it")
            self._wait_briefly(keys, deadline)

    def _wait_briefly(self, keys: Sequence[str], deadline: Deadline) -> None:
        try:
            self._store.wait(list(keys), timedelta(seconds=min(LOOK_S, deadline.left_s)))
        except torch.distributed.DistStoreError:  # the keys are not there yet
            return
        except RuntimeError as error:
            raise TransferBroken(f"the trainer's rank 0 died while {self._name} was in use: {error}") from error

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class SharedSender(BucketSender):
    """The sender's end: shares its memory with the engines of its machine."""

    has_own_memory = True

    def __init__(self, store: Store, name: str, world_size: int, deadline: Deadline) -> None:
        """Wait for all engines. Raises TransferBroken."""
        self._store, self._name, self._peers = store, name, Peers(store, name)
        self._members = range(1, world_size)
        self._sent, self._made = 0, 0
        self._numbers: dict[int, int] = {}
        """Address of a half -> its number, under which engines find it in the store."""
        self._files: dict[int, int] = {}
        """Number of a half -> descriptor of its file."""
        store.set(f"{name}/sender", str(os.getpid()))
        try:
            for rank in self._members:
                self._peers.add(f"{name}/member/{rank}", f"rank {rank}", deadline)
        except TransferBroken:
            self._peers.close()
            raise

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See BucketSender."""
        number, self._made = self._made, self._made + 1
        if device.type == "cuda":
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            told = _pickle(reduce_tensor(memory))  # type: ignore[no-untyped-call]
        else:
            descriptor = self._files[number] = os.memfd_create("turnlog-bucket", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            memory = _map(descriptor, nbytes)
            told = json.dumps((f"/proc/{os.getpid()}/fd/{descriptor}", nbytes)).encode()
        self._numbers[memory.untyped_storage().data_ptr()] = number
        self._forget_halves(number)
        with naming_member("the trainer's rank 0"):
            put(self._store, f"{self._name}/half/{number}", told)
        return memory

    def _forget_halves(self, number: int) -> None:
        """Close the files of all halves but the last two."""
        for old in [one for one in self._files if one < number - 1]:
            os.close(self._files.pop(old))
            self._store.delete_key(f"{self._name}/half/{old}")

    def send(self, bucket: torch.Tensor, timeout_s: float) -> SentBucket:
        if bucket.device.type == "cuda":
            torch.cuda.current_stream(bucket.device).synchronize()
        number, self._sent = self._sent, self._sent + 1
        half = self._numbers[bucket.untyped_storage().data_ptr()]
        with naming_member("the trainer's rank 0"):
            self._store.set(f"{self._name}/bucket/{number}", f"{half} {bucket.numel()}")
        return _SentByMemory(self, number)

    def wait_taken(self, number: int, timeout_s: float) -> None:
        """Wait until all engines have read a bucket. Raises TransferBroken."""
        keys = {f"{self._name}/taken/{number}/{rank}": rank for rank in self._members}
        deadline = Deadline(timeout_s)
        for key, rank in keys.items():
            self._peers.wait([key], f"rank {rank}", deadline)
        with naming_member("the trainer's rank 0"):
            for key in (*keys, f"{self._name}/bucket/{number}"):
                self._store.delete_key(key)

    def abort(self) -> None:
        self._peers.abort()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._peers.close()


@dataclass(slots=True)
class _SentByMemory(SentBucket):
    group: SharedSender
    number: int
    is_taken: bool = False

    def wait(self, timeout_s: float) -> None:
        if not self.is_taken:
            self.group.wait_taken(self.number, timeout_s)
            self.is_taken = True


class SharedSource(BucketSource):
    """The receiver's end: maps the halves of a sender."""

    needs_memory = False

    def __init__(self, store: Store, name: str, rank: int, device: torch.device, deadline: Deadline) -> None:
        """Find the sender on this machine. Raises TransferBroken."""
        self._store, self._name, self._rank, self._device = store, name, rank, device
        self._peers = Peers(store, name)
        self._read = 0
        self._halves: dict[int, torch.Tensor] = {}
        self._peers.add(f"{name}/sender", "the sender", deadline)
        with naming_member("the trainer's rank 0"):
            store.set(f"{name}/member/{rank}", str(os.getpid()))

    def begin(self, into: torch.Tensor | None) -> None:
        """Do nothing: the sender writes on its own."""

    def bucket(self, deadline: Deadline) -> torch.Tensor:
        """See BucketSource."""
        key = f"{self._name}/bucket/{self._read}"
        self._peers.wait([key], "the sender", deadline)
        with naming_member("the trainer's rank 0"):
            number, nbytes = map(int, self._store.get(key).split())
            if number not in self._halves:
                for old in [one for one in self._halves if one < number - 1]:
                    del self._halves[old]
                self._halves[number] = self._open(self._store.get(f"{self._name}/half/{number}"))
        return self._halves[number][:nbytes]

    def _open(self, told: bytes) -> torch.Tensor:
        """Map a half. Raises TransferBroken."""
        if self._device.type == "cuda":
            rebuild, given = pickle.loads(told)  # by the trainer, on whose device the loader lets this engine be
            arguments = list(given)
            arguments[DEVICE_OF_STORAGE] = self._device.index if self._device.index is not None else 0
            found: torch.Tensor = rebuild(*arguments)
            return found
        path, nbytes = json.loads(told)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise TransferBroken(
                f"the memory of the sender of {self._name} cannot be mapped ({error}): let the engine run as the "
                "trainer's user on its machine, or join a group of gloo or NCCL"
            ) from error
        try:
            return _map(descriptor, int(nbytes))
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """See BucketSource."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        with naming_member("the trainer's rank 0"):
            self._store.set(f"{self._name}/taken/{self._read}/{self._rank}", "")
        self._read += 1

    def close(self) -> None:
        self._halves.clear()
        self._peers.close()


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    """Return a file's memory as a uint8 tensor [nbytes], which keeps the mapping."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8))


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()
