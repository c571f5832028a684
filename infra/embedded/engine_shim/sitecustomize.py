"""Lets SGLang's engine run on CPU; Python runs this at its start, before anything else.

Each part waits in the import system for the module that it mends. It does nothing beside a build for GPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

BUFFERS = "sglang.srt.mem_cache.pool_host.common"


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators torchvision::nms and ::qnms when torchvision is looked for, so that it can
    be imported.

    It declares fakes for them, and they exist only when its compiled part loads. That does not load beside a CPU-only
    torch. Beside a CUDA build it does, also without a GPU, and a second declaration would abort the process."""

    library: Any = None
    """Kept: the declarations end with it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None, always."""
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                library: Any = torch.library
                self.library = library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


class CpuOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; gives torch.ops.sgl_kernel its names when sglang is looked for, so that vision models load.

    The Qwen-VL modules look SGLang's CPU kernels up when they are imported, and compute with torch where the machine
    has none: the names resolve, calling one raises."""

    given = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None, always."""
        if fullname == "sglang" and not self.given:
            self.given = True
            import torch

            operators: Any = torch.ops
            operators.sgl_kernel = _named(type(operators.sgl_kernel))("sgl_kernel")
        return None


def _named(namespace: Any) -> Any:
    class Named(namespace):  # type: ignore[misc]
        """The namespace; what it lacks and ends in _cpu is an operator that raises."""

        def __getattr__(self, name: str) -> Any:
            return absent(name) if name.endswith("_cpu") else super().__getattr__(name)

    return Named


def absent(name: str) -> Any:
    """An operator that this machine does not have."""

    def operator(*_: object, **__: object) -> object:
        raise NotImplementedError(f"torch.ops.sgl_kernel.{name} was called, and it has no build for this machine")

    return operator


class PlainRowBuffer(importlib.abc.MetaPathFinder):
    """Finds BUFFERS as Python would, and gives "cpu" an allocator once it is loaded, so that routed experts come back.

    SGLang pins their buffer through the CUDA driver on every device that has no allocator of its own; a CPU has none,
    and without a GPU there is no driver. Plain memory holds the same rows."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """BUFFERS' own spec with a loader that adds the allocator; None for every other module."""
        if fullname != BUFFERS:
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


sys.meta_path[:0] = [PlainRowBuffer(), CpuOperators(), TorchvisionOperators()]
