"""A container as a sandbox: made by the daemon through the SDK, with the init of the local sandboxes in it.

Source: Docker Engine API 1.41.

The daemon is found as `docker` finds it (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH). Every call of the SDK
blocks, so it is made in a thread. A container's first process is python3 of its image, and the init program is sent
over its input.

The daemon sends both output streams through one connection. Each part follows eight bytes: stream, three zeros, length
("Attach to a container", stream format). Two threads copy the data, since a connection may be TLS.

A socket belongs to the network namespace of the thread that made it (network_namespaces(7)). So a thread that enters
the container's namespace (setns(2)) can make the socket on which the worker's egress proxy accepts, if the worker is
root on the daemon's machine and the kernel is shared."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.roots import loader_command, owned_prefix, ownerless, record_removal, sent_program
from turnlog.sandbox_workers.inside.child import FORGETFUL
from turnlog.sandbox_workers.inside.observables import listener
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    Execution,
    ImageMissing,
    Kind,
    OnOutput,
    SandboxDied,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits

Answer = TypeVar("Answer")
TIMEOUT_S = 60.0
"""Time limit in seconds for one answer of the daemon."""
REMEDY = (
    "start it, or set DOCKER_HOST to where it listens (unix:///..., tcp://... with DOCKER_TLS_VERIFY and "
    "DOCKER_CERT_PATH); `docker info` must answer for the worker's user"
)

FIRST_UID = 20_000
"""User of slot 0 in its container; slot n has the n-th from there, because RLIMIT_NPROC counts a user's processes in
all containers of a daemon. Below 65,536, since a daemon with user namespaces or without root maps no more."""
WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
"""Writable folders, each a tmpfs of at most `disk_bytes`."""
CA = "/etc/turnlog/ca.pem"
BASELINE_BYTES = 64 << 20
"""Bytes for the init and the kernel's own, beside what calls may use."""
BASELINE_PIDS = 4
"""Processes for the init, what a runtime adds, and one more, so that `pids` is exceeded before it is exhausted."""
LABEL = "turnlog.sandbox"
"""Label of every container of ours; its value is the boot id of the machine whose worker made it."""
IPC = {"kernel.msgmni": "0", "kernel.shmmni": "0", "kernel.sem": "0 0 0 0", "fs.mqueue.queues_max": "0"}
"""Settings with which no System V or POSIX queue, semaphore or segment can be made: they would outlive a reset."""
ENVIRONMENT = {
    "HOME": WORKSPACE,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **FORGETFUL,
}
"""Variables added to the image's own; the hash seed makes re-runs alike."""


FOREIGN = {name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "USER", "LANG")}
"""Variables added for a workspace in folders of the image, whose programs expect what the image sets."""
ROOTS_RIGHTS = [
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT",
]  # fmt: skip
"""Capabilities for a workspace in folders of the image: its programs run as root there, as under `docker run`, so that
package managers work. None of them reaches beyond the container."""


def connect() -> Any:
    """Return the SDK's low-level client of a daemon that answers. Raises BackendUnavailable."""
    try:
        import docker  # type: ignore[import-untyped]
        from docker.utils import kwargs_from_env  # type: ignore[import-untyped]
    except ImportError as error:
        raise BackendUnavailable(f"the docker backend needs its SDK: pip install turnlog[docker] ({error})") from error
    try:
        client = docker.APIClient(**kwargs_from_env(), timeout=TIMEOUT_S)
    except docker.errors.DockerException as error:
        release(error)
        raise BackendUnavailable(f"no Docker daemon answers: {error}; {REMEDY}") from error
    if str(client.base_url).startswith("http+docker://ssh"):
        client.close()
        raise BackendUnavailable("DOCKER_HOST=ssh://... cannot carry a sandbox's stream: forward the socket by ssh -L")
    return client


async def call_daemon(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Call the SDK in a thread and return the daemon's answer. Raises SandboxUnavailable, ImageMissing."""
    return await asyncio.to_thread(call_daemon_blocking, call, *arguments, **named)


def call_daemon_blocking(call: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Call the SDK as `call_daemon` does, but in this thread."""
    import requests
    from docker.errors import DockerException, ImageNotFound  # type: ignore[import-untyped]

    try:
        return call(*arguments, **named)
    except ImageNotFound as error:
        raise ImageMissing(str(error.explanation or error)) from error
    except (DockerException, requests.RequestException, OSError) as error:
        release(error)
        raise SandboxUnavailable(f"the Docker daemon refused or is gone: {error}") from error


def release(error: BaseException) -> None:
    """Release what the frames of an error refer to: the SDK does not close a unix socket that it could not connect."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def boot_id() -> str:
    """Return this machine's id since its last start (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def name(slot: int) -> str:
    """Return a new container name, which tells its owner as all our names do."""
    return f"{owned_prefix()}{slot}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon that makes containers."""

    client: Any
    """Client of the SDK."""
    about: Mapping[str, Any]
    """The daemon's /info."""
    runtime: str | None
    """The daemon's name for the runtime; None for its default."""


def container_arguments(
    daemon: Daemon, settings: SandboxSettings, slot: int, shape: Shape, ca: Path | None
) -> dict[str, Any]:
    """Return the arguments of the SDK's create_container. `ca`: a file of the daemon's machine to be shown as CA."""
    uid, called = 0 if shape.folders else FIRST_UID + slot, name(slot)
    own = {"environment": FOREIGN} if shape.folders else {"environment": ENVIRONMENT, "working_dir": WORKSPACE}
    return {
        "image": shape.image or settings.docker_image,
        "name": called,
        "hostname": "sandbox",
        "entrypoint": entrypoint(called),
        "user": f"{uid}:{uid}",
        **own,
        "stdin_open": True,
        "labels": {LABEL: boot_id()},
        "healthcheck": {"Test": ["NONE"]},
        "host_config": daemon.client.create_host_config(**confinement(daemon, settings, uid, shape, ca)),
    }


def confinement(daemon: Daemon, settings: SandboxSettings, uid: int, shape: Shape, ca: Path | None) -> dict[str, Any]:
    """Return the arguments of the SDK's create_host_config."""
    # noexec is Docker's default for a tmpfs, but programs must run from a workspace.
    mode = "1777" if shape.folders else "0700"
    options = f"rw,exec,nosuid,nodev,size={shape.disk_bytes},mode={mode},uid={uid},gid={uid}"
    own = shape.memory_bytes or settings.memory_bytes
    memory = own + shape.disk_bytes + BASELINE_BYTES  # a tmpfs is charged to its container
    bounds: dict[str, Any] = {"mem_limit": memory, "memswap_limit": memory}
    if daemon.about.get("CpuCfsQuota"):
        bounds["nano_cpus"] = int(settings.cpus * 1e9)
    return (
        bounds
        | {
            "cap_drop": ["ALL"],
            "cap_add": ROOTS_RIGHTS if shape.folders else [],
            "ipc_mode": "private",
            "log_config": {"Type": "none"},  # otherwise the daemon would write every frame to its disk
            "mounts": [{"Type": "bind", "Source": str(ca), "Target": CA, "ReadOnly": True}] if ca else [],
            "network_mode": "none",
            "pids_limit": (shape.pids or settings.pids) + BASELINE_PIDS,
            "read_only": not shape.folders,
            "restart_policy": {"Name": "no"},
            "runtime": daemon.runtime,
            "security_opt": ["no-new-privileges"],
            "sysctls": IPC,
            "tmpfs": dict.fromkeys(FOLDERS[2:] if shape.folders else FOLDERS, options),
        }
    )


async def sweep(client: Any) -> int:
    """Remove containers of this machine's dead workers, and ended ones of workers anywhere. Return how many are gone.
    Raises SandboxUnavailable if the daemon does not answer."""
    gone = 0
    for found in await call_daemon(client.containers, all=True, filters={"label": [LABEL]}):
        name = next((name.lstrip("/") for name in found.get("Names") or ()), "")
        here = found["Labels"][LABEL] == boot_id()
        if not (found["State"] in ("exited", "dead") or (here and ownerless(name))):
            continue
        with contextlib.suppress(SandboxUnavailable):  # another worker may have removed it
            await call_daemon(client.remove_container, found["Id"], force=True)
            record_removal("container", name)
            gone += 1
    return gone


def entrypoint(name: str) -> list[str]:
    """Return the argv; the image's PATH decides on python3. `name` is an argument by which the worker recognises the
    process."""
    return loader_command(name)


def program(denied: bytes, shape: Shape | None = None) -> bytes:
    """Encode what is sent first: arguments of `inside.attached.main`, a seccomp filter (or nothing) and the writable
    folders."""
    roots = () if shape is None else shape.folders
    folders = () if shape is None else FOLDERS[1:] if roots else FOLDERS
    return sent_program("attached", base64.b64encode(denied).decode(), json.dumps(roots), *folders)


def fingerprint() -> str:
    """Return the sha256 of the init program."""
    return hashlib.sha256(program(b"")).hexdigest()


log = logging.getLogger(__name__)

DENIED = errno.EACCES
PRYING = Command(
    kind=Kind.python,
    source=f"""
import os
try:
    os.listdir('/proc/1/fd')
except PermissionError:
    raise SystemExit({DENIED}) from None
""",
)
OOM_KILLED = "was killed for memory"
EXIT_S = 2.0
"""Seconds that an init gets to end once its input has ended; then the container is killed."""

HEADER = struct.Struct(">BxxxL")
STDOUT, STDERR = 1, 2
PART_BYTES = 65536
WORDS_BYTES = 4096
"""Maximum bytes of its standard error that are retained."""

CLONE_NEWNET = 0x40000000
NETWORK_S = 5.0
"""Seconds for an entrypoint to be executed and a loopback to come up."""
PAUSE_S = 0.01
RUNTIME = "runc"
"""The runtime whose containers have their sockets in the host's kernel."""


class ContainerSandbox(InitSandbox):
    """A container, removed when it is closed."""

    def __init__(self, client: Any, container: str, stream: ContainerStream, shape: Shape) -> None:
        super().__init__(stream, stream.control, lambda: None, EXIT_S, disk_bytes=shape.disk_bytes)
        self._layered = bool(shape.folders)
        self.container = container
        """Id of the container."""
        self.guarded = True
        """True if no call can reach into the init, so that its report of a reset is a proof."""
        self._client = client
        self.stream = stream
        self._removal: asyncio.Task[str] | None = None

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        try:
            return await super().exec(command, limits, on_output=on_output)
        except SandboxDied as error:
            said = self.stream.words.decode(errors="replace").strip().rpartition("\n")[2]
            how = f"its container {await self._remove_container()}" + (f": {said}" if said else "")
            raise SandboxDied(f"{error}; {how}", error.evidence) from error

    async def reset(self) -> bool:
        """See Sandbox. A reset is never proved if an earlier call could have forged the answer, or could write to the
        container's own layer."""
        return self.guarded and not self._layered and await super().reset()

    async def close(self) -> None:
        await super().close()
        if await self._remove_container() == OOM_KILLED:
            self._evidence = dataclasses.replace(self._evidence, limit="memory_bytes")

    async def _remove_container(self) -> str:
        """Remove the container and return how it ended."""
        if self._removal is None:
            self._removal = asyncio.create_task(discard_container(self._client, self.container, self.stream))
        return await asyncio.shield(self._removal)


async def is_init_protected(sandbox: ContainerSandbox, probe: Command) -> bool:
    """Return whether a call is denied access to the init's descriptors, as by Linux for a process that is not dumpable
    (proc_pid_fd(5)); gVisor does not. Call this before any code of an agent has run. Raises SandboxDied."""
    answer = await sandbox.exec(probe, SandboxLimits())
    return answer.exit_code == DENIED


async def discard_container(client: Any, container: str, stream: ContainerStream) -> str:
    """Close the stream, remove the container and return how it ended. If the daemon is gone, that is logged, and the
    next worker removes what is left."""
    from docker.errors import NotFound

    await stream.close()
    try:
        state = (await call_daemon(client.inspect_container, container))["State"]
        await call_daemon(client.remove_container, container, force=True)
    except SandboxUnavailable as error:
        if isinstance(error.__cause__, NotFound):
            return "was removed by somebody else"
        log.warning("container %s could not be removed: %s", container[:12], error)
        return f"cannot be asked about: {error}"
    return OOM_KILLED if state["OOMKilled"] else f"ended as {state['ExitCode']} {state['Error']}".rstrip()


class ContainerStream:
    """A container in place of a process. It ends when its streams do."""

    def __init__(self, attached: Any, pid: int) -> None:
        """Create it on the event loop. `attached` is the result of the SDK's attach_socket."""
        self.pid = pid
        """Pid on the daemon's machine."""
        self.returncode: int | None = None
        """0 once it has ended; the daemon has the real exit code."""
        self._stderr = asyncio.StreamReader()
        self.stderr: asyncio.StreamReader | None = self._stderr
        self.control, self._pair = socket.socketpair()
        """The worker's end of the control socket."""
        self._attached = attached
        self._socket: socket.socket = getattr(attached, "_sock", attached)
        self._socket.settimeout(None)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.words = b""
        """Last bytes that it wrote to its standard error."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._outward, self._inward)]
        for thread in self._threads:
            thread.start()

    def sendall(self, data: bytes) -> None:
        """Send data to the container's input, before the worker's end is used. Blocks; raises OSError."""
        self._socket.sendall(data)

    def kill(self) -> None:
        """Shut the connection down: the container's input ends, and so does its init."""
        for end in (self._socket, self._pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int:
        """Wait until the container's output ends."""
        await self._ended.wait()
        return 0

    async def close(self) -> None:
        """End both directions and the threads that served them."""
        self.kill()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._pair.close()
        detach(self._attached)

    def _inward(self) -> None:
        """Copy from worker to container."""
        with contextlib.suppress(OSError):
            while part := self._pair.recv(PART_BYTES):
                self._socket.sendall(part)
        with contextlib.suppress(OSError):  # TLS cannot close one direction; then the whole connection ends
            self._socket.shutdown(socket.SHUT_WR)

    def _outward(self) -> None:
        """Copy from container to worker."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                stream, size = HEADER.unpack(self._exactly(HEADER.size))
                while size:
                    size -= len(part := self._part(size))
                    if stream == STDOUT:
                        self._pair.sendall(part)
                    else:
                        self._loop.call_soon_threadsafe(self._append_words, part)
        with contextlib.suppress(OSError):
            self._pair.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._over)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._part(size - len(data))
        return data

    def _part(self, most: int) -> bytes:
        part = self._socket.recv(min(most, PART_BYTES))
        if not part:
            raise EOFError
        return part

    def _append_words(self, part: bytes) -> None:
        self.words = (self.words + part)[-WORDS_BYTES:]

    def _over(self) -> None:
        self.returncode = 0
        self._stderr.feed_data(self.words)
        self._stderr.feed_eof()
        self._ended.set()


def detach(attached: Any) -> None:
    """Close the connection of an SDK attach_socket, including its HTTP response."""
    response = getattr(attached, "_response", None)
    if response is not None:
        response.close()
    with contextlib.suppress(OSError):
        attached.close()


def reachable(address: str, runtime: str) -> bool:
    """Return whether containers of the daemon at `address` have network namespaces that we may enter."""
    return runtime == RUNTIME and address.startswith("http+docker://localhost") and os.geteuid() == 0


def listening_in(pid: int, name: str, patience_s: float = NETWORK_S) -> socket.socket:
    """Return a listening socket in the namespace of process `pid`, which must be the first of the container `name`.
    Blocks. Raises SandboxUnavailable."""
    found: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            found.append(_open_listener(pid, name, time.monotonic() + patience_s))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=enter)  # a thread of its own, since it never leaves that namespace
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise SandboxUnavailable(
            f'cannot listen in the network of container {name}: {found[0]}; network = "allowlist" needs a worker '
            "that is root on the daemon's own machine, in its pid namespace"
        ) from found[0]
    return found[0]


def wait_for_process(pid: int, name: str, deadline: float) -> None:
    """Wait until process `pid` has `name` among its arguments, since a daemon reports a container as running before the
    runtime has executed its entrypoint. Blocks until `deadline`, time.monotonic() seconds, at most. Raises OSError."""
    while name.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        if time.monotonic() > deadline:
            raise ProcessLookupError(errno.ESRCH, "its first process is not a process of this machine")
        time.sleep(PAUSE_S)


def _open_listener(pid: int, name: str, deadline: float) -> socket.socket:
    wait_for_process(pid, name, deadline)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    while True:
        try:
            return listener(namespace=True)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
