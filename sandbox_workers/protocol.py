"""What a sandbox is to a worker, whoever provides it: provider -> sandbox -> run / reset / close.

SandboxError
├── NoBubblewrap       this machine cannot start bubblewrap: says why, names [sandbox] backend and the remedy
├── SandboxUnavailable a backend that works here could not start one more sandbox
├── SandboxDied        the sandbox went away in the middle of a call: the call may run again
└── WorkspaceLost      the session's files are gone: the call cannot run, an empty sandbox would lie
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from turnlog.schemas.events import SandboxLimits, ToolStatus

TOOLS = ("python", "shell")
"""python: the code runs in a warm interpreter, forked per call. shell: bash, else sh, -c command."""


class SandboxError(Exception):
    """Base of the tree above."""


class NoBubblewrap(SandboxError):
    """bubblewrap cannot run here."""


class SandboxUnavailable(SandboxError):
    """A sandbox did not come up."""


class SandboxDied(SandboxError):
    """The sandbox ended before it answered."""


class WorkspaceLost(SandboxError):
    """Neither a live sandbox nor a stored workspace holds the session's files."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How one run of a tool ended. Every process of it is dead when this exists."""

    status: ToolStatus
    reason: str
    """Empty for ok and tool_error; else the limit that ended it, by its name in SandboxLimits."""
    exit_code: int | None
    """128 + n after signal n; None when we ended it."""
    output: bytes
    """stdout, then stderr; at most `output_bytes`."""
    duration_s: float
    cpu_s: float
    """User and system time of the whole process tree."""


class Sandbox(Protocol):
    """One place to run tools in: one call at a time, files stay between calls until `reset`, processes never do."""

    async def run(self, tool: str, source: str, limits: SandboxLimits) -> Execution:
        """Run `source` with one of TOOLS under `limits`. Raises SandboxDied; cancelling the awaiting task kills the
        sandbox, since nobody knows then what the call had done."""
        ...

    async def cancel(self) -> None:
        """End the call that runs: its `run` answers `cancelled`."""
        ...

    async def reset(self) -> bool:
        """Remove every file; True when it is as new, False when in doubt (then close it). Never raises."""
        ...

    async def close(self) -> None:
        """End it with everything inside. Never raises; may be called twice."""
        ...


class Provider(Protocol):
    """A backend. `name` goes into logs, metrics and results."""

    name: str

    async def start(self, slot: int, disk_bytes: int) -> Sandbox:
        """A new empty sandbox in slot `slot` (one host user per slot). Raises SandboxUnavailable."""
        ...


def at_most(asked: SandboxLimits, most: SandboxLimits) -> SandboxLimits:
    """The limits of a call: what it asks for, never more than the worker grants."""
    names = [field.name for field in dataclasses.fields(SandboxLimits)]
    return SandboxLimits(**{name: min(getattr(asked, name), getattr(most, name)) for name in names})
