"""Run recorded calls again and compare the outcomes with the record.

Calls run one after the other, each on its recorded files and with the recorded answers of the network."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs, Listing, MemoryBlobs
from turnlog.infra.environments.tools import AGENT
from turnlog.infra.environments.workspaces import WorkspaceManifest
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.terminal import aside
from turnlog.names import ExitStatus
from turnlog.sandbox_settings import LOCAL, Interception
from turnlog.sandbox_workers.calls import unkept
from turnlog.sandbox_workers.console.recorded import (
    BadPattern,
    RecordedCall,
    RecordedSession,
)
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.placements import EnvironmentDigests, Placement, Scheduler
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Lease
from turnlog.sandbox_workers.protocol import Execution, FileRefused, Kind, SandboxError
from turnlog.sandbox_workers.tools import Refusal, tools
from turnlog.sandbox_workers.workspaces import Workspaces
from turnlog.schemas.events import EgressRequest, ToolStatus
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

REPLAYED_TLS: dict[Interception, Interception] = {"intercept": "intercept", "tunnel": "intercept", "refuse": "refuse"}
"""TLS mode of a rerun. Requests in a tunnel were not recorded: they cannot be given again, and are refused as not
recorded."""
AROUND = 40
"""Bytes of an excerpt on either side of the first difference."""
NAMED = 10
"""Maximum number of files named of a workspace that differs."""
MASK = b"\0"
"""Replaces the matches of --ignore in both outputs; no legal text looks like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOptions:
    """Selection of calls, and of the differences that count."""

    call: int | None = None
    """The call_seq of the only call to run; None for all."""
    ignored: tuple[re.Pattern[bytes], ...] = ()
    keep_going: bool = True
    strict: bool = False


@dataclass(slots=True)
class RerunReport:
    """Outcome of one call's rerun."""

    call: RecordedCall
    verdict: str
    """same | differs | not_run | cannot"""
    differences: list[RerunDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the report as JSON."""
        request = self.call.request
        return {
            "call_seq": request.call_seq,
            "call_id": request.call_id,
            "tool": request.tool,
            "verdict": self.verdict,
            "differences": [difference.body() for difference in self.differences],
            "notes": self.notes,
        }


async def rerun(role: Role, session: RecordedSession, options: RerunOptions) -> list[RerunReport]:
    """Run the calls again and compare, in order. Raises NoSuchCall, BackendUnavailable, EgressUnavailable, LogError,
    StoreUnavailable."""
    chosen = session.calls if options.call is None else _only(session, options.call)
    reports: list[RerunReport] = []
    async with Rerunner.open(role, chosen) as rerunner:
        for number, call in enumerate(chosen, 1):
            report = await _one(rerunner, call, options)
            aside(f"{number}/{len(chosen)} call {call.request.call_seq} {call.request.tool}: {report.verdict}")
            if options.call is None or call.request.call_seq == options.call:
                reports.append(report)
            if report.verdict == "differs" and not options.keep_going:
                break
    return reports


def exit_status(reports: Sequence[RerunReport]) -> int:
    """Return 0 if all calls that ran are the same; 1 if one differs; 2 if one could not be run, or none was."""
    verdicts = {report.verdict for report in reports}
    if "differs" in verdicts:
        return ExitStatus.DIFFERS
    return ExitStatus.DONE if "same" in verdicts and "cannot" not in verdicts else ExitStatus.FAILED


def patterns(texts: Sequence[str]) -> tuple[re.Pattern[bytes], ...]:
    """Compile the patterns of --ignore. Raises BadPattern."""
    try:
        return tuple(re.compile(text.encode()) for text in texts)
    except re.error as error:
        raise BadPattern(f"--ignore {error.pattern!r}: {error}") from None


async def _one(rerunner: Rerunner, call: RecordedCall, options: RerunOptions) -> RerunReport:
    if not call.ran:
        return RerunReport(call, "not_run", notes=[call.why_not])
    again = await rerunner.run(call)
    if again.result is None:
        return RerunReport(call, "cannot", notes=list(again.notes))
    try:
        then = await rerunner.then(call)
    except (BlobMissing, BlobCorrupt) as error:
        return RerunReport(call, "cannot", notes=[f"the recorded result is incomplete: {error}"])
    found = differences(then, again.result, options.ignored)
    counted = [one for one in found if options.strict or one.what != "environment"]
    return RerunReport(call, "differs" if counted else "same", found, list(again.notes))


def _only(session: RecordedSession, call_seq: int) -> tuple[RecordedCall, ...]:
    """Return one call, preceded by the earlier ones if it uses the interpreter that they have built up. Raises
    NoSuchCall."""
    before = session.upto(call_seq)
    return before if uses_interpreter(before[-1]) else before[-1:]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A call that ran again, or the reason why it could not."""

    result: Result | None
    notes: tuple[str, ...] = ()


class Rerunner:
    """Runs the calls of one session, in order. `open` creates one."""

    def __init__(
        self, settings: Settings, blobs: Blobs, pools: SandboxPools, egress: Egress | None, *, interpreted: int
    ) -> None:
        """Create it. `interpreted` is the last call_seq that uses a persistent interpreter; -1 if none does."""
        self._interpreted = interpreted
        self._blobs = blobs
        self._workspaces = Workspaces(blobs)
        self._scheduler = Scheduler(settings.sandbox, pools, egress=egress is not None)
        self._environments = EnvironmentDigests(settings.egress)
        self._egress = egress

    @classmethod
    @asynccontextmanager
    async def open(cls, role: Role, calls: Sequence[RecordedCall]) -> AsyncIterator[Rerunner]:
        """Open it with a pool of one sandbox for each backend that the calls ask for. Raises BackendUnavailable,
        EgressUnavailable."""
        specs = [call.request.sandbox for call in calls]
        settings, blobs = role.settings, ScratchBlobs(role.blobs)
        own = dataclasses.replace(
            settings.sandbox,
            slots=1,
            prewarm=1,
            # the pools reject unknown names
            backends=tuple(sorted({spec.backend for spec in specs} - {*LOCAL})),
            first_uid=settings.sandbox.first_uid + settings.sandbox.slots,  # those below are a worker's on this machine
        )
        async with AsyncExitStack() as stack:
            egress = None
            if any(spec.network == "allowlist" for spec in specs):
                replay = dataclasses.replace(settings.egress, mode="replay", tls=REPLAYED_TLS[settings.egress.tls])
                egress = await stack.enter_async_context(Egress.open_temporary(replay, blobs))
            ca = egress.ca if egress is not None else None
            pools = await stack.enter_async_context(SandboxPools.open(own, ca=ca))
            sequence = [call.request.call_seq for call in calls if uses_interpreter(call)]
            yield cls(settings, blobs, pools, egress, interpreted=max(sequence, default=-1))

    async def run(self, call: RecordedCall) -> Again:
        """Run the call again. If its files are durable, the sandbox is retained for the session. Raises LogError,
        StoreUnavailable."""
        request = call.request
        if request.tool == AGENT.name:
            return Again(result=None, notes=("is an agent, whose turns the policy sampled: it cannot be run again",))
        placement = self._scheduler.placement(request)
        if isinstance(placement, Refusal):
            return Again(result=None, notes=(f"cannot run here: {placement.text}",))
        durable = request.sandbox.durable_workspace
        try:
            sha256 = await self._environments.sha256(placement.pool.provider, placement.shape, request.sandbox)
            async with placement.pool.lease(
                placement.shape, session=request.session_id if durable else None, fresh=request.sandbox.fresh
            ) as lease:
                notes = await self._place_files(lease, call, placement)
                execution, requests = await self._ran(lease, call, placement)
                execution, tree = (
                    await self._store_files(lease, call, placement, execution) if durable else (execution, None)
                )
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
        """Return the recorded result. Raises BlobError if its whole output is gone."""
        done, begun = call.completed, call.answered_start
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

    async def _place_files(self, lease: Lease, call: RecordedCall, placement: Placement) -> tuple[str, ...]:
        """Put the call's files into the sandbox. Return notes about deviations. Raises SandboxError."""
        wanted, there = call.request.workspace, await self._tree(lease.workspace) if lease.held else None
        asked = await self._tree(wanted)
        if wanted is None and call.request.call_seq and call.request.sandbox.durable_workspace and not lease.held:
            return ("ran on an empty workspace: its original workspace was not recorded",)
        if wanted is None or (there is not None and asked is not None and there.tree_sha256 == asked.tree_sha256):
            return ()
        if lease.sandbox.interpreter and call.request.call_seq <= self._interpreted:
            return ("ran on other files than originally: restoring them would end the interpreter that it needs",)
        if asked is None:
            return (f"ran on other files than originally: workspace {wanted.sha256} is not in the store",)
        await self._workspaces.restore(lease.sandbox, wanted, disk_bytes=placement.limits.disk_bytes)
        if placement.interpreter and asked.interpreter:
            return ("ran in a new interpreter: the state that earlier calls left in the old one is in no snapshot",)
        return ("its files were restored from the recorded workspace",) if lease.held else ()

    async def _ran(
        self, lease: Lease, call: RecordedCall, placement: Placement
    ) -> tuple[Execution, tuple[EgressRequest, ...]]:
        spec, sandbox = call.request.sandbox, lease.sandbox
        if self._egress is None or sandbox.proxy is None:
            return await placement.tool.run(sandbox, placement.limits, spec.env), ()
        assert call.completed is not None
        env = {**spec.env, **self._egress.environment_of(sandbox.proxy, placement.pool.provider)}
        async with self._egress.serving(
            sandbox.proxy, allow=spec.allow, call_seq=call.request.call_seq, answers=call.completed.requests
        ) as asked:
            execution = await placement.tool.run(sandbox, placement.limits, env)
        return execution, asked.recorded_requests()

    async def _store_files(
        self, lease: Lease, call: RecordedCall, placement: Placement, execution: Execution
    ) -> tuple[Execution, WorkspaceManifest | None]:
        """Return the tree that the call left, with which the session goes on. Raises SandboxError."""
        try:
            ref = await self._workspaces.snapshot(
                lease.sandbox, call.request.workspace, most=placement.limits.disk_bytes
            )
        except FileRefused as error:
            return unkept(execution, error), None
        lease.keep(ref)
        return execution, await self._tree(ref)

    async def _tree(self, ref: BlobRef | None) -> WorkspaceManifest | None:
        """Open a workspace. Return None if `ref` is None or its workspace is gone."""
        if ref is None:
            return None
        try:
            return await self._workspaces.open(ref)
        except SandboxError:  # WorkspaceLost or WorkspaceCorrupt: no comparison is possible
            return None


def uses_interpreter(call: RecordedCall) -> bool:
    """Return whether the call uses what earlier calls have built up in the sandbox's persistent interpreter."""
    tool = tools().get(call.request.tool)
    return tool is not None and Kind.session in tool.kinds


class ScratchBlobs(MemoryBlobs):
    """Reads from the real store and writes to memory, so that a rerun leaves nothing behind."""

    def __init__(self, below: Blobs) -> None:
        super().__init__()
        self._below = below

    async def get(self, ref: BlobRef) -> bytes:
        try:
            return await super().get(ref)
        except BlobMissing:
            return await self._below.get(ref)

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        try:
            await super().get_file(ref, path)
        except BlobMissing:
            await self._below.get_file(ref, path)

    async def get_named(self, name: str) -> bytes:
        try:
            return await super().get_named(name)
        except BlobMissing:
            return await self._below.get_named(name)

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        try:
            await super().get_named_file(name, ref, path)
        except BlobMissing:
            await self._below.get_named_file(name, ref, path)

    async def names(self, prefix: str) -> list[str]:
        return sorted({*await super().names(prefix), *await self._below.names(prefix)})

    async def list_objects(self, prefix: str) -> Listing:
        return await self._below.list_objects(prefix)

    async def copy(self, name: str, to: str) -> None:
        await self.put_named(to, await self.get_named(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a call, recorded or now."""

    status: ToolStatus
    reason: str
    exit_code: int | None
    output: bytes
    tree: WorkspaceManifest | None
    """Durable workspace after the call; None if there is none, or if it is unknown."""
    requests: tuple[EgressRequest, ...]
    environment_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunDifference:
    """A difference between record and rerun."""

    what: str
    """status | exit_code | output | workspace | requests | environment"""
    recorded: str
    now: str
    at: int | None = None
    """Number of equal bytes before the difference, after masking; for outputs only."""

    def body(self) -> dict[str, Any]:
        """Return the difference as JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def differences(then: Result, now: Result, ignored: Sequence[re.Pattern[bytes]] = ()) -> list[RerunDifference]:
    """Return all differences, the most telling first. Raw bytes are compared, except for what `ignored` matches."""
    found = []
    if (then.status, then.reason) != (now.status, now.reason):
        found.append(RerunDifference(what="status", recorded=_status(then), now=_status(now)))
    if then.exit_code != now.exit_code:
        found.append(RerunDifference(what="exit_code", recorded=str(then.exit_code), now=str(now.exit_code)))
    found += _of_outputs(mask_output(then.output, ignored), mask_output(now.output, ignored))
    if then.tree is not None and now.tree is not None and then.tree.tree_sha256 != now.tree.tree_sha256:
        found.append(_of_trees(then.tree, now.tree))
    found += _of_requests(then.requests, now.requests)
    if then.environment_sha256 and now.environment_sha256 and then.environment_sha256 != now.environment_sha256:
        found.append(RerunDifference(what="environment", recorded=then.environment_sha256, now=now.environment_sha256))
    return found


def mask_output(output: bytes, ignored: Iterable[re.Pattern[bytes]]) -> bytes:
    """Replace what may differ."""
    for pattern in ignored:
        output = pattern.sub(lambda _: MASK, output)
    return output


def _status(result: Result) -> str:
    return result.status.value + (f" ({result.reason})" if result.reason else "")


def _of_outputs(then: bytes, now: bytes) -> list[RerunDifference]:
    if then == now:
        return []
    at = next((place for place, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    return [RerunDifference(what="output", recorded=_excerpt(then, at), now=_excerpt(now, at), at=at)]


def _excerpt(output: bytes, at: int) -> str:
    """Return the text around the first difference, with "..." where it is cut."""
    first, last = max(0, at - AROUND), at + AROUND
    text = output[first:last].decode(errors="backslashreplace")
    return ("..." if first else "") + text + ("..." if last < len(output) else "")


def _of_trees(then: WorkspaceManifest, now: WorkspaceManifest) -> RerunDifference:
    before, after = _entries(then), _entries(now)
    missing = [path for path in before if path not in after]
    more = [path for path in after if path not in before]
    changed = [path for path in before if path in after and before[path] != after[path]]
    both = _list_paths("different content or mode", changed)
    return RerunDifference(
        what="workspace",
        recorded="; ".join(filter(None, (_list_paths("only then", missing), both))) or "no file more",
        now="; ".join(filter(None, (_list_paths("only now", more), both))) or "no file more",
    )


def _entries(tree: WorkspaceManifest) -> Mapping[str, object]:
    return {
        stored.entry.path: (stored.entry.kind, stored.entry.mode, stored.entry.target, stored.sha256)
        for stored in tree.files
    }


def _list_paths(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    shown = ", ".join(path.encode(errors="surrogateescape").decode(errors="backslashreplace") for path in paths[:NAMED])
    return f"{what}: {shown}{more}"


def _of_requests(then: Iterable[EgressRequest], now: Iterable[EgressRequest]) -> list[RerunDifference]:
    """Compare requests and their outcomes, but not their order, duration or source."""
    before, after = Counter(map(_describe_request, then)), Counter(map(_describe_request, now))
    if before == after:
        return []
    missing, more = list((before - after).elements()), list((after - before).elements())
    return [
        RerunDifference(what="requests", recorded=_list_paths("only then", missing), now=_list_paths("only now", more))
    ]


def _describe_request(one: EgressRequest) -> str:
    return f"{one.method} {one.url} -> {one.status} {one.response.sha256[:16] if one.response else one.reason}"
