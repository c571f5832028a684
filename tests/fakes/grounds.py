"""Where a PatchVerifier's calls run without runner, worker and log: a new bubblewrap for each, blobs in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.episodes import Episode, SandboxCall, TaskRow, Verdict
from turnlog.infra.environments.verifiers import PatchVerifier
from turnlog.infra.environments.verifiers.patches import Trees, grade_patch
from turnlog.infra.environments.workspaces import store_files
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.protocol import Command, Kind, Provider, Shape
from turnlog.sandbox_workers.workspaces import Workspaces
from turnlog.schemas.events import Outcome, SandboxLimits, ToolCallCompleted
from turnlog.schemas.types import BlobRef

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=10.0)


class Grounds:
    """Begins each call in a sandbox that has never run anything."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.blobs = MemoryBlobs()
        self.limits = LIMITS
        self.ran: list[str] = []

    async def run(self, part: str, workspace: BlobRef, call: SandboxCall) -> ToolCallCompleted:
        """See turnlog.infra.environments.verifiers.patches.Run."""
        self.ran.append(part)
        return await self.ran_in(workspace, Command(kind=Kind.python, source=call.arguments["code"]))

    async def ran_in(self, workspace: BlobRef | None, command: Command) -> ToolCallCompleted:
        """A command on these files, and what it left."""
        sandbox = await self._provider.start(0, Shape(disk_bytes=self.limits.disk_bytes))
        workspaces = Workspaces(self.blobs)
        try:
            if workspace is not None:
                await workspaces.restore(sandbox, workspace, disk_bytes=self.limits.disk_bytes)
            done = await sandbox.exec(command, self.limits)
            left = await workspaces.snapshot(sandbox, workspace)
        finally:
            await sandbox.close()
        return ToolCallCompleted(
            event_id="e", run_id="r", group_id="g", session_id="s", floor=0, rollout_id="o", call_id="c", call_seq=0,
            status=done.status, reason=done.reason, exit_code=done.exit_code, output=done.output, full_output=None,
            duration_s=done.duration_s, queue_s=0.0, workspace=left, attempt=1, worker="w", cached=False,
        )  # fmt: skip

    async def judged(
        self, verifier: PatchVerifier, task: TaskRow, files: Mapping[str, Any], *, acts: str | Mapping[str, Any] = ""
    ) -> Verdict:
        """Of an agent that ran `acts` in the shell on the files, or left those."""
        first = await store_files(files, self.blobs)
        if isinstance(acts, str):
            last = (await self.ran_in(first, Command(kind=Kind.shell, source=acts))).workspace
        else:
            last = await store_files(acts, self.blobs)
        episode = Episode(task=task, messages=(), outcome=Outcome.completed, reason="")
        return await grade_patch(verifier, episode, Trees(first=first, last=last), self.blobs, self.run)


@asynccontextmanager
async def grounds() -> AsyncIterator[Grounds]:
    """Raises BackendUnavailable where there are no user namespaces."""
    provider = await Bubblewrap.open(SandboxSettings(first_uid=292_000))
    try:
        yield Grounds(provider)
    finally:
        await provider.close()
