"""Whose doing it is that a sandbox went away under a call: the agent's on evidence, else ours. Pure; the one home of
the rule, for every backend.

What is the agent's is answered, once, by a status that its model reads, and the session goes on to its verdict with the
files from before the call: an agent that could void its episode would learn to. What is ours runs again.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.events.tools import ToolStatus

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
    deaths: int = 0
    """New sandboxes, alive just before, that have gone away under this call, the latest included."""
    stateful: bool = False
    """It went on in a persistent interpreter, which is gone: it cannot run again, and nobody may gain by that."""


UNKNOWN = Evidence()


def attributed(evidence: Evidence) -> Verdict | None:
    """The answer of a call whose sandbox ended so; None: nothing says that it was the agent, and it can run again."""
    if evidence.limit:
        return ToolStatus.resource_limit, evidence.limit
    if evidence.changed:
        return ToolStatus.tool_error, CHANGED
    if evidence.stood:
        return None
    if evidence.silent:
        return ToolStatus.timeout, "wall_s"
    if evidence.stateful or evidence.deaths >= DEATHS:
        return ToolStatus.tool_error, ENDED
    return None
