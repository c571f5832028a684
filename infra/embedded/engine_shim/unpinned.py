"""Lets an engine on CPU return routed experts: its row buffer is allocated without CUDA's page lock.

SGLang pins the buffer through the CUDA driver on every device that has no allocator of its own; a CPU has none, and
without a GPU there is no driver. Plain memory holds the same rows.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "sglang.srt.mem_cache.pool_host.common"


class PlainRowBuffer(importlib.abc.MetaPathFinder):
    """Finds MODULE as Python would, and gives "cpu" an allocator once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """MODULE's own spec with a loader that adds the allocator; None for every other module."""
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                functions: Any = module.__dict__.get("ALLOC_MEMORY_FUNCS", {})  # other versions may have none
                functions.setdefault("cpu", plain)

            loader.exec_module = exec_module
        return spec


def plain(dims: tuple[int, ...], dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
    """The buffer that SGLang's own allocator makes, not pinned."""
    return allocator.allocate(dims, dtype=dtype, device=device)


sys.meta_path.insert(0, PlainRowBuffer())
