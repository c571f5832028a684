"""The training side of a direct transfer, for tests: a host and its senders, in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.tensors.digests import bucket_digests, bucket_offsets, bucket_tensors
from turnlog.infra.tensors.files import CODES, TensorSpec
from turnlog.infra.tensors.transfer import PlannedBucket, SenderGroup, TransferHost, TransferPlan

HOST, CPU = "127.0.0.1", torch.device("cpu")
Weights = Mapping[str, torch.Tensor]


def specs_of(weights: Weights) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, CODES[str(one.dtype).removeprefix("torch.")], tuple(one.shape))
        for name, one in weights.items()
    )


def digests_of(weights: Weights) -> dict[str, str]:
    """Name -> digest of each tensor."""
    return dict(zip(weights, bucket_digests(specs_of(weights), filled(specs_of(weights), weights)), strict=True))


def filled(specs: Sequence[TensorSpec], weights: Weights, bucket: torch.Tensor | None = None) -> torch.Tensor:
    """Return a bucket with these tensors and zeros between them."""
    bucket = torch.empty(bucket_offsets(specs)[-1], dtype=torch.uint8) if bucket is None else bucket
    bucket.zero_()
    for spec, place in zip(specs, bucket_tensors(specs, bucket), strict=True):
        place.copy_(weights[spec.name])
    return bucket


def plan_of(
    weights: Weights, version: int, attempt: int, *, senders: int = 1, half_bytes: int = 1 << 20, shared: bool = False
) -> TransferPlan:
    """Divide the tensors into buckets of the senders by turns."""
    specs, buckets, begin = specs_of(weights), list[tuple[int, int]](), 0
    for end in range(1, len(specs) + 1):
        if end == len(specs) or bucket_offsets(specs[begin : end + 1])[-1] > half_bytes:
            buckets.append((len(buckets) % senders, end - begin))
            begin = end
    return TransferPlan(version, attempt, specs, tuple(buckets), shared, 2 * half_bytes)


class TrainingSide:
    """A context manager that hosts one group name for engines with `ranks` ranks in all."""

    def __init__(
        self,
        ranks: int,
        *,
        backend: str = "gloo",
        senders: int = 1,
        half_bytes: int = 1 << 20,
        timeout_s: float = 120.0,
    ) -> None:
        self.backend, self.senders, self.half_bytes, self.timeout_s = backend, senders, half_bytes, timeout_s
        self.group, self.world_size = uuid.uuid4().hex, 1 + ranks
        self.host = TransferHost(HOST, timeout_s)
        self.groups: list[SenderGroup] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self.groups:
            if error is not None:
                group.abort()
            group.close()
        self.host.close()

    def transfer(self, version: int, attempt: int = 0, first_rank: int = 1) -> Transfer:
        return Transfer(
            version=version, attempt=attempt, group=self.group, address=HOST, port=self.host.port,
            world_size=self.world_size, senders=self.senders, first_rank=first_rank,
            shared=self.backend == "shared",
        )  # fmt: skip

    def plan(self, weights: Weights, version: int, attempt: int = 0) -> TransferPlan:
        shared = self.backend == "shared"
        return plan_of(weights, version, attempt, senders=self.senders, half_bytes=self.half_bytes, shared=shared)

    def join(self) -> None:
        """Form the groups of all senders, in order, as engines do."""
        for index in range(self.senders):
            found = SenderGroup.join(
                HOST, self.host.port, self.group, index, self.world_size, self.backend, self.timeout_s
            )
            self.groups.append(found)

    def send(
        self,
        plan: TransferPlan,
        weights: Weights,
        spoil: Callable[[int, torch.Tensor], None] = lambda number, bucket: None,
        count: int | None = None,
    ) -> None:
        """Send all buckets, or the first `count`; `spoil` may change the contents of each."""
        self.host.put_plan(self.group, plan)
        if not self.groups:
            self.join()
        for number, bucket in enumerate(plan.planned_buckets()[:count]):
            sent = self._send(bucket, weights, lambda content, number=number: spoil(number, content))
        sent.wait(self.timeout_s)

    def _send(self, bucket: PlannedBucket, weights: Weights, spoil: Callable[[torch.Tensor], None]):  # type: ignore[no-untyped-def]
        group = self.groups[bucket.sender]
        content = group.buffer(bucket.nbytes, self.half_bytes, CPU, self.timeout_s)
        filled(bucket.specs, weights, content)
        spoil(content)
        return group.send(content)

    async def sends(self, weights: Weights, version: int, attempt: int = 0) -> None:
        """Send a version from a thread of its own."""
        await asyncio.to_thread(self.send, self.plan(weights, version, attempt), weights)
