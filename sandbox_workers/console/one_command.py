"""`turnlog sandbox exec`: one command in a sandbox of its own, as a tool call would run it, output as it is written."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from turnlog.infra.roles.terminal import aside
from turnlog.sandbox_workers.pooling import backend
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    Execution,
    Kind,
    Sandbox,
    SandboxError,
    Shape,
    Stream,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus
from turnlog.settings import Settings

FIRST_SLOT = 1000
"""Slots from here on are no worker's: a host user that runs nothing else."""
STATUS = {ToolStatus.timeout: 124, ToolStatus.resource_limit: 137, ToolStatus.cancelled: 130}
"""Exit statuses where the command has none: those of timeout(1) and of a shell."""
TERMINATED = 128 + signal.SIGTERM
READER_GONE = 128 + signal.SIGPIPE


class NothingToRun(SandboxError):
    """`exec` was given no command. Remedy: write it after --"""


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run it; the exit status. Raises BackendUnavailable, SandboxUnavailable, ImageMissing, SandboxDied,
    NothingToRun, EgressError."""
    command = asked(arguments)
    try:
        execution = asyncio.run(_run(settings, arguments, command))
    except asyncio.CancelledError:
        return TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return READER_GONE
    if execution.status in (ToolStatus.ok, ToolStatus.tool_error) and execution.exit_code is not None:
        return execution.exit_code
    limits = granted(settings, arguments)
    most = f" ({getattr(limits, execution.reason):g})" if hasattr(limits, execution.reason) else ""
    line = f"{execution.status}: {execution.reason}{most}, after {execution.duration_s:.2f} s"
    aside(f"turnlog sandbox exec: {line}")
    return STATUS.get(execution.status, 1)


def asked(arguments: argparse.Namespace) -> Command:
    """What to run. Raises NothingToRun."""
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        raise NothingToRun("there is no command: turnlog sandbox exec -- ls -la /")
    stdin = sys.stdin.buffer.read() if arguments.stdin else b""
    if arguments.python or arguments.shell:
        kind = Kind.python if arguments.python else Kind.shell
        return Command(kind=kind, source=" ".join(words), stdin=stdin)
    return Command(kind=Kind.program, argv=tuple(words), stdin=stdin)


def granted(settings: Settings, arguments: argparse.Namespace) -> SandboxLimits:
    """The limits named, else those of [sandbox]."""
    names = [field.name for field in dataclasses.fields(SandboxLimits)]
    given = {name: getattr(arguments, name) for name in names}
    own = {name: getattr(settings.sandbox, name) for name in names}
    return SandboxLimits(**{name: own[name] if given[name] is None else given[name] for name in names})


async def _run(settings: Settings, arguments: argparse.Namespace, command: Command) -> Execution:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # SIGINT does so by itself
    limits = granted(settings, arguments)
    async with _sandbox(settings, arguments, command, limits) as (sandbox, ready):
        return await sandbox.exec(ready, limits, on_output=_written)


@asynccontextmanager
async def _sandbox(
    settings: Settings, arguments: argparse.Namespace, command: Command, limits: SandboxLimits
) -> AsyncIterator[tuple[Sandbox, Command]]:
    """A fresh sandbox with its way out, if it has one, and the command with the variables for that."""
    name = arguments.backend or settings.sandbox.backend
    async with AsyncExitStack() as stack:
        egress = None
        if arguments.network != "none":
            from turnlog.infra.blobs import MemoryBlobs
            from turnlog.sandbox_workers.egress import Egress

            rules = (*settings.egress.allow, *arguments.allow)
            live = dataclasses.replace(settings.egress, mode="live", allow=rules)
            egress = await stack.enter_async_context(Egress.opened(live, MemoryBlobs()))
        provider = await backend(name, settings.sandbox, ca=egress.ca if egress else None)
        stack.push_async_callback(provider.close)
        if arguments.network not in provider.networks:
            raise BackendUnavailable(f"backend {name} does not serve --network {arguments.network}")
        shape = Shape(image=arguments.image, network=arguments.network, disk_bytes=limits.disk_bytes)
        sandbox = await provider.start(FIRST_SLOT + os.getpid() % FIRST_SLOT, shape)
        stack.push_async_callback(sandbox.close)
        if egress is not None and sandbox.proxy is not None:
            await stack.enter_async_context(egress.serving(sandbox.proxy))
            command = dataclasses.replace(command, env=egress.environment_of(sandbox.proxy, name))
        yield sandbox, command


def _written(stream: Stream, chunk: bytes) -> None:
    out = sys.stdout.buffer if stream is Stream.stdout else sys.stderr.buffer
    out.write(chunk)
    out.flush()
