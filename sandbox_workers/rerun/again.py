"""Recorded calls, run again one after the other, each on the files it had, with the network answers it got."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.infra.role import Role
from turnlog.sandbox_settings import Interception
from turnlog.sandbox_workers import answers
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.plans import Plan, Planner
from turnlog.sandbox_workers.pooling.lease import Lease
from turnlog.sandbox_workers.pooling.pools import LOCAL, Pools
from turnlog.sandbox_workers.protocol import Execution, FileRefused, Kind, SandboxError
from turnlog.sandbox_workers.rerun.comparison import Result
from turnlog.sandbox_workers.rerun.recorded import RecordedCall
from turnlog.sandbox_workers.rerun.scratch import ScratchBlobs
from turnlog.sandbox_workers.surroundings import Surroundings
from turnlog.sandbox_workers.tools import Refusal, tools
from turnlog.sandbox_workers.workspaces import Manifest, Workspaces
from turnlog.schemas.events import EgressRequest
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

REPLAYED_TLS: dict[Interception, Interception] = {"intercept": "intercept", "tunnel": "intercept", "refuse": "refuse"}
"""What went through a tunnel nobody saw: it cannot be given again, and is refused as not recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A call that ran again, or why it could not."""

    result: Result | None
    notes: tuple[str, ...] = ()


class Rerunner:
    """Runs the calls of one session, in order. `open` makes one."""

    def __init__(
        self, settings: Settings, blobs: Blobs, pools: Pools, egress: Egress | None, *, interpreted: int
    ) -> None:
        """`interpreted`: the last call_seq that goes on in a persistent interpreter; -1: none does."""
        self._interpreted = interpreted
        self._blobs = blobs
        self._workspaces = Workspaces(blobs)
        self._planner = Planner(settings.sandbox, pools, egress=egress is not None)
        self._surroundings = Surroundings(settings.egress)
        self._egress = egress

    @classmethod
    @asynccontextmanager
    async def open(cls, role: Role, calls: Sequence[RecordedCall]) -> AsyncIterator[Rerunner]:
        """With a pool of one sandbox for each backend that the calls ask for. Raises BackendUnavailable,
        EgressUnavailable."""
        specs = [call.request.sandbox for call in calls]
        settings, blobs = role.settings, ScratchBlobs(role.blobs)
        own = dataclasses.replace(
            settings.sandbox,
            slots=1,
            prewarm=1,
            # a name that is no backend's is refused by the pools
            backends=tuple(sorted({spec.backend for spec in specs} - {*LOCAL})),  # type: ignore[arg-type]
            first_uid=settings.sandbox.first_uid + settings.sandbox.slots,  # a worker of this machine has those below
        )
        async with AsyncExitStack() as stack:
            egress = None
            if any(spec.network == "allowlist" for spec in specs):
                replay = dataclasses.replace(settings.egress, mode="replay", tls=REPLAYED_TLS[settings.egress.tls])
                egress = await stack.enter_async_context(Egress.opened(replay, blobs))
            ca = egress.ca if egress is not None else None
            pools = await stack.enter_async_context(Pools.opened(own, ca=ca))
            sequence = [call.request.call_seq for call in calls if interpreted(call)]
            yield cls(settings, blobs, pools, egress, interpreted=max(sequence, default=-1))

    async def run(self, call: RecordedCall) -> Again:
        """The call again. Its sandbox stays its session's when its files do. Raises LogError, StoreUnavailable."""
        request = call.request
        plan = self._planner.plan(request)
        if isinstance(plan, Refusal):
            return Again(result=None, notes=(f"cannot run here: {plan.text}",))
        durable = request.sandbox.durable_workspace
        try:
            sha256 = await self._surroundings.sha256(plan.pool.provider, plan.shape, request.sandbox)
            async with plan.pool.lease(
                plan.shape, session=request.session_id if durable else None, fresh=request.sandbox.fresh
            ) as lease:
                notes = await self._placed(lease, call, plan)
                execution, requests = await self._ran(lease, call, plan)
                execution, tree = await self._kept(lease, call, plan, execution) if durable else (execution, None)
        except (SandboxError, BlobMissing, BlobCorrupt) as error:
            return Again(result=None, notes=(f"could not run: {type(error).__name__}: {error}",))
        result = Result(
            status=execution.status,
            reason=execution.reason,
            exit_code=execution.exit_code,
            output=execution.output,
            tree=tree,
            requests=requests,
            environment_sha256=sha256,
        )
        return Again(result=result, notes=notes)

    async def then(self, call: RecordedCall) -> Result:
        """What was recorded. Raises BlobError when its whole output is gone."""
        done, begun = call.completed, call.begun
        assert done is not None
        assert begun is not None
        return Result(
            status=done.status,
            reason=done.reason,
            exit_code=done.exit_code,
            output=await self._blobs.get(done.full_output) if done.full_output else done.output,
            tree=await self._tree(done.workspace) if call.request.sandbox.durable_workspace else None,
            requests=done.requests,
            environment_sha256=begun.environment_sha256,
        )

    async def _placed(self, lease: Lease, call: RecordedCall, plan: Plan) -> tuple[str, ...]:
        """Have the files that the call had in the sandbox; what is to be said about that. Raises SandboxError."""
        wanted, there = call.request.workspace, await self._tree(lease.workspace) if lease.held else None
        asked = await self._tree(wanted)
        if wanted is None and call.request.call_seq and call.request.sandbox.durable_workspace and not lease.held:
            return ("ran on an empty workspace: which one it had was not recorded",)
        if wanted is None or (there is not None and asked is not None and there.tree_sha256 == asked.tree_sha256):
            return ()
        if lease.sandbox.interpreter and call.request.call_seq <= self._interpreted:
            return ("ran on other files than it had: to restore them would end the interpreter that is needed",)
        if asked is None:
            return (f"ran on other files than it had: workspace {wanted.sha256} is not in the store",)
        await self._workspaces.restore(lease.sandbox, wanted, disk_bytes=plan.limits.disk_bytes)
        if plan.interpreter and asked.interpreter:
            return ("ran in a new interpreter: what earlier calls had built up in the old one is in no snapshot",)
        return ("its files were restored from the recorded workspace",) if lease.held else ()

    async def _ran(self, lease: Lease, call: RecordedCall, plan: Plan) -> tuple[Execution, tuple[EgressRequest, ...]]:
        spec, sandbox = call.request.sandbox, lease.sandbox
        if self._egress is None or sandbox.proxy is None:
            return await plan.tool.run(sandbox, plan.limits, spec.env), ()
        assert call.completed is not None
        env = {**spec.env, **self._egress.environment_of(sandbox.proxy, plan.pool.provider.name)}
        async with self._egress.serving(
            sandbox.proxy, allow=spec.allow, call_seq=call.request.call_seq, answers=call.completed.requests
        ) as asked:
            execution = await plan.tool.run(sandbox, plan.limits, env)
        return execution, asked.made()

    async def _kept(
        self, lease: Lease, call: RecordedCall, plan: Plan, execution: Execution
    ) -> tuple[Execution, Manifest | None]:
        """The tree that the call left; the session goes on with it. Raises SandboxError."""
        try:
            ref = await self._workspaces.snapshot(lease.sandbox, call.request.workspace, most=plan.limits.disk_bytes)
        except FileRefused as error:
            return answers.unkept(execution, error), None
        lease.keep(ref)
        return execution, await self._tree(ref)

    async def _tree(self, ref: BlobRef | None) -> Manifest | None:
        """None: nothing is named, or it is gone."""
        if ref is None:
            return None
        try:
            return await self._workspaces.open(ref)
        except SandboxError:  # WorkspaceLost or WorkspaceCorrupt: it cannot be compared with
            return None


def interpreted(call: RecordedCall) -> bool:
    """It goes on in what earlier calls have built up in the sandbox's persistent interpreter."""
    tool = tools().get(call.request.tool)
    return tool is not None and Kind.session in tool.kinds
