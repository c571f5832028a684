"""`turnlog status`: processes, lag per role, engines, weight versions, and what the live views count."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from turnlog.consumers.lag import Lag, lag_of
from turnlog.infra import run_folder
from turnlog.infra.embedded.supervisor import SATISFIED
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events
from turnlog.infra.log import LogUnavailable
from turnlog.infra.roles.role import opened
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.settings import Settings

VIEWS_TIMEOUT_S = 2.0


def show(settings: Settings, *, as_json: bool) -> int:
    """Print the status; 0 when every process is ready, 1 otherwise, 3 when the run is not up."""
    processes = status_processes(settings)
    found: dict[str, Any] = {"run": settings.run.id, "processes": processes, "views": views(settings)}
    if processes:
        try:
            found |= asyncio.run(_from_log(settings))
        except LogUnavailable as error:
            found["log"] = str(error)
    if as_json:
        say_json(found)
    else:
        tell(found, settings, Terminal())
    if not processes:
        return ExitStatus.NOT_UP
    ready = all(process["state"] in SATISFIED for process in processes)
    return ExitStatus.DONE if ready else ExitStatus.DIFFERS


def views(settings: Settings) -> dict[str, Any]:
    """What the live views answer; {"unavailable": why} when they do not."""
    try:
        url = run_folder.read_endpoints(Path(settings.run.directory)).views
        with urllib.request.urlopen(f"{url}/views", timeout=VIEWS_TIMEOUT_S) as answer:
            body: dict[str, Any] = json.load(answer)
            return body
    except (run_folder.NoEndpoints, urllib.error.URLError, OSError, ValueError) as error:
        return {"unavailable": str(error)}


async def _from_log(settings: Settings) -> dict[str, Any]:
    async with opened("status", settings) as role:
        lag = _by_topic(await lag_of(role.log, settings))
        engines = {event.engine_id: {"state": event.state, "version": event.version, "url": event.url}
                   for event in await all_events(role, topics.ENGINES)}  # fmt: skip
        return {"lag": lag, "engines": engines}


def _by_topic(lags: Iterable[Lag]) -> dict[str, dict[str, int]]:
    """Records that wait: role -> topic."""
    behind: dict[str, dict[str, int]] = {}
    for one in lags:
        topic = behind.setdefault(one.role, {})
        topic[one.place.topic] = topic.get(one.place.topic, 0) + one.records
    return behind


def tell(found: dict[str, Any], settings: Settings, console: Terminal) -> None:
    """Print what was found as people read it."""
    if not found["processes"]:
        console.print(f"run {settings.run.id!r} is not up: start it with `turnlog --run {settings.run.id} up`")
        return
    table = Table("process", "state", "pid", "restarts", "waits for / error", title=f"run {found['run']}")
    for process in found["processes"]:
        why = process["waiting"] or process["error"].partition("\n")[0]
        table.add_row(process["name"], process["state"], str(process["pid"] or "-"), str(process["restarts"]), why)
    console.print(table)
    for role, lag in found.get("lag", {}).items():
        console.print(f"lag of {role}: " + ", ".join(f"{topic} {count}" for topic, count in lag.items()))
    for engine, facts in found.get("engines", {}).items():
        console.print(f"{engine}: {facts['state']}, weight version {facts['version']}, {facts['url']}")
    seen = found["views"]
    if "unavailable" in seen:
        console.print(f"live views: {seen['unavailable']}")
        return
    sessions = ", ".join(f"{outcome} {count}" for outcome, count in sorted(seen["sessions"].items()))
    step = seen["last_step"]
    console.print(
        f"sessions: {sessions or 'none'}; steps {seen['steps']}; newest weight version {seen['newest_version']}"
    )
    if step:
        facts = f"reward {step['reward']:.3f}, loss {step['loss']:+.4f}, lag {step['lag']}"
        console.print(f"last step: batch {step['batch']}, {facts}")
