"""Processes of a run on the nodes of a Ray cluster.

The ranks of a trainer and the engines of a run are actors, each in a bundle of a placement group (cluster.py). Each
engine has a local process beside the supervisor (hosting.py) that joins the cluster, waits until it has room, and
watches the actor (actor.py), which in turn supervises the engine and its loader. Three things follow:
* The run's supervisor needs no knowledge of Ray.
* If Ray ends the processes that have joined it, it does not end the supervisor.
* However the local process ends, Ray then removes its actor and frees the resources.
"""

from __future__ import annotations

from turnlog.infra.embedded import NotInstalled
from turnlog.settings import Settings


def host_engine(settings: Settings) -> int:
    """Run an engine on Ray in the foreground: `turnlog role engine` with [engine] launcher = "ray".

    Raises NotInstalled, NoCluster, NodeUnfit, ActorLost, and any error that ends the engine or its loader for good."""
    try:
        from turnlog.infra.roles.ending import run_verb
        from turnlog.plugins.ray.hosting import watch_engine
    except ModuleNotFoundError as error:
        raise NotInstalled(f'engine.launcher = "ray" needs {error.name}: pip install turnlog[ray]') from error
    return run_verb(watch_engine(settings))
