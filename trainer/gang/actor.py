"""A rank as an actor of Ray's, on whatever node it was placed.

Ray imports this module before it makes the actor, and Megatron asks for a device as soon as it is imported: so nothing
here imports it, nor torch, before the actor has said which device is its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from turnlog.infra.on_ray.cluster import Place, place
from turnlog.infra.roles import log_lines
from turnlog.trainer.gang import LOCAL_RANK

if TYPE_CHECKING:
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearningPlan


def local_rank(given: Mapping[str, list[str]], environment: Mapping[str, str]) -> int:
    """The place of the device that Ray gave this process among those that it sees."""
    if not (mine := given.get("GPU")):
        return 0
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",").index(mine[0]) if seen else int(mine[0])


class Rank:
    """All but `alive` are called one after the other."""

    def __init__(self, run: str) -> None:
        os.environ[LOCAL_RANK] = str(local_rank(ray.get_runtime_context().get_accelerator_ids(), os.environ))
        self._run = run
        self._open = ExitStack()
        self._store: Any = None
        self._learner: Learner
        self._first = False

    def place(self, model: Path) -> Place:
        """Where this is, and whether that folder is there, too."""
        return place(model)

    def meet(self, address: str, world_size: int) -> int:
        """Host the store where all ranks meet: its port."""
        from turnlog.trainer.launch import meeting_place

        self._store = meeting_place(0, world_size, address)
        return int(self._store.port)

    def join(self, plan: LearningPlan, rank: int, address: str, port: int) -> None:
        """Be that rank, on the weights of the plan. Raises as launchers.ranks."""
        from turnlog.trainer.launch import layout_of, learner_of, meeting_place, process_group

        log_lines.begin(os.environ, sys.stderr)
        log_lines.speaks("trainer", run=self._run, instance=f"{log_lines.instance_of('trainer')}-{rank}")
        self._store = self._store or meeting_place(port, plan.world_size, address)
        layout = layout_of(plan.options)
        group = process_group(
            rank=rank, world_size=plan.world_size, store=self._store, join_s=plan.join_s, **layout
        )  # fmt: skip
        self._open.enter_context(group)
        self._learner, self._first = learner_of(plan), rank == 0

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Of Learner; what it gives at rank 0."""
        found = getattr(self._learner, method)(*arguments)
        return found if self._first else None

    def alive(self) -> None:
        """In a thread of its own."""
