"""The reference client: lists the tools of a server and makes the calls of a script, and prints what it got as JSON.

`client.py stdio PYTHON SERVER` or `client.py http URL`; the script is on stdin."""

import asyncio
import json
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


async def main() -> None:
    """Run the script."""
    kind, *rest = sys.argv[1:]
    if kind == "stdio":
        transport = stdio_client(StdioServerParameters(command=rest[0], args=rest[1:]))
    else:
        transport = streamable_http_client(rest[0])
    async with transport as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        tools = [
            tool.model_dump(by_alias=True, exclude_none=True, mode="json")
            for tool in (await session.list_tools()).tools
        ]
        answers = []
        for name, arguments in json.load(sys.stdin):
            said = await session.call_tool(name, arguments)
            answers.append(said.model_dump(by_alias=True, exclude_none=True, mode="json"))
    print(json.dumps({"tools": tools, "answers": answers}))


asyncio.run(main())
