"""From a plan to ranks: one process alone, local processes started from here, or the processes of a torchrun.

Rank 0 is the role itself, so it owns log, store, health and signals, and one supervisor watches one process. Ranks that
it starts end when it does: their connection to it closes. Under torchrun (`torchrun --no-python ... turnlog trainer`),
which places ranks on several machines, every process finds its rank in the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from turnlog.trainer.heartbeats import beating, heard
from turnlog.trainer.learner import Learner
from turnlog.trainer.model_folder import read_weights
from turnlog.trainer.plan import LearningPlan
from turnlog.trainer.process_group import HOST, meeting_place, process_group
from turnlog.trainer.ranks import Ranks, follow
from turnlog.trainer.shape import read_shape

END_S = 30.0
Beat = Callable[[int], None]
"""Is told of every rank but 0 that beats, from a thread."""


def torchrun_rank(environment: Mapping[str, str]) -> int | None:
    """This process's rank when torchrun started it."""
    return int(environment["RANK"]) if "TORCHELASTIC_RUN_ID" in environment else None


@contextmanager
def ranks(plan: LearningPlan, beat: Beat = lambda _: None) -> Iterator[Ranks]:
    """Rank 0 with its peers, on the weights of the plan's model folder. Raises UnsupportedModel, WeightsMismatch."""
    if plan.world_size == 1 or torchrun_rank(os.environ) is not None:
        with _rank_zero(plan, None, beat) as everyone:
            yield everyone
        return
    store = meeting_place(0, plan.world_size)
    children = [_start(plan, rank, store.port) for rank in range(1, plan.world_size)]
    try:
        with _rank_zero(plan, store, beat) as everyone:
            yield everyone
        for child in children:
            child.wait(END_S)
    finally:
        for child in children:
            child.kill()
            child.wait()


def serve_rank(plan: LearningPlan | None, *, rank: int, world_size: int, tensor: int, pipeline: int, port: int) -> None:
    """Be a rank other than 0 until released. `plan` None: rank 0 tells it; port 0: meet as torchrun says."""
    store = meeting_place(port, world_size) if port else None
    with process_group(rank=rank, world_size=world_size, store=store, tensor=tensor, pipeline=pipeline) as control:
        box: list[LearningPlan | None] = [plan]
        dist.broadcast_object_list(box, src=0, group=control)
        assert box[0] is not None
        with beating(*_meeting_address(store), rank):
            follow(_learner(box[0]), control)


@contextmanager
def _rank_zero(plan: LearningPlan, store: TCPStore | None, beat: Beat) -> Iterator[Ranks]:
    options = plan.options
    with process_group(
        rank=0,
        world_size=plan.world_size,
        store=store,
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
    ) as control:
        if plan.world_size == 1:
            yield Ranks(_learner(plan), control, 1)
            return
        dist.broadcast_object_list([plan], src=0, group=control)
        everyone = Ranks(_learner(plan), control, plan.world_size)
        with heard(*_meeting_address(store), plan.world_size, beat):
            yield everyone
        everyone.release()  # after an error the others find the connection closed instead


def _meeting_address(store: TCPStore | None) -> tuple[str, int]:
    """(host, port) of the store where the ranks met: one of this machine, else torchrun's."""
    return (HOST, store.port) if store else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _learner(plan: LearningPlan) -> Learner:
    return Learner(read_shape(plan.model), read_weights(plan.weights), plan.options)


def _start(plan: LearningPlan, rank: int, port: int) -> subprocess.Popen[bytes]:
    options = plan.options
    numbers = (rank, plan.world_size, options.tensor_parallel, options.pipeline_parallel, port)
    command = [sys.executable, "-m", "turnlog.trainer.follower", *map(str, numbers)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
