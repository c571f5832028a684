"""Lets torchvision be imported by an engine on CPU; Python runs this at start, before anything else.

torchvision declares fakes for the operators torchvision::nms and ::qnms, which exist only when its compiled part
loads. It does not load beside a CPU-only torch, so that their schemas are declared here. Beside a CUDA build of torch
it does load, also without a GPU, and a second declaration would abort the process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is looked for."""

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


sys.meta_path.insert(0, TorchvisionOperators())
for beside in ("cpu_operators", "unpinned"):  # modules of this folder, known to the engine's process alone
    __import__(beside)
