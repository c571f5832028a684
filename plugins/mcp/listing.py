"""Tools of a session's MCP servers, as its first call recorded them: declarations for the model, and calls of its own.

Everything here is a pure function of that record, so another runner and a later verdict see the same tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnlog.infra.environments.episodes import SandboxCall
from turnlog.infra.environments.simulations import NO_OBJECT, object_of
from turnlog.infra.environments.tools import declaration
from turnlog.plugins.mcp.servers import BadServer, McpServer, tool_call

ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")
LONGEST = 64
"""Maximum number of characters in the name of a function (OpenAI)."""
SHOWN = 1024
"""Maximum number of characters of a description."""
Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool, the server that has it, and its name for the model."""

    name: str
    server: McpServer
    tool: Mapping[str, Any]

    @property
    def declaration(self) -> dict[str, Any]:
        """Declaration in the format of OpenAI's `tools`."""
        about = str(self.tool.get("description") or self.tool.get("title") or "")[:SHOWN]
        schema = self.tool.get("inputSchema")
        return declaration(self.name, about, schema if isinstance(schema, Mapping) else {"type": "object"})


class ToolListing:
    """The tools of a session."""

    def __init__(self, servers: Sequence[McpServer], output: str) -> None:
        """Read the answer of `list_call`. Raises BadServer."""
        try:
            recorded = {one["name"]: one for one in json.loads(output)["servers"]}
            self.instructions = {name: str(one.get("instructions", "")) for name, one in recorded.items()}
            """Instructions of each server for its use."""
            pairs = [(server, tool) for server in servers for tool in recorded[server.name]["tools"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadServer(f"no list of tools of MCP servers: {type(error).__name__}: {error}") from error
        self.tools = _name_tools(pairs)
        """Every tool, in the order of the servers."""
        self._by_name = {tool.name: tool for tool in self.tools}

    @property
    def declarations(self) -> tuple[dict[str, Any], ...]:
        """Declarations for the model."""
        return tuple(tool.declaration for tool in self.tools)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Map a call of the model, whose `arguments` are JSON text, to the sandbox. A string is an answer."""
        if name not in self._by_name:
            return f"there is no tool {name!r}"
        values = object_of(arguments)
        return NO_OBJECT if values is None else self.call(name, values)

    def call(self, name: str, arguments: Mapping[str, Any]) -> SandboxCall:
        """Return the call of a tool. Raises KeyError if no server lists it."""
        tool = self._by_name[name]
        return tool_call(tool.server, tool.tool, arguments)


def _name_tools(pairs: Sequence[tuple[McpServer, Mapping[str, Any]]]) -> tuple[ListedTool, ...]:
    """Give every tool a name of its own. A name that two tools have gets its server as a prefix; what is then too long,
    or still the same, ends in a hash of server and tool."""
    plain = [ILLEGAL.sub("_", tool["name"]) for _, tool in pairs]
    count = Counter(plain)
    names = [
        name if count[name] == 1 else f"{server.name}__{name}" for name, (server, _) in zip(plain, pairs, strict=True)
    ]
    again = Counter(names)
    found = []
    for name, (server, tool) in zip(names, pairs, strict=True):
        if again[name] > 1 or not 0 < len(name) <= LONGEST:
            mark = hashlib.sha256(f"{server.name}\0{tool['name']}".encode()).hexdigest()[:8]
            name = f"{name[: LONGEST - 9]}_{mark}"
        found.append(ListedTool(name, server, tool))
    return tuple(found)


def content_of(output: str, *, images: bool = False) -> str | list[Block]:
    """Return the content of a tool message for a call's answer: text, or OpenAI's content blocks if it has images and
    the model takes them (`images`). What a model cannot read is named in its place."""
    try:
        answer = json.loads(output)
        blocks = answer["content"]
    except (ValueError, KeyError, TypeError):
        return output  # how the call ended, as text
    shown = [_block(block, images=images) for block in blocks if isinstance(block, dict)]
    if all(block["type"] == "text" for block in shown):
        return "\n".join(block["text"] for block in shown)
    return shown


def _block(block: Block, *, images: bool) -> Block:
    kind, data = str(block.get("type")), block.get("data")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    if kind == "image" and images and isinstance(data, str):
        url = f"data:{block.get('mimeType', 'image/png')};base64,{data}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        if isinstance(resource.get("text"), str):
            return {"type": "text", "text": resource["text"]}
        return _describe_block(f"resource {resource.get('uri', '')}", resource.get("mimeType"), resource.get("blob"))
    if kind == "resource_link":
        return {"type": "text", "text": f"[{block.get('name', '')}: {block.get('uri', '')}]"}
    return _describe_block(kind, block.get("mimeType"), data)


def _describe_block(what: str, kind: object, data: object) -> Block:
    size = f", {len(data) * 3 // 4 - data.count('=')} bytes" if isinstance(data, str) else ""
    return {"type": "text", "text": f"[{what} {kind or ''}{size}]"}
