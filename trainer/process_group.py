"""torch.distributed and Megatron's process groups, made and unmade."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from turnlog.trainer import mcore

__all__ = ["HOST", "IDLE", "Store", "meeting_place", "process_group"]

HOST = "127.0.0.1"
IDLE = timedelta(days=7)
"""Ranks wait in a collective while rank 0 waits for a batch; a dead peer closes its socket and is noticed at once."""


@contextmanager
def process_group(
    *, rank: int = 0, world_size: int = 1, store: Store | None = None, tensor: int = 1, pipeline: int = 1
) -> Iterator[dist.ProcessGroup]:
    """Groups for `world_size` ranks; yields the control group (gloo on every device). One rank needs no port.

    `store` None with several ranks: torchrun's environment variables say where to meet.
    """
    if world_size == 1:
        store = HashStore()
    if store is None:
        dist.init_process_group(mcore.BACKEND, timeout=IDLE)
    else:
        dist.init_process_group(mcore.BACKEND, timeout=IDLE, store=store, rank=rank, world_size=world_size)
    try:
        mcore.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
        yield dist.new_group(backend="gloo", timeout=IDLE)
    finally:
        mcore.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def meeting_place(port: int, world_size: int) -> TCPStore:
    """Where the ranks of this machine meet; port 0: be the host, on a free port."""
    if port:
        return TCPStore(HOST, port, world_size, is_master=False, wait_for_workers=False)
    listener = socket.create_server((HOST, 0))  # one that the store makes itself listens on every interface
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
