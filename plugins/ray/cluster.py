"""Connection to a Ray cluster, placement groups in it, and results of its actors.

NoCluster   no cluster answers at the address
ActorLost   an actor or its node died
└── ActorSilent   Ray cannot reach the actor, which may answer again
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnlog.infra.roles import Unreachable

CONNECT_S = 5.0
Bundle = Mapping[str, int]
"""Amount of each resource that is taken of one node, by resource name."""


class NoCluster(Unreachable):
    """Remedy: [trainer] or [engine] ray_address, or launcher = "local"."""


class ActorLost(Exception):
    """The actor is lost; its owner starts another one."""


class ActorSilent(ActorLost):
    """Ray cannot reach the actor, and does not know that it died."""


class ActorPlacement(NamedTuple):
    """Node and address of an actor."""

    node: str
    address: str
    sees: bool
    """True if the requested folders exist there."""


def place(*folders: Path) -> ActorPlacement:
    """Return the place of the calling actor."""
    sees = all(folder.is_dir() for folder in folders)
    return ActorPlacement(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), sees)


@contextmanager
def join_cluster(address: str, section: str) -> Iterator[None]:
    """Join the cluster while the block runs; `section` is the settings section named in the error. Raises NoCluster."""
    try:
        _check_listens(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        ray.init(address, logging_level=logging.ERROR)
    except OSError as error:
        raise NoCluster(
            f"no Ray cluster at {address}: {error}. Set {section}.ray_address or RAY_ADDRESS, or {section}.launcher = "
            "local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise OSError if nobody listens at the address: Ray would retry for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


@contextmanager
def bundles(bundle: Bundle, count: int, strategy: str) -> Iterator[PlacementGroup]:
    """Request a placement group, which may not be placed yet, and remove it at the end of the block."""
    group = placement_group([dict(bundle)] * count, strategy=strategy)
    try:
        yield group
    finally:
        remove_placement_group(group)


def no_room(bundle: Bundle, count: int, strategy: str) -> str:
    """Return a message with the requested and the free resources."""
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    what = f"{count} bundles of {dict(bundle)} by {strategy}" if count > 1 else f"a bundle of {dict(bundle)}"
    return f"Ray did not place {what}; free in its cluster: {free or 'neither CPU nor GPU'}"


def start_actor(actor: Any, group: PlacementGroup, index: int, bundle: Bundle, *arguments: Any) -> Any:
    """Start an actor that takes a whole bundle."""
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    taken = actor.options(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=where)
    return taken.remote(*arguments)


def results(asked: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the results of the actors called `names` once all of them have finished. Raises ActorLost if one died, and
    the first error that one raised."""
    left = list(asked)
    while left:
        done, left = ray.wait(left)
        try:
            ray.get(done)
        except RayTaskError as error:
            raise error.cause or error from error
        except RayError as error:
            name = next(name for name, one in zip(names, asked, strict=True) if one in done)
            raise ActorLost(f"{name} on Ray is gone: {in_a_line(error)}") from error
    return list(ray.get(list(asked)))


def in_a_line(error: RayError) -> str:
    """Return Ray's message, which has several indented lines, as one line."""
    return " ".join(str(error).split())
