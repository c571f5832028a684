"""Garbage collection of processes that hold many objects for all their life."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cheap_collections() -> Iterator[None]:
    """Make garbage collections inside the block visit only objects that were created in it. The modules of torch and
    Megatron alone make a full collection take half a second."""
    is_outermost = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()
