"""Heartbeats of ranks: each counts up a key of the store where the ranks met, and rank 0 looks whether it moves.

A rank waits in a collective for as long as another one does not come, so a stopped rank looks like a slow step to all
the others. Beats come from a thread of their own over a connection of their own: they stop when the process does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT_S = 1.0


@contextlib.contextmanager
def beating(host: str, port: int, rank: int) -> Iterator[None]:
    """Beat while the block runs."""
    store = _client(host, port)
    with _every(BEAT_S, lambda: store.add(_key(rank), 1)):
        yield


@contextlib.contextmanager
def heard(host: str, port: int, world_size: int, beat: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, call `beat` (in a thread of our own) with every rank but 0 whose count has moved."""
    store = _client(host, port)
    counts = dict.fromkeys(range(1, world_size), 0)

    def listen() -> None:
        for rank, before in counts.items():
            counts[rank] = store.add(_key(rank), 0)
            if counts[rank] != before:
                beat(rank)

    with _every(BEAT_S, listen):
        yield


def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def _key(rank: int) -> str:
    return f"turnlog/beats/{rank}"


@contextlib.contextmanager
def _every(pause_s: float, work: Callable[[], object]) -> Iterator[None]:
    """`work` again and again in a thread; it ends with the block, or when the store is gone with its host."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # what torch raises when the host's end is closed
            while not over.wait(pause_s):
                work()

    thread = threading.Thread(target=run, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * pause_s)
