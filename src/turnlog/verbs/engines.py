"""`turnlog engines list|scale|register|drain`: list the engines that serve a run, and change them while it runs.

A request for an engine is a record on the log (infra/roles/fleet.py). Whoever serves the run follows it, also after a
restart.

NotServing   a requested engine does not serve in time, or failed to start
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from turnlog.infra.roles.ending import run_verb
from turnlog.names import ExitStatus
from turnlog.settings import EngineKind, Settings
from turnlog.verbs.verb import Verb, acts, add_json

if TYPE_CHECKING:
    from turnlog.infra.roles.role import Role
    from turnlog.processors.core.views.fleet import Fleet, FleetEngine

ENGINES_EPILOG = """\
Each request is recorded on the log. A new engine serves once it has the newest weights; a leaving engine takes no new
requests, and those that it still runs end within [engine] drain_s or are submitted again elsewhere (docs/engines.md).

Examples:
  turnlog engines list                            list engines, their weights, and who requested them
  turnlog engines scale 4                         let `turnlog up` host 4 engines; wait until they serve
  turnlog engines register http://sglang-7:30000  add one that you have started yourself with the model in [model] path
  turnlog engines register --kind vllm http://vllm-7:8000  add one of another kind than [engine] kind
  turnlog engines drain http://sglang-7:30000     remove it; its name works as well
Exit status: 0 success, 2 error.
"""
LOOK_S = 0.2
SPARE_S = 60.0
"""Seconds to wait beyond the limits of the settings, for a supervisor to notice and a process to stop."""


class NotServing(Exception):
    """Remedy: read the engine's log; `turnlog status`, `turnlog engines list`."""


def _engines_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = ENGINES_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the engines of the run, as recorded on its log")
    add_json(listed)
    scaled = actions.add_parser("scale", help="host N engines")
    scaled.add_argument("count", type=int, choices=range(1, 1025), metavar="N", help="1 to 1024")
    joined = actions.add_parser("register", help="add an engine that you have started yourself")
    joined.add_argument("url", metavar="URL", help="http://host:port at which gateways and its loader reach it")
    joined.add_argument("--name", default="", metavar="ID", help="its name on the log (default: HOST:PORT)")
    joined.add_argument(
        "--kind", default="", choices=get_args(EngineKind), help="its kind (default: by [engine] kind and kinds)"
    )
    gone = actions.add_parser("drain", help="remove an engine")
    gone.add_argument("engine", metavar="URL|ID", help="its address or name, as shown by `list`")
    for action in (scaled, joined, gone):
        action.add_argument("--reason", default="", metavar="TEXT", help="recorded on the log")
        action.add_argument("--no-wait", action="store_true", help="return as soon as the request is on the log")


def _engines(settings: Settings, arguments: argparse.Namespace) -> int:
    return run_verb(_run(settings, arguments))


async def _run(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles import fleet
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import aside, say

    async with open_role("engines", settings) as role:
        match arguments.action:
            case "list":
                _tell(await fleet.read(role), as_json=arguments.json)
                return ExitStatus.DONE
            case "scale":
                asked = await fleet.scale(role, arguments.count, reason=arguments.reason)
            case "register":
                of = {"name": arguments.name, "kind": arguments.kind, "reason": arguments.reason}
                asked = [await fleet.register(role, arguments.url, **of)]
            case _:
                asked = [await fleet.drain(role, arguments.engine, reason=arguments.reason)]
        if not asked:
            say(f"{arguments.count} engines are already hosted")
        for engine in asked:
            say(f"{engine.id}: requested to {'leave' if engine.leaving else 'serve'}")
        if not arguments.no_wait:
            await wait_until_settled(role, asked, told=aside)
    return ExitStatus.DONE


async def wait_until_settled(role: Role, asked: Sequence[FleetEngine], *, told: Callable[[str], None]) -> None:
    """Wait until each engine serves or has left, as requested. `told` is called with a line for each change. Raises
    NotServing."""
    import asyncio  # takes longer than all of `turnlog health`, which imports this module

    from turnlog.infra.roles import fleet
    from turnlog.processors.core.views.fleet import GONE, SERVING

    began, bound = time.monotonic(), role.settings.engine
    patience_s = SPARE_S + max(bound.start_timeout_s, bound.drain_s)
    waiting, seen = {engine.id for engine in asked}, {engine.id: "" for engine in asked}
    lacks: dict[str, str] = {}
    while waiting:
        now = await fleet.read(role)
        for engine in [now.engines[engine_id] for engine_id in sorted(waiting)]:
            if engine.state != seen[engine.id]:
                seen[engine.id] = engine.state
                told(f"{time.monotonic() - began:6.1f} s  {engine.id} {_describe_engine(engine)}")
            if engine.state == (GONE if engine.leaving else SERVING) or engine.has_left:
                waiting.discard(engine.id)
        before, lacks = lacks, _lacking(role.settings, waiting)
        for engine_id in [one for one in lacks if lacks[one] != before.get(one)]:
            told(f"{time.monotonic() - began:6.1f} s  {engine_id} waits: {lacks[engine_id]}")
        if waiting and time.monotonic() > began + patience_s:
            names = (f"{one} ({lacks[one]})" if one in lacks else one for one in sorted(waiting))
            raise NotServing(
                f"{', '.join(names)} after {patience_s:.0f} s: `turnlog engines list` shows their progress; "
                "[engine] start_timeout_s and drain_s limit how long that may take"
            )
        if waiting:
            await asyncio.sleep(LOOK_S)


def _lacking(settings: Settings, waiting: set[str]) -> dict[str, str]:
    """Return what each engine that is starting on this machine waits for. Raises NotServing if its supervisor has given
    one up."""
    from turnlog.infra.embedded.supervisor import ChildState
    from turnlog.infra.embedded.up import status_processes

    found = {one["name"]: one for one in (status_processes(settings) if waiting else ()) if one["name"] in waiting}
    for name, process in found.items():
        if process["state"] == ChildState.FAILED:
            raise NotServing(f"{name} does not start: {process['error']}")
    return {name: process["waiting"] for name, process in found.items() if process["waiting"]}


def _describe_engine(engine: FleetEngine) -> str:
    from turnlog.processors.core.views.fleet import SERVING

    weights = f" with weight version {engine.version}" if engine.state == SERVING else ""
    return f"{engine.state or 'has not reported yet'}{weights}{engine.cause and ': '}{engine.cause}"


def _tell(found: Fleet, *, as_json: bool) -> None:
    from rich.table import Table

    from turnlog.infra.roles.terminal import Terminal, say_json
    from turnlog.processors.core.views.fleet import GONE, SERVING

    if as_json:
        say_json([dataclasses.asdict(engine) for engine in found.engines.values()])
        return
    table = Table("engine", "state", "version", "requested", "by", "address", "why")
    for engine in found.engines.values():
        wanted = {"": "-", SERVING: "serve", GONE: "leave"}[engine.wanted]
        table.add_row(
            engine.id, engine.state or "-", str(engine.version), wanted, engine.by or "-", engine.url or "-",
            engine.cause,
        )  # fmt: skip
    Terminal().print(table)


VERBS = (
    Verb("engines", "list the engines; add or remove some during a run", _engines, _engines_arguments,
         looks=acts("list")),
)  # fmt: skip
