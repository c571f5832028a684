"""MCP servers as a recipe names them, and the calls that list their tools and call one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from turnlog.infra.environments.episodes import SandboxCall
from turnlog.infra.environments.tools import MCP_TOOL as TOOL
from turnlog.infra.environments.tools import idempotency_class

CallClass = Literal["read_only", "idempotent", "unsafe"]
MOST_TOOLS = 128
"""Tools of a server that a session may have by default; OpenAI's API takes as many."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class BadServer(ValueError):
    """A server is described in a way that cannot be used; the message says which part, and what is legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server: either a `command`, which runs in the session's sandbox and speaks by stdio, or a `url` of streamable
    HTTP, which the sandbox worker reaches under [egress]."""

    name: str
    """Name, 1 to 32 of letters, digits, _ and -. It prefixes the names of tools that two servers have."""
    command: Sequence[str] = ()
    """The program and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the sandbox's. Not for secrets, because they are recorded on the log."""
    cwd: str = ""
    """Working directory, relative to the workspace."""
    url: str = ""
    """Address, such as https://mcp.example/mcp. Credentials are in [egress] credentials_file of the worker."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each request. Not for secrets, because they are recorded on the log."""
    timeout_s: float = 30.0
    """Seconds for an answer, at most wall_s of the sandbox's limits less one."""
    only: Sequence[str] = ()
    """Names of the tools that the session has, with * and ? as wildcards; empty for all."""
    most_tools: int = MOST_TOOLS
    """Maximum number of tools."""
    first: bool = False
    """True if the first `most_tools` are taken of a server that lists more. Otherwise no session begins with it."""
    stateless: bool = False
    """True if the server keeps nothing between calls, so that a session goes on with a new connection to it."""
    classes: Mapping[str, CallClass] = field(default_factory=dict)
    """Class of calls by tool, in place of what the server's annotations say."""

    def __post_init__(self) -> None:
        """Check it. Raises BadServer."""
        if not NAME.fullmatch(self.name):
            raise BadServer(f"MCP server {self.name!r:.80}: a name has 1 to 32 letters, digits, _ and -")
        if bool(self.command) == bool(self.url):
            raise BadServer(f"MCP server {self.name}: name either a command or a url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise BadServer(f"MCP server {self.name}: a url begins with http:// or https://, got {self.url!r:.80}")
        if isinstance(self.command, str):
            raise BadServer(f"MCP server {self.name}: the command is a list of words, got a text")

    def spec(self) -> dict[str, Any]:
        """Return what a call names of it, as JSON."""
        return {
            "name": self.name,
            "command": list(self.command),
            "env": dict(self.env),
            "cwd": self.cwd,
            "url": self.url,
            "headers": dict(self.headers),
            "timeout_s": self.timeout_s,
            "only": list(self.only),
            "most_tools": self.most_tools,
            "first": self.first,
            "stateless": self.stateless,
        }

    def class_of(self, tool: Mapping[str, Any]) -> CallClass:
        """Return the class of a tool's calls. Without annotations it is unsafe, as the protocol's defaults say."""
        return self.classes.get(tool["name"]) or cast(CallClass, idempotency_class(tool))


def list_call(servers: Sequence[McpServer]) -> SandboxCall:
    """Return the call that lists the tools of a session's servers: its opening."""
    if twice := sorted({one.name for one in servers if [other.name for other in servers].count(one.name) > 1}):
        raise BadServer(f"two MCP servers have the name {twice[0]!r}: give one another name")
    return SandboxCall(TOOL, {"op": "list", "servers": [server.spec() for server in servers]})


def tool_call(server: McpServer, tool: Mapping[str, Any], arguments: Mapping[str, Any]) -> SandboxCall:
    """Return a call of a listed tool."""
    return SandboxCall(
        TOOL,
        {
            "op": "call",
            "servers": [server.spec()],
            "tool": tool["name"],
            "arguments": dict(arguments),
            "class": server.class_of(tool),
        },
    )
