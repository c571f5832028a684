"""Run calls to their answers: lease, announce, run, store, publish; and run again those whose sandbox went away.

The files of a session are placed into the sandbox of its next call, and stored after the call.

NoSandboxInTime   raised within: the call was cancelled, or its deadline passed, while it waited for a sandbox"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client import Counter, Histogram

from turnlog.infra.blobs import BlobError, Blobs
from turnlog.infra.environments.tools import AGENT
from turnlog.infra.event_log import EventSink
from turnlog.infra.log import Record
from turnlog.infra.roles.credentials import CredentialKeys, CredentialUnusable
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.tls import TlsFileUnusable
from turnlog.sandbox_workers.agent_calls import RecordedCalls, blamed_on_servers
from turnlog.sandbox_workers.calls import (
    AttemptsExhausted,
    CallOutcome,
    Pending,
    ToolCallPartitionTask,
    apply_event,
    make_completed_event,
    make_started_event,
    mark_sandbox_ended,
    unkept,
    unrun,
    without_interpreter,
)
from turnlog.sandbox_workers.connections import SessionConnections, WorkerConnections
from turnlog.sandbox_workers.outside import ENVIRONMENT, NoSandbox
from turnlog.sandbox_workers.placements import EnvironmentDigests, Placement, Scheduler
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Lease
from turnlog.sandbox_workers.protocol import (
    DiskLacksRoom,
    Execution,
    FileRefused,
    ImageMissing,
    InterpreterLost,
    QuotaExceeded,
    SandboxDied,
    SandboxUnavailable,
    Verdict,
    WorkspaceCorrupt,
    WorkspaceLost,
    at_most,
    attribute_death,
)
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes
from turnlog.sandbox_workers.session_files import SessionFiles
from turnlog.sandbox_workers.tools import Refusal
from turnlog.sandbox_workers.tools.tool import CallContext
from turnlog.sandbox_workers.workspaces.store import Workspaces
from turnlog.schemas import SessionIsErased
from turnlog.schemas.events import EgressRequest, ToolCallCompleted, ToolCallRequested, ToolCallStarted, ToolStatus
from turnlog.schemas.events.tools import UNISOLATED
from turnlog.schemas.topics import INLINE_LIMIT_BYTES
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

if TYPE_CHECKING:
    from turnlog.sandbox_workers.egress import Egress, GatewayRelay
    from turnlog.sandbox_workers.egress.mcp_relay import McpRelay


log = logging.getLogger(__name__)

DISK = "disk"
"""Readiness condition of /readyz that does not hold while the disk under workspaces is full."""
LONG_S = 1e9
"""Seconds: longer than anybody waits, but still small enough for a clock to add."""
CALLS = Counter("turnlog_sandbox_calls", "Tool calls answered", ["tool", "status", "backend"])
SECONDS = Histogram("turnlog_sandbox_call_seconds", "Duration of tool calls in their sandbox", ["tool", "backend"])
CatchUp = Callable[[ToolCallPartitionTask], Awaitable[None]]
"""Callback that reads what other workers have written into the results of a partition."""
Ran = tuple[Execution, tuple[EgressRequest, ...]]
"""Execution of a call, and its requests to the network."""
LOST = {WorkspaceLost: "workspace_lost", WorkspaceCorrupt: "workspace_corrupt", InterpreterLost: "interpreter_lost"}


class NoSandboxInTime(Exception):
    """No sandbox was leased in time: the call was cancelled, or its deadline passed. Look at the call again."""


class CallHost(Protocol):
    """Parts of a role that running calls needs."""

    @property
    def settings(self) -> Settings:
        """Settings of the worker."""
        ...

    @property
    def events(self) -> EventSink:
        """Takes the records of calls that began or are answered."""
        ...

    @property
    def blobs(self) -> Blobs:
        """Store of workspaces and long outputs."""
        ...

    @property
    def health(self) -> Health:
        """Readiness of the worker."""
        ...

    @property
    def instance(self) -> str:
        """Name of the worker in its records."""
        ...

    async def park(self, record: Record, cause: Exception) -> None:
        """Dead-letter the request of a call that cannot be run."""
        ...


class CallRunner:
    """Answers one call at a time per session, and as many sessions at once as the pools have slots."""

    def __init__(
        self, role: CallHost, pools: SandboxPools, catch_up: CatchUp, clock: Callable[[], float], egress: Egress | None
    ) -> None:
        settings = role.settings
        self._events = role.events
        self._blobs = role.blobs
        self._redactor = role.events.redactor
        self._pools = pools
        self._scheduler = Scheduler(settings.sandbox, pools, egress=egress is not None)
        self._egress, self._settings = egress, settings
        self._files = SessionFiles(
            Workspaces(role.blobs, trees=2 * settings.sandbox.slots * len(pools.served_backends))
        )
        self._environments = EnvironmentDigests(settings.egress)
        self._park, self._health = role.park, role.health
        self._catch_up = catch_up
        self._clock = clock
        self.connections = WorkerConnections()
        """The connections of the sessions whose calls run here."""
        self._shared = SessionConnections()
        self._server_sandboxes = ServerSandboxes(pools.providers, slots=settings.sandbox.slots)
        self._max_attempts = settings.sandbox.max_attempts
        self._name = role.instance + (UNISOLATED if pools.fallback else "")

    async def close(self) -> None:
        """Close what tools keep here: connections, then servers."""
        await self.connections.close()
        await self._shared.close()

    def release(self, session: str) -> None:
        """Give up what is kept for a session that is over: connections and slots."""
        self.connections.forget(session)
        self._pools.release(session)

    def placement(self, pending: Pending) -> Placement | Refusal:
        """Return how the call will be run, computed once."""
        if pending.placement is None:
            pending.placement = self._scheduler.placement(pending.request)
        return pending.placement

    async def answer(self, unit: ToolCallPartitionTask, pending: Pending) -> None:
        """Publish the call's answer and tell the partition's state its position. A call whose session was erased ends
        without an answer. Raises LogError, StoreUnavailable."""
        try:
            await self._answer(unit, pending)
        except SessionIsErased as erased:
            log.warning("call %s gets no answer: %s", pending.request.call_id, erased, extra=_about(pending))
            unit.drop(pending)
            self.release(unit.session(pending.request))

    async def _answer(self, unit: ToolCallPartitionTask, pending: Pending) -> None:
        """See `answer`. Raises SessionIsErased, and what `answer` raises."""
        placement = self.placement(pending)
        execution = self._unrunnable(unit, pending, placement)
        while execution is None:
            assert isinstance(placement, Placement)
            try:
                execution = await self._attempt(unit, pending, placement)
                if execution is None:
                    return
            except NoSandboxInTime:
                execution = self._unrunnable(unit, pending, placement)
            except DiskLacksRoom as error:  # not an attempt, since it was not begun; it waits for room
                self._health.unmet(DISK, str(error))
                log.warning("call %s waits: %s", pending.request.call_id, error, extra=_about(pending))
                execution = self._unrunnable(unit, pending, placement)
            except (SandboxDied, SandboxUnavailable) as error:
                unit.attempts[pending.request.call_id] = self._attempts(unit, pending) + (not pending.begun)
                pending.begun = False
                log.warning(
                    "call %s ended without an answer: %s", pending.request.call_id, error, extra=_about(pending)
                )
                execution = self._unrunnable(unit, pending, placement)
        if execution.reason == "attempts":
            await self._park(pending.record, AttemptsExhausted(execution.output.decode(errors="replace")))
        outcome = CallOutcome(execution=execution, workspace=await self._files.before(pending.request))
        await (await self._submit_answer(unit, pending, placement, outcome, self._age(pending)))

    def _unrunnable(
        self, unit: ToolCallPartitionTask, pending: Pending, placement: Placement | Refusal
    ) -> Execution | None:
        """Return the answer of a call that must not run (again), or None if it may run."""
        attempts = self._attempts(unit, pending)
        if pending.cancelled:
            return unrun(ToolStatus.cancelled, "cancelled")
        if isinstance(placement, Refusal):
            return unrun(ToolStatus.refused, placement.reason, placement.text)
        if attempts and placement.tool.once:
            text = f"{pending.request.tool} ran, and its sandbox or worker went away: it is not run again"
            return unrun(ToolStatus.infra_error, "not_repeated", text)
        if attempts >= self._max_attempts:
            text = f"the sandbox went away {attempts} times; [sandbox] max_attempts is {self._max_attempts}"
            return unrun(ToolStatus.infra_error, "attempts", text)
        if self._age(pending) > pending.request.deadline_s:
            return unrun(ToolStatus.timeout, "deadline_s", "nobody waits for the answer any more")
        return None

    async def _attempt(self, unit: ToolCallPartitionTask, pending: Pending, placement: Placement) -> Execution | None:
        """Make one attempt. Return None if the call is answered, else the answer of a call that did not run. Raises
        SandboxDied, SandboxUnavailable, NoSandboxInTime."""
        if not placement.tool.takes_sandbox:
            return await self._attempt_outside(unit, pending, placement)
        async with AsyncExitStack() as stack:
            try:
                lease = await self._lease_sandbox(stack, unit, pending, placement)
                self._health.mark_ready(DISK)
                if pending.again and not await lease.sandbox.healthy():
                    raise SandboxUnavailable("it was gone before the call")
                sha256 = await self._environments.sha256(
                    placement.pool.provider, placement.shape, pending.request.sandbox
                )
            except ImageMissing as error:
                return unrun(ToolStatus.refused, "image", str(error))
            placed = await self._place_files(lease, pending, placement)
            if isinstance(placed, Execution):
                return placed
            queue_s = self._age(pending)
            if not await self._announce_start(unit, pending, sha256):
                return None
            outcome = await self._outcome(unit, lease, pending, placement, lost=placed)
            SECONDS.labels(pending.request.tool, placement.pool.provider.name).observe(outcome.execution.duration_s)
            acknowledged = await self._submit_answer(unit, pending, placement, outcome, queue_s)
        await acknowledged  # the slot is free already
        return None

    async def _attempt_outside(
        self, unit: ToolCallPartitionTask, pending: Pending, placement: Placement
    ) -> Execution | None:
        """Make one attempt at a call that takes no sandbox, as `_attempt` does. Raises SandboxUnavailable."""
        queue_s = self._age(pending)
        if not await self._announce_start(unit, pending, ENVIRONMENT):
            return None
        place = pending.sandbox = NoSandbox()
        try:
            execution = await placement.tool.run(
                place, placement.limits, {}, context=self._context(unit, pending.request)
            )
        except asyncio.CancelledError:
            if not place.cancelled:
                raise
            uncancel_current_task()
            execution = unrun(ToolStatus.cancelled, "cancelled")
        finally:
            pending.sandbox = None
        SECONDS.labels(pending.request.tool, "none").observe(execution.duration_s)
        outcome = await self._store_output(execution, await self._files.before(pending.request), ())
        await (await self._submit_answer(unit, pending, placement, outcome, queue_s))
        return None

    def _context(self, unit: ToolCallPartitionTask, request: ToolCallRequested) -> CallContext:
        egress = self._egress
        way_out = None if egress is None else partial(egress.way_out, request.sandbox.allow, call_id=request.call_id)
        connections = self.connections.of(unit.session(request))
        return CallContext(
            call_id=request.call_id, call_seq=request.call_seq, connections=connections, way_out=way_out,
            shared=self._shared, server_sandboxes=self._server_sandboxes,
        )  # fmt: skip

    async def _lease_sandbox(
        self, stack: AsyncExitStack, unit: ToolCallPartitionTask, pending: Pending, placement: Placement
    ) -> Lease:
        """Lease a sandbox. Raises NoSandboxInTime, SandboxUnavailable, ImageMissing."""
        request = pending.request
        session = unit.session(request) if request.sandbox.durable_workspace else None
        # A repeated call runs in a new sandbox, to see whether the call itself takes sandboxes down.
        pending.again = self._attempts(unit, pending) > 0
        lease = placement.pool.lease(placement.shape, session=session, fresh=request.sandbox.fresh or pending.again)
        try:
            async with asyncio.timeout(min(request.deadline_s - self._age(pending), LONG_S)) as pending.lease_timeout:
                return await stack.enter_async_context(lease)
        except TimeoutError as error:
            raise NoSandboxInTime from error
        finally:
            pending.lease_timeout = None

    async def _place_files(self, lease: Lease, pending: Pending, placement: Placement) -> bool | Execution:
        """Put the right files into the sandbox. Return whether their interpreter is missing, or the answer of a call
        that cannot run."""
        request = pending.request
        try:
            return await self._files.place(
                lease, request, disk_bytes=placement.limits.disk_bytes, interpreter=placement.interpreter
            )
        except InterpreterLost as error:
            lease.keep(request.workspace)  # other tools go on with the files
            return unrun(ToolStatus.infra_error, LOST[InterpreterLost], str(error))
        except WorkspaceLost as error:
            return unrun(ToolStatus.infra_error, LOST[type(error)], str(error))
        except QuotaExceeded as error:
            return unrun(ToolStatus.resource_limit, "disk_bytes", str(error))

    async def _announce_start(self, unit: ToolCallPartitionTask, pending: Pending, environment_sha256: str) -> bool:
        """Write ToolCallStarted. Return False if another worker's answer precedes it on the log: then this call has had
        its effects."""
        pending.begun = True
        attempt = self._attempts(unit, pending) + 1
        event = make_started_event(
            pending.request, attempt=attempt, worker=self._name, environment_sha256=environment_sha256
        )
        await (await self._submit_event(unit, event))
        if unit.strays:
            await self._catch_up(unit)
        return unit.answers.find(pending.request.call_id) is None

    async def _outcome(
        self, unit: ToolCallPartitionTask, lease: Lease, pending: Pending, placement: Placement, *, lost: bool
    ) -> CallOutcome:
        """Run the call and store what it left. Raises SandboxDied if the sandbox ended by something other than the
        call, as far as is known."""
        stateful = placement.interpreter and await self._files.stateful(
            lease, pending.request, leaves_state=placement.tool.leaves_state
        )
        pending.stateful = stateful
        context = self._context(unit, pending.request)
        execution, requests = await self._run(unit, lease, pending, placement, context)
        if lost and pending.died:  # the interpreter existed until this call
            execution, lost = without_interpreter(execution), False
        execution, workspace = await self._store_files(lease, pending, placement, execution, lost=lost)
        if (redactor := self._redactor) is not None:  # before a long output is stored and cut
            masked = await asyncio.to_thread(redactor.output, execution.output, pending.request.call_seq)
            execution = dataclasses.replace(execution, output=masked)
        return await self._store_output(execution, workspace, requests)

    async def _store_output(
        self, execution: Execution, workspace: BlobRef | None, requests: tuple[EgressRequest, ...]
    ) -> CallOutcome:
        """Return the outcome; an output that is too long for a record is stored whole."""
        outcome = CallOutcome(execution=execution, workspace=workspace, requests=requests)
        if len(execution.output) <= INLINE_LIMIT_BYTES:
            return outcome
        whole = await self._blobs.put(execution.output)
        cut = dataclasses.replace(execution, output=execution.output[:INLINE_LIMIT_BYTES])
        return dataclasses.replace(outcome, execution=cut, full_output=whole)

    async def _store_files(
        self, lease: Lease, pending: Pending, placement: Placement, execution: Execution, *, lost: bool
    ) -> tuple[Execution, BlobRef | None]:
        """Store the session's files. Return the answer, and the workspace after it. Raises SandboxDied."""
        request = pending.request
        try:
            workspace = await self._files.keep(
                lease, request, disk_bytes=placement.limits.disk_bytes, lost=lost,
                leaves_state=placement.tool.leaves_state,
            )  # fmt: skip
        except FileRefused as error:
            return unkept(execution, error), await self._files.without(request, lost=lost)
        except SandboxDied as error:
            execution = mark_sandbox_ended(execution, self._verdict(pending, error))
            return execution, await self._files.without(request, lost=lost)
        if request.sandbox.durable_workspace:
            lease.keep(workspace)
        return execution, workspace

    def _verdict(self, pending: Pending, error: SandboxDied) -> Verdict:
        """Return the answer of a call whose sandbox went away. Raises `error` if nothing indicates that the call caused
        it: then the call runs again, in a new sandbox."""
        pending.died = True
        pending.deaths += pending.again and not error.evidence.ours
        evidence = dataclasses.replace(error.evidence, deaths=pending.deaths, stateful=pending.stateful)
        verdict = attribute_death(evidence)
        if verdict is None:
            raise error
        log.info("call %s has ended its sandbox: %s", pending.request.call_id, error, extra=_about(pending))
        return verdict

    async def _run(
        self,
        unit: ToolCallPartitionTask,
        lease: Lease,
        pending: Pending,
        placement: Placement,
        context: CallContext,
    ) -> Ran:
        spec = pending.request.sandbox
        if pending.cancelled:
            return unrun(ToolStatus.cancelled, "cancelled"), ()
        pending.sandbox = lease.sandbox
        try:
            if spec.network != "allowlist":
                return await self._ran(lease, pending, placement, spec.env, context), ()
            return await self._run_with_network(unit, lease, pending, placement, context)
        finally:
            pending.sandbox = None

    async def _ran(
        self, lease: Lease, pending: Pending, placement: Placement, env: Mapping[str, str], context: CallContext
    ) -> Execution:
        """Run the tool. Raises SandboxDied."""
        try:
            return await placement.tool.run(lease.sandbox, placement.limits, env, context=context)
        except SandboxDied as error:
            return unrun(*self._verdict(pending, error), "the call has ended its sandbox\n")

    async def _run_with_network(
        self,
        unit: ToolCallPartitionTask,
        lease: Lease,
        pending: Pending,
        placement: Placement,
        context: CallContext,
    ) -> Ran:
        """Run the call beside the proxy. Raises SandboxDied, also if the object store or the [egress] proxy failed one
        of its requests: what the call made of a wrong answer cannot be trusted."""
        from turnlog.sandbox_workers.egress import Egress, EgressUnavailable, ProxyUnusable  # needed by such calls only
        from turnlog.sandbox_workers.egress.mcp_relay import AgentPaths

        request, sandbox = pending.request, lease.sandbox
        if self._egress is None:  # only an agent gets here: other calls are refused
            self._egress = Egress.without_rules(self._settings.egress, self._blobs)
        assert sandbox.proxy is not None  # guaranteed by the shape's network
        env = {**request.sandbox.env, **self._egress.environment_of(sandbox.proxy, placement.pool.provider)}
        try:
            async with AsyncExitStack() as stack:
                gateway = await self._gateway(stack, request, placement)
                servers = self._servers(unit, pending, placement, context)
                if servers is not None:
                    stack.push_async_callback(servers.close)
                requests = await stack.enter_async_context(
                    self._egress.serving(
                        sandbox.proxy, allow=request.sandbox.allow, call_seq=request.call_seq, call_id=request.call_id,
                        gateway=gateway if gateway is None or servers is None else AgentPaths(gateway, servers),
                    )
                )  # fmt: skip
                execution = await self._ran(lease, pending, placement, env, context)
                if servers is not None:
                    await servers.close()
                    execution = blamed_on_servers(execution, servers.failed)
        except (CredentialUnusable, EgressUnavailable, TlsFileUnusable) as error:
            return unrun(ToolStatus.infra_error, "credential", str(error)), ()
        except BlobError as error:
            raise SandboxDied(f"its requests to the network could not be kept: {error}") from error
        except ProxyUnusable as error:
            raise SandboxDied(f"its requests to the network found no way out: {error}") from error
        return execution, requests.recorded_requests()

    async def _gateway(
        self, stack: AsyncExitStack, request: ToolCallRequested, placement: Placement
    ) -> GatewayRelay | None:
        """Open an agent's way to the gateway; None for other tools. Raises CredentialUnusable, EgressUnavailable,
        TlsFileUnusable."""
        if request.tool != AGENT.name:
            return None
        from turnlog.sandbox_workers.egress import GatewayRelay

        keys = CredentialKeys(self._settings.sandbox.credential_key, Path(self._settings.run.directory))
        token = keys.decrypt_token(placement.tool.arguments["credential"], request.call_id)
        return await stack.enter_async_context(GatewayRelay.open(self._settings.gateway, token))

    def _servers(
        self, unit: ToolCallPartitionTask, pending: Pending, placement: Placement, context: CallContext
    ) -> McpRelay | None:
        """Return the MCP servers of an agent; None for other tools, and agents without any."""
        servers = placement.tool.arguments.get("mcp") if pending.request.tool == AGENT.name else None
        if not servers:
            return None
        from turnlog.sandbox_workers.egress.mcp_relay import McpRelay

        async def write(event: ToolCallRequested | ToolCallCompleted) -> None:
            await (await self._submit_event(unit, event))

        limits = at_most(pending.request.sandbox.limits, self._scheduler.most)
        calls = RecordedCalls(pending.request, write, context, limits, worker=self._name)
        return McpRelay(servers, calls)

    async def _submit_answer(
        self,
        unit: ToolCallPartitionTask,
        pending: Pending,
        placement: Placement | Refusal,
        outcome: CallOutcome,
        queue_s: float,
    ) -> asyncio.Task[None]:
        """Submit the answer. Await the returned asyncio task for its acknowledgement."""
        attempt = self._attempts(unit, pending)
        event = make_completed_event(pending.request, outcome, attempt=attempt, queue_s=queue_s, worker=self._name)
        tool, backend = "", ""  # empty for a refusal: arbitrary names would make unlimited series
        if isinstance(placement, Placement):
            tool, backend = pending.request.tool, placement.pool.provider.name
        CALLS.labels(tool, outcome.execution.status, backend).inc()
        pending.sent = True
        return await self._submit_event(unit, event)

    async def _submit_event(
        self, unit: ToolCallPartitionTask, event: ToolCallRequested | ToolCallStarted | ToolCallCompleted
    ) -> asyncio.Task[None]:
        """Submit the record; this fixes its order.

        The partition's state is updated in the order of acknowledgements, so a gap between two records of ours belongs
        to another worker. It is updated at once, so no commit passes a record that it does not know."""
        acknowledgement = await self._events.submit(event)

        async def apply_acknowledgement() -> None:
            _, position = await acknowledgement
            if not isinstance(event, ToolCallRequested):
                apply_event(unit, event, position)

        return asyncio.create_task(apply_acknowledgement())

    def _attempts(self, unit: ToolCallPartitionTask, pending: Pending) -> int:
        return unit.attempts.get(pending.request.call_id, 0)

    def _age(self, pending: Pending) -> float:
        return max(0.0, self._clock() - pending.record.timestamp_ms / 1000)


def uncancel_current_task() -> None:
    """Go on after a cancellation that was meant for the call alone."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


def _about(pending: Pending) -> dict[str, str]:
    """Return the fields of a log line about the call. They are set per line, not per asyncio task, since sandboxes that
    a call makes outlive it."""
    return {"session_id": pending.request.session_id, "group_id": pending.request.group_id}
