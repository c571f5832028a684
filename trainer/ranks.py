"""All ranks as one learner: what rank 0 is asked to do is broadcast, and every rank does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.hf_weights import Tensors
from turnlog.trainer.learner import Learner, StepResult
from turnlog.trainer.loss import Objective

Call = tuple[str, tuple[Any, ...]]
"""(method of Learner, arguments)"""


class Ranks:
    """Rank 0's end. Not thread-safe: one thread makes all calls."""

    def __init__(self, learner: Learner, control: dist.ProcessGroup, world_size: int) -> None:
        """`control`: a gloo group of all ranks."""
        self._learner, self._control, self.world_size = learner, control, world_size

    def step(self, rows: BatchRows, objective: Objective, learning_rate: float) -> StepResult:
        """See Learner.step."""
        result: StepResult = self._everywhere("step", rows, objective, learning_rate)
        return result

    def measure(self, rows: BatchRows, objective: Objective) -> StepResult:
        """See Learner.measure."""
        result: StepResult = self._everywhere("measure", rows, objective)
        return result

    def export(self) -> Tensors:
        """See Learner.export."""
        tensors: Tensors = self._everywhere("export")
        return tensors

    def save(self, directory: Path, common: Mapping[str, Any]) -> None:
        """See Learner.save."""
        self._everywhere("save", directory, dict(common))

    def restore(self, directory: Path) -> None:
        """See Learner.restore."""
        self._everywhere("restore", directory)

    def release(self) -> None:
        """Let the other ranks end."""
        if self.world_size > 1:
            dist.broadcast_object_list([None], src=0, group=self._control)

    def _everywhere(self, method: str, *arguments: Any) -> Any:
        if self.world_size > 1:
            call: Call = (method, arguments)
            dist.broadcast_object_list([call], src=0, group=self._control)
        return getattr(self._learner, method)(*arguments)


def follow(learner: Learner, control: dist.ProcessGroup) -> None:
    """Every other rank's end: do what rank 0 does until it releases us. Raises RuntimeError when rank 0 dies."""
    while True:
        box: list[Call | None] = [None]
        dist.broadcast_object_list(box, src=0, group=control)
        if box[0] is None:
            return
        method, arguments = box[0]
        getattr(learner, method)(*arguments)
