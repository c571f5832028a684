"""Configuration of command-line agents, so that their MCP calls go through the worker's proxy and are on the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from turnlog.infra.environments.tools import GATEWAY_INSIDE, MCP_INSIDE
from turnlog.plugins.mcp.servers import BadServer, McpServer

SHIM: Final = ".turnlog/mcp_shim.py"
"""Path in the workspace of the stand-in for servers with a command."""
Entries = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class McpConfig:
    """Additions to a CommandAgent."""

    servers: tuple[dict[str, Any], ...]
    """CommandAgent.mcp."""
    argv: tuple[str, ...] = ()
    """Arguments to add to the program's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to add."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to add."""


def mcp_config(harness: str, servers: Sequence[McpServer]) -> McpConfig:
    """Return the configuration with which a harness finds the servers at the worker's proxy.

    The harness is one of HARNESSES; `mcp.json` writes the file .mcp.json in the format that most programs read. Servers
    with a URL are called by the worker; those with a command run in the sandbox, below a stand-in that reports their
    calls. Raises BadServer."""
    if harness not in HARNESSES:
        raise BadServer(f"no MCP configuration for harness {harness!r}: there is one for {', '.join(HARNESSES)}")
    if twice := sorted({one.name for one in servers if [other.name for other in servers].count(one.name) > 1}):
        raise BadServer(f"two MCP servers have the name {twice[0]!r}: give one another name")
    argv, env, files = HARNESSES[harness](servers)
    if any(server.command for server in servers):
        files = {**files, SHIM: Path(__file__).with_name("shim.py").read_text()}
    return McpConfig(tuple(server.spec() for server in servers), tuple(argv), env, files)


def address(server: McpServer) -> str:
    """Return the address of a server as the program sees it."""
    return f"{GATEWAY_INSIDE}{MCP_INSIDE}{server.name}"


def shim(server: McpServer) -> list[str]:
    """Return the command of a server's stand-in."""
    return ["python3", SHIM, server.name, *server.command]


Parts = tuple[Sequence[str], Mapping[str, str], Mapping[str, str]]


def _entries(servers: Sequence[McpServer], url: str, **more: Any) -> Entries:
    """Return the map that most programs call mcpServers; `url` is their key for an address of streamable HTTP."""
    found: Entries = {}
    for server in servers:
        if server.url:
            found[server.name] = {url: address(server), **more}
        else:
            command, *arguments = shim(server)
            found[server.name] = {"command": command, "args": arguments, "env": dict(server.env)}
    return found


def _claude_code(servers: Sequence[McpServer]) -> Parts:
    config = json.dumps({"mcpServers": _entries(servers, "url", type="http")})
    return ("--mcp-config", config, "--strict-mcp-config"), {}, {}


def _codex(servers: Sequence[McpServer]) -> Parts:
    argv: list[str] = []
    for server in servers:
        key = f"mcp_servers.{server.name}"
        if server.url:
            argv += ["-c", f"{key}.url={json.dumps(address(server))}"]
            continue
        command, *arguments = shim(server)
        argv += ["-c", f"{key}.command={json.dumps(command)}", "-c", f"{key}.args={json.dumps(arguments)}"]
        for name, value in server.env.items():
            argv += ["-c", f"{key}.env.{name}={json.dumps(value)}"]
    return argv, {}, {}


def _opencode(servers: Sequence[McpServer]) -> Parts:
    entries: Entries = {}
    for server in servers:
        if server.url:
            entries[server.name] = {"type": "remote", "url": address(server), "enabled": True}
        else:
            entries[server.name] = {
                "type": "local", "command": shim(server), "environment": dict(server.env), "enabled": True
            }  # fmt: skip
    return (), {}, {"opencode.json": json.dumps({"mcp": entries})}


def _qwen_code(servers: Sequence[McpServer]) -> Parts:
    return (), {}, {".qwen/settings.json": json.dumps({"mcpServers": _entries(servers, "httpUrl", trust=True)})}


def _gemini_cli(servers: Sequence[McpServer]) -> Parts:
    return (), {}, {".gemini/settings.json": json.dumps({"mcpServers": _entries(servers, "httpUrl", trust=True)})}


def _mcp_json(servers: Sequence[McpServer]) -> Parts:
    return (), {}, {".mcp.json": json.dumps({"mcpServers": _entries(servers, "url", type="http")})}


HARNESSES: Final[Mapping[str, Callable[[Sequence[McpServer]], Parts]]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "qwen-code": _qwen_code,
    "gemini-cli": _gemini_cli,
    "mcp.json": _mcp_json,
}
"""Programs, by the names of docs/harnesses.md."""
