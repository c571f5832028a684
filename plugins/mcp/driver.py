"""Driver that keeps MCP servers inside a sandbox: children of the persistent interpreter that speak JSON-RPC by stdio.

This text is sent into the sandbox and becomes the module `turnlog_mcp` there, so it is standard library only and
imports nothing of turnlog. Protocol: Model Context Protocol 2025-11-25, https://modelcontextprotocol.io/specification
(lifecycle, transports, server/tools). The worker's HTTP client uses its functions, too."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any

PROTOCOL = "2025-11-25"
"""Version that the client offers; the server may answer with an older one."""
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", PROTOCOL)
METHOD_NOT_FOUND = -32601
MESSAGE_BYTES = 64 * 2**20
"""Maximum length of one message of a server, in bytes."""
MOST_LISTED = 20_000
"""Maximum number of tools that a server may list, before a filter."""
LIST_BYTES = 512 * 2**10
"""Maximum size in bytes of the tools of one server, as they are recorded."""
LAST_WORDS = 2000
"""Bytes of a server's stderr, and characters of what it wrote in place of messages, that errors show."""
KEPT = ("name", "title", "description", "inputSchema", "annotations")
"""Parts of a tool that are recorded."""
ROOM = 512
"""Bytes of an answer reserved for its frame and for notes of what was left out."""

Tool = dict[str, Any]


class McpFailure(Exception):
    """The server failed: reason by name, text for people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ServerLost(McpFailure):
    """The server, or the session with it, is gone; nobody knows whether a request that was sent has had its effects."""

    def __init__(self, text: str) -> None:
        super().__init__("mcp_lost", text)


class ServerSilent(Exception):
    """The server did not answer in time."""


class McpRefusal(Exception):
    """The server answered a request with an error, whose text the model may read."""


def hello() -> dict[str, Any]:
    """Return the parameters of `initialize`. The client offers nothing that a server could ask it for."""
    return {
        "protocolVersion": PROTOCOL,
        "capabilities": {},
        "clientInfo": {"name": "turnlog", "version": "1"},
    }


def check_greeting(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what is recorded of a server's answer to `initialize`. Raises McpFailure."""
    version, about = result.get("protocolVersion"), result.get("serverInfo")
    if version not in VERSIONS or not isinstance(about, dict):
        raise McpFailure(
            "mcp_protocol", f"MCP server {name} speaks {version!r:.80}; turnlog speaks {', '.join(VERSIONS)}"
        )
    return {
        "protocol": version,
        "server": {key: str(about.get(key, ""))[:200] for key in ("name", "version")},
        "instructions": str(result.get("instructions") or "")[:20_000],
    }


def select_tools(pages: list[Tool], spec: dict[str, Any]) -> list[Tool]:
    """Return the tools that the session has, in the server's order. Raises McpFailure for more than it may have."""
    name, most = spec["name"], spec["most_tools"]
    found = [
        tool
        for tool in pages
        if not spec["only"] or any(fnmatch.fnmatchcase(tool["name"], one) for one in spec["only"])
    ]
    if len(found) > most and not spec["first"]:
        raise McpFailure(
            "mcp_tools",
            f"MCP server {name} lists {len(found)} tools; a session may have {most} of it: choose some by `only`, take "
            "the first ones by `first`, or raise `most_tools`",
        )
    found = [{key: tool[key] for key in KEPT if key in tool} for tool in found[:most]]
    if (size := len(json.dumps(found))) > LIST_BYTES:
        raise McpFailure(
            "mcp_tools",
            f"the tools of MCP server {name} take {size} bytes, {LIST_BYTES} are allowed: choose some by `only`",
        )
    return found


def page_of(result: dict[str, Any], name: str, before: list[Tool]) -> str:
    """Add a page of tools/list to `before`; return the cursor of the next page, or an empty string. Raises
    McpFailure."""
    tools = result.get("tools")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools
    ):
        raise McpFailure("mcp_protocol", f"MCP server {name} answers tools/list with {json.dumps(result)[:200]}")
    before += tools
    cursor = result.get("nextCursor") or ""
    if len(before) > MOST_LISTED or (cursor and not tools):
        raise McpFailure("mcp_tools", f"MCP server {name} lists more than {MOST_LISTED} tools, or pages without end")
    return str(cursor)


def too_long(name: str) -> McpRefusal:
    """Return the error for an answer that nobody reads to its end."""
    return McpRefusal(f"MCP server {name} answered with more than {MESSAGE_BYTES} bytes")


def result_of(message: dict[str, Any], name: str, method: str) -> dict[str, Any]:
    """Return the result of a response. Raises McpRefusal, McpFailure."""
    if "error" in message:
        error = message["error"] if isinstance(message["error"], dict) else {}
        raise McpRefusal(f"{str(error.get('message') or 'an error without a message')[:4000]} ({error.get('code')})")
    if not isinstance(message.get("result"), dict):
        raise McpFailure("mcp_protocol", f"MCP server {name} answers {method} with {json.dumps(message)[:200]}")
    return message["result"]  # type: ignore[no-any-return]


def reply_to(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reply to what a server asks or notifies: it may ping, and gets nothing else. None if no reply is
    due."""
    if "method" not in message or "id" not in message:
        return None
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "ping":
        return {**reply, "result": {}}
    return {**reply, "error": {"code": METHOD_NOT_FOUND, "message": "this client offers nothing"}}


def call_answer(result: dict[str, Any], name: str, most: int) -> dict[str, Any]:
    """Return what is recorded of a tools/call result, in at most `most` bytes of JSON. Raises McpFailure."""
    content = result.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise McpFailure("mcp_protocol", f"MCP server {name} answers tools/call with {json.dumps(result)[:200]}")
    if not content and "structuredContent" in result:
        content = [{"type": "text", "text": json.dumps(result["structuredContent"], ensure_ascii=False)}]
    return {"content": fit_content(content, most), "isError": result.get("isError") is True}


def fit_content(content: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the blocks that fit `most` bytes. A text that does not is cut; a note stands for any other block, and for
    those after it."""
    left, kept = most - ROOM, []
    for number, block in enumerate(content):
        size = len(json.dumps(block, ensure_ascii=False).encode(errors="replace"))
        if size <= left:
            kept.append(block)
            left -= size
            continue
        text = block.get("text")
        if isinstance(text, str) and left > 0:
            cut = text[:left]
            while cut and len(json.dumps(cut, ensure_ascii=False).encode(errors="replace")) > left:
                cut = cut[: len(cut) * 3 // 4]
            kept.append(
                {"type": "text", "text": f"{cut}\n[{len(text) - len(cut)} characters left out: output_bytes is {most}]"}
            )
        else:
            note = f"[{str(block.get('type'))[:20]} of {size} bytes left out: output_bytes is {most}]"
            kept.append({"type": "text", "text": note})
        if number + 1 < len(content):
            kept.append({"type": "text", "text": f"[{len(content) - number - 1} more parts left out]"})
        break
    return kept


class StdioServer:
    """A server that this process has started."""

    def __init__(self, spec: dict[str, Any], deadline: float) -> None:
        """Start it and greet it. Raises McpFailure, ServerSilent."""
        self.name = spec["name"]
        self.touched = False
        """True if a call that is not safe was sent to it, so that it may have state that a new one lacks."""
        self._count = 0
        self._buffer = bytearray()
        self._said = bytearray()
        self._strange = ""
        self._too_long = False
        self._searched = 0
        home = os.environ.get("HOME") or os.getcwd()
        try:
            self._process = subprocess.Popen(
                spec["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd=os.path.join(home, spec["cwd"]), env={**os.environ, **spec["env"]}, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise McpFailure("mcp_start", f"MCP server {self.name} cannot be started: {error}") from error
        pipes: list[Any] = [self._process.stdin, self._process.stdout, self._process.stderr]
        self._input, self._output, self._errors = pipes
        for pipe in (self._input, self._output, self._errors):
            os.set_blocking(pipe.fileno(), False)
        try:
            self.about = check_greeting(self.request("initialize", hello(), deadline), self.name)
            self._send({"jsonrpc": "2.0", "method": "notifications/initialized"}, deadline)
        except (ServerLost, McpRefusal) as error:
            self.end()
            raise McpFailure("mcp_start", f"MCP server {self.name} did not start: {error}") from error
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """True if its process lives."""
        return self._process.poll() is None

    def tools(self, deadline: float) -> list[Tool]:
        """Return every tool. Raises McpFailure, ServerSilent, McpRefusal."""
        found: list[Tool] = []
        cursor = page_of(self.request("tools/list", {}, deadline), self.name, found)
        while cursor:
            cursor = page_of(self.request("tools/list", {"cursor": cursor}, deadline), self.name, found)
        return found

    def request(self, method: str, params: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return its result. Raises McpFailure, ServerSilent, McpRefusal."""
        self._count += 1
        number = self._count
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, deadline)
        try:
            while True:
                message = self._next(deadline)
                if "method" not in message and message.get("id") == number:
                    return result_of(message, self.name, method)
                if (reply := reply_to(message)) is not None:
                    self._send(reply, deadline)
        except ServerSilent:
            if self._strange:
                raise McpFailure(
                    "mcp_protocol", f"MCP server {self.name} writes no JSON-RPC: {self._strange!r}"
                ) from None
            about = {"requestId": number, "reason": "timeout"}
            with contextlib.suppress(ServerLost, ServerSilent):
                note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": about}
                self._send(note, time.monotonic() + 0.1)
            raise

    def end(self) -> None:
        """End it. Never raises."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            try:
                data = data[os.write(self._input.fileno(), data) :]
            except BlockingIOError:
                self._wait(deadline, writing=True)
            except OSError as error:
                raise self._build_loss() from error

    def _next(self, deadline: float) -> dict[str, Any]:
        """Return the next message. Lines that are none are skipped, as the reference client does. Raises McpRefusal
        for one that is too long: only one request waits for an answer."""
        while True:
            while (end := self._buffer.find(b"\n", self._searched)) >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                if self._too_long:
                    self._too_long = False
                    raise too_long(self.name)
                try:
                    message = json.loads(line)
                except (ValueError, RecursionError):
                    message = None
                if isinstance(message, dict) and message.get("jsonrpc") == "2.0":
                    return message
                if line.strip():
                    self._strange = self._strange or line[:LAST_WORDS].decode(errors="replace")
            if len(self._buffer) > MESSAGE_BYTES:
                self._too_long = True
                self._buffer.clear()
            self._searched = len(self._buffer)
            self._wait(deadline)

    def _wait(self, deadline: float, *, writing: bool = False) -> None:
        """Wait until the server has written something (or reads, with `writing`), and read it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._errors, selectors.EVENT_READ)
            if writing:
                selector.register(self._input, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ServerSilent
                ready = {key.fileobj for key, _ in selector.select(left)}
                if self._errors in ready:
                    part = self._read(self._errors)
                    self._said = (self._said + part)[-LAST_WORDS:]
                    if not part:
                        selector.unregister(self._errors)
                if self._output in ready:
                    part = self._read(self._output)
                    if not part:
                        raise self._build_loss()
                    self._buffer += part
                    return
                if self._input in ready:
                    return

    @staticmethod
    def _read(pipe: Any) -> bytes:
        try:
            return os.read(pipe.fileno(), 1 << 20)
        except BlockingIOError:
            return b""

    def _build_loss(self) -> ServerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        with contextlib.suppress(OSError):
            self._said = (self._said + self._read(self._errors))[-LAST_WORDS:]
        said = self._said.decode(errors="replace").strip()
        how = f"exit {self._process.returncode}" if self._process.returncode is not None else "it closed its output"
        return ServerLost(f"MCP server {self.name} ended ({how})" + (f": {said}" if said else ""))


class KeptServers:
    """The servers of this interpreter, by name."""

    def __init__(self) -> None:
        self._known: dict[str, StdioServer] = {}

    def listing(self, spec: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return what is recorded of a server: who it is, and its tools."""
        server = self._server(spec, deadline)
        return {"name": server.name, **server.about, "tools": select_tools(server.tools(deadline), spec)}

    def call(
        self, spec: dict[str, Any], tool: str, arguments: Any, *, safe: bool, most: int, deadline: float
    ) -> dict[str, Any]:
        """Call a tool. A lost server is started anew for a call that is safe, if no call before it was unsafe."""
        params = {"name": tool, "arguments": arguments}
        again = False
        while True:
            server = self._server(spec, deadline)
            server.touched = server.touched or not safe
            try:
                return call_answer(server.request("tools/call", params, deadline), server.name, most)
            except ServerLost as lost:
                self._forget(spec["name"])
                if not safe or (server.touched and not spec["stateless"]):
                    raise
                if again:
                    raise McpRefusal(f"{lost}; it did so twice under this call") from lost
                again = True

    def _server(self, spec: dict[str, Any], deadline: float) -> StdioServer:
        name = spec["name"]
        known = self._known.get(name)
        if known is not None and not known.alive:
            touched, lost = known.touched, known._build_loss()
            self._forget(name)
            if touched and not spec["stateless"]:
                raise lost
            known = None
        if known is None:
            known = self._known[name] = StdioServer(spec, deadline)
        return known

    def _forget(self, name: str) -> None:
        if (known := self._known.pop(name, None)) is not None:
            known.end()


def answer(text: str, servers: KeptServers) -> None:
    """Print one line of JSON: {"answer"}, {"error"} for the model, {"silent"}, or {"failed", "text"}."""
    given = json.loads(text)
    deadline = time.monotonic() + given["within_s"]
    try:
        if given["op"] == "list":
            said: dict[str, Any] = {"answer": servers.listing(given["server"], deadline)}
        else:
            said = {
                "answer": servers.call(
                    given["server"], given["tool"], given["arguments"],
                    safe=given["safe"], most=given["most"], deadline=deadline,
                )
            }  # fmt: skip
    except McpRefusal as refused:
        said = {"error": str(refused)}
    except ServerSilent:
        said = {"silent": given["within_s"]}
    except McpFailure as failure:
        said = {"failed": failure.reason, "text": str(failure)}
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    sys.stdout.flush()


SERVERS = KeptServers()
