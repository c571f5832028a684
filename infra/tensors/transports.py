"""Weights into a paused engine without its reading a file: [loader] transport = tensor | distributed.

    tensor        a bucket at a time through shared memory of the machine that loader and engine are on
    distributed   a bucket at a time by broadcast: the loader is rank 0 of a group that it makes with the engine's ranks
                  for each version, at an address of its own that the engine is told

What is sent are the files that the loader has verified; each bucket is a run of a file's bytes, mapped, never read into
memory of its own. SGLang takes buckets between begin_weight_update and end_weight_update, answers 200 to names that it
does not know and dies of other shapes, so names and shapes are checked before (versions.check_fits).

Half of a version is none: before the first bucket the engine's label says that it is loading, the version's own comes
last. Who is killed in between leaves an engine that its successor, and every gateway, sees to hold no version; one that
refuses a bucket is dead to its loader, whatever it answers.

TransportUnusable   this machine, or this engine, cannot have that transport

torch's daemon `torch_shm_manager`, which starts with the first shared bucket, removes what a killed loader leaves in
shared memory; it stays for as long as the engine has a connection to it.

Sources: sglang 0.5.21 `managers/scheduler_components/weight_updater.py`, `utils/common.py` (MultiprocessingSerializer,
init_custom_process_group), `weight_sync/tensor_bucket.py`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from turnlog.infra.engine import LOADING, EngineDead, EngineError, EngineRefused, SGLangControl
from turnlog.infra.tensors.files import DTYPES, SUFFIX, Place, places

log = logging.getLogger(__name__)
BUCKET_BYTES = 512 << 20
"""Of one call; a larger tensor is one of its own. An engine holds as much beside its weights."""
SHARED = Path("/dev/shm")


class TransportUnusable(EngineRefused):
    """The engine keeps its old weights. Remedy: what the message says, or [loader] transport = "disk"."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one type that lie behind one another in a file."""

    path: Path
    places: Sequence[Place]

    @property
    def nbytes(self) -> int:
        return self.places[-1].end - self.places[0].begin

    def values(self) -> torch.Tensor:
        """Their bytes [nbytes], mapped."""
        begin = self.places[0].begin
        return torch.from_numpy(np.memmap(self.path, np.uint8, "c", offset=begin, shape=(self.nbytes,)))

    def shared(self) -> torch.Tensor:
        """The same in shared memory."""
        return cast(torch.Tensor, self.values().share_memory_())  # type: ignore[no-untyped-call]

    def tensors(self, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) each, as views of the bytes."""
        first = self.places[0].begin
        found = []
        for place in self.places:
            flat = values[place.begin - first : place.end - first].view(_dtype(place))
            found.append((place.spec.name, flat.view(place.spec.shape)))
        return found


def buckets(folder: Path, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """All tensors of the folder's files. Raises NotSafetensors."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        run: list[Place] = []
        for place in places(path):
            if run and (place.spec.code != run[0].spec.code or place.end - run[0].begin > limit):
                yield Bucket(path, run)
                run = []
            run.append(place)
        yield Bucket(path, run)


def _dtype(place: Place) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[place.spec.code])
    return found


class Calls:
    """Of one engine, within `timeout_s` in all."""

    def __init__(self, engine: SGLangControl, timeout_s: float) -> None:
        self._engine, self.url, self.until = engine, engine.url, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.1, self.until - time.monotonic())

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Raises EngineRefused, EngineDead."""
        await self._engine.call("POST", path, body, self.left_s)

    async def label(self, text: str) -> None:
        """See SGLangControl."""
        await self._engine.label(text, timeout_s=self.left_s)

    async def ranks(self) -> int:
        """Among which the engine cuts its tensors."""
        info = await self._engine.call("GET", "/server_info", None, self.left_s)
        return int(info.get("tp_size") or 1)


Send = Callable[[Bucket], Awaitable[None]]


class InBuckets(ABC):
    """What both transports have in common."""

    async def load(self, engine: SGLangControl, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """See Transport. Raises TransportUnusable."""
        calls, found = Calls(engine, timeout_s), list(buckets(folder))
        if not found:
            raise EngineRefused(f"{folder} has no {SUFFIX} file")
        async with self._sender(calls, found, flush) as send:
            await _begin(calls)
            try:
                await calls.label(label if label.startswith(LOADING) else LOADING + label)
                for bucket in found:
                    await send(bucket)
                await calls.post("/end_weight_update", {})
                await calls.label(label)
            except EngineRefused as error:
                raise EngineDead(f"{calls.url} was left with tensors of two versions: {error}") from error

    @abstractmethod
    def _sender(self, calls: Calls, found: Sequence[Bucket], flush: bool) -> Any:
        """A context of Send. Raises TransportUnusable, EngineDead."""


async def _begin(calls: Calls) -> None:
    """Open a session, in place of one that a killed loader left."""
    try:
        await calls.post("/begin_weight_update", {})
    except EngineRefused:
        await calls.post("/end_weight_update", {})
        await calls.post("/begin_weight_update", {})


def room() -> int:
    """Bytes that are free in SHARED."""
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize


class SharedMemory(InBuckets):
    """[loader] transport = "tensor"."""

    def __init__(self, room: Callable[[], int] = room) -> None:
        """`room`: bytes that may be shared now."""
        self._room = room
        # Of a file descriptor, torch's other way to share, the engine would have to prove that it may ask for it.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _sender(self, calls: Calls, found: Sequence[Bucket], flush: bool) -> AsyncIterator[Send]:
        ranks = await calls.ranks()
        free, largest = self._room(), max(bucket.nbytes for bucket in found)
        if free < largest:
            raise TransportUnusable(
                f"{SHARED} has {free} bytes free, a bucket of this version needs {largest}: enlarge it, or set "
                '[loader] transport = "disk"'
            )

        async def send(bucket: Bucket) -> None:
            shared = await asyncio.to_thread(bucket.shared)
            handles = [_pickled(bucket.tensors(shared)) for _ in range(ranks)]
            await calls.post("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": flush})

        yield send


def _pickled(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """As SGLang's MultiprocessingSerializer: names of shared memory, no values."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


class Broadcast(InBuckets):
    """[loader] transport = "distributed"."""

    def __init__(self, backend: str) -> None:
        """`backend`: gloo | nccl"""
        self._backend = backend

    @asynccontextmanager
    async def _sender(self, calls: Calls, found: Sequence[Bucket], flush: bool) -> AsyncIterator[Send]:
        name = f"turnlog-{secrets.token_hex(8)}"
        group = await self._formed(calls, name)

        async def send(bucket: Bucket) -> None:
            told = {
                "names": [place.spec.name for place in bucket.places],
                "dtypes": [DTYPES[place.spec.code] for place in bucket.places],
                "shapes": [place.spec.shape for place in bucket.places],
                "group_name": name,
                "load_format": "flattened_bucket",
                "flush_cache": flush,
            }
            await _both(
                calls.post("/update_weights_from_distributed", told),
                asyncio.to_thread(self._broadcast, group, bucket, calls),
            )

        try:
            yield send
        finally:
            group.shutdown()
            try:
                await calls.post("/destroy_weights_update_group", {"group_name": name})
            except EngineError as error:  # of what came before there is more to be said, and the name is not used again
                log.warning("%s did not leave the group %s: %s", calls.url, name, error)

    async def _formed(self, calls: Calls, name: str) -> Any:
        size = 1 + await calls.ranks()
        host = await asyncio.to_thread(_own_address, calls.url)
        listener = socket.create_server((host, 0))  # one that the store makes itself listens on every interface
        port, limit = listener.getsockname()[1], timedelta(seconds=calls.left_s)
        store = TCPStore(
            host, port, size, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        told = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }
        log.debug("group %s of %d ranks at %s:%d", name, size, host, port)
        _, group = await _both(
            calls.post("/init_weights_update_group", told),
            asyncio.to_thread(self._joined, store, name, size, limit, host, calls.url),
        )
        return group

    def _joined(self, store: Store, name: str, size: int, limit: timedelta, host: str, url: str) -> Any:
        """Rank 0, under the keys that torch's own helper gives a group of that name."""
        device = "cpu" if self._backend == "gloo" else "cuda"
        for prefix in (name, f"{name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        try:
            if self._backend == "nccl":
                cuda = dist.ProcessGroupNCCL.Options()
                cuda._timeout = limit
                return dist.ProcessGroupNCCL(store, 0, size, cuda)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            return dist.ProcessGroupGloo(store, 0, size, options)
        except RuntimeError as error:
            raise EngineDead(
                f"{url} did not join a {self._backend} group at {host} within [loader] timeout_s: can it reach that "
                f"address? ({error})"
            ) from error

    def _broadcast(self, group: Any, bucket: Bucket, calls: Calls) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        values = bucket.values() if self._backend == "gloo" else bucket.values().cuda()
        try:
            group.broadcast([values], options).wait(timedelta(seconds=calls.left_s))
        except RuntimeError as error:
            raise EngineDead(f"{calls.url} left the group in the middle of a broadcast: {error}") from error


async def _both(call: Awaitable[None], work: Awaitable[Any]) -> tuple[None, Any]:
    """The engine's answer and our own part, which ends when the engine's does; what the engine says of a failure comes
    first."""
    results = await asyncio.gather(call, work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return None, results[1]


def _own_address(url: str) -> str:
    """Of this machine, as the engine there sees it."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), 5.0) as there:
            return str(there.getsockname()[0])
    except OSError as error:
        raise EngineDead(f"{url}: {error}") from error
