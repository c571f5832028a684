"""The worker's end of a sandbox: a process and the socket to the init inside. Both backends use it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from turnlog.sandbox_workers.inside.frames import HEADER
from turnlog.sandbox_workers.protocol import TOOLS, Execution, SandboxDied, SandboxUnavailable
from turnlog.schemas.events import SandboxLimits, ToolStatus

START_S = 20.0
GRACE_S = 5.0
"""How much longer than the wall limit the init may take to answer before the sandbox is killed."""
HEAD_BYTES = 65536
"""No head is longer. The init shares its sandbox with the agent's code, so nothing that it says is trusted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """Who a sandbox runs as on the host; None: as we do."""

    uid: int | None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of Popen that drop root: no groups, own gid and uid."""
        return {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}


async def started(
    argv: Callable[[int], list[str]],
    *,
    account: Account,
    env: Mapping[str, str],
    inherited: Iterable[int] = (),
    ended: Callable[[], None] = lambda: None,
    exit_s: float = 0.0,
) -> InitSandbox:
    """Start `argv(control descriptor)` and wait until its init is ready. `ended` runs after the sandbox's death;
    `exit_s` is how long it may take to end by itself, where killing it would leave its children.
    Raises SandboxUnavailable with what it wrote on stderr."""
    ours, theirs = socket.socketpair()
    try:
        # bwrap dies with the *thread* that started it (PR_SET_PDEATHSIG): that is the event loop's, never a pool's.
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
        ended()
        if isinstance(error, OSError):
            raise SandboxUnavailable(f"{argv(0)[0]} cannot be started: {error}") from error
        raise
    finally:
        theirs.close()
    sandbox = InitSandbox(process, ours, ended, exit_s)
    try:
        async with asyncio.timeout(START_S):
            await sandbox.ready()
    except (TimeoutError, SandboxDied) as error:
        said = await sandbox.last_words()
        raise SandboxUnavailable(said or f"it was not ready within {START_S:.0f} s") from error
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


class InitSandbox:
    """See Sandbox."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        ended: Callable[[], None],
        exit_s: float,
    ) -> None:
        self.process = process
        self._control = control
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._ended = ended
        self._exit_s = exit_s
        self._closed = False

    async def ready(self) -> None:
        """The init has said that it works. Raises SandboxDied."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._control)
        head, _ = await self._receive(0)
        if head != {"ready": True, "pid": head.get("pid")}:
            raise SandboxDied(f"the init began with {head}")

    async def run(self, tool: str, source: str, limits: SandboxLimits) -> Execution:
        """See Sandbox."""
        if tool not in TOOLS:
            raise ValueError(f"{tool!r} is not one of {', '.join(TOOLS)}")
        began = asyncio.get_running_loop().time()
        try:
            await self._send({"op": "exec", "tool": tool, "limits": dataclasses.asdict(limits)}, source)
            async with asyncio.timeout(limits.wall_s + GRACE_S):
                head, output = await self._receive(limits.output_bytes)
            return _execution(head, output)
        except TimeoutError:
            await self.close()
            duration = asyncio.get_running_loop().time() - began
            return Execution(ToolStatus.timeout, "wall_s", None, b"", duration, 0.0)
        except BaseException:
            await self.close()
            raise

    async def cancel(self) -> None:
        """See Sandbox."""
        with contextlib.suppress(SandboxDied):  # then `run` says so
            await self._send({"op": "cancel"})

    async def reset(self) -> bool:
        """See Sandbox."""
        try:
            await self._send({"op": "reset"})
            async with asyncio.timeout(GRACE_S):
                head, _ = await self._receive(0)
        except (SandboxDied, TimeoutError):
            return False
        return head == {"clean": True}

    async def close(self) -> None:
        """See Sandbox."""
        if self._closed:
            return
        self._closed = True
        (self._writer or self._control).close()
        try:
            async with asyncio.timeout(self._exit_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._ended()

    async def last_words(self) -> str:
        """End it and return what it wrote on stderr."""
        assert self.process.stderr is not None
        words = asyncio.create_task(self.process.stderr.read(4096))
        if self.process.returncode is None:
            await asyncio.wait([words], timeout=0.5)
        await self.close()
        return (await words).decode(errors="replace").strip()

    async def _send(self, head: dict[str, Any], source: str = "") -> None:
        assert self._writer is not None
        text, body = json.dumps(head).encode(), source.encode(errors="replace")
        try:
            self._writer.write(HEADER.pack(len(text), len(body)) + text + body)
            await self._writer.drain()
        except OSError as error:
            raise SandboxDied(f"the sandbox closed its socket: {error}") from error

    async def _receive(self, most: int) -> tuple[dict[str, Any], bytes]:
        try:
            head_size, body_size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if head_size > HEAD_BYTES or body_size > most:
                raise SandboxDied(f"the init announced {head_size} + {body_size} bytes")
            head = json.loads(await self._reader.readexactly(head_size))
            body = await self._reader.readexactly(body_size)
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise SandboxDied(f"the sandbox ended before it answered ({type(error).__name__})") from error
        if not isinstance(head, dict):
            raise SandboxDied("the init answered with something else than an object")
        return head, body


def _execution(head: dict[str, Any], output: bytes) -> Execution:
    """Raises SandboxDied for an answer that an init would not give."""
    try:
        status, reason, code = ToolStatus(head["status"]), str(head["reason"]), head["exit_code"]
        duration, cpu = float(head["duration_s"]), float(head["cpu_s"])
        if not (code is None or isinstance(code, int)) or not math.isfinite(duration + cpu):
            raise ValueError(head)
    except (KeyError, ValueError, TypeError) as error:
        raise SandboxDied(f"the init answered nonsense: {error}") from error
    return Execution(status, reason, code, output, duration, cpu)


def own_account(first_uid: int, slot: int) -> Account:
    """The host user of a slot: its own when we are root, else the only one that we have."""
    return Account(first_uid + slot if os.geteuid() == 0 else None)
