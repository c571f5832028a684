"""Tasks whose model, or agent, calls the tools of MCP servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from turnlog.environments import Observation, Opening, Recipe, SandboxAnswer, SandboxCall, Task, TaskRow
from turnlog.infra.environments.tools import MCP_TOOL
from turnlog.plugins.mcp.listing import ToolListing, content_of
from turnlog.plugins.mcp.servers import BadServer, McpServer, list_call


def with_servers(task: Task, servers: Sequence[McpServer], *, images: bool = False) -> Task:
    """Return the task with the tools of MCP servers, beside its own.

    The session begins with a call that lists them; its answer, which the log keeps, is the list for all of the session.
    `images`: pictures in answers become content blocks, for models that take images; otherwise they are named in text.
    Raises BadServer."""
    if task.opening is not None:
        raise BadServer(f"task {task.id} has an opening call of its own, so it cannot list the tools of MCP servers")

    def read_list(answer: SandboxAnswer) -> Opening:
        listing = ToolListing(servers, answer.output)
        own = {tool["function"]["name"] for tool in task.tools}
        if twice := sorted(own & {tool.name for tool in listing.tools}):
            raise BadServer(f"task {task.id} and an MCP server both have a tool {twice[0]!r}: leave one out by `only`")

        def tool_call(name: str, arguments: str) -> SandboxCall | str:
            return task.tool_call(name, arguments) if name in own else listing.tool_call(name, arguments)

        return Opening(tools=listing.declarations, tool_call=tool_call)

    def observe(call: SandboxCall, answer: SandboxAnswer) -> Observation:
        if call.tool != MCP_TOOL:
            return task.observe(call, answer)
        return Observation(content_of(answer.output, images=images))

    sandbox = task.sandbox
    if any(server.command for server in servers):
        sandbox = dataclasses.replace(sandbox, durable_workspace=True)
    return dataclasses.replace(
        task,
        sandbox=sandbox,
        sandbox_tools=tuple(dict.fromkeys((*task.sandbox_tools, MCP_TOOL))),
        opening=list_call(servers),
        opened=read_list,
        observe=observe,
    )


class McpRecipe(Recipe):
    """Base class for recipes whose tasks have the tools of MCP servers. Subclasses define `servers` beside `name`,
    `verifier` and `tasks`."""

    servers: Sequence[McpServer] = ()
    images = False
    """True if the model takes images."""

    def task(self, row: TaskRow) -> Task:
        """Return the task of a row, with the tools of the servers."""
        return with_servers(super().task(row), self.servers, images=self.images)
