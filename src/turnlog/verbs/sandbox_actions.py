"""The actions `turnlog sandbox check`, `exec` and `pool`.

check   which backends work on this machine, and which layers of isolation hold around a call
exec    one command in a sandbox of its own, as a tool call would run it; its output is streamed
pool    the state of the slots of every live worker, read from their health servers (/state)
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table

from turnlog.infra import run_folder
from turnlog.infra.roles.probe import states
from turnlog.infra.roles.terminal import Terminal, aside, say, say_json
from turnlog.names import ExitStatus
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.pooling.upkeep import SlotState
from turnlog.sandbox_workers.pooling.worker_pools import backend, find_backends
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    Execution,
    Kind,
    OutputStream,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus
from turnlog.settings import Settings

LONGEST = 600
"""Maximum characters of a line."""
TRUSTED = "this backend isolates nothing: use it only for code that you trust"
BWRAP, USERS, SECCOMP, GROUPS = "bwrap", "a user per slot", "seccomp filter", "control groups"


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """A line of the report."""

    name: str
    ok: bool
    says: str
    """Finding, or what is missing and how to get it."""
    needed: bool
    """True if the backend of [sandbox] needs it to isolate fully."""


async def check(settings: Settings, *, as_json: bool) -> int:
    """Print a line per finding. Return 0 if nothing needed is missing."""
    found = await findings(settings.sandbox, find_backends())
    if as_json:
        say_json([dataclasses.asdict(finding) for finding in found])
    else:
        for finding in found:
            mark = "ok" if finding.ok else "MISSING" if finding.needed else "no"
            say(f"{finding.name:20} {mark:8} {finding.says}")
    missing = [finding.name for finding in found if finding.needed and not finding.ok]
    verdict = f"{settings.sandbox.backend} is fully isolated here"
    if missing:
        verdict = f"{settings.sandbox.backend} is not fully isolated here: {', '.join(missing)}"
    aside(verdict)
    return ExitStatus.DIFFERS if missing else ExitStatus.DONE


async def findings(settings: SandboxSettings, backends: Iterable[str]) -> list[BackendFinding]:
    """Return the findings: layers first, then these backends."""
    layers = [await asyncio.to_thread(_bwrap), _users(settings), await asyncio.to_thread(_seccomp), _groups(settings)]
    return [*layers, *[await _backend(name, settings) for name in backends]]


async def _backend(name: str, settings: SandboxSettings) -> BackendFinding:
    needed = name == settings.backend or name in settings.backends
    try:
        provider = await backend(name, settings)
    except BackendUnavailable as error:
        return BackendFinding(f"backend {name}", False, _line(error), needed)
    await provider.close()
    if name == "subprocess":
        return BackendFinding(f"backend {name}", not needed, f"works; {TRUSTED}", needed)
    return BackendFinding(f"backend {name}", True, "works", needed)


def _bwrap() -> BackendFinding:
    from turnlog.infra.sandbox_root import cache_directory
    from turnlog.sandbox_workers.backends.bubblewrap import find, version

    try:
        binary = find(cache_directory())
    except SandboxUnavailable as error:
        return BackendFinding(BWRAP, False, _line(error), True)
    return BackendFinding(BWRAP, True, f"{'.'.join(map(str, version(binary)))} {binary}", True)


def _users(settings: SandboxSettings) -> BackendFinding:
    if os.geteuid() == 0:
        last = settings.first_uid + settings.slots - 1
        return BackendFinding(USERS, True, f"host users {settings.first_uid} to {last}", True)
    said = (
        f"sandboxes run as host user {os.geteuid()}, like this process: start the worker as root, so that each slot "
        "has its own user"
    )
    return BackendFinding(USERS, False, said, True)


def _seccomp() -> BackendFinding:
    from turnlog.sandbox_workers.backends import seccomp

    content = seccomp.program()
    if content is None:
        return BackendFinding(SECCOMP, False, "install libseccomp and turnlog[sandbox]", True)
    return BackendFinding(SECCOMP, True, f"{len(content)} bytes of BPF", True)


def _groups(settings: SandboxSettings) -> BackendFinding:
    from turnlog.sandbox_workers.backends.cgroups import Cgroups

    if settings.cgroups == "off":
        return BackendFinding(GROUPS, False, 'off by [sandbox] cgroups = "off"', True)
    try:
        found = Cgroups.open(dataclasses.replace(settings, cgroups="required"))
    except BackendUnavailable as error:
        return BackendFinding(GROUPS, False, _line(error), True)
    assert found is not None
    return BackendFinding(GROUPS, True, f"version {found.tree.version}: {', '.join(sorted(found.tree.folders))}", True)


def _line(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())[:LONGEST]


FIRST_SLOT = 1000
"""First slot number that no worker uses: it stands for a host user that runs nothing else."""
STATUS = {ToolStatus.timeout: 124, ToolStatus.resource_limit: 137, ToolStatus.cancelled: 130}
"""Exit statuses where the command has none: those of timeout(1) and of a shell."""
TERMINATED = 128 + signal.SIGTERM


class NothingToRun(SandboxError):
    """`exec` was given no command. Remedy: write it after --"""


class NotText(SandboxError):
    """Source of Python or a shell is not text. Each undecodable byte would become a `?`, which a shell expands."""


def execute(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises BackendUnavailable, SandboxUnavailable, ImageMissing,
    SandboxDied, NothingToRun, NotText, EgressError."""
    command = command_of(arguments)
    try:
        execution = asyncio.run(_run(settings, arguments, command))
    except asyncio.CancelledError:
        return TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return ExitStatus.READER_GONE
    if execution.status in (ToolStatus.ok, ToolStatus.tool_error) and execution.exit_code is not None:
        return execution.exit_code
    limits = limits_from_arguments(settings, arguments)
    most = f" ({getattr(limits, execution.reason):g})" if hasattr(limits, execution.reason) else ""
    line = f"{execution.status}: {execution.reason}{most}, after {execution.duration_s:.2f} s"
    aside(f"turnlog sandbox exec: {line}")
    return STATUS.get(execution.status, 1)


def command_of(arguments: argparse.Namespace) -> Command:
    """Return the command to run. Raises NothingToRun, NotText."""
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise NothingToRun("no command given; for example: turnlog sandbox exec -- ls -la /")
    stdin = sys.stdin.buffer.read() if arguments.stdin else b""
    if arguments.python or arguments.shell:
        try:
            " ".join(words).encode()
        except UnicodeEncodeError:
            raise NotText(
                "the command contains bytes that are not UTF-8: pass them with --stdin or in a file"
            ) from None
        kind = Kind.python if arguments.python else Kind.shell
        return Command(kind=kind, source=" ".join(words), stdin=stdin)
    return Command(kind=Kind.program, argv=tuple(words), stdin=stdin)


def limits_from_arguments(settings: Settings, arguments: argparse.Namespace) -> SandboxLimits:
    """Return the limits from the arguments, and those of [sandbox] for the others."""
    names = [field.name for field in dataclasses.fields(SandboxLimits)]
    given = {name: getattr(arguments, name) for name in names}
    own = {name: getattr(settings.sandbox, name) for name in names}
    return SandboxLimits(**{name: own[name] if given[name] is None else given[name] for name in names})


async def _run(settings: Settings, arguments: argparse.Namespace, command: Command) -> Execution:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # SIGINT does so by itself
    limits = limits_from_arguments(settings, arguments)
    async with _sandbox(settings, arguments, command, limits) as (sandbox, ready):
        return await sandbox.exec(ready, limits, on_output=_write_output)


@asynccontextmanager
async def _sandbox(
    settings: Settings, arguments: argparse.Namespace, command: Command, limits: SandboxLimits
) -> AsyncIterator[tuple[Sandbox, Command]]:
    """Open a fresh sandbox, with egress if it has a network. Yield it and the command with the variables for that."""
    name = arguments.backend or settings.sandbox.backend
    async with AsyncExitStack() as stack:
        egress = None
        if arguments.network != "none":
            from turnlog.infra.blobs import MemoryBlobs
            from turnlog.sandbox_workers.egress import Egress

            rules = (*settings.egress.allow, *arguments.allow)
            live = dataclasses.replace(settings.egress, mode="live", allow=rules)
            egress = await stack.enter_async_context(Egress.open_temporary(live, MemoryBlobs()))
        provider = await backend(name, settings.sandbox, ca=egress.ca if egress else None)
        stack.push_async_callback(provider.close)
        if arguments.network not in provider.networks:
            raise BackendUnavailable(f"backend {name} does not serve --network {arguments.network}")
        shape = Shape(image=arguments.image, network=arguments.network, disk_bytes=limits.disk_bytes)
        sandbox = await provider.start(FIRST_SLOT + os.getpid() % FIRST_SLOT, shape)
        stack.push_async_callback(sandbox.close)
        if egress is not None and sandbox.proxy is not None:
            await stack.enter_async_context(egress.serving(sandbox.proxy))
            command = dataclasses.replace(command, env=egress.environment_of(sandbox.proxy, provider))
        yield sandbox, command


def _write_output(stream: OutputStream, chunk: bytes) -> None:
    out = sys.stdout.buffer if stream is OutputStream.stdout else sys.stderr.buffer
    out.write(chunk)
    out.flush()


TIMEOUT_S = 2.0
EVERY_S = 1.0
ALWAYS = frozenset({SlotState.ready, SlotState.leased, SlotState.held})
"""States that have a column even if no slot is in them."""
NOBODY = 3
"""Exit status if nothing is up, as in `turnlog status`."""

Answers = dict[str, dict[str, Any]]
"""Report of each worker by name, or {"unreachable": why}."""


def show_pools(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the pools once, or repeatedly. Return 0 if a worker answered, else 3."""
    found = answers_of(addresses(settings, arguments.urls))
    if arguments.json:
        say_json(found)
    elif arguments.watch:
        _watch(settings, arguments.urls)
    else:
        Terminal().print(build_pools_table(settings, found))
    return 0 if any("pools" in answer for answer in found.values()) else NOBODY


def addresses(settings: Settings, urls: list[str]) -> dict[str, str]:
    """Return the base URL of each worker's health server: those in `urls`, else those of the run."""
    if urls:
        return {url: url.rstrip("/") for url in urls}
    return run_folder.health_of(Path(settings.run.directory), "sandbox")


def answers_of(workers: dict[str, str]) -> Answers:
    """Return the report of each worker; for one that does not answer, the reason."""
    return {name: said.get("pools") or said for name, said in states(workers, "sandbox", TIMEOUT_S).items()}


def build_pools_table(settings: Settings, found: Answers) -> Group:
    """Build a table of the pools that fits a terminal of 80 characters, and lines for what does not fit in."""
    if not found:
        where = f"run {settings.run.id!r} has no sandbox worker: start it with `turnlog up`, or name one with --url"
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
            live.update(build_pools_table(settings, answers_of(addresses(settings, urls))), refresh=True)
            time.sleep(EVERY_S)
