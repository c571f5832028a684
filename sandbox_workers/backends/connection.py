"""The worker's end of a sandbox: a process, the socket to the init inside, and the kernel's limits around both.

All backends with an init use it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from turnlog.infra.run_folder import lacks_room
from turnlog.sandbox_workers.backends import init_wire
from turnlog.sandbox_workers.backends.init_wire import RESET_S, UNBOUNDED, ControlChannel, Heartbeat, InitFiles, refusal
from turnlog.sandbox_workers.inside.processes import tree_bytes
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    FileRefused,
    Kind,
    OnOutput,
    OutputStream,
    SandboxDied,
    SandboxUnavailable,
    attribute_death,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

log = logging.getLogger(__name__)

START_S = 60.0

NO_ROOM_BYTES = 2**20
"""A disk with less free space than this, in bytes, counts as full: the write that failed has used up the rest."""
METER_S = 0.05
"""Minimum seconds between looks at a call's CPU time."""
INIT_CPU_S, INIT_CPU_SHARE = 0.1, 0.1
"""CPU seconds that an init may use for a call, and additionally for each second of it: its looks at a tree of 64
processes take up to 5 ms."""

COMPARED_EVERY = 64
"""Every 64th init is compared with the first. Their namespaces are new, so a difference would be a fault of ours or of
the kernel's; the comparison takes 2 core-ms."""


class _Process(Protocol):
    """The part of an asyncio process that is used here."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stderr(self) -> asyncio.StreamReader | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class InitTimeouts:
    """Waiting times for an init that is to answer a call."""

    grace_s: float = 5.0
    """Seconds beyond the wall limit before the sandbox is killed."""
    stalled_s: float = 1.0
    """A time-out that is this many seconds late means that this process was suspended, not that the init was silent."""


PATIENCE = InitTimeouts()


@dataclasses.dataclass(frozen=True, slots=True)
class HostUser:
    """Host user that a sandbox runs as; None for the worker's own."""

    uid: int | None

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of Popen that drop root: no groups, own gid and uid."""
        return {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}


def own_account(first_uid: int, slot: int) -> HostUser:
    """Return the host user of a slot: one of its own if the worker is root, else the worker's user."""
    return HostUser(first_uid + slot if os.geteuid() == 0 else None)


def init_command(python: list[str], control: int, *arguments: str, program: str = "init") -> list[str]:
    """Return the argv of a module of inside/; its environment must name the program's folder in PYTHONPATH."""
    options = ["-s", "-P", "-X", "utf8"]
    return [*python, *options, "-m", f"turnlog.sandbox_workers.inside.{program}", str(control), *arguments]


async def start_sandbox(
    argv: Callable[[int], list[str]],
    *,
    account: HostUser,
    env: Mapping[str, str],
    inherited: Iterable[int] = (),
    ended: Callable[[], None] = lambda: None,
    exit_s: float = 0.0,
    bounds: KernelLimits | None = None,
    disk_bytes: int = UNBOUNDED,
    shares: Path | None = None,
    zygote: bool = False,
    patience: InitTimeouts = PATIENCE,
) -> InitSandbox:
    """Start `argv(control descriptor)` and wait until its init is ready.

    With `zygote` the descriptor is that of the orders. `shares` is the folder of the sandbox's files, if others write
    to the same disk. `ended` is called after the sandbox's death. `exit_s` is the time that the process gets to end by
    itself, where killing it would leave its children. Raises SandboxUnavailable with what the process wrote to
    stderr."""
    ours, theirs = socket.socketpair()
    try:
        # bwrap dies with the *thread* that started it (PR_SET_PDEATHSIG), so start it in the event loop's thread.
        process = await asyncio.create_subprocess_exec(
            *argv(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(), *inherited),
            env=dict(env),
            cwd="/",
            **account.options(),
        )
    except BaseException as error:
        ours.close()
        if bounds is not None:
            bounds.close()
        ended()
        if isinstance(error, OSError):
            raise SandboxUnavailable(f"{argv(0)[0]} cannot be started: {error}") from error
        raise
    finally:
        theirs.close()
    mother = Zygote(ours) if zygote else None
    control = ours if mother is None else mother.fork()
    sandbox = InitSandbox(
        process, control, ended, exit_s, bounds=bounds, disk_bytes=disk_bytes, shares=shares, zygote=mother,
        patience=patience,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S):
            await _adopt_while_starting(sandbox.ready(), process.pid, bounds)
    except (TimeoutError, SandboxDied, OSError) as error:
        said = await sandbox.last_words()
        raise SandboxUnavailable(said or str(error) or f"it was not ready within {START_S:.0f} s") from error
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


async def _adopt_while_starting(ready: Awaitable[None], pid: int, bounds: KernelLimits | None) -> None:
    """Move the process into its control group while it comes up, which takes the kernel a while, and then what it has
    started since. Raises OSError, SandboxDied."""
    if bounds is None:
        await ready
        return
    adoption = asyncio.create_task(asyncio.to_thread(bounds.adopt, pid))
    try:
        await ready
    finally:
        await asyncio.wait([adoption])
        failure = adoption.exception()  # also retrieved if `ready` raises; otherwise asyncio logs that it never was
    if failure:
        raise failure
    bounds.adopt(pid)


class InitSandbox(InitFiles):
    """A sandbox with an init. `process` may be a substitute for a process on another machine."""

    def __init__(
        self,
        process: _Process,
        control: socket.socket,
        ended: Callable[[], None],
        exit_s: float,
        *,
        bounds: KernelLimits | None = None,
        disk_bytes: int = UNBOUNDED,
        shares: Path | None = None,
        zygote: Zygote | None = None,
        patience: InitTimeouts = PATIENCE,
    ) -> None:
        super().__init__(control, disk_bytes)
        self._patience, self._shares = patience, shares
        self.process = process
        self._zygote = zygote
        self.observed: dict[str, Any] | None = None
        """State that the first init found around it (inside/observables.py); None until it was asked for."""
        self.proxy: socket.socket | None = None
        self._after = ended
        self._exit_s = exit_s
        self.bounds = bounds
        self._cancelled = False
        self._closing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the init reports that it is ready. Raises SandboxDied."""
        head, self.proxy = await self._channel.receive_greeting()
        if head.get("ready") is not True:
            raise SandboxDied(f"the init began with {head}")
        if self._zygote is not None and self.observed is None:
            await self.matches_first_init()

    async def matches_first_init(self) -> bool:
        """Return whether a new init, which has run nothing yet, observes the same state as the slot's first one. Raises
        SandboxDied."""
        _, body = await self._ask({"op": "observed"}, most=init_wire.OBSERVED_BYTES)
        seen = init_wire.parse_observables(body)
        self.observed = self.observed or seen
        if changed := ", ".join(name for name, value in seen.items() if self.observed.get(name) != value):
            log.error("a new sandbox finds other than the first of its slot did: %s", changed)
        return not changed

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        found = await self._exec(command, limits, on_output)
        if command.kind is Kind.session and found.status is ToolStatus.resource_limit and self.interpreter:
            # Timing decides whether the init or the kernel enforces a limit first, and which process the kernel kills.
            # It must not decide whether the interpreter survives.
            with contextlib.suppress(SandboxDied):  # the sandbox is closed then, and the result stands
                await self._ask({"op": "end"})
            self.interpreter = False
        return found

    async def _exec(self, command: Command, limits: SandboxLimits, on_output: OnOutput | None) -> Execution:
        alive = self.interpreter
        request = init_wire.call(command, limits, alive=alive, prompt=on_output is not None)
        parts: dict[OutputStream, list[bytes]] = {OutputStream.stdout: [], OutputStream.stderr: []}
        self._cancelled, heartbeat = False, Heartbeat()
        with self._asking("exec"):
            await self._set_limits(limits)
            try:
                most_s = limits.wall_s + self._patience.grace_s
                async with asyncio.timeout(most_s), meter_call(limits, self.bounds, self._cancel_for_limit):
                    await self._channel.send(*request)
                    async with heartbeat.beating(self._channel):
                        answer = await self._output(parts, limits.output_bytes, on_output)
                self.interpreter = answer.get("interpreter") is True
                if alive and answer.get("lost"):
                    return init_wire.LOST
                found = init_wire.execution(answer, init_wire.join_output(parts), cancelled=self._cancelled)
                if not self._cancelled:
                    await self._check_room(limits.disk_bytes)
                return self._apply_kernel_limits(found, limits)
            except FileRefused:
                raise
            except (TimeoutError, SandboxDied, OSError) as error:
                return await self._result_after_death(error, limits, init_wire.join_output(parts), heartbeat)
            except BaseException:
                await self.close()
                raise

    async def _check_room(self, disk_bytes: int) -> None:
        """Raise SandboxDied if the disk is full although the sandbox uses less than it may: then others have filled it,
        and the outcome says nothing about the call."""
        if self._shares is None or not (full := await asyncio.to_thread(lacks_room, self._shares, NO_ROOM_BYTES)):
            return
        if await asyncio.to_thread(tree_bytes, str(self._shares)) < disk_bytes:
            self._evidence = dataclasses.replace(self._evidence, starved=True)
            raise SandboxDied(full)

    async def _set_limits(self, limits: SandboxLimits) -> None:
        """Set the limits of a call. Raises SandboxDied if the sandbox is closed; SandboxUnavailable if the limits
        cannot be set, which is not the call's fault."""
        if self._closing is not None:  # its control group is gone, too, so setting limits would fail
            raise SandboxDied("the sandbox was closed")
        try:
            if self.bounds is not None:
                self.bounds.begin(limits)
        except OSError as error:
            await self.close()
            raise SandboxUnavailable(f"its bounds cannot be set: {error}") from error

    async def reset(self) -> bool:
        """See Sandbox. With a zygote nothing is reset: another init is started in namespaces of its own."""
        if self._zygote is None:
            return await super().reset()
        self.interpreter = False
        if self._closing is not None:
            return False
        try:
            async with asyncio.timeout(RESET_S):
                with self._asking("reset"):
                    before, self._channel = self._channel, ControlChannel(self._zygote.fork())
                    await before.close()
                    if self.proxy is not None:
                        self.proxy.close()
                await self.ready()
                return not self._zygote.to_be_compared or await self.matches_first_init()
        except (TimeoutError, SandboxDied, OSError):
            await self.close()
            return False
        except BaseException:
            await self.close()
            raise

    async def cancel(self) -> None:
        with contextlib.suppress(SandboxDied):  # `exec` raises it
            if self._asked == "exec":
                self._cancelled = True
                await self._channel.send({"op": "cancel"})

    async def close(self) -> None:
        """See Sandbox. Cancelling the caller does not interrupt the closing."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.interpreter = False
        if self.proxy is not None:
            self.proxy.close()
        if self._zygote is not None:
            self._zygote.close()
        closing = asyncio.create_task(self._channel.close())
        try:
            async with asyncio.timeout(self._exit_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        await closing
        if self.bounds is not None:
            self._evidence = dataclasses.replace(self._evidence, limit=self.bounds.exceeded_limit() or "")
            await asyncio.to_thread(self.bounds.close)
        self._after()

    async def last_words(self) -> str:
        """End the sandbox and return what it wrote to stderr."""
        assert self.process.stderr is not None
        words = asyncio.create_task(self.process.stderr.read(4096))
        if self.process.returncode is None:
            await asyncio.wait([words], timeout=0.5)
        await self.close()
        return (await words).decode(errors="replace").strip()

    async def _output(
        self, parts: dict[OutputStream, list[bytes]], most: int, on_output: OnOutput | None
    ) -> dict[str, Any]:
        """Collect the output of the call until its answer comes; return the head of the answer."""
        while True:
            head, size = await self._channel.head(most)
            if "output" not in head:
                refusal(head)
                return head
            if not size or head["output"] not in ("stdout", "stderr"):
                raise SandboxDied("the init answered with output that is none")
            stream = OutputStream(head["output"])
            parts[stream].append(await self._channel.body(size))
            most -= size
            if on_output is not None:
                on_output(stream, parts[stream][-1])

    async def _cancel_for_limit(self, limit: str) -> None:
        with contextlib.suppress(SandboxDied):  # `exec` raises it
            await self._channel.send({"op": "cancel", "limit": limit})

    def _apply_kernel_limits(self, found: Execution, limits: SandboxLimits) -> Execution:
        """Turn a limit that the kernel enforced or counted into the result, whatever became of the command then. The
        kernel's CPU time includes processes that nobody waited for and the init itself."""
        if self.bounds is None:
            return found
        found = dataclasses.replace(found, cpu_s=max(found.cpu_s, self.bounds.cpu_s()))
        if found.status not in (ToolStatus.ok, ToolStatus.tool_error):
            return found
        limit = self.bounds.exceeded_limit()
        if limit is None and cpu_left(limits, self.bounds, found.duration_s) <= 0:
            limit = "cpu_s"
        if limit is None:
            return found
        return dataclasses.replace(found, status=ToolStatus.resource_limit, reason=limit, exit_code=None)

    async def _result_after_death(
        self, error: Exception, limits: SandboxLimits, output: bytes, heartbeat: Heartbeat
    ) -> Execution:
        """Return the result of a call whose sandbox gave no answer, if the call caused that. Raises SandboxDied
        otherwise."""
        late_s = heartbeat.took_s - limits.wall_s - self._patience.grace_s
        # If it is later than that, this process was suspended.
        silent = isinstance(error, TimeoutError) and late_s < self._patience.stalled_s
        self._evidence = dataclasses.replace(self._evidence, silent=silent, stood=heartbeat.has_stalled)
        said = await self.last_words()
        evidence = await self._close_with_evidence(error)
        if (verdict := attribute_death(evidence)) is not None:
            return Execution(*verdict, None, output, heartbeat.took_s, 0.0)
        raise SandboxDied(": ".join(text for text in (str(error), said) if text), evidence) from error


class KernelLimits(Protocol):
    """The kernel's limits of one sandbox (a control group), where available."""

    def adopt(self, pid: int) -> None:
        """Move a process and all its descendants into the limits, before any call. Raises OSError."""
        ...

    def begin(self, limits: SandboxLimits) -> None:
        """Set the limits of the next call. Raises OSError."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU seconds of all that ran within the limits since `begin`, waited for or not; 0 if the kernel
        does not report it."""
        ...

    def overdrawn(self) -> str | None:
        """Return the name of a limit that the call exceeds now, among those that the kernel counts but does not
        enforce; None if there is none."""
        ...

    def exceeded_limit(self) -> str | None:
        """Return the name of the limit that was met by the call that ended or whose sandbox died, or None."""
        ...

    def close(self) -> None:
        """Kill what is left and remove the control group. Never raises."""
        ...


@contextlib.asynccontextmanager
async def meter_call(
    limits: SandboxLimits, bounds: KernelLimits | None, met: Callable[[str], Awaitable[None]]
) -> AsyncIterator[None]:
    """Meter a call while the block runs: call `met` with a limit that the kernel counts but does not enforce, once it
    is exceeded."""
    if bounds is None:
        yield
        return

    async def watch() -> None:
        await met(await wait_until_exceeded(limits, bounds))

    async with init_wire.running_after(METER_S, watch):
        yield


async def wait_until_exceeded(limits: SandboxLimits, bounds: KernelLimits) -> str:
    """Wait until the call exceeds its limit of socket memory or CPU time, and return the limit's name. CPU time is read
    from the control group, because no init is notified of children that nobody waits for."""
    clock, cores = asyncio.get_running_loop().time, os.cpu_count() or 1
    began = clock()
    due = began + limits.cpu_s / cores
    while True:
        if (limit := bounds.overdrawn()) is not None:
            return limit
        if (now := clock()) >= due:
            if (left := cpu_left(limits, bounds, now - began)) <= 0:
                return "cpu_s"
            due = now + left / cores
        await asyncio.sleep(METER_S)


def cpu_left(limits: SandboxLimits, bounds: KernelLimits, took_s: float) -> float:
    """Return the CPU seconds that are left, with an allowance for the init itself."""
    return limits.cpu_s + INIT_CPU_S + INIT_CPU_SHARE * took_s - bounds.cpu_s()


class Zygote:
    """The worker's handle on a zygote: the socket for orders. When it is closed, the zygote ends with all that it
    made."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._forks = 0
        orders.setblocking(False)

    def fork(self) -> socket.socket:
        """Return the control socket of a new init in namespaces of its own. The socket is at its end if the zygote is
        gone."""
        self._forks += 1
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._orders, [b"!"], [theirs.fileno()])
        return ours

    @property
    def to_be_compared(self) -> bool:
        """True if the latest init is to be compared with the first."""
        return self._forks % COMPARED_EVERY == 0

    def close(self) -> None:
        self._orders.close()
