"""What a sandbox is to a worker, whoever provides it: provider -> sandbox -> exec / files / reset / close.

A Provider makes sandboxes of a Shape; a Pool leases them; a Sandbox runs one Command at a time. Workspaces (their
snapshots) are made from `index`, `read_files` and `restore`, so that every backend's can be stored and moved alike.

SandboxError
├── BackendUnavailable   this machine cannot use the backend: says why, names the setting and the remedy
├── SandboxUnavailable   a backend that works here could not start one more sandbox
│   └── DiskLacksRoom    the disk that workspaces lie on is full: calls wait until there is room
├── SandboxDied          the sandbox went away in the middle of a call: it may run again (`attributed`)
├── ImageMissing         the backend has no such image: the call is refused, nothing is pulled while it waits
├── FileRefused          a path or a size that `read`, `write` or `restore` does not serve: the call is a tool error
│   ├── FileMissing      nothing is there
│   └── QuotaExceeded    it would not fit the workspace
└── WorkspaceLost        the session's files are gone: the call cannot run, an empty sandbox would lie
    ├── WorkspaceCorrupt the stored workspace is not what its hash says, or is no workspace
    └── InterpreterLost  the files are there; the interpreter that python_session calls had built up is not
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from turnlog.infra.workspaces import FileEntry
from turnlog.schemas.events import SandboxLimits, ToolStatus

DEATHS = 2
"""New sandboxes that one call may take down before it is held to be the call's doing."""
CHANGED, ENDED = "sandbox_changed", "sandbox_ended"
"""Reasons of a tool_error, see below."""

Verdict = tuple[ToolStatus, str]
"""Status and reason of the call's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a sandbox's end."""

    limit: str = ""
    """The kernel enforced a bound of the sandbox's own control group during the call: its name in SandboxLimits."""
    changed: str = ""
    """What the init found changed that nothing but a call can reach: limits (its own) | folders (the writable ones)."""
    silent: bool = False
    """The call was not answered within wall_s and some grace."""
    stood: bool = False
    """The worker itself stood still for longer than a sandbox waits for it."""
    starved: bool = False
    """The disk that its workspace shares with others took no more, and the call was below its own limit."""
    deaths: int = 0
    """New sandboxes, alive just before, that have gone away under this call, the latest included."""
    stateful: bool = False
    """It went on in a persistent interpreter, which is gone: it cannot run again, and nobody may gain by that."""

    @property
    def ours(self) -> bool:
        """It ended by what no call can do."""
        return self.stood or self.starved


UNKNOWN = Evidence()


def attributed(evidence: Evidence) -> Verdict | None:
    """Whose doing it is that a sandbox went away under a call: the agent's on evidence, else ours (decision 18). The
    answer of a call whose sandbox ended so; None: nothing says that it was the agent, and it can run again.

    What is the agent's is answered, once, by a status that its model reads, and the session goes on to its verdict with
    the files from before the call: an agent that could void its episode would learn to. What is ours runs again."""
    if evidence.limit:
        return ToolStatus.resource_limit, evidence.limit
    if evidence.changed:
        return ToolStatus.tool_error, CHANGED
    if evidence.ours:
        return None
    if evidence.silent:
        return ToolStatus.timeout, "wall_s"
    if evidence.stateful or evidence.deaths >= DEATHS:
        return ToolStatus.tool_error, ENDED
    return None


class SandboxError(Exception):
    """Base of the tree above."""


class BackendUnavailable(SandboxError):
    """This backend cannot run here."""


class SandboxUnavailable(SandboxError):
    """A sandbox did not come up."""


class DiskLacksRoom(SandboxUnavailable):
    """Names the disk. Remedy: room there, or another one by TMPDIR."""


class SandboxDied(SandboxError):
    """The sandbox ended before it answered. Carries what is known of why, which says whose doing it was."""

    def __init__(self, text: str, evidence: Evidence = UNKNOWN) -> None:
        super().__init__(text)
        self.evidence = evidence


class ImageMissing(SandboxError):
    """There is no such image."""


class FileRefused(SandboxError):
    """The path leads out of the workspace, names no plain file, or is too long."""


class FileMissing(FileRefused):
    """There is no such file."""


class QuotaExceeded(FileRefused):
    """More bytes or files than the workspace may hold."""


class WorkspaceLost(SandboxError):
    """Neither a live sandbox nor a stored workspace holds the session's files."""


class WorkspaceCorrupt(WorkspaceLost):
    """The stored workspace cannot be trusted."""


class InterpreterLost(WorkspaceLost):
    """The persistent interpreter went with its sandbox."""


class Kind(StrEnum):
    """How a command is started. `session` needs a backend with `Provider.sessions`."""

    program = "program"
    """`argv`, found on PATH."""
    shell = "shell"
    """`source` by bash -c, else sh -c."""
    python = "python"
    """`source` in a fresh interpreter that knows nothing of earlier calls."""
    session = "session"
    """`source` in the sandbox's one persistent interpreter, which is started when there is none; what the last
    expression is worth is printed, as an interactive interpreter does."""


class Stream(StrEnum):
    """Where output came from."""

    stdout = "stdout"
    stderr = "stderr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run."""

    kind: Kind
    source: str = ""
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own environment."""
    cwd: str = ""
    """A folder of the workspace, relative to it; empty: the workspace itself."""
    agent: bool = False
    """A program that is an agent of its own. Both its streams are one, of which the middle is left out beyond
    output_bytes, instead of its end; and what address space it reserves is not bounded, since engines of JavaScript
    reserve far more than memory_bytes, which bounds what is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a sandbox is made for. One of a shape serves every call that asks for that shape."""

    image: str | None = None
    network: str = "none"
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Execution:
    """How one run of a command ended. Every process of it is dead when this exists, the persistent interpreter
    of a `session` that ended by itself aside: that one stands still."""

    status: ToolStatus
    reason: str
    """Empty for ok and a command's own tool_error; else the limit that ended it, by its name in SandboxLimits, or what
    became of its sandbox or interpreter (`attributed`)."""
    exit_code: int | None
    """128 + n after signal n; None when we ended it."""
    output: bytes
    """stdout, then stderr; at most `output_bytes`."""
    duration_s: float
    cpu_s: float
    """User and system time of the whole process tree."""


OnOutput = Callable[[Stream, bytes], None]
"""Takes output as it comes. What it raises ends the call."""


class Sandbox(Protocol):
    """One place to run commands in: one call at a time, files stay between calls until `reset`, processes never do,
    the persistent interpreter aside."""

    @property
    def proxy(self) -> socket.socket | None:
        """Listens on the sandbox's own loopback, for the worker's egress proxy to accept on; None unless the shape's
        network is "allowlist"."""
        ...

    @property
    def interpreter(self) -> bool:
        """A persistent interpreter lives, with what calls have built up in it."""
        ...

    async def exec(self, command: Command, limits: SandboxLimits, *, on_output: OnOutput | None = None) -> Execution:
        """Run a command. Raises SandboxDied, SandboxUnavailable (nothing ran), FileRefused (cwd); cancelling the
        awaiting task kills the sandbox, since nobody knows then what the call had done."""
        ...

    async def cancel(self) -> None:
        """End the call that runs: its `exec` answers `cancelled`."""
        ...

    async def read(self, path: str, *, most: int) -> bytes:
        """Bytes of a file of the workspace. No link is followed out of it. Raises FileRefused, FileMissing (also for
        more than `most` bytes), SandboxDied."""
        ...

    async def read_part(self, path: str, *, offset: int, size: int, most: int) -> bytes:
        """Bytes of a file from `offset` on, `size` of them where there are so many, empty at its end. Raises as `read`,
        which `most` is for."""
        ...

    async def write(self, path: str, content: bytes, *, mode: int = 0o644, follow: bool = False) -> None:
        """Replace or make a file of the workspace, folders above it included, in one step. A link at its place is
        replaced; `follow`: the file that it leads to is, and a file that is there keeps its mode. Raises FileRefused,
        QuotaExceeded, SandboxDied."""
        ...

    async def index(self) -> tuple[FileEntry, ...]:
        """The whole workspace, sorted by path. Raises FileRefused (more than a snapshot can hold), SandboxDied."""
        ...

    async def read_files(self, paths: Sequence[str], *, most: int) -> tuple[bytes, ...]:
        """Bytes of many plain files at once, `most` bytes together. Raises as `read`."""
        ...

    async def restore(self, entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> None:
        """Empty the workspace and fill it: `contents` maps each file's path to its bytes. The interpreter is ended.
        Every path is checked before anything is written. Raises FileRefused, QuotaExceeded, SandboxDied."""
        ...

    async def reset(self) -> bool:
        """Make it as new: no file, process, or state of a call; True when that was proved, False when in doubt (then
        close it). Never raises."""
        ...

    async def healthy(self) -> bool:
        """It answers. Never raises."""
        ...

    async def close(self) -> None:
        """End it with everything inside. Never raises; may be called twice."""
        ...


class Provider(Protocol):
    """A backend. `name` goes into logs, metrics and results."""

    name: str
    sessions: bool
    """Its sandboxes have a persistent interpreter."""
    networks: frozenset[str]
    """Of SandboxSpec.network, those that it serves."""
    costly: bool
    """Its sandboxes are paid for by the second: none is started before a call needs it."""

    async def start(self, slot: int, shape: Shape) -> Sandbox:
        """A new empty sandbox in slot `slot` (one host user per slot). Raises SandboxUnavailable, ImageMissing."""
        ...

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        """What a sandbox of this shape is made of: name -> version or sha256; equal maps for equal surroundings.
        Raises ImageMissing."""
        ...

    async def close(self) -> None:
        """Release what the backend itself holds; sandboxes are closed before. Never raises."""
        ...


def at_most(asked: SandboxLimits, most: SandboxLimits) -> SandboxLimits:
    """The limits of a call: what it asks for, never more than the worker grants."""
    names = [field.name for field in dataclasses.fields(SandboxLimits)]
    return SandboxLimits(**{name: min(getattr(asked, name), getattr(most, name)) for name in names})
