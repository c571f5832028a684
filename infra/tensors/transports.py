"""Transfer of weights into a paused engine without files: [loader] transport = tensor | distributed.

    tensor        in buckets through shared memory of the machine that runs both loader and engine
    distributed   in buckets by broadcast: for each version, the loader is rank 0 of a group with the engine's ranks,
                  at an address of the loader that the engine is sent

The source is the files that the loader has verified. Each bucket is a range of a file's bytes, which is mapped and
never read into separate memory. SGLang accepts buckets between begin_weight_update and end_weight_update. It answers
200 to unknown names and dies of wrong shapes, so names and shapes are checked before (fits.check_fits).

A partly loaded version must not be served. Before the first bucket the engine's label is set to "loading", and the
version's own label is set last. If the loader is killed in between, its successor and every gateway see an engine
without a version. An engine that refuses a bucket counts as dead to its loader, whatever it answers.

TransportUnusable   this machine, or this engine, does not support that transport

torch's daemon `torch_shm_manager` starts with the first shared bucket and removes what a killed loader leaves in shared
memory. It lives for as long as the engine has a connection to it.

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
from turnlog.infra.tensors.files import DTYPES, SUFFIX, TensorPosition, places

log = logging.getLogger(__name__)
BUCKET_BYTES = 512 << 20
"""Maximum bytes per request; a larger tensor is a bucket of its own. An engine needs as much memory beside its
weights."""
SHARED = Path("/dev/shm")


class TransportUnusable(EngineRefused):
    """The transport cannot be used; the engine keeps its old weights. Remedy: see the message, or set [loader]
    transport = "disk"."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of one type in a file."""

    path: Path
    places: Sequence[TensorPosition]

    @property
    def nbytes(self) -> int:
        return self.places[-1].end - self.places[0].begin

    def values(self) -> torch.Tensor:
        """Return the bytes [nbytes], mapped from the file."""
        begin = self.places[0].begin
        return torch.from_numpy(np.memmap(self.path, np.uint8, "c", offset=begin, shape=(self.nbytes,)))

    def share_memory(self) -> torch.Tensor:
        """Return the bytes in shared memory."""
        return cast(torch.Tensor, self.values().share_memory_())  # type: ignore[no-untyped-call]

    def tensors(self, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) for each, as views of `values`."""
        first = self.places[0].begin
        found = []
        for place in self.places:
            flat = values[place.begin - first : place.end - first].view(_dtype(place))
            found.append((place.spec.name, flat.view(place.spec.shape)))
        return found


def buckets(folder: Path, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Divide all tensors of the folder's files into buckets. Raises NotSafetensors."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        run: list[TensorPosition] = []
        for place in places(path):
            if run and (place.spec.code != run[0].spec.code or place.end - run[0].begin > limit):
                yield Bucket(path, run)
                run = []
            run.append(place)
        yield Bucket(path, run)


def _dtype(place: TensorPosition) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[place.spec.code])
    return found


class Calls:
    """Requests to one engine that share a total time-out of `timeout_s`."""

    def __init__(self, engine: SGLangControl, timeout_s: float) -> None:
        self._engine, self.url, self.until = engine, engine.url, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.1, self.until - time.monotonic())

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Send a request. Raises EngineRefused, EngineDead."""
        await self._engine.call("POST", path, body, self.left_s)

    async def label(self, text: str) -> None:
        """See SGLangControl."""
        await self._engine.label(text, timeout_s=self.left_s)

    async def ranks(self) -> int:
        """Return the number of ranks over which the engine splits its tensors."""
        info = await self._engine.call("GET", "/server_info", None, self.left_s)
        return int(info.get("tp_size") or 1)


Send = Callable[[Bucket], Awaitable[None]]


class InBuckets(ABC):
    """Base class of both transports."""

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
        """Return a context manager that yields a Send. Raises TransportUnusable, EngineDead."""


async def _begin(calls: Calls) -> None:
    """Begin an update. If a killed loader has left one open, end that first."""
    try:
        await calls.post("/begin_weight_update", {})
    except EngineRefused:
        await calls.post("/end_weight_update", {})
        await calls.post("/begin_weight_update", {})


def room() -> int:
    """Return the free bytes in SHARED."""
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize


class SharedMemory(InBuckets):
    """Transport for [loader] transport = "tensor"."""

    def __init__(self, room: Callable[[], int] = room) -> None:
        """`room` returns the bytes that may be shared now."""
        self._room = room
        # With file descriptors, torch's other strategy, the engine would have to prove that it may request them.
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
            shared = await asyncio.to_thread(bucket.share_memory)
            handles = [_pickle_tensors(bucket.tensors(shared)) for _ in range(ranks)]
            await calls.post("/update_weights_from_tensor", {"serialized_named_tensors": handles, "flush_cache": flush})

        yield send


def _pickle_tensors(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Serialize as SGLang's MultiprocessingSerializer does: names of shared memory instead of values."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


class Broadcast(InBuckets):
    """Transport for [loader] transport = "distributed"."""

    def __init__(self, backend: str) -> None:
        """`backend`: gloo | nccl."""
        self._backend = backend

    @asynccontextmanager
    async def _sender(self, calls: Calls, found: Sequence[Bucket], flush: bool) -> AsyncIterator[Send]:
        name = f"turnlog-{secrets.token_hex(8)}"
        group = await self._form_group(calls, name)

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
            except EngineError as error:  # not raised: an earlier error matters more, and the name is not used again
                log.warning("%s did not leave the group %s: %s", calls.url, name, error)

    async def _form_group(self, calls: Calls, name: str) -> Any:
        size = 1 + await calls.ranks()
        host = await asyncio.to_thread(_own_address, calls.url)
        listener = socket.create_server((host, 0))  # TCPStore's own listener would accept on every interface
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
            asyncio.to_thread(self._join_group, store, name, size, limit, host, calls.url),
        )
        return group

    def _join_group(self, store: Store, name: str, size: int, limit: timedelta, host: str, url: str) -> Any:
        """Join as rank 0, under the keys that torch's own helper uses for a group of that name. Raises EngineDead."""
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
    """Await the engine's answer and our own part, which ends when the engine's does. If both fail, raise the
    engine's error."""
    results = await asyncio.gather(call, work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return None, results[1]


def _own_address(url: str) -> str:
    """Return this machine's address as the engine sees it. Raises EngineDead."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), 5.0) as there:
            return str(there.getsockname()[0])
    except OSError as error:
        raise EngineDead(f"{url}: {error}") from error
