"""Lets an engine on CPU load vision models: names of SGLang's CPU kernels resolve, calling one raises.

Its Qwen-VL modules look the kernels up when they are imported, and compute with torch where the machine has none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class CpuOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; gives torch.ops.sgl_kernel its names when sglang is looked for."""

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


sys.meta_path.insert(0, CpuOperators())
