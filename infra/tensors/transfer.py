"""Transport of tensors from training ranks to engines, without SGLang and without the log.

    TransferHost    in the trainer's rank 0: a TCPStore of torch at which all members meet, and the plan of a transfer
    SenderGroup     in a training rank that sends: the process group GROUP-INDEX, of which it is rank 0
    Receiver        in a rank of an engine, which is a member of the groups of all senders

A group broadcasts buckets by gloo or NCCL, or shares the sender's memory with engines of the same machine: a file
without a name (memfd) on a CPU, CUDA IPC on a device. A bucket is a buffer of bytes with the layout that
infra/tensors/digests.py describes. A group serves several transfers, one after another. After any error both ends leave
it, and the next attempt uses groups of another name.

TransferBroken   a member died, or did not join or answer in time; or the transfer was aborted, or its plan is invalid

Sources: torch 2.13 `distributed/distributed_c10d.py` (how groups are made), `multiprocessing/reductions.py` (CUDA
IPC).
"""

from __future__ import annotations

import json
import mmap
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.tensors.digests import bucket_offsets
from turnlog.infra.tensors.files import WIDTHS, TensorSpec
from turnlog.infra.tensors.shared_buckets import SharedSender, SharedSource
from turnlog.infra.tensors.transfer_groups import (
    BucketSender,
    BucketSource,
    Deadline,
    GroupSender,
    GroupSource,
    SentBucket,
    TransferBroken,
    connect,
    form_group,
    get,
    naming_member,
    put,
)

__all__ = ["Deadline", "Receiver", "SenderGroup", "SentBucket", "TransferBroken", "TransferHost", "TransferPlan"]

SHARED = "shared"
"""Kind of a group whose members map the sender's memory; other kinds are backends of torch."""
HUGE_BYTES = 2 << 20
"""Size of a huge page; smaller buffers use pages of the usual size."""
FIELDS = ("version", "attempt", "tensors", "buckets", "shared", "bucket_bytes")


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Tensors that are sent together."""

    sender: int
    """Index of the sender's group."""
    specs: tuple[TensorSpec, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The order in which tensors are sent, which all members follow."""

    version: int
    attempt: int
    tensors: tuple[TensorSpec, ...]
    """Tensors in the order in which they are sent."""
    buckets: tuple[tuple[int, int], ...]
    """(index of the sender, number of tensors) of each bucket, in order."""
    shared: bool
    """Whether engines map the senders' memory."""
    bucket_bytes: int
    """Bytes of memory that a member uses beside the model, in two halves. A bucket of several tensors fits into a
    half; a larger tensor is sent alone."""

    def encode(self) -> bytes:
        """Return the plan as compressed JSON."""
        tensors = [(spec.name, spec.code, spec.shape) for spec in self.tensors]
        values = (self.version, self.attempt, tensors, self.buckets, self.shared, self.bucket_bytes)
        return zlib.compress(json.dumps(dict(zip(FIELDS, values, strict=True))).encode(), 1)

    @classmethod
    def decode(cls, content: bytes) -> TransferPlan:
        """Return the plan. Raises TransferBroken."""
        try:
            given = json.loads(zlib.decompress(content))
            plan = cls(
                version=int(given["version"]),
                attempt=int(given["attempt"]),
                tensors=tuple(
                    TensorSpec(str(name), code, tuple(map(int, shape))) for name, code, shape in given["tensors"]
                ),
                buckets=tuple((int(sender), int(count)) for sender, count in given["buckets"]),
                shared=bool(given["shared"]),
                bucket_bytes=int(given["bucket_bytes"]),
            )
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise TransferBroken(
                f"the plan of the transfer cannot be read ({error!r}): are both ends of one release?"
            ) from error
        plan.planned_buckets()
        return plan

    def planned_buckets(self) -> list[PlannedBucket]:
        """Return all buckets. Raises TransferBroken."""
        if unknown := next(
            (spec for spec in self.tensors if spec.code not in WIDTHS or min(spec.shape, default=1) < 0), None
        ):
            raise TransferBroken(f"the plan has {unknown}, whose type or shape is not known")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise TransferBroken("the plan has a tensor twice")
        counts = [count for _, count in self.buckets]
        if sum(counts) != len(self.tensors) or min(counts, default=1) < 1:
            raise TransferBroken(f"the plan's buckets have {sum(counts)} tensors, the plan has {len(self.tensors)}")
        found, begin = list[PlannedBucket](), 0
        for sender, count in self.buckets:
            specs = self.tensors[begin : begin + count]
            nbytes = bucket_offsets(specs)[-1]
            if count > 1 and nbytes > self.bucket_bytes // 2:
                raise TransferBroken(f"the plan has a bucket of {nbytes} bytes, more than half of {self.bucket_bytes}")
            found.append(PlannedBucket(sender, specs, nbytes))
            begin += count
        return found


class TransferHost:
    """The place at which the members of groups meet, and where they find the plan."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen at a free port of the address `host`. Raises OSError."""
        listener = socket.create_server((host, 0))  # TCPStore's own listener would accept on every interface
        self.host, self.port = host, listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host, self.port, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._planned = ""

    def put_plan(self, group: str, plan: TransferPlan) -> None:
        """Let the members of the groups of this name read the plan, in place of the last one."""
        assert self._store is not None
        if self._planned:
            self._store.delete_key(self._planned)
        self._planned = plan_key(group, plan.version, plan.attempt)
        put(self._store, self._planned, plan.encode())

    def close(self) -> None:
        """Stop listening. Members that wait at the store get an error."""
        self._store = None


def plan_key(group: str, version: int, attempt: int) -> str:
    """Return the key of a plan in the store."""
    return f"{group}/plan/{version}/{attempt}"


@dataclass(slots=True)
class _Half:
    """Memory of the sender, and the bucket that was sent out of it last."""

    memory: torch.Tensor
    sent: SentBucket | None = None

    def wait(self, timeout_s: float) -> None:
        if self.sent is not None:
            self.sent.wait(timeout_s)
            self.sent = None


class SenderGroup:
    """The sender's end of one group. Not thread-safe, apart from `abort`."""

    def __init__(self, sender: BucketSender, timeout_s: float) -> None:
        """`timeout_s`: maximum seconds to wait for memory if a bucket must be copied into it."""
        self._sender, self._timeout_s = sender, timeout_s
        self._halves: list[_Half | None] = [None, None]
        self._turn = 0

    @staticmethod
    def join(
        address: str,
        port: int,
        group: str,
        index: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> SenderGroup:
        """Form the group GROUP-INDEX as its rank 0, with world_size - 1 ranks of engines.

        `address`, `port`: those of the TransferHost. `backend`: gloo | nccl | shared. `timeout_s` is for joining, and
        for a bucket that is sent without another. Raises TransferBroken.
        """
        deadline, name = Deadline(timeout_s), f"{group}-{index}"
        store = connect(address, port, deadline)
        with naming_member(f"the trainer at {address}:{port}"):
            store.set(kind_key(name), backend)
        if backend == SHARED:
            return SenderGroup(SharedSender(store, name, world_size, deadline), timeout_s)
        found = form_group(store, address, port, name, 0, world_size, backend, deadline)
        return SenderGroup(GroupSender(found, name), timeout_s)

    def buffer(self, nbytes: int, half_bytes: int, device: torch.device, timeout_s: float) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] of undefined contents, in one of two halves by turns, or in memory of its own
        if it is larger than `half_bytes`. `send` sends it without another copy. Waits until the last bucket in this
        memory was sent. Raises TransferBroken."""
        self._turn = 1 - self._turn
        for number, half in enumerate(self._halves):
            alone = half is not None and half.memory.numel() > half_bytes
            if half is not None and (alone or nbytes > half_bytes or number == self._turn):
                half.wait(timeout_s)
                small = half.memory.numel() < nbytes
                if alone or small or nbytes > half_bytes or half.memory.device.type != device.type:
                    self._halves[number] = None
        found = self._halves[self._turn]
        if found is None:
            found = self._halves[self._turn] = _Half(self._sender.allocate(max(nbytes, half_bytes), device))
        return found.memory[:nbytes]

    def send(self, bucket: torch.Tensor, timeout_s: float | None = None) -> SentBucket:
        """Begin to send a uint8 tensor [bytes]; on a device, after the work of the current stream. It may take
        `timeout_s`, or if that is None, as long as joining. Raises TransferBroken."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        start = bucket.untyped_storage().data_ptr()
        half = next((one for one in self._halves if one and one.memory.untyped_storage().data_ptr() == start), None)
        if half is None and self._sender.has_own_memory:
            copied = self.buffer(bucket.numel(), bucket.numel(), bucket.device, timeout_s)
            return self.send(copied.copy_(bucket), timeout_s)
        sent = self._sender.send(bucket, timeout_s)
        if half is not None:
            half.sent = sent
        return sent

    def abort(self) -> None:
        """End the group at once. Whoever waits gets TransferBroken. May be called from any thread."""
        self._sender.abort()

    def close(self) -> None:
        """Leave the group after the last bucket was waited for."""
        self._halves = [None, None]
        self._sender.close()


class Receiver:
    """A rank of an engine in the groups of all senders. Not thread-safe."""

    def __init__(
        self,
        transfer: Transfer,
        *,
        device: torch.device,
        timeout_s: float,
        own_rank: int = 0,
    ) -> None:
        """Join all groups within `timeout_s`. `own_rank`: rank within the engine. Raises TransferBroken."""
        deadline = Deadline(timeout_s)
        self.group, self._device = transfer.group, device
        self._store = connect(transfer.address, transfer.port, deadline)
        self._sources: list[BucketSource] = []
        self._shared = transfer.shared
        self._halves: _Halves | None = None
        """Kept between transfers: the kernel's zeroing of new memory takes a tenth of the time of a transfer."""
        try:
            for index in range(transfer.senders):
                self._join(f"{transfer.group}-{index}", transfer, transfer.first_rank + own_rank, deadline)
        except BaseException:
            self.close()
            raise

    def _join(self, name: str, transfer: Transfer, rank: int, deadline: Deadline) -> None:
        address, port = transfer.address, transfer.port
        with naming_member(f"the sender of {name}"):
            kind = get(self._store, kind_key(name), deadline).decode()
        # What a sender of shared memory tells is trusted, so this is the loader's decision and not the store's.
        if (kind == SHARED) != self._shared:
            raise TransferBroken(
                f"the sender of {name} uses {kind}, and the loader expects memory to be shared: {self._shared}; "
                "[engine] colocate must be the same for trainer and loaders"
            )
        if kind == SHARED:
            own = connect(address, port, deadline)
            self._sources.append(SharedSource(own, name, rank, self._device, deadline))
            return
        if (kind == "nccl") != (self._device.type == "cuda"):
            raise TransferBroken(
                f"the sender of {name} uses {kind}, and this engine is on {self._device.type}: let the trainer and all "
                "engines have devices of one kind, or send through the store"
            )
        found = form_group(self._store, address, port, name, rank, transfer.world_size, kind, deadline)
        self._sources.append(GroupSource(found, name))

    def plan(self, version: int, attempt: int, timeout_s: float) -> TransferPlan:
        """Wait for the plan of the transfer and return it. Raises TransferBroken."""
        with naming_member(f"the trainer, which was to give the plan of {self.group},"):
            content = get(self._store, plan_key(self.group, version, attempt), Deadline(timeout_s))
        plan = TransferPlan.decode(content)
        if (plan.version, plan.attempt) != (version, attempt):
            raise TransferBroken(
                f"the plan is of version {plan.version}, attempt {plan.attempt}, not {version}, {attempt}"
            )
        if plan.shared != self._shared:
            raise TransferBroken(f"the plan says shared={plan.shared}, its groups do not")
        if lacking := {sender for sender, _ in plan.buckets} - set(range(len(self._sources))):
            raise TransferBroken(f"the plan has buckets of the senders {sorted(lacking)} among {len(self._sources)}")
        return plan

    def receive(self, plan: TransferPlan, timeout_s: float) -> Iterator[tuple[tuple[TensorSpec, ...], torch.Tensor]]:
        """Yield (tensors, bucket) in the order of the plan. A bucket is valid until the next is asked for. The next one
        arrives meanwhile, unless one of the two is larger than half of the plan's memory. Raises TransferBroken."""
        deadline, planned = Deadline(timeout_s), plan.planned_buckets()
        if self._halves is None or self._halves.half_bytes != plan.bucket_bytes // 2:
            self._halves = _Halves(plan.bucket_bytes // 2, self._device)
        halves = self._halves
        begun = 0
        for number, bucket in enumerate(planned):
            if begun == number:
                self._begin(bucket, halves)
                begun += 1
            source = self._sources[bucket.sender]
            content = source.bucket(deadline)
            if content.numel() != bucket.nbytes:
                raise TransferBroken(f"a bucket of {content.numel()} bytes came, the plan says {bucket.nbytes}")
            if begun < len(planned) and max(bucket.nbytes, planned[begun].nbytes) <= halves.half_bytes:
                self._begin(planned[begun], halves)
                begun += 1
            yield bucket.specs, content
            del content
            source.free()

    def _begin(self, bucket: PlannedBucket, halves: _Halves) -> None:
        source = self._sources[bucket.sender]
        source.begin(halves.take(bucket.nbytes) if source.needs_memory else None)

    def close(self) -> None:
        """Leave all groups, also while something is received."""
        for source in self._sources:
            source.close()
        self._sources.clear()
        self._halves = None


class _Halves:
    """Two buffers, which are used by turns, or one of a larger size."""

    def __init__(self, half_bytes: int, device: torch.device) -> None:
        self.half_bytes, self._device = half_bytes, device
        self._halves: list[torch.Tensor | None] = [None, None]
        self._turn = 0

    def take(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.half_bytes:
            self._halves = [None, None]  # a larger bucket uses memory of its own, and the halves are freed for it
            return new_buffer(nbytes, self._device)
        self._turn = 1 - self._turn
        half = self._halves[self._turn]
        if half is None:
            half = self._halves[self._turn] = new_buffer(self.half_bytes, self._device)
        return half[:nbytes]


def new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] of undefined contents."""
    if device.type != "cpu" or nbytes < HUGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def kind_key(name: str) -> str:
    """Return the key of the kind of a group in the store."""
    return f"{name}/kind"
