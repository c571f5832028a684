"""A rank as a Ray actor, on whatever node it was placed.

Ray imports this module before it creates the actor, and Megatron requests a device as soon as it is imported. So
nothing here imports Megatron or torch before the actor has set its own device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from turnlog.infra.roles import log_lines
from turnlog.plugins.ray.cluster import ActorPlacement, place
from turnlog.trainer import LOCAL_RANK

if TYPE_CHECKING:
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearningPlan
    from turnlog.trainer.tenants import TenantLearner


def local_rank(given: Mapping[str, list[str]], environment: Mapping[str, str]) -> int:
    """Return the index of the device that Ray gave this process among the devices that it sees."""
    if not (mine := given.get("GPU")):
        return 0
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",").index(mine[0]) if seen else int(mine[0])


class Rank:
    """A rank. All methods except `alive` are called one after the other."""

    def __init__(self, run: str) -> None:
        os.environ[LOCAL_RANK] = str(local_rank(ray.get_runtime_context().get_accelerator_ids(), os.environ))
        self._run = run
        self._open = ExitStack()
        self._store: Any = None
        self._learner: Learner | TenantLearner
        self._first = False

    def place(self, model: Path) -> ActorPlacement:
        """Return the node of this actor, and whether the model folder exists there."""
        return place(model)

    def meet(self, address: str, world_size: int) -> int:
        """Host the store where all ranks meet, and return its port."""
        from turnlog.trainer.launch import meeting_place

        self._store = meeting_place(0, world_size, address)
        return int(self._store.port)

    def join(self, plan: LearningPlan, rank: int, address: str, port: int) -> None:
        """Become rank `rank`, on the weights of the plan. Raises the errors of launch.ranks."""
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

    def call(self, method: str, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call a method of the learner and return its result at rank 0, None elsewhere."""
        arguments, named = given
        found = getattr(self._learner, method)(*arguments, **named)
        return found if self._first else None

    def alive(self) -> None:
        """Answer a heartbeat, in a separate thread."""
