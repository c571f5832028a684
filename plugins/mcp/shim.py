"""Stand-in for an MCP server with a command, for an agent's program: `shim.py NAME COMMAND...`.

It starts the server, passes each message on, and reports the list of tools and every call to the worker's proxy, before
the server gets a call and before the program gets the answer. Standard library only: it is a file of the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from typing import Any

PROXY = "http://127.0.0.1:3128/mcp/"
RECORDED = ("tools/list", "tools/call")


def report(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """Tell the proxy."""
    request = urllib.request.Request(
        f"{PROXY}{name}/record", json.dumps(about).encode(), {"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def main() -> None:
    """Serve the standard streams until the program closes them or the server ends."""
    name, *command = sys.argv[1:]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    waiting: dict[Any, Any] = {}

    def back() -> None:
        for line in server.stdout or ():
            message = parse_message(line)
            number = waiting.pop(message.get("id"), None) if "method" not in message else None
            if number is not None:
                report(name, {"number": number, "response": message})
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        for number in list(waiting.values()):
            report(name, {"number": number, "response": {"error": {"message": "the server ended"}}})
        os._exit(server.wait() & 0xFF)

    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    for line in sys.stdin.buffer:
        message = parse_message(line)
        if message.get("method") in RECORDED and "id" in message:
            waiting[message["id"]] = report(name, {"request": message})["number"]
        server.stdin.write(line)
        server.stdin.flush()
    server.stdin.close()
    thread.join()


def parse_message(line: bytes) -> dict[str, Any]:
    """Return a message; an empty one for a line that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


if __name__ == "__main__":
    main()
