"""Stand-in for sgl_kernel, which has no build for CPU: every name resolves, and calling one raises.

SGLang's CPU engine imports names from it, but computes with its own torch code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0.0+cpu"
PREFIX = "sgl_kernel."


class Absent:
    """A kernel, or a namespace of kernels, that does not exist on this machine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        return _absent(self._name, name)

    def __call__(self, *_: object, **__: object) -> object:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{self._name} was called, and there is no CUDA device: set [engine] device")


class AbsentModule(ModuleType):
    """A submodule in which every name is an Absent."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Absent:
        return _absent(self.__name__, name)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of sgl_kernel."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for names below sgl_kernel, else None."""
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.startswith(PREFIX) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the empty module."""
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code."""


def _absent(owner: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{owner}.{name}")


def __getattr__(name: str) -> Absent:
    return _absent("sgl_kernel", name)


sys.meta_path.append(AbsentFinder())
