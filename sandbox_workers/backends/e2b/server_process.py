"""The part of envd's process service that E2B's SDK 2 uses for commands, over the machines of a local server.

Source: process.proto, as the SDK generates it (e2b.envd.process); served by connectrpc's own ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

from turnlog.sandbox_workers.backends.e2b.server_machine import Machine

READ_BYTES = 32768
ProcessEvent = process_pb.ProcessEvent
StartContext = RequestContext[process_pb.StartRequest, process_pb.StartResponse]
InputContext = RequestContext[process_pb.SendInputRequest, process_pb.SendInputResponse]
SignalContext = RequestContext[process_pb.SendSignalRequest, process_pb.SendSignalResponse]
CloseContext = RequestContext[process_pb.CloseStdinRequest, process_pb.CloseStdinResponse]


class Processes(process_connect.Process):
    """process.Process: Start, SendInput, CloseStdin, SendSignal; whatever else is UNIMPLEMENTED."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._machines = machines

    async def start(
        self, request: process_pb.StartRequest, ctx: StartContext, /
    ) -> AsyncIterator[process_pb.StartResponse]:
        """Run a process; its events until it ends. Leaving does not end it."""
        machine = self._machine(ctx.request_headers.get("e2b-sandbox-id") or "")
        config = request.process or process_pb.ProcessConfig()
        process = await machine.start([config.cmd, *config.args], dict(config.envs), stdin=request.stdin)
        yield event(Oneof("start", ProcessEvent.StartEvent(pid=process.pid)))
        async for name, data in _output(process):
            yield event(Oneof("data", ProcessEvent.DataEvent(output=Oneof(name, data))))  # type: ignore[arg-type]
        code = await process.wait()
        machine.processes.pop(process.pid, None)
        yield event(Oneof("end", ProcessEvent.EndEvent(exit_code=code, exited=code >= 0, status=f"exit {code}")))

    async def send_input(
        self, request: process_pb.SendInputRequest, ctx: InputContext, /
    ) -> process_pb.SendInputResponse:
        """Bytes for a process's stdin."""
        process = self._process(ctx.request_headers.get("e2b-sandbox-id") or "", request.process)
        given = request.input.input if request.input is not None else None
        if process.stdin is None or given is None or given.field != "stdin":
            raise ConnectError(Code.FAILED_PRECONDITION, "the process has no stdin")
        try:
            process.stdin.write(given.value)
            await process.stdin.drain()
        except OSError as error:
            raise ConnectError(Code.INTERNAL, f"error writing to stdin: {error}") from error
        return process_pb.SendInputResponse()

    async def close_stdin(
        self, request: process_pb.CloseStdinRequest, ctx: CloseContext, /
    ) -> process_pb.CloseStdinResponse:
        """No more input."""
        process = self._process(ctx.request_headers.get("e2b-sandbox-id") or "", request.process)
        if process.stdin is not None:
            process.stdin.close()
        return process_pb.CloseStdinResponse()

    async def send_signal(
        self, request: process_pb.SendSignalRequest, ctx: SignalContext, /
    ) -> process_pb.SendSignalResponse:
        """SIGTERM or SIGKILL."""
        process = self._process(ctx.request_headers.get("e2b-sandbox-id") or "", request.process)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if request.signal is process_pb.Signal.SIGKILL else signal.SIGTERM)
        return process_pb.SendSignalResponse()

    def _machine(self, identity: str) -> Machine:
        machine = self._machines.get(identity)
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "sandbox not found")
        return machine

    def _process(self, identity: str, selector: process_pb.ProcessSelector | None) -> asyncio.subprocess.Process:
        chosen = selector.selector if selector is not None else None
        process = None
        if chosen is not None and chosen.field == "pid":
            process = self._machine(identity).processes.get(chosen.value)
        if process is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        return process


def event(what: Oneof) -> process_pb.StartResponse:  # type: ignore[type-arg]
    """One event of a started process."""
    return process_pb.StartResponse(event=ProcessEvent(event=what))


async def _output(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[str, bytes]]:
    """What it writes, as it comes; a reader that does not keep up holds the process back."""
    assert process.stdout is not None
    assert process.stderr is not None
    pending = {
        asyncio.ensure_future(stream.read(READ_BYTES)): (name, stream)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
    }
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                name, stream = pending.pop(read)
                if data := read.result():
                    yield name, data
                    pending[asyncio.ensure_future(stream.read(READ_BYTES))] = (name, stream)
    finally:
        for read in pending:
            read.cancel()
