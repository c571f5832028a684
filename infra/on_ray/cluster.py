"""A Ray cluster that is joined, room in it, and what its actors answer.

NoCluster   none answers at the address
ActorLost   an actor died, or the node that it was on
└── ActorSilent   ... or it may answer again
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
"""Resource -> how much of it, of one node."""


class NoCluster(Unreachable):
    """Remedy: [trainer] or [engine] ray_address, or launcher = "local"."""


class ActorLost(Exception):
    """Whoever had started it starts another."""


class ActorSilent(ActorLost):
    """Ray cannot reach it, and does not know that it died."""


class Place(NamedTuple):
    """Where an actor is."""

    node: str
    address: str
    sees: bool
    """Whether the folders that were asked for are there, too."""


def place(*folders: Path) -> Place:
    """Of the actor that asks."""
    sees = all(folder.is_dir() for folder in folders)
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), sees)


@contextmanager
def joined(address: str, section: str) -> Iterator[None]:
    """While the block runs this process has joined the cluster; `section`: of the settings that say so. Raises
    NoCluster."""
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
    """Ray would ask an address where nobody listens for a quarter of an hour. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


@contextmanager
def bundles(bundle: Bundle, count: int, strategy: str) -> Iterator[PlacementGroup]:
    """A placement group that is asked for; it may yet have to be waited for."""
    group = placement_group([dict(bundle)] * count, strategy=strategy)
    try:
        yield group
    finally:
        remove_placement_group(group)


def no_room(bundle: Bundle, count: int, strategy: str) -> str:
    """What was asked for, and what is free."""
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    what = f"{count} bundles of {dict(bundle)} by {strategy}" if count > 1 else f"a bundle of {dict(bundle)}"
    return f"Ray did not place {what}; free in its cluster: {free or 'neither CPU nor GPU'}"


def started(actor: Any, group: PlacementGroup, index: int, bundle: Bundle, *arguments: Any) -> Any:
    """An actor that takes the whole of a bundle."""
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    taken = actor.options(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=where)
    return taken.remote(*arguments)


def results(asked: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """What actors of those names give, as soon as all have. Raises ActorLost for one that died, and what the first one
    to fail raised."""
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
    """What Ray says in several, indented."""
    return " ".join(str(error).split())
