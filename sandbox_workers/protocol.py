"""Interfaces between a worker and its sandboxes: provider -> sandbox -> exec / files / reset / close.

A Provider makes sandboxes of a Shape; a Pool leases them; a Sandbox runs one Command at a time. Workspace snapshots are
built from `index`, `read_files` and `restore`, so the workspaces of every backend can be stored and moved alike.

SandboxError
├── BackendUnavailable   this machine cannot use the backend; the message names the cause, the setting and the remedy
├── SandboxUnavailable   a backend that works here could not start one more sandbox
│   └── DiskLacksRoom    the disk that workspaces lie on is full: calls wait until there is room
├── SandboxDied          the sandbox went away in the middle of a call: it may run again (`attribute_death`)
├── ImageMissing         the backend has no such image: the call is refused, nothing is pulled while it waits
├── FileRefused          a path or a size that `read`, `write` or `restore` rejects: the call is a tool error
│   ├── FileMissing      nothing is there
│   └── QuotaExceeded    it would not fit the workspace
└── WorkspaceLost        the session's files are gone: the call cannot run, because an empty sandbox would mislead it
    ├── WorkspaceCorrupt the stored workspace does not match its hash, or is no workspace
    └── InterpreterLost  the files are there; the interpreter state that python_session calls had built up is not
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from turnlog.infra.environments.workspaces import FileEntry
from turnlog.schemas.events import SandboxLimits, ToolStatus

LIMITS = tuple(each.name for each in dataclasses.fields(SandboxLimits))
DEATHS = 2
"""Number of new sandboxes that one call may take down before their ends are attributed to the call."""
CHANGED, ENDED = "sandbox_changed", "sandbox_ended"
"""Reasons of a tool_error; `attribute_death` chooses between them."""

Verdict = tuple[ToolStatus, str]
"""Status and reason of a call's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence about why a sandbox ended."""

    limit: str = ""
    """Name in SandboxLimits of a bound that the kernel enforced on the sandbox's own control group during the call, or
    ""."""
    changed: str = ""
    """Change that the init found and that only a call can have made: "limits" (the init's own), "folders" (the writable
    ones), or ""."""
    silent: bool = False
    """True if the call was not answered within wall_s and some grace."""
    stood: bool = False
    """True if the worker itself was stalled for longer than a sandbox waits for it."""
    starved: bool = False
    """True if the disk that holds the workspace, which others share, was full while the call was below its own
    limit."""
    deaths: int = 0
    """Number of new sandboxes, alive just before the call, that have gone away under it, including the latest."""
    killed: bool = False
    """True if a process that runs the sandbox ended by a signal from inside while the machine around it went on."""
    stateful: bool = False
    """True if the call used a persistent interpreter, which is gone. Such a call cannot run again, and nobody may gain
    by that."""

    @property
    def ours(self) -> bool:
        """True if the cause is one that no call can produce."""
        return self.stood or self.starved


UNKNOWN = Evidence()


def attribute_death(evidence: Evidence) -> Verdict | None:
    """Return the answer of a call whose sandbox went away, or None if nothing indicates that the agent caused it.

    Decision 18: the end is the agent's doing if there is evidence for it, else ours. If it is the agent's, the call is
    answered once, with a status that the model reads, and the session goes on to its reward with the files from before
    the call: an agent that could void its episode would learn to. If it is ours (None), the call runs again."""
    if evidence.limit:
        return ToolStatus.resource_limit, evidence.limit
    if evidence.changed:
        return ToolStatus.tool_error, CHANGED
    if evidence.ours:
        return None
    if evidence.silent:
        return ToolStatus.timeout, "wall_s"
    if evidence.killed or evidence.stateful or evidence.deaths >= DEATHS:
        return ToolStatus.tool_error, ENDED
    return None


class SandboxError(Exception):
    """Base class of the errors listed in the module docstring."""


class BackendUnavailable(SandboxError):
    """The backend cannot run on this machine."""


class SandboxUnavailable(SandboxError):
    """A sandbox could not be started."""


class DiskLacksRoom(SandboxUnavailable):
    """The disk that workspaces lie on is full; the message names it. Remedy: free space there, or choose another disk
    by TMPDIR."""


class SandboxDied(SandboxError):
    """The sandbox ended before it answered. `evidence` holds what is known of the cause, and so decides whom it is
    attributed to."""

    def __init__(self, text: str, evidence: Evidence = UNKNOWN) -> None:
        super().__init__(text)
        self.evidence = evidence


class ImageMissing(SandboxError):
    """The backend has no such image."""


class FileRefused(SandboxError):
    """The path leads out of the workspace, does not name a plain file, or is too long."""


class FileMissing(FileRefused):
    """The file does not exist."""


class QuotaExceeded(FileRefused):
    """The workspace would exceed its limit of bytes or files."""


class WorkspaceLost(SandboxError):
    """The session's files are neither in a live sandbox nor in a stored workspace."""


class WorkspaceCorrupt(WorkspaceLost):
    """The stored workspace does not match its hash, or is no workspace."""


class InterpreterLost(WorkspaceLost):
    """The persistent interpreter was lost with its sandbox."""


class Kind(StrEnum):
    """Way in which a command is started. `session` needs a backend with `Provider.sessions`."""

    program = "program"
    """Run `argv`; the program is looked up on PATH."""
    shell = "shell"
    """Run `source` by `bash -c`, or `sh -c` where there is no bash."""
    python = "python"
    """Run `source` in a fresh interpreter, without any state of earlier calls."""
    session = "session"
    """Run `source` in the sandbox's one persistent interpreter, which is started if there is none. The value of the
    last expression is printed, as an interactive interpreter does."""


class OutputStream(StrEnum):
    """Output stream of a command."""

    stdout = "stdout"
    stderr = "stderr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run in a sandbox."""

    kind: Kind
    source: str = ""
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the sandbox's own environment."""
    cwd: str = ""
    """Working directory relative to the workspace; empty for the workspace itself."""
    agent: bool = False
    """True if the program is an agent of its own. Its two streams are merged; beyond output_bytes the middle is left
    out instead of the end. Its address space is not limited, since JavaScript engines reserve far more than
    memory_bytes, which limits the memory used."""
    keeps: bool = False
    """True if processes that this `session` command has started from the interpreter, and that live at its end, are
    kept: stopped, as the interpreter is, until the next command with `keeps`. They end with the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Properties that a sandbox is created with. A sandbox serves every call that asks for its shape."""

    image: str | None = None
    network: str = "none"
    disk_bytes: int
    folders: tuple[str, ...] = ()
    """See SandboxSpec. Paths of the workspace are then relative to /, and `read` and `write` also take absolute ones;
    those without a leading / are relative to the first folder."""
    memory_bytes: int = 0
    """Memory of the whole sandbox, for backends that bound it at its start; 0: as [sandbox] says."""
    pids: int = 0
    """Number of processes of the whole sandbox; see memory_bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCommand:
    """The command that an image names as its own, and how it is run."""

    argv: tuple[str, ...]
    """Empty if the image names none."""
    cwd: str
    user: str
    """USER of the image: a name or number, and :GROUP if there is one; empty for root."""


@dataclass(frozen=True, slots=True)
class Execution:
    """Result of one run of a command. Every process of the command is dead when this exists. The persistent interpreter
    of a `session` command is the exception: if the command ended by itself within its limits, its interpreter is
    stopped, not dead."""

    status: ToolStatus
    reason: str
    """Empty for ok and for a command's own tool_error. Otherwise the limit that ended it, by its name in SandboxLimits,
    or what became of its sandbox or interpreter (`attribute_death`)."""
    exit_code: int | None
    """Exit status, or 128 + n after signal n; None if the worker ended the command."""
    output: bytes
    """stdout followed by stderr; at most `output_bytes` bytes."""
    duration_s: float
    cpu_s: float
    """User and system time of the whole process tree, in seconds."""


OnOutput = Callable[[OutputStream, bytes], None]
"""Callback for output as it arrives. An exception that it raises ends the call."""


class Sandbox(Protocol):
    """A place to run commands in, one call at a time. Files stay between calls until `reset`; processes do not, except
    the persistent interpreter."""

    @property
    def proxy(self) -> socket.socket | None:
        """Socket that listens on the sandbox's own loopback, on which the worker's egress proxy accepts; None unless
        the shape's network is "allowlist"."""
        ...

    @property
    def interpreter(self) -> bool:
        """True if a persistent interpreter is alive, with the state that calls have built up in it."""
        ...

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        """Run a command. Raises SandboxDied; SandboxUnavailable if nothing ran; FileRefused for a bad `cwd`. Cancelling
        the awaiting asyncio task kills the sandbox, since nobody would know what the call had done."""
        ...

    async def cancel(self) -> None:
        """End the running call; its `exec` returns `cancelled`."""
        ...

    async def read(self, path: str, *, most: int) -> bytes:
        """Return the bytes of a file of the workspace. No link is followed out of it. Raises FileRefused, FileMissing
        (also if the file has more than `most` bytes), SandboxDied."""
        ...

    async def read_part(self, path: str, *, offset: int, size: int, most: int) -> bytes:
        """Return up to `size` bytes of a file from `offset` on; empty at its end. Raises as `read` does, including for
        a file of more than `most` bytes."""
        ...

    async def write(self, path: str, content: bytes, *, mode: int = 0o644, follow: bool = False) -> None:
        """Replace or create a file of the workspace in one step, including the folders above it. A link at `path` is
        replaced; with `follow`, the file that it leads to is, and an existing file keeps its mode. Raises FileRefused,
        QuotaExceeded, SandboxDied."""
        ...

    async def index(self) -> tuple[FileEntry, ...]:
        """List the whole workspace, sorted by path. Raises FileRefused (more than a snapshot can hold), SandboxDied."""
        ...

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        """Return the bytes of several plain files, at most `most` bytes together. Raises as `read` does."""
        ...

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        """Empty the workspace and fill it from `entries`; `contents` maps each file's path to its bytes. The
        interpreter is ended. Every path is checked before anything is written. Raises FileRefused, QuotaExceeded,
        SandboxDied."""
        ...

    async def reset(self) -> bool:
        """Remove every file, process and state of earlier calls. Return True if that was proved, False when in doubt;
        then close the sandbox. Never raises."""
        ...

    async def healthy(self) -> bool:
        """Return whether the sandbox answers. Never raises."""
        ...

    async def close(self) -> None:
        """End the sandbox with everything inside. Never raises; may be called twice."""
        ...


class Provider(Protocol):
    """A sandbox backend. `name` goes into logs, metrics and results."""

    name: str
    sessions: bool
    """True if its sandboxes have a persistent interpreter."""
    networks: frozenset[str]
    """Values of SandboxSpec.network that the backend serves."""
    costly: bool
    """True if its sandboxes are paid for by the second; then none is started before a call needs it."""
    places: bool
    """True if it serves `Shape.folders`."""

    async def start(self, slot: int, shape: Shape) -> Sandbox:
        """Start a new empty sandbox in slot `slot` (one host user per slot). Raises SandboxUnavailable,
        ImageMissing."""
        ...

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """Return the components of a sandbox of this shape: name -> version or sha256. Equal maps mean equal
        environments. Raises ImageMissing."""
        ...

    async def close(self) -> None:
        """Release the resources of the backend itself; its sandboxes have been closed before. Never raises."""
        ...


def at_most(asked: SandboxLimits, most: SandboxLimits) -> SandboxLimits:
    """Return the limits of a call: what it asks for, capped at what the worker grants."""
    if all(getattr(asked, name) <= getattr(most, name) for name in LIMITS):
        return asked
    return SandboxLimits(**{name: min(getattr(asked, name), getattr(most, name)) for name in LIMITS})
