"""An MCP server that errs as it is told, standard library only.

`mcp_server.py stdio HOW...`, or `mcp_server.py http PORT HOW...`. Without HOW it is a plain server: the reference
client speaks to it as to the reference server (tests/unit/sandbox/test_mcp_bad_servers.py). HOW is one of: mute
(answers nothing), deaf (answers initialize alone), garbage (writes what is no JSON), exits (before it answers), many=N
(lists N tools), pages=N (in pages of N), endless (pages without end), strange (results of another shape), old (a
version of the protocol that nobody knows), stateless (HTTP without sessions), status=N (HTTP refuses)."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

HOW = dict(word.partition("=")[::2] for word in sys.argv[(2 if sys.argv[1:2] == ["stdio"] else 3) :])
READ = {"readOnlyHint": True}
TOOLS: dict[str, dict[str, Any]] = {
    "add": {"description": "Add two numbers.", "annotations": READ},
    "count": {"description": "Raise a count."},
    "peek": {"description": "Show the count.", "annotations": READ},
    "big": {"description": "As many bytes as told.", "annotations": READ},
    "hang": {"description": "Never answer.", "annotations": READ},
    "die": {"description": "End in the middle of the call.", "annotations": READ},
    "die_once": {"description": "End in the middle of the first call.", "annotations": READ},
    "die_unsafe": {"description": "The same, with effects."},
    "strange": {"description": "Answer another shape.", "annotations": READ},
    "change": {"description": "Change the list of tools."},
    "environment": {"description": "Show a header or a variable.", "annotations": READ},
}
count = 0


def text(value: object, *, error: bool = False) -> dict[str, Any]:
    """A result of one text."""
    return {"content": [{"type": "text", "text": str(value)}], "isError": error}


def listed(cursor: str) -> dict[str, Any]:
    """A page of tools/list."""
    schema = {"type": "object", "properties": {}}
    if "endless" in HOW:
        number = int(cursor or 0)
        return {"tools": [{"name": f"t{number}", "inputSchema": schema}], "nextCursor": str(number + 1)}
    names = [f"t{number}" for number in range(int(HOW["many"]))] if "many" in HOW else list(TOOLS)
    tools = [{"name": name, "inputSchema": schema, **TOOLS.get(name, {})} for name in names]
    size, start = int(HOW.get("pages") or len(tools) or 1), int(cursor or 0)
    more = {"nextCursor": str(start + size)} if start + size < len(tools) else {}
    return {"tools": tools[start : start + size], **more}


def called(name: str, arguments: dict[str, Any], headers: Any) -> dict[str, Any]:
    """The result of tools/call."""
    global count
    match name if name in TOOLS else "":
        case "add":
            return text(arguments["a"] + arguments["b"])
        case "count":
            count += 1
            return text(count)
        case "peek":
            return text(count)
        case "big":
            return text("x" * arguments["size"])
        case "hang":
            time.sleep(3600)
        case "die" | "die_unsafe":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        case "die_once":
            if not os.path.exists(arguments["mark"]):
                open(arguments["mark"], "w").close()
                os._exit(7)
            return text("lives")
        case "strange":
            return {"other": 1}
        case "change":
            del TOOLS["add"]
            return text("changed")
        case "environment":
            return text(headers.get(arguments["name"], os.environ.get(arguments["name"])))
    return text(f"Unknown tool: {name}", error=True)


def answered(message: dict[str, Any], headers: Any = {}) -> dict[str, Any] | None:  # noqa: B006 - it is read alone
    """The response to a message, or None."""
    method, params = message.get("method"), message.get("params") or {}
    if "id" not in message or "mute" in HOW or ("deaf" in HOW and method != "initialize"):
        return None
    if method == "initialize":
        version = "1999-01-01" if "old" in HOW else params["protocolVersion"]
        about = {"name": "fake", "version": "1"}
        result: dict[str, Any] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif method == "tools/list":
        result = {"tools": "none"} if "strange" in HOW else listed(params.get("cursor", ""))
    elif method == "tools/call":
        result = called(params["name"], params.get("arguments") or {}, headers)
    else:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "Method not found"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def stdio() -> None:
    """Serve the standard streams."""
    if "garbage" in HOW:
        print("Welcome! This is no JSON.", flush=True)
    if "exits" in HOW:
        sys.exit("a module is missing")
    for line in sys.stdin:
        if "garbage" in HOW:
            print("nor is this", flush=True)
        elif (said := answered(json.loads(line))) is not None:
            print(json.dumps(said), flush=True)


class Handler(BaseHTTPRequestHandler):
    """Serve POST /mcp by JSON."""

    protocol_version = "HTTP/1.1"
    sessions: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        """Answer a message."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers.get("Mcp-Session-Id", "")
        if message.get("method") == "initialize":
            session = f"session-{os.getpid()}-{len(self.sessions)}"
            self.sessions.add(session)
        elif session not in self.sessions and "stateless" not in HOW:
            return self.reply(404, b"no such session")
        if HOW.get("status"):
            return self.reply(int(HOW["status"]), b"not for you: " + self.headers.get("Authorization", "").encode())
        said = answered(message, self.headers)
        if said is None and "id" in message:
            time.sleep(3600)
        if said is None:
            return self.reply(202, b"")
        body = b"<html>no JSON</html>" if "garbage" in HOW else json.dumps(said).encode()
        return self.reply(200, body, *([("Mcp-Session-Id", session)] if "stateless" not in HOW else []))

    def do_DELETE(self) -> None:
        """End a session."""
        self.sessions.discard(self.headers.get("Mcp-Session-Id", ""))
        self.reply(200, b"")

    def reply(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in (*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        stdio()
    else:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
