"""The torch operators that an embedded engine on a CPU computes with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from turnlog.infra.embedded import engine_shim


def engine_operators(name: str) -> ModuleType:
    """Return a module of the engine's sgl_kernel alone, without SGLang and what the engine changes in torch."""
    path = Path(next(iter(engine_shim.__path__))) / "sgl_kernel" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_operators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
