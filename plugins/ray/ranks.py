"""Ranks as actors of a Ray cluster, one in each bundle of a placement group.

The trainer is not a rank and needs no device. The arrays of a call lie in Ray's object store, once per node, and each
rank maps them. An exception or the death of a rank is raised here and ends the trainer, and with it all ranks, since
the others would wait for that rank in a collective. The supervisor starts the next generation, which resumes from the
checkpoint. Ray also ends the actors of a trainer that was killed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate

import ray
from ray.exceptions import RayError

from turnlog.plugins.ray.cluster import ActorLost, NoCluster, bundles, join_cluster, no_room, results, start_actor
from turnlog.plugins.ray.rank_actor import Rank
from turnlog.trainer import LayoutUnfit, RankLost
from turnlog.trainer.calls import L, P, R, Ranks
from turnlog.trainer.plan import LearningPlan

log = logging.getLogger(__name__)
BEAT_S = 1.0
BEATS = "beats"
"""Concurrency group in which a rank answers heartbeats while it computes."""
BESIDE = "beside"
"""Concurrency group of calls to rank 0 while it computes."""


class OnRay(Ranks):
    """The actors as one learner, in the order of their ranks."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks

    def call(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call every actor; the arguments lie in the object store once per node."""
        held = ray.put((arguments, named))
        result: R = of_ranks([rank.call.remote(method.__name__, held) for rank in self._ranks])[0]
        return result

    def call_beside(self, method: Callable[Concatenate[L, P], R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call the actor of rank 0, beside its other calls."""
        first = self._ranks[0].call.options(concurrency_group=BESIDE)
        result: R = of_ranks([first.remote(method.__name__, (arguments, named))])[0]
        return result


@contextmanager
def actors(plan: LearningPlan, beat: Callable[[int], None]) -> Iterator[Ranks]:
    """Yield all ranks, joined; `beat` is called from a thread with each rank that answers a heartbeat.

    Raises LayoutUnfit, RankLost, and the errors of launchers.ranks.
    """
    with _cluster(plan.ray_address):
        bundle, count = _bundle(plan), plan.world_size
        actor = ray.remote(concurrency_groups={BEATS: 1, BESIDE: 1})(Rank)
        gang: list[Any] = []
        with bundles(bundle, count, plan.ray_placement) as group:
            if not group.wait(plan.join_s):
                said = no_room(bundle, count, plan.ray_placement)
                raise RankLost(f"{said}; waited for {plan.join_s:.0f} s")
            try:
                for index in range(count):
                    gang.append(start_actor(actor, group, index, bundle, os.environ.get("TURNLOG_RUN_ID", "")))
                ranks = _join_ranks(plan, gang)
                with _request_heartbeats(ranks, beat):
                    yield OnRay(ranks)
            finally:
                for one in gang:
                    ray.kill(one)


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(join_cluster(address, "trainer"))
        except NoCluster as error:
            raise LayoutUnfit(str(error)) from error
        yield


def _bundle(plan: LearningPlan) -> dict[str, int]:
    """Return the resources that a rank takes from a node: a device, if the cluster has any."""
    devices = int(ray.cluster_resources().get("GPU", 0))
    if 0 < devices < plan.world_size:
        raise LayoutUnfit(f"trainer.world_size = {plan.world_size} and the Ray cluster has {devices} GPUs")
    return {"CPU": 1, "GPU": 1} if devices else {"CPU": plan.options.threads}


def _join_ranks(plan: LearningPlan, gang: Sequence[Any]) -> list[Any]:
    """Join the actors and return them in the order of ranks; those of one node are neighbours."""
    places = of_ranks([one.place.remote(plan.model) for one in gang])
    if blind := next((place for place in places if not place.sees), None):
        raise LayoutUnfit(
            f"node {blind.address} of the Ray cluster does not see {plan.model}: [model] path and [run] directory "
            "must be on storage that all nodes share"
        )
    order = sorted(range(len(gang)), key=lambda one: (places[one].node, one))
    ranks, address = [gang[one] for one in order], places[order[0]].address
    port = of_ranks([ranks[0].meet.remote(address, plan.world_size)])[0]
    of_ranks([one.join.remote(plan, rank, address, port) for rank, one in enumerate(ranks)])
    return ranks


def of_ranks(asked: Sequence[Any]) -> list[Any]:
    """Return the results of all ranks, by rank. Raises RankLost for a rank that died, or the first exception of a
    rank.
    """
    try:
        return results(asked, [f"rank {rank}" for rank in range(len(asked))])
    except ActorLost as error:
        raise RankLost(str(error)) from error


@contextmanager
def _request_heartbeats(ranks: Sequence[Any], beat: Callable[[int], None]) -> Iterator[None]:
    """Request a heartbeat from all ranks repeatedly while the block runs, from each once it has answered the last
    one.
    """
    over = threading.Event()

    def listen() -> None:
        asked: dict[Any, int] = {}
        while not over.wait(BEAT_S):
            waited_for = set(asked.values())
            asked |= {
                one.alive.options(concurrency_group=BEATS).remote(): rank
                for rank, one in enumerate(ranks)
                if rank not in waited_for
            }
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=BEAT_S)
            for answer in done:
                rank = asked.pop(answer)
                try:
                    ray.get(answer)
                except RayError as error:
                    log.error("rank %d on Ray is gone: %s", rank, error)
                    return
                beat(rank)

    thread = threading.Thread(target=listen, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * BEAT_S)
