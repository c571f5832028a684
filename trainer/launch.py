"""Launching of ranks from a plan: one process alone, local processes started from here, the processes of a torchrun, or
a Ray cluster.

Rank 0 is the role itself, so it owns log, store, health and signals, and one supervisor watches one process. Ranks that
it starts end when it does, because their connection to it closes. Under torchrun (`torchrun --no-python ... turnlog
trainer`), which places ranks on several machines, every process finds its rank in the environment. To the caller the
ranks are one learner: a call to rank 0 is broadcast, and every rank executes it.

A rank in a collective waits for as long as another one does not arrive, so a stopped rank looks like a slow step to all
the others. Hence heartbeats: each rank increments a key of the store where the ranks met, from its own thread over its
own connection, and rank 0 checks whether it changes. A rank that ends or hangs before it has joined the others ends
rank 0 with RankLost, and so the rank group: the supervisor starts it again, as another generation. So does a rank that
ends later, whose connections close.

    LOCAL_RANK=RANK python -m turnlog.trainer.launch RANK WORLD TENSOR PIPELINE CONTEXT EXPERT PORT JOIN_S
                                                    # a rank other than 0 on this machine, and its device
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Concatenate

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from turnlog.infra.garbage import cheap_collections
from turnlog.infra.offers import find_plugins
from turnlog.infra.roles import log_lines
from turnlog.infra.roles.log_lines import instance_of
from turnlog.names import EntryPointGroup
from turnlog.trainer import LOCAL_RANK, LayoutUnfit, RankLost, mcore
from turnlog.trainer.algorithms.logprobs import check_teacher
from turnlog.trainer.calls import L, P, R, Ranks, RankZero, follow
from turnlog.trainer.checkpoints.exports import Exports
from turnlog.trainer.checkpoints.places import RunBlobs, StorePlace
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.layouts import GB, TrainedModels, check_layout, check_memory
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import JOIN_S, LearnerOptions, LearningPlan
from turnlog.trainer.tenants import TenantLearner
from turnlog.trainer.weights import read_weights

__all__ = ["HOST", "IDLE", "Store", "meeting_place", "process_group"]

HOST = "127.0.0.1"
IDLE = timedelta(days=7)
"""Timeout of the control group's collectives: ranks wait while rank 0 waits for a batch. A dead peer closes its socket
and is noticed at once.
"""
CONTROL = "control"
"""Description of the control group, which tells it from Megatron's."""

JOIN_LOOK_S = 0.1


@contextmanager
def process_group(
    *,
    rank: int = 0,
    world_size: int = 1,
    store: Store | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    join_s: float = JOIN_S,
) -> Iterator[dist.ProcessGroup]:
    """Create the groups of `world_size` ranks and yield the control group (gloo on every device). One rank needs no
    port.

    If `store` is None with several ranks, torchrun's environment variables name the meeting place. Raises RankLost if
    the ranks do not meet within `join_s` seconds.
    """
    if world_size == 1:
        store = HashStore()
    limit = timedelta(seconds=join_s)
    with _joining(join_s):
        if store is None:
            dist.init_process_group(mcore.BACKEND, timeout=limit)
        else:
            dist.init_process_group(mcore.BACKEND, timeout=limit, store=store, rank=rank, world_size=world_size)
    try:
        mcore.parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,  # an expert is whole on a rank
        )
        with _joining(join_s):
            control = dist.new_group(backend="gloo", timeout=limit, group_desc=CONTROL)
        for group in (None, control):
            _set_pg_timeout(IDLE, group)
        yield control
    finally:
        mcore.RouterReplay.clear_global_router_replay_instances()
        for network in list(mcore.TRAINED):
            network.release()
        mcore.TRAINED.clear()
        mcore.RotaryEmbedding.forward.cache_clear()  # its keys are modules, which hold a group
        mcore.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def limit_collectives(limit_s: float) -> None:
    """Let collectives fail if this rank waits longer than `limit_s` for another, except where others wait for rank 0.

    A rank that hangs still sends heartbeats, and its connections stay open.
    """
    for group in list(_world.pg_map):
        if group.group_desc != CONTROL or dist.get_rank() == 0:
            _set_pg_timeout(timedelta(seconds=limit_s), group)


@contextmanager
def _joining(limit_s: float) -> Iterator[None]:
    """Convert torch's error about a rank that went away while the others joined it to RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"the ranks did not join each other within {limit_s:.0f} s: {error}") from error


@contextmanager
def _together(children: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Convert torch's error about a rank that ended while the others worked with it to RankLost.

    `children` are the ranks that this process started.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if "Timed out" in str(error):
            raise RankLost(
                "a rank did not answer the others within trainer.collective_timeout_s; raise it if a step takes longer "
                f"on some rank than on others: {error}"
            ) from error
        states = {rank: child.poll() for rank, child in children.items()}
        ended = [f"rank {rank} ended with status {status}" for rank, status in states.items() if status is not None]
        said = ", ".join(ended) or "a rank ended"
        raise RankLost(f"{said} while the others waited for it; its log says why: {error}") from error


def await_ranks(store: Store, ranks: Mapping[int, subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait until each of these children has reported that it is here.

    Raises RankLost for one that ended, or that reported nothing within `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    missing = dict(ranks)
    while missing := {rank: child for rank, child in missing.items() if not store.check([_here(rank)])}:
        for rank, child in missing.items():
            if (status := child.poll()) is not None:
                raise RankLost(f"rank {rank} ended with status {status} before it joined; its log says why")
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankLost(f"ranks {names} have reported nothing for {limit_s:.0f} s")
        time.sleep(JOIN_LOOK_S)


def _here(rank: int) -> str:
    return f"turnlog/here/{rank}"


def meeting_place(port: int, world_size: int, host: str = HOST) -> TCPStore:
    """Return the store where the ranks meet. Port 0 hosts it on a free port."""
    if port:
        return TCPStore(host, port, world_size, is_master=False, wait_for_workers=False)
    # A listener that the store creates itself would accept connections on every interface.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


BEAT_S = 1.0


@contextlib.contextmanager
def beating(host: str, port: int, rank: int) -> Iterator[None]:
    """Send heartbeats while the block runs."""
    store = _client(host, port)
    with _every(BEAT_S, lambda: store.add(_key(rank), 1)):
        yield


@contextlib.contextmanager
def watch_heartbeats(host: str, port: int, world_size: int, beat: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, call `beat` from a thread with every rank except 0 whose count has changed."""
    store = _client(host, port)
    counts = dict.fromkeys(range(1, world_size), 0)

    def listen() -> None:
        for rank, before in counts.items():
            counts[rank] = store.add(_key(rank), 0)
            if counts[rank] != before:
                beat(rank)

    with _every(BEAT_S, listen):
        yield


def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def _key(rank: int) -> str:
    return f"turnlog/beats/{rank}"


@contextlib.contextmanager
def _every(pause_s: float, work: Callable[[], object]) -> Iterator[None]:
    """Call `work` every `pause_s` seconds in a thread, until the block ends or the host of the store is gone."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # raised by torch when the host closes the connection
            while not over.wait(pause_s):
                work()

    thread = threading.Thread(target=run, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * pause_s)


END_S = 30.0
Beat = Callable[[int], None]
"""Called from a thread with every rank except 0 that sends a heartbeat."""


def torchrun_rank(environment: Mapping[str, str]) -> int | None:
    """Return this process's rank if torchrun started it, else None."""
    return int(environment["RANK"]) if "TORCHELASTIC_RUN_ID" in environment else None


@contextmanager
def local_ranks(plan: LearningPlan, beat: Beat) -> Iterator[Ranks]:
    """Yield rank 0 with its peers, which are processes of this machine, or of the machines where torchrun started them.

    Raises LayoutUnfit, WeightsMismatch, RankLost.
    """
    if plan.world_size == 1 or torchrun_rank(os.environ) is not None:
        with _together({}), _rank_zero(plan, None, beat) as everyone:
            yield everyone
        return
    mcore.check_devices(plan.world_size)
    store = meeting_place(0, plan.world_size)
    children = {rank: _start(plan, rank, store.port) for rank in range(1, plan.world_size)}
    try:
        await_ranks(store, children, plan.join_s)
        with _together(children), _rank_zero(plan, store, beat) as everyone:
            yield everyone
        for child in children.values():
            child.wait(END_S)
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def serve_rank(
    *,
    rank: int,
    world_size: int,
    layout: Mapping[str, int],
    port: int,
    place: StorePlace | None = None,
    blobs: RunBlobs | None = None,
    join_s: float = JOIN_S,
) -> None:
    """Be a rank other than 0 until released; rank 0 sends the plan.

    For `layout`, see `layout_of`. With port 0 the ranks meet as torchrun's environment describes. `place` is the
    storage of checkpoints and `blobs` that of weights, with the settings and the cache of this machine.
    """
    store = meeting_place(port, world_size) if port else None
    if store:
        store.set(_here(rank), "")
    with process_group(rank=rank, world_size=world_size, store=store, join_s=join_s, **layout) as control:
        box: list[LearningPlan | None] = [None]
        dist.broadcast_object_list(box, src=0, group=control)
        assert box[0] is not None
        with beating(*_meeting_address(store), rank):
            follow(learner_of(dataclasses.replace(box[0], place=place, blobs=blobs)), control)


def layout_of(options: LearnerOptions) -> dict[str, int]:
    """Return the arguments of `process_group` that describe how ranks share the model."""
    return {
        "tensor": options.tensor_parallel,
        "pipeline": options.pipeline_parallel,
        "context": options.context_parallel,
        "expert": options.expert_parallel,
    }


@contextmanager
def _rank_zero(plan: LearningPlan, store: TCPStore | None, beat: Beat) -> Iterator[Ranks]:
    layout = layout_of(plan.options)
    with process_group(world_size=plan.world_size, store=store, join_s=plan.join_s, **layout) as control:
        if plan.world_size == 1:
            yield RankZero(learner_of(plan), control, 1)
            return
        # Credentials of the object store are not sent between machines: each has its own settings.
        dist.broadcast_object_list([dataclasses.replace(plan, place=None, blobs=None)], src=0, group=control)
        everyone = RankZero(learner_of(plan), control, plan.world_size)
        with watch_heartbeats(*_meeting_address(store), plan.world_size, beat):
            yield everyone
        everyone.release()  # after an error the others find the connection closed instead


def _meeting_address(store: TCPStore | None) -> tuple[str, int]:
    """Return (host, port) of the store where the ranks met: one of this machine, else torchrun's."""
    return (HOST, store.port) if store else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def learner_of(plan: LearningPlan) -> Learner | TenantLearner:
    """Return this rank's learner, on the plan's weights. Collective."""
    learner = _tenant_learner(plan) if plan.tenants else _run_learner(plan)
    limit_collectives(plan.collective_timeout_s)  # loading may take longer, if the ranks' disks differ
    return learner


def _tenant_learner(plan: LearningPlan) -> TenantLearner:
    options = plan.options
    return TenantLearner(read_shape(plan.model), read_weights(plan.weights), options, max_rank=options.lora_rank)


def _run_learner(plan: LearningPlan) -> Learner:
    reference = None if plan.reference is None else read_weights(plan.reference)
    teacher = None if plan.teacher is None else (read_shape(plan.teacher), read_weights(plan.teacher))
    return Learner(
        read_shape(plan.model),
        read_weights(plan.weights),
        plan.options,
        reference,
        critic=plan.objective.critic is not None,
        teacher=teacher,
        place=plan.place,
        exports=Exports(plan.blobs, chain=plan.delta_chain),
    )


def follower(plan: LearningPlan, rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a rank other than 0 on this machine, which takes the device of its number."""
    numbers = (rank, plan.world_size, *layout_of(plan.options).values(), port, plan.join_s)
    command = [sys.executable, "-m", "turnlog.trainer.launch", *map(str, numbers)]
    return command, {**os.environ, LOCAL_RANK: str(rank)}


def _start(plan: LearningPlan, rank: int, port: int) -> subprocess.Popen[bytes]:
    command, environment = follower(plan, rank, port)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:  # await_ranks notices that it ended
        pickle.dump((plan.place, plan.blobs), child.stdin)
    return child


def main(arguments: list[str]) -> None:
    """Serve until rank 0 releases this rank or dies. Standard input holds the pickled places of checkpoints and
    weights."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shutdown or a terminal signals every process:
        signal.signal(number, signal.SIG_IGN)  # rank 0 needs us for a last checkpoint, and we end with it
    *numbers, join_s = arguments
    rank, world_size, *shares, port = map(int, numbers)
    log_lines.begin(os.environ, sys.stderr)
    log_lines.speaks("trainer", run=os.environ.get("TURNLOG_RUN_ID", ""), instance=f"{instance_of('trainer')}-{rank}")
    layout = dict(zip(layout_of(LearnerOptions()), shares, strict=True))
    place, blobs = pickle.load(sys.stdin.buffer)  # written by our own parent
    with cheap_collections(collect=False):
        serve_rank(
            rank=rank, world_size=world_size, layout=layout, port=port, place=place, blobs=blobs, join_s=float(join_s)
        )


@contextmanager
def ranks(plan: LearningPlan, beat: Beat = lambda _: None) -> Iterator[Ranks]:
    """Yield all ranks, on the weights of the plan's model folder.

    Raises UnsupportedModel, LayoutUnfit, WeightsMismatch, TeacherUnfit, RankLost, and SettingsError if a rank's device
    has too little memory.
    """
    shape = read_shape(plan.model)
    check_layout(shape, plan.options)
    if plan.launcher == "torchrun" and torchrun_rank(os.environ) is None:
        raise LayoutUnfit(
            "trainer.launcher is torchrun, which did not start this process: run `torchrun --no-python turnlog role "
            "trainer` on each machine, or set trainer.launcher to local"
        )
    if plan.tenants and plan.launcher == "ray":
        raise LayoutUnfit("trainer.launcher = ray is not supported for tenants: set it to local or torchrun")
    local = 0 if plan.launcher == "ray" else mcore.device_bytes()
    if available := plan.device_memory_gb * GB * (local > 0 or plan.launcher == "ray") or local:
        check_memory(
            shape, plan.options, models_of(plan), world_size=plan.world_size,
            node_size=min(plan.world_size, torch.cuda.device_count() or plan.world_size), device_bytes=available,
        )  # fmt: skip
    if plan.teacher is not None:
        check_teacher(plan.teacher, plan.model, plan.options)
    with (on_ray if plan.launcher == "ray" else local_ranks)(plan, beat) as everyone:
        yield everyone


def models_of(plan: LearningPlan) -> TrainedModels:
    """Return what ranks train and compute by this plan."""
    return TrainedModels(
        tokens=plan.options.microbatch_tokens,
        critic=plan.objective.critic is not None,
        reference=plan.reference is not None,
        teacher=None if plan.teacher is None else read_shape(plan.teacher),
    )


def on_ray(plan: LearningPlan, beat: Beat) -> AbstractContextManager[Ranks]:
    """Return the ranks of a Ray cluster. Raises LayoutUnfit if Ray is not installed."""
    points = find_plugins(EntryPointGroup.LAUNCHERS, "launcher", LayoutUnfit)
    try:
        actors = points["ray"].load()
    except ModuleNotFoundError as error:
        raise LayoutUnfit(f'trainer.launcher = "ray" needs {error.name}: pip install turnlog[ray]') from error
    ranks_of_cluster: AbstractContextManager[Ranks] = actors(plan, beat)
    return ranks_of_cluster


class LearnerThread:
    """The ranks, called from a dedicated thread, so that a step never blocks clients, health checks and signals."""

    def __init__(self, plan: LearningPlan, beat: Beat) -> None:
        """`beat` is called as in ranks."""
        self._plan, self._beat = plan, beat
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._open = ExitStack()
        self._ranks: Ranks | None = None

    async def __aenter__(self) -> LearnerThread:
        try:
            self._ranks = await self._run(lambda: self._open.enter_context(ranks(self._plan, self._beat)))
        except BaseException:
            self._thread.shutdown()
            raise
        return self

    async def __aexit__(self, *failure: Any) -> None:
        try:
            await self._run(lambda: self._open.__exit__(*failure))
        finally:
            self._thread.shutdown()

    async def call(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a method of the learner on all ranks, in the thread."""
        everyone = self._ranks
        assert everyone is not None
        return await self._run(lambda: everyone.call(method, *arguments, **named))

    async def call_beside(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a method of the learner that is not collective at rank 0, in another thread."""
        everyone = self._ranks
        assert everyone is not None
        return await asyncio.to_thread(lambda: everyone.call_beside(method, *arguments, **named))

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


if __name__ == "__main__":
    main(sys.argv[1:])
