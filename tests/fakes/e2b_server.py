"""A local server for E2B's own SDK: the REST calls and the envd calls that the e2b backend makes, on loopback.

For tests and for trying things without a key: the SDK is pointed at it by E2B_API_URL and E2B_SANDBOX_URL. Source of
the protocol: the SDK's source (e2b 2), which is also what speaks to it; machines are bubblewraps of ours, which
makes them no microVMs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from turnlog.infra.roles.health import QuietServer
from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_workers.backends.bubblewrap import find
from turnlog.sandbox_workers.backends.roots import interpreter, owned_prefix

ENVD_VERSION = "0.6.7"
Template = Mapping[str, Path]
"""Folders that its machines have in addition: path inside -> folder of this machine."""
DEFAULT_TIMEOUT_S = 300

HOME = "/user"
PYTHON = "/opt/python"
UID = 1000
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64")
PASSWD = f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n"

READ_BYTES = 32768
ProcessEvent = process_pb.ProcessEvent
StartContext = RequestContext[process_pb.StartRequest, process_pb.StartResponse]
InputContext = RequestContext[process_pb.SendInputRequest, process_pb.SendInputResponse]
SignalContext = RequestContext[process_pb.SendSignalRequest, process_pb.SendSignalResponse]
CloseContext = RequestContext[process_pb.CloseStdinRequest, process_pb.CloseStdinResponse]


class LocalE2b:
    """The server's state. `key` is the only API key that it takes."""

    def __init__(self, parts: Parts, *, key: str, first_uid: int) -> None:
        self.key = key
        self.failing = 0
        """Status that every request with the key is answered with; 0: none but its own."""
        self.url = ""
        self.machines: dict[str, Machine] = {}
        """Those that live, by sandbox id."""
        self.created = 0
        self.renewals: asyncio.Queue[str] = asyncio.Queue()
        """Ids of machines whose time-out was set again."""
        self.arrived = asyncio.Event()
        """A request for a sandbox came in."""
        self.proceed = asyncio.Event()
        """Requests for a sandbox are answered once this is set."""
        self.proceed.set()
        self.templates: dict[str, Template] = {"base": {}}
        """Those that exist, by name."""
        self.asked: list[str] = []
        """The template of each machine."""
        self._parts = parts
        self._first_uid = first_uid
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def connection(self) -> dict[str, str]:
        """For the SDK's calls, so that they come here."""
        return {"api_key": self.key, "api_url": self.url, "sandbox_url": self.url}

    async def create(self, request: Request) -> Response:
        """POST /v2/sandboxes."""
        if refused := self._unauthorised(request):
            return refused
        asked = await request.json()
        self.arrived.set()
        template = asked["templateID"]
        if template not in self.templates:
            return _error(404, f"template '{template}' not found")
        if asked.get("allow_internet_access") is not False:
            return _error(400, "machines of this server have no internet access: set allow_internet_access to false")
        uid = self._first_uid + self.created if os.geteuid() == 0 else None
        self.created += 1
        self.asked.append(template)
        machine = Machine(
            self._parts, self.templates[template], identity=uuid.uuid4().hex, uid=uid,
            metadata=asked.get("metadata") or {},
        )  # fmt: skip
        self.machines[machine.identity] = machine
        self._expire(machine, asked.get("timeout", DEFAULT_TIMEOUT_S))
        await self.proceed.wait()
        return JSONResponse(self._described(machine), status_code=201)

    async def listed(self, request: Request) -> Response:
        """GET /v2/sandboxes."""
        if refused := self._unauthorised(request):
            return refused
        return JSONResponse([self._described(machine) for machine in self.machines.values()])

    async def details(self, request: Request) -> Response:
        """GET /sandboxes/{id}."""
        machine = self.machines.get(request.path_params["identity"])
        if refused := self._unauthorised(request):
            return refused
        return JSONResponse(self._described(machine)) if machine else _error(404, "sandbox not found")

    async def delete(self, request: Request) -> Response:
        """DELETE /sandboxes/{id}."""
        if refused := self._unauthorised(request):
            return refused
        machine = self.machines.pop(request.path_params["identity"], None)
        if machine is None:
            return _error(404, "sandbox not found")
        await machine.kill()
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        """POST /sandboxes/{id}/timeout."""
        machine = self.machines.get(request.path_params["identity"])
        if refused := self._unauthorised(request):
            return refused
        if machine is None:
            return _error(404, "sandbox not found")
        self.renewals.put_nowait(machine.identity)
        self._expire(machine, (await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """GET /health of envd."""
        known = request.headers.get("e2b-sandbox-id") in self.machines
        return Response(status_code=204) if known else _error(502, "The sandbox was not found")

    async def close(self) -> None:
        """End every machine."""
        machines = list(self.machines.values())
        self.machines.clear()
        await asyncio.gather(*(machine.kill() for machine in machines), *self._ending)

    def _expire(self, machine: Machine, after_s: float) -> None:
        if machine.expiry is not None:
            machine.expiry.cancel()
        machine.expiry = asyncio.get_running_loop().call_later(after_s, self._expired, machine)

    def _expired(self, machine: Machine) -> None:
        if self.machines.pop(machine.identity, None) is not None:
            ending = asyncio.create_task(machine.kill())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _unauthorised(self, request: Request) -> Response | None:
        given = request.headers.get("x-api-key")
        if given != self.key:
            return _error(401, "Invalid API key")
        return _error(self.failing, "not now") if self.failing else None

    def _described(self, machine: Machine) -> dict[str, Any]:
        now = datetime.now(UTC)
        return {
            "templateID": "local", "alias": "base", "sandboxID": machine.identity, "clientID": "local",
            "envdVersion": ENVD_VERSION, "envdAccessToken": "local", "metadata": machine.metadata, "state": "running",
            "startedAt": now.isoformat(), "endAt": (now + timedelta(seconds=DEFAULT_TIMEOUT_S)).isoformat(),
            "cpuCount": os.cpu_count() or 1, "memoryMB": 512, "diskSizeMB": 1024,
        }  # fmt: skip


def _error(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status_code=status)


def application(state: LocalE2b, processes: process_connect.Process) -> Starlette:
    """Both APIs as one ASGI application: their paths do not meet."""
    return Starlette(
        routes=[
            Route("/v2/sandboxes", state.create, methods=["POST"]),
            Route("/v2/sandboxes", state.listed, methods=["GET"]),
            Route("/sandboxes/{identity}", state.details, methods=["GET"]),
            Route("/sandboxes/{identity}", state.delete, methods=["DELETE"]),
            Route("/sandboxes/{identity}/timeout", state.timeout, methods=["POST"]),
            Route("/health", state.health, methods=["GET"]),
            Mount("/", process_connect.ProcessASGIApplication(processes)),
        ]
    )


@asynccontextmanager
async def serving(
    *,
    first_uid: int,
    key: str = "e2b_local",
    cache: Path | None = None,
    processes: process_connect.Process | None = None,
) -> AsyncIterator[LocalE2b]:
    """Serve on a free port of loopback while the block runs. `processes` may lie in place of envd.
    Raises SandboxUnavailable without bwrap."""
    cache = cache or cache_directory()
    state = LocalE2b(Parts(find(cache), interpreter(cache).root), key=key, first_uid=first_uid)
    # With its protocol named, asyncio switches Nagle's delay off for what is accepted from it.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = application(state, processes or Processes(state.machines))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, timeout_keep_alive=3600
    )
    server = QuietServer(config)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
        await asyncio.sleep(0.01)
    try:
        yield state
    finally:
        state.proceed.set()
        await state.close()
        server.should_exit = True
        await task
        listener.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """Host paths of what every machine is made of."""

    bwrap: Path
    python_root: Path
    """A prefix with bin/python3 and the standard library."""


class Machine:
    """One running sandbox of the local server."""

    def __init__(
        self, parts: Parts, template: Template, *, identity: str, uid: int | None, metadata: Mapping[str, str]
    ) -> None:
        """`uid`: host user of its processes; None: ours."""
        self.identity = identity
        self.metadata = dict(metadata)
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.expiry: asyncio.TimerHandle | None = None
        self.ended = asyncio.Event()
        """Nothing of it is left."""
        self._parts = parts
        self._template = template
        self._uid = uid
        self._folder = Path(tempfile.mkdtemp(prefix=owned_prefix()))
        for name, mode in (("home", 0o700), ("etc", 0o755)):
            (self._folder / name).mkdir(mode=mode)
        (self._folder / "etc" / "passwd").write_text(PASSWD)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile("/etc/ld.so.cache", self._folder / "etc" / "ld.so.cache")
        self._folder.chmod(0o755)
        if uid is not None:
            os.chown(self._folder / "home", uid, uid)

    async def start(self, words: list[str], env: Mapping[str, str], *, stdin: bool) -> asyncio.subprocess.Process:
        """Run `words` inside."""
        account = {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        process = await asyncio.create_subprocess_exec(
            *self._bwrap(env),
            *words,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            **account,  # type: ignore[arg-type]
        )
        self.processes[process.pid] = process
        return process

    async def kill(self) -> None:
        """End every process and remove the folder."""
        if self.expiry is not None:
            self.expiry.cancel()
        for process in list(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in list(self.processes.values()):
            await process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self.ended.set()

    def _bwrap(self, env: Mapping[str, str]) -> list[str]:
        words = [str(self._parts.bwrap), "--unshare-all", "--uid", str(UID), "--gid", str(UID), "--die-with-parent"]
        words += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr"]
        for folder in SYSTEM_FOLDERS:
            if os.path.islink(folder):
                words += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                words += ["--ro-bind", folder, folder]
        words += ["--ro-bind", str(self._parts.python_root), PYTHON]
        for inside, folder in self._template.items():
            words += ["--ro-bind", str(folder), inside]
        words += ["--ro-bind", str(self._folder / "etc"), "/etc"]
        words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
        words += ["--bind", str(self._folder / "home"), HOME, "--chdir", HOME]
        own = {
            "PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{PYTHON}/lib",
            "HOME": HOME,
            "USER": "user",
        }
        for name, value in {**own, **env}.items():
            words += ["--setenv", name, value]
        return [*words, "--"]


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
