"""A server of the reference implementation, for an environment of its own: `server.py stdio`, `server.py http PORT`."""

import base64
import os
import sys

from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("reference", instructions="Count and add.", version="7")
counts: dict[str, int] = {}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def put(name: str, value: int) -> str:
    """Set a count."""
    counts[name] = value
    return f"{name} is {value}"


@server.tool()
def count(name: str) -> str:
    """Raise a count by one."""
    counts[name] = counts.get(name, 0) + 1
    return f"{name} is {counts[name]}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def peek(name: str) -> dict[str, int]:
    """Show a count."""
    return {"count": counts.get(name, 0)}


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def picture():  # type: ignore[no-untyped-def]
    """Show a dot."""
    from mcp.server.mcpserver import Image

    return ["a dot", Image(data=PNG, format="png")]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def end() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


@server.tool(name="end_unsafe")
def end_unsafe() -> str:
    """End the server in the middle of a call that may have had effects."""
    os._exit(3)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def header(name: str) -> str:
    """Repeat a name."""
    return name


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        hosts = TransportSecuritySettings(allowed_hosts=["127.0.0.1:*", "mcp.test:*"])
        options = {"json_response": "json" in sys.argv, "stateless_http": "stateless" in sys.argv}
        options["transport_security"] = hosts
        server.run("streamable-http", port=int(sys.argv[2]), **options)
