"""`turnlog sandbox pool`: what the slots of every live worker do, asked of their health servers (/state)."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table

from turnlog.infra import run_folder
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.sandbox_workers.pooling.slots import SlotState
from turnlog.settings import Settings

TIMEOUT_S = 2.0
EVERY_S = 1.0
ALWAYS = frozenset({SlotState.ready, SlotState.leased, SlotState.held})
"""Columns that are shown though no slot is in that state."""
NOBODY = 3
"""Exit status, as `turnlog status` has it, when nothing is up."""

Answers = dict[str, dict[str, Any]]
"""Worker -> what it says of itself, or {"unreachable": why}."""


def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the pools once, or again and again; 0 when a worker answered, else 3."""
    found = asked(addresses(settings, arguments.urls))
    if arguments.json:
        say_json(found)
    elif arguments.watch:
        _watch(settings, arguments.urls)
    else:
        Terminal().print(drawn(settings, found))
    return 0 if any("pools" in answer for answer in found.values()) else NOBODY


def addresses(settings: Settings, urls: list[str]) -> dict[str, str]:
    """Worker -> base URL of its health server: those named, else those of the run."""
    if urls:
        return {url: url.rstrip("/") for url in urls}
    try:
        health = run_folder.read_endpoints(Path(settings.run.directory)).health
    except run_folder.NoEndpoints:
        return {}
    return {name: url for name, url in health.items() if name.startswith("sandbox-")}


def asked(workers: dict[str, str]) -> Answers:
    """What each says; one that does not answer says why."""
    found: Answers = {}
    for name, url in workers.items():
        try:
            with urllib.request.urlopen(f"{url}/state", timeout=TIMEOUT_S) as answer:
                state = json.load(answer)
                found[name] = state.get("pools") or {
                    "unreachable": f"{url} is a {state.get('role')}, no sandbox worker"
                }
        except (urllib.error.URLError, OSError, ValueError) as error:
            found[name] = {"unreachable": f"{url}: {error}"}
    return found


def drawn(settings: Settings, found: Answers) -> Group:
    """A table of the pools that fits a terminal of 80 characters, and lines for what does not fit in."""
    if not found:
        where = f"run {settings.run.id!r} has no sandbox worker: start it with `turnlog up`, or name one by --url"
        return Group(where)
    pools = [pool for answer in found.values() for pool in answer.get("pools", ())]
    states = [state for state in SlotState if state in ALWAYS or any(pool["slots"][state] for pool in pools)]
    table = Table(
        title=f"sandbox pools of run {settings.run.id}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in ("worker", "backend"):
        table.add_column(name, no_wrap=True)
    for name in (*states, "queue", "hits", "miss", "wait ms", "leak"):
        table.add_column(str(name), justify="right", no_wrap=True)
    notes = []
    for worker, answer in found.items():
        for pool in answer.get("pools", ()):
            table.add_row(worker, pool["backend"], *_figures(pool, states))
            notes += [f"{worker} {pool['backend']}: {error}" for error in pool["errors"]]
            replaced = ", ".join(f"{why} {count:,}" for why, count in sorted(pool["renewals"].items()))
            notes += [f"{worker} {pool['backend']}: replaced {replaced}"] if replaced else []
        if answer.get("fallback"):
            notes.append(f"{worker}: TOOLS RUN WITHOUT ISOLATION; `turnlog sandbox check` says why")
        if "unreachable" in answer:
            notes.append(f"{worker}: {answer['unreachable']}")
    return Group(*([table] if table.row_count else []), *notes)


def _figures(pool: dict[str, Any], states: list[SlotState]) -> list[str]:
    slots = [str(pool["slots"][state] or "-") for state in states]
    counts = [f"{pool[name]:,}" for name in ("waiting", "hits", "misses")]
    waits = "/".join(f"{pool['wait_ms'][share]:.0f}" for share in ("p50", "p99"))
    return [*slots, *counts, waits, str(pool["leaks"] or "-")]


def _watch(settings: Settings, urls: list[str]) -> None:
    with Live(console=Terminal(), auto_refresh=False) as live:
        while True:
            live.update(drawn(settings, asked(addresses(settings, urls))), refresh=True)
            time.sleep(EVERY_S)
