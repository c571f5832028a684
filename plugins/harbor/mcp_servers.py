"""MCP servers of a task, and how an agent is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnlog.plugins.mcp import BadServer, McpServer, list_call
from turnlog.plugins.mcp.harnesses import HARNESSES

PROGRAM: Final = "program"
UNTOLD: Final = ("oracle",)
"""Agents that need no servers."""


def servers_of(about: Sequence[Mapping[str, Any]]) -> tuple[McpServer, ...]:
    """Return the servers of a row's `mcp_servers`. Raises BadServer for one that cannot be served."""
    return tuple(map(_server, about))


def _server(about: Mapping[str, Any]) -> McpServer:
    name = about["name"]
    match about["transport"]:
        case "stdio":
            return McpServer(name=name, command=(about["command"], *about["args"]))
        case "streamable-http":
            return McpServer(name=name, url=about["url"], headers=about["headers"])
    raise BadServer(
        f"server {name!r} has transport = 'sse', the format's default, which turnlog does not speak: set "
        "transport = 'streamable-http', or 'stdio' and a command"
    )


def harness_of(agent: str) -> str:
    """Return the name under which `mcp_config` knows an agent. Raises BadServer if it does not."""
    name = "mcp.json" if agent == PROGRAM else agent
    if name not in HARNESSES:
        known = ", ".join(one for one in HARNESSES if one not in ("mcp.json", "gemini-cli"))
        raise BadServer(f"agent={agent} cannot be told of MCP servers: choose one of {known}, {PROGRAM}, loop")
    return name


def check_servers(about: Sequence[Mapping[str, Any]], agent: str) -> None:
    """Check that an agent can have the servers of a row. Raises BadServer."""
    if not about or agent in UNTOLD:
        return
    list_call(servers_of(about))
    if agent != "loop":
        harness_of(agent)
