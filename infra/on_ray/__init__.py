"""Processes of a run on the nodes of a Ray cluster.

The ranks of a trainer and the engines of a run are actors, each in a bundle of a placement group (cluster.py). An
engine is held by a process beside the supervisor (hosting.py): it joins the cluster, waits for room by name, and
watches the actor (actor.py), which is a supervisor of its own for that engine and its loader. So the run's supervisor
knows nothing of Ray; a Ray that ends the processes that have joined it ends no supervisor, and the end of the process
here, however it comes about, is for Ray the end of its actor and of its room.
"""

from __future__ import annotations

from turnlog.infra.embedded import NotInstalled
from turnlog.settings import Settings


def host_engine(settings: Settings) -> int:
    """`turnlog engine` with [engine] launcher = "ray": hold an engine on Ray in the foreground. Raises NotInstalled,
    NoCluster, NodeUnfit, ActorLost, and what ends the engine or its loader for good."""
    try:
        from turnlog.infra.on_ray.hosting import held
        from turnlog.infra.roles.ending import run_verb
    except ModuleNotFoundError as error:
        raise NotInstalled(f'engine.launcher = "ray" needs {error.name}: pip install turnlog[ray]') from error
    return run_verb(held(settings))
