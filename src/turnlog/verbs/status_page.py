"""`turnlog status`: processes, unread records per role, engines, weight versions, and the counts of the live views. If
no supervisor of this machine runs the roles, most of it is read from the log, and the rest from health addresses."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from turnlog.consumers.index import IndexFailure
from turnlog.consumers.index.reader import Index, path_of
from turnlog.consumers.lag import Lag, lag_of
from turnlog.infra import run_folder
from turnlog.infra.access.bearers import first_token
from turnlog.infra.embedded.supervisor import SATISFIED
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events
from turnlog.infra.log import LogUnavailable
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.http_clients import fetch_json, fetch_warnings
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.runs import life
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.names import ExitStatus
from turnlog.processors.core.books import counting_steps
from turnlog.processors.core.views.fleet import NO_WEIGHTS, Fleet
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas import topics
from turnlog.schemas.events import SampleBatchFormed, StepCompleted
from turnlog.settings import Settings

TIMEOUT_S = 2.0


def show(settings: Settings, *, as_json: bool, health: Sequence[str] = (), every_s: float = 0.0) -> int:
    """Print the status. If `every_s` is not 0, repeat that every so many seconds until Ctrl-C; with `as_json` each time
    as one line. Return the exit status of `once`."""
    while every_s:
        if not as_json:
            Terminal().clear()
        once(settings, as_json=as_json, health=health, indent=None)
        time.sleep(every_s)  # polled: other processes and servers send no events
    return once(settings, as_json=as_json, health=health)


def once(settings: Settings, *, as_json: bool, health: Sequence[str] = (), indent: int | None = 2) -> int:
    """Print the status. Return 0 if everything that was queried is ready, 1 if not, 3 if the run is not up.

    Without a supervisor of this machine, the status is read from the log as far as possible, and `health` (else
    [status] health) lists addresses of roles to query. Raises LogError in that case.
    """
    processes, elsewhere = status_processes(settings), False
    asked = _query_addresses(health or settings.status.health)
    found: dict[str, Any] = {"run": settings.run.id, "processes": processes, "health": asked}
    found["disk"] = run_folder.lacks_room(Path(settings.run.directory))
    found["warnings"] = _warnings(settings, processes, asked)
    found |= {"views": views(settings, asked), "recipes": recipes(settings)}
    if processes:
        try:
            found |= run_verb(_from_log(settings))
        except LogUnavailable as error:
            found["log"] = str(error)
    elif elsewhere := _runs_elsewhere(settings):
        found |= run_verb(_from_log(settings))
    if as_json:
        say_json(found, indent=indent)
    else:
        tell(found, settings, Terminal())
    if not processes and not elsewhere:
        return ExitStatus.NOT_UP
    ready = all(process["state"] in SATISFIED for process in processes) and all(one["ready"] for one in asked.values())
    return ExitStatus.DONE if ready else ExitStatus.DIFFERS


def _warnings(
    settings: Settings, processes: Sequence[Mapping[str, Any]], asked: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Return the warnings of running roles by their names: of the run's own processes, and of the queried addresses."""
    health = run_folder.health_addresses(settings) if processes else {}
    with ThreadPoolExecutor(max(1, min(32, len(health)))) as pool:
        own = dict(
            zip(health, pool.map(lambda one: fetch_warnings(one, timeout_s=TIMEOUT_S), health.values()), strict=True)
        )
    told = own | {address: list(said.get("warnings", ())) for address, said in asked.items()}
    return {name: lines for name, lines in told.items() if lines}


def _runs_elsewhere(settings: Settings) -> bool:
    """Return whether no supervisor of this machine has started the run, and the settings name every server that its log
    needs."""
    ours = (Path(settings.run.directory) / run_folder.FILE).exists()
    return not ours and bool(settings.kafka.bootstrap and settings.registry.url and settings.store.endpoint)


def _query_addresses(addresses: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Query health addresses. Return for each the role that answers, whether it is ready and alive, and what it waits
    for."""
    with ThreadPoolExecutor(max(1, min(32, len(addresses)))) as pool:
        return dict(zip(addresses, pool.map(_asked_one, addresses), strict=True))


def _asked_one(address: str) -> dict[str, Any]:
    url = address.rstrip("/")
    try:
        alive, said = fetch_json(f"{url}/healthz", timeout_s=TIMEOUT_S)
        ready, waits = fetch_json(f"{url}/readyz", timeout_s=TIMEOUT_S)
    except (OSError, ValueError) as error:
        return {"role": "", "alive": False, "ready": False, "why": f"no answer: {error}", "warnings": []}
    stale = [f"loop {name} makes no progress" for name, loop in said.get("loops", {}).items() if loop.get("stale")]
    why = "; ".join([*stale, *map(str, waits.get("waiting", {}).values())])
    warnings = waits.get("warnings", [])
    return {"role": said.get("role", ""), "alive": alive, "ready": ready and alive, "why": why, "warnings": warnings}


def views(settings: Settings, asked: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the answer of the live views, those of the run or one in `asked`; {"unavailable": why} if there is
    none."""
    try:
        own = [address.rstrip("/") for address, said in (asked or {}).items() if said["role"] == "views"]
        if not (own or settings.views.enabled):
            return {"unavailable": "they are off: set [views] enabled = true to count sessions"}
        url = own[0] if own else run_folder.read_endpoints(Path(settings.run.directory)).views
        return fetch_json(f"{url}/views", timeout_s=TIMEOUT_S, bearer=first_token(settings.access))[1]
    except (run_folder.NoEndpoints, urllib.error.URLError, OSError, ValueError) as error:
        return {"unavailable": str(error)}


def recipes(settings: Settings) -> dict[str, Any]:
    """Return the figures of each recipe in the run's index, and their time; {"unavailable": why} if there is no
    index."""
    try:
        with Index.open(path_of(settings)) as index:
            rows, as_of = index.recipes()
            return {"as_of_ms": as_of.written_ms, "of": rows}
    except IndexFailure as failure:
        return {"unavailable": str(failure)}


async def _from_log(settings: Settings) -> dict[str, Any]:
    async with open_role("status", settings) as role:
        lag = _by_topic(await lag_of(role.log, settings))
        fleet = await _read_fleet(role)
        engines = {engine.id: {"state": engine.state, "version": engine.version, "url": engine.url}
                   for engine in fleet.engines.values()}  # fmt: skip
        return {"lag": lag, "engines": engines, "progress": await read_progress(role)}


async def _read_fleet(role: Role) -> Fleet:
    fleet = Fleet()
    for event in await all_events(role, topics.ENGINES):
        fleet.apply(event)
    return fleet


async def read_progress(role: Role) -> dict[str, Any]:
    """Return the progress of the run from its control topics: rollout batches trained and planned, batches, newest
    weights and how many engines have them."""
    said = await life(role)
    steps: dict[int, StepCompleted] = counting_steps(await all_events(role, topics.STEPS))
    batches = [event for event in await all_events(role, topics.BATCHES) if isinstance(event, SampleBatchFormed)]
    weights = WeightChain()
    for event in await all_events(role, topics.WEIGHTS):
        weights.apply(event)
    acknowledged = (await _read_fleet(role)).acknowledged_versions().values()
    loaded = [version for version in acknowledged if version != NO_WEIGHTS]
    last = steps[max(steps)] if steps else None
    return {
        "phase": said.phase,
        "draws_planned": said.plan and said.plan.draws,
        "draws_trained": len({step.draw_index for step in steps.values()}),
        "batches_formed": len({batch.batch_index for batch in batches}),
        "steps": len(steps),
        "newest_version": weights.newest,
        "newest_state": weights.newest_state,
        "newest_loaded": sum(version == weights.newest for version in loaded),
        "engines": len(loaded),
        "last_step": last and {"batch": last.batch_index, "reward": last.reward_mean, "loss": last.loss,
                               "lag": last.lag_max},
    }  # fmt: skip


def _by_topic(lags: Iterable[Lag]) -> dict[str, dict[str, int]]:
    """Return unread records: role -> topic -> number."""
    behind: dict[str, dict[str, int]] = {}
    for one in lags:
        topic = behind.setdefault(one.role, {})
        topic[one.place.topic] = topic.get(one.place.topic, 0) + one.records
    return behind


def tell(found: dict[str, Any], settings: Settings, console: Terminal) -> None:
    """Print the status as text."""
    if not found["processes"] and "lag" not in found:
        directory = Path(settings.run.directory)
        if not directory.exists():
            console.print(
                f"there is no run {settings.run.id!r} here: {directory.absolute()} does not exist; `turnlog run list` "
                "lists the runs of this directory",
                soft_wrap=True,
            )
            return
        up = run_folder.verb_line(directory, "up")
        console.print(f"run {settings.run.id!r} is not up: start it with `{up}`", soft_wrap=True)
        return
    if found.get("disk"):
        console.print(f"paused: {found['disk']}")
    if found["processes"]:
        table = Table("process", "state", "pid", "restarts", "waits for / error", title=f"run {found['run']}")
        for process in found["processes"]:
            why = process["waiting"] or process["error"].partition("\n")[0]
            table.add_row(process["name"], process["state"], str(process["pid"] or "-"), str(process["restarts"]), why)
        console.print(table)
    if found.get("health"):
        table = Table("address", "role", "state", "waits for", title=f"run {found['run']}")
        for address, said in found["health"].items():
            state = "ready" if said["ready"] else "alive" if said["alive"] else "not alive"
            table.add_row(address, said["role"], state, said["why"])
        console.print(table)
    for name, lines in found["warnings"].items():
        for line in lines:
            console.print(f"warning from {name}: {line}", soft_wrap=True)
    for role, lag in found.get("lag", {}).items():
        console.print(f"lag of {role}: " + ", ".join(f"{topic} {count}" for topic, count in lag.items()))
    for engine, facts in found.get("engines", {}).items():
        console.print(f"{engine}: {facts['state']}, weight version {facts['version']}, {facts['url']}")
    _tell_progress(found, console)
    _tell_recipes(found["recipes"], console)


FIGURES = {"reward": ".3f", "pass_rate": ".2f", "output_tokens": ".0f", "turns": ".1f", "lag": ".2f"}
"""Figures of a recipe and their formats; `-` is printed if there is no value."""


def _tell_recipes(found: dict[str, Any], console: Terminal) -> None:
    """Print one recipe as a line, several as a table."""
    if "unavailable" in found:
        console.print(f"recipes: {found['unavailable']}")
        return
    table = Table("recipe", "sessions", *(name.replace("_", " ") for name in FIGURES))
    for row in found["of"]:
        figures = ("-" if row[name] is None else format(row[name], form) for name, form in FIGURES.items())
        table.add_row(row["recipe"], str(row["sessions"]), *figures)
    if table.row_count > 1:
        written = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(found["as_of_ms"] / 1000))
        table.title = f"means of settled sessions, index of {written}"
        console.print(table)
    elif table.row_count:
        said = ", ".join(f"{column.header} {next(iter(column.cells))}" for column in table.columns)
        console.print(said)


def _describe_newest(progress: dict[str, Any]) -> str:
    """Return the state of the newest weights and how many engines have them, in words."""
    if progress["newest_version"] is None:
        return ""
    return f" ({progress['newest_state']}, {progress['newest_loaded']} of {progress['engines']} engines)"


def _tell_progress(found: dict[str, Any], console: Terminal) -> None:
    """Print the progress from the live views, which count sessions, else from the log."""
    seen, progress = found["views"], found.get("progress")
    if progress:
        planned = "?" if progress["draws_planned"] is None else progress["draws_planned"]
        if progress["phase"] != RunPhase.RUNNING:
            console.print(f"the run is {progress['phase']}")
        console.print(
            f"draws trained: {progress['draws_trained']} of {planned}; batches formed {progress['batches_formed']}, "
            f"steps {progress['steps']}; newest weight version {progress['newest_version']}{_describe_newest(progress)}"
        )
    if "unavailable" in seen:
        console.print(f"live views: {seen['unavailable']}")
        step = progress and progress["last_step"]
    else:
        sessions = ", ".join(f"{outcome} {count}" for outcome, count in sorted(seen["sessions"].items()))
        step = seen["last_step"]
        console.print(
            f"sessions: {sessions or 'none'}; steps {seen['steps']}; newest weight version {seen['newest_version']}"
        )
    if step:
        facts = f"reward {step['reward']:.3f}, loss {step['loss']:+.4f}, lag {step['lag']}"
        console.print(f"last step: batch {step['batch']}, {facts}")
