"""Calls of one session to a worker of the fixture `house`, as a runner makes them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from turnlog.environments import SandboxCall
from turnlog.infra.embedded.ports import free_ports
from turnlog.plugins.mcp import McpServer, ToolListing, list_call
from turnlog.sandbox_settings import EgressSettings
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolCallCompleted, ToolStatus
from turnlog.schemas.types import BlobRef

LIMITS = SandboxLimits(memory_bytes=2 << 30, wall_s=60.0, cpu_s=60.0)
SPEC = SandboxSpec(backend="subprocess", durable_workspace=True, limits=LIMITS)


def outside(house: Any) -> int:
    """A port of mcp.test, which the workers of the house may reach."""
    (port,) = free_ports(1)
    egress = EgressSettings(allow=(f"* http://mcp.test:{port}/mcp",), private_hosts=(f"mcp.test:{port}",))
    house.settings = dataclasses.replace(house.settings, egress=egress)
    return port


class Session:
    """A session of the runner's, as far as its calls go."""

    def __init__(self, house: Any, name: str, spec: SandboxSpec = SPEC) -> None:
        self.house, self.name, self.spec = house, name, spec
        self.seq = 0
        self.workspace: BlobRef | None = None

    async def call(self, call: SandboxCall, **changes: Any) -> ToolCallCompleted:
        """Make one."""
        request = self.house.call(
            f"{self.name}-{self.seq}", self.seq, session=self.name, tool=call.tool, sandbox=self.spec,
            arguments=json.dumps(call.arguments).encode(), workspace=self.workspace, **changes,
        )  # fmt: skip
        done: ToolCallCompleted = await self.house.answer(request)
        self.seq, self.workspace = self.seq + 1, done.workspace
        return done

    async def begin(self, *servers: McpServer) -> ToolListing:
        """List the tools."""
        done = await self.call(list_call(servers))
        assert done.status is ToolStatus.ok, (done.status, done.reason, done.output)
        return ToolListing(servers, done.output.decode())
