"""Lets SGLang's engine run on CPU; Python runs this at its start, before anything else.

Each part waits in the import system for the module that it mends. It does nothing beside a build for GPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


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


ASKED_FOR = ("fused_qk_norm_cpu", "fused_qk_norm_rope_cpu")
"""Kernels that mixtures in half precision take where their names resolve, and compute without where they do not."""


def _named(namespace: Any) -> Any:
    class Named(namespace):  # type: ignore[misc]
        """The namespace; what it lacks and ends in _cpu is an operator that raises, unless it is asked for."""

        def __getattr__(self, name: str) -> Any:
            named = name.endswith("_cpu") and name not in ASKED_FOR
            return absent(name) if named else super().__getattr__(name)

    return Named


def absent(name: str) -> Any:
    """An operator that this machine does not have."""

    def operator(*_: object, **__: object) -> object:
        raise NotImplementedError(f"torch.ops.sgl_kernel.{name} was called, and it has no build for this machine")

    return operator


class Mended(importlib.abc.MetaPathFinder):
    """Finds a module of MENDED as Python would, and mends it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec with a loader that mends it; None for every other module."""
        if fullname not in MENDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                MENDED[fullname](module)

            loader.exec_module = exec_module
        return spec


def with_plain_buffer(module: Any) -> None:
    """Give "cpu" an allocator, so that routed experts come back.

    SGLang pins their buffer through the CUDA driver on every device that has no allocator of its own; a CPU has none,
    and without a GPU there is no driver. Plain memory holds the same rows."""
    functions: Any = module.__dict__.get("ALLOC_MEMORY_FUNCS", {})  # other versions may have none
    functions.setdefault("cpu", plain)


def plain(dims: tuple[int, ...], dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
    """The buffer that SGLang's own allocator makes, not pinned."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def without_pinning(module: Any) -> None:
    """Let the module make tensors in plain memory, so that adapters serve: it pins what describes a batch for the copy
    to a GPU, which asks for the CUDA driver."""
    module.torch = Unpinned(module.torch)


class Unpinned:
    """torch, but that nothing is pinned."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.Tensor.pin_memory = lambda tensor, *_: tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        """torch.tensor"""
        return self._torch.tensor(*arguments, **named)

    def zeros(self, *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        """torch.zeros"""
        return self._torch.zeros(*arguments, **named)


MENDED: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": with_plain_buffer,
    "sglang.srt.lora.layers": without_pinning,
    "sglang.srt.lora.backend.torch_backend": without_pinning,
}

sys.meta_path[:0] = [Mended(), CpuOperators(), TorchvisionOperators()]
