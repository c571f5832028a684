"""A training rank's side of direct transfers: it sends its buckets of a version to the engines.

All methods are collective. A rank whose transfer fails still takes part in the gathers of the other ranks, and rank 0
learns of every failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from turnlog.infra.tensors.transfer import SHARED, SenderGroup, TransferHost, TransferPlan
from turnlog.infra.tensors.transfer_groups import Deadline, SentBucket, TransferBroken, own_address
from turnlog.trainer import mcore
from turnlog.trainer.export import ExportBucket, WeightExport

LOOPBACK = ("127.", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Instructions for one attempt to send a version, the same for every rank."""

    group: str
    """Name of the process groups; engines read it in WeightTransferBegun."""
    address: str
    port: int
    world_size: int
    version: int
    attempt: int
    timeout_s: float
    """Seconds within which everything must be sent."""
    bucket_bytes: int
    """Memory for buckets on a rank."""
    shared: bool
    """Whether engines are on the devices of the ranks and map their memory."""


class WeightSender:
    """Sends this rank's tensors to one set of engines at a time."""

    def __init__(self) -> None:
        self._host: TransferHost | None = None
        self._group: SenderGroup | None = None
        self._sent: dict[ExportBucket, SentBucket] = {}
        self._failure = ""

    def open(self, host: str, urls: Sequence[str], timeout_s: float) -> tuple[str, int] | None:
        """Leave the groups of the last engines. Return at rank 0 the address and port at which the next ones join it.
        The address is `host`, or if that is empty, rank 0's own on the route to the engines at `urls`. Raises
        TransferBroken.
        """
        self.close()
        if dist.get_rank() != 0:
            return None
        address = host or _address_for(urls)
        try:
            self._host = TransferHost(address, timeout_s)
        except OSError as error:
            raise TransferBroken(
                f"the trainer cannot listen at {address} ({error}): [weights] host must be an address of its machine"
            ) from error
        return self._host.host, self._host.port

    def send(self, export: WeightExport, order: SendOrder) -> str:
        """Send all buckets. Return what failed on any rank, for rank 0; empty if nothing did."""
        deadline, self._failure = Deadline(order.timeout_s), ""
        if self._host is not None:
            self._host.put_plan(order.group, self._plan(export, order))
        if export.own_sender is not None and self._group is None:
            self._join(export.own_sender, order, deadline)
        stream = export.stream(
            release=lambda sent: self._wait(sent, deadline),
            # Memory that engines map is filled in place, so that tensors are copied only once.
            allocate=(lambda nbytes: self._shared_memory(nbytes, order, deadline)) if order.shared else None,
        )
        for bucket, values in stream:
            if self._group is not None and not self._failure:
                try:
                    self._sent[bucket] = self._group.send(values, deadline.left_s)
                except TransferBroken as error:
                    self._fail(error)
        for bucket in list(self._sent):
            self._wait(bucket, deadline)
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, self._failure)
        if any(failures):
            self.close()
        return "; ".join(filter(None, failures))

    def _plan(self, export: WeightExport, order: SendOrder) -> TransferPlan:
        return TransferPlan(
            version=order.version,
            attempt=order.attempt,
            tensors=tuple(spec for bucket in export.buckets for spec in bucket.specs),
            buckets=tuple((bucket.sender, len(bucket.specs)) for bucket in export.buckets),
            shared=order.shared,
            bucket_bytes=order.bucket_bytes,
        )

    def _join(self, index: int, order: SendOrder, deadline: Deadline) -> None:
        backend = SHARED if order.shared else mcore.BACKEND
        within_s = deadline.left_s / 2  # time for another attempt must remain
        try:
            self._group = SenderGroup.join(
                order.address, order.port, order.group, index, order.world_size, backend, within_s
            )
        except TransferBroken as error:
            self._fail(error)

    def _shared_memory(self, nbytes: int, order: SendOrder, deadline: Deadline) -> torch.Tensor:
        """Return memory for a bucket that engines map, or memory that nobody maps if the transfer has failed."""
        if self._group is not None and not self._failure:
            try:
                return self._group.buffer(nbytes, order.bucket_bytes // 2, torch.device(mcore.DEVICE), deadline.left_s)
            except TransferBroken as error:
                self._fail(error)
        return torch.empty(nbytes, dtype=torch.uint8, device=mcore.DEVICE)

    def _wait(self, bucket: ExportBucket, deadline: Deadline) -> None:
        """Wait until the bucket is out of this rank's memory."""
        sent = self._sent.pop(bucket, None)
        if sent is None or self._failure:
            return
        try:
            sent.wait(deadline.left_s)
        except TransferBroken as error:
            self._fail(error)

    def _fail(self, error: TransferBroken) -> None:
        """Leave the group. What it still reads of the model's memory may change with the next step: engines of a failed
        transfer compare no digests with it.
        """
        self._failure = str(error)
        if self._group is not None:
            self._group.close()  # dropped here, it would wait for the broadcasts under way
            self._group = None

    def close(self) -> None:
        """Leave the groups."""
        self._sent.clear()
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._host is not None:
            self._host.close()
            self._host = None


def _address_for(urls: Sequence[str]) -> str:
    """Return this machine's address on the route to an engine, of another machine if there is one: engines on this
    machine reach it too. Raises TransferBroken.
    """
    parts = [urlsplit(url) for url in urls]
    found = [own_address(str(each.hostname), each.port or 80) for each in parts]
    return next((each for each in found if not each.startswith(LOOPBACK)), found[0])
