"""Erasure of one session: its key, and every object that holds its content and nobody else's.

The content of records is encrypted under a key of the session, so that dropping the key erases it from topics, archive
and batch files at once. What is stored elsewhere is deleted or built anew: blobs that no other session refers to
(erasure_objects.py), the index and datasets.

The order makes it safe to stop anywhere and to begin again. SessionErased is written first: it decides, in the order of
agent.sessions, whether the session is excluded, and it records what the fold can no longer derive. Then the assembler
must have written everything that it derives from the content. Only then is the key dropped, and then the objects.

NotErasable (ErasureError)   the session cannot be erased, or not yet; the message says why and what to do
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnlog.consumers.erasure_objects import SessionObjects, delete_objects, find_objects
from turnlog.consumers.replay.source import Inputs, LoneGroup, NothingToReplay, Skips, recorded_run
from turnlog.infra.access.audit import audit_command
from turnlog.infra.archive import NoArchive
from turnlog.infra.history import archive_role, events, partitions, recorded_erasures, records
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.role import Role, RunPhase
from turnlog.infra.roles.runs import Life, is_encrypted, life, nothing_recorded
from turnlog.infra.session_keys import SessionKeys
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.erasure import recorded_lineages, recorded_turns
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import INPUTS, SPINE
from turnlog.schemas import topics
from turnlog.schemas.events import (
    Event,
    SampleBatchFormed,
    SessionErased,
    SessionStarted,
    ToolCallCompleted,
    ToolCallRequested,
)
from turnlog.schemas.ids import digest

PATIENCE_S = 30.0
"""Seconds to wait for the assembler, after the erasure was recorded."""
POLL_S = 0.2
PRUNED = (topics.SESSIONS, topics.TURNS, topics.SNAPSHOTS, topics.TREES, topics.SAMPLES)
"""Topics from which records of the session may have been deleted, so that only the archive has them."""


class ErasureError(Exception):
    """Base of the errors above."""


class NotErasable(ErasureError):
    """Remedy: see the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """Facts about a session, and everything that is left to erase."""

    session_id: str
    group_id: str
    recorded: tuple[SessionErased, ...]
    """The records of its erasure."""
    structure: SessionErased
    """The record to write."""
    keys: tuple[str, ...]
    """Ids of its keys that are not erased yet."""
    waits_for: tuple[str, ...]
    """Records that the assembler still has to derive from its content."""
    batches: tuple[int, ...]
    """Indexes of the batches that hold samples of the session."""
    objects: SessionObjects

    @property
    def is_recorded(self) -> bool:
        """Whether SessionErased is on the log, with the structure of the session's tree if it has one."""
        return any(event.has_structure >= self.structure.has_structure for event in self.recorded)

    @property
    def names_batches(self) -> bool:
        """Whether the records of its erasure name all of its batches."""
        return {index for event in self.recorded for index in event.batches} >= set(self.batches)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to erase on the log and in the store."""
        return self.is_recorded and not (self.keys or self.objects.deletable or self.objects.waiting)


async def plan_erasure(role: Role, session_id: str, *, objects: bool = True) -> Erasure:
    """Find out what is to be erased, without changing anything. Without `objects`, the log and all archives are not
    searched for references to objects. Raises NotErasable, ReplayError, LogError, BlobError, ArchiveError,
    RegistryUnavailable."""
    run, keys = await _encrypted_run(role)
    assert run.configured is not None
    await keys.refresh()
    sources = await _sources(role)
    found = await _find(sources, session_id)
    started = next((event for event in found if isinstance(event, SessionStarted)), None)
    if started is None:
        raise NotErasable(
            f"no record says that session {session_id!r} started in run {role.settings.run.id!r}: check the id "
            "(`turnlog log query 'SELECT session_id FROM sessions'`) and the run"
        )
    recorded = tuple(event for event in found if isinstance(event, SessionErased))
    group = await _fold_group(sources, started.group_id)
    assert group.fold is not None, "the group has a SessionStarted"
    is_closed = run.phase is RunPhase.CLOSED
    if not recorded and not is_closed:
        _check_over(started, group.fold)
        await _check_calls(role, started, keys.sessions_of(session_id))
    batches = await _batches(role, session_id)
    return Erasure(
        session_id=session_id,
        group_id=started.group_id,
        recorded=recorded,
        structure=_structure(started, group.fold, batches),
        keys=tuple(keys.keys_of(session_id)),
        waits_for=() if is_closed else await _missing(sources, started, group.outputs),
        batches=batches,
        objects=await find_objects(role, run.configured.blob_folder, started, keys.sessions_of(session_id))
        if objects
        else SessionObjects(),
    )


async def erase(role: Role, plan: Erasure, *, by: str, patience_s: float = PATIENCE_S) -> Erasure:
    """Erase the session and return what is left, which is nothing but objects that wait. May be repeated after an
    interruption anywhere. Raises NotErasable, AuditUnavailable, and what `plan_erasure` raises."""
    await audit_command(role, "act", "session", (plan.session_id,), "erase")
    seen: dict[Partition, int] | None = None
    deadline = math.inf
    while not plan.is_recorded or (plan.keys and plan.waits_for):
        if not plan.is_recorded:
            await role.events.append(dataclasses.replace(plan.structure, by=by))
        elif seen is not None:
            deadline = min(deadline, asyncio.get_running_loop().time() + patience_s)
            if not await _have_moved(role, seen, deadline):
                raise NotErasable(_behind(plan))
        seen = await role.log.end_offsets(_output_places(role, plan.group_id))
        plan = await plan_erasure(role, plan.session_id, objects=False)
    assert role.events.keys is not None, "it could be planned"
    await role.events.keys.erase(plan.session_id, by)
    plan = await plan_erasure(role, plan.session_id)
    if not plan.names_batches:  # one was formed meanwhile
        await role.events.append(dataclasses.replace(plan.structure, by=by))
    left = await delete_objects(role.blobs, plan.objects.deletable)
    objects = dataclasses.replace(plan.objects, deletable=(), waiting=(*left, *plan.objects.waiting))
    return dataclasses.replace(await plan_erasure(role, plan.session_id, objects=False), objects=objects)


def _behind(plan: Erasure) -> str:
    return (
        f"session {plan.session_id} cannot be erased yet: the assembler has not written {plan.waits_for[0]}, which it "
        "derives from the content; start it (`turnlog up`, or `turnlog role assembler`) and repeat the command"
    )


async def _have_moved(role: Role, ends: Mapping[Partition, int], deadline: float) -> bool:
    """Wait until a partition has another end offset than in `ends`. Return False if none has at the deadline. A plan
    reads whole topics, so it is not made anew before there is something new to read."""
    while asyncio.get_running_loop().time() < deadline:
        if await role.log.end_offsets(list(ends)) != ends:
            return True
        await asyncio.sleep(POLL_S)  # poll: another process's records cannot be awaited
    return False


async def rewrap(role: Role) -> int:
    """Wrap the keys of all sessions under the first of [erasure] master_keys, and return how many were not. Raises
    NotErasable, WrongMasterKey, LogUnavailable."""
    return await (await _encrypted_run(role))[1].rewrap()


async def _encrypted_run(role: Role) -> tuple[Life, SessionKeys]:
    """Return what topic `runs` says of the run, and the keys of its sessions. Raises NotErasable if the run does not
    encrypt content, or if this process does not have its master keys; NothingToReplay."""
    run, run_id = await life(role), role.settings.run.id
    if run.configured is None or run.configured.run_id != run_id:
        raise NothingToReplay(await nothing_recorded(role))
    if not is_encrypted(run.configured):
        raise NotErasable(
            f"run {run_id!r} does not encrypt the content of its sessions, so none can be erased: [erasure] "
            "master_keys must be set when a run is configured (`turnlog run delete` deletes a whole run)"
        )
    if role.events.keys is None:
        raise NotErasable(
            f"[erasure] master_keys is empty: name the file with the master keys of run {run_id!r} by "
            "TURNLOG_ERASURE_MASTER_KEYS_FILE"
        )
    return run, role.events.keys


async def _sources(role: Role) -> list[Role]:
    """Return the readers that together have every record of the run: the topics, and before them the archive, if
    records were deleted from topics. Records that both have are read twice."""
    starts = await role.log.start_offsets([place for topic in PRUNED for place in partitions(role, topic)])
    if not any(starts.values()):
        return [role]
    try:
        return [await archive_role(role), role]
    except NoArchive:
        return [role]


async def _find(sources: Sequence[Role], session_id: str) -> list[Event]:
    """Return the SessionStarted and SessionErased of the session."""
    names = (SessionStarted.__name__, SessionErased.__name__)
    found: dict[str, Event] = {}
    for source in sources:
        async for _, event in events(source, topics.SESSIONS, names=names):
            if event.session_id == session_id:
                found.setdefault(event.event_id, event)
    return list(found.values())


async def _fold_group(sources: Sequence[Role], group_id: str) -> LoneGroup:
    """Fold a group alone. Raises BrokenFold."""
    *archived, role = sources
    rules = (await recorded_run(role)).rules()
    unit = _unit(role, group_id)
    archive = archived[0].events if archived else None
    erasures = await recorded_erasures(role.log, role.events, Partition(SPINE, unit), rules.run_id, archive=archive)
    skips: Skips = frozenset()
    for source in sources:
        skips |= await Inputs(source, rules, unit).read_skips()
    group = LoneGroup(group_id)
    for source in sources:
        ends = await source.log.end_offsets([Partition(topic, unit) for topic in INPUTS])
        await Inputs(source, rules, unit, skips, erasures=erasures).fold_group(group, ends)
    return group


def _unit(role: Role, group_id: str) -> int:
    return partition_of(group_id.encode(), role.settings.kafka.groups)


def _check_over(started: SessionStarted, group: GroupFold) -> None:
    """Raise NotErasable unless nothing more can come of the session: it has settled, or its group has. A session that
    never finished, since its gateway died, ends with its group. One that has finished awaits its reward, and its judge
    could not write it any more."""
    session = group.session(started.session_id)
    if not group.settled and (session is None or not session.settled):
        why = "has not finished" if session is None or session.finish is None else "has finished, and awaits its reward"
        raise NotErasable(
            f"session {started.session_id} {why}, and its group has not settled: repeat the command once it has, at "
            "the latest after [assembler] group_deadline_s; `turnlog run close` ends a whole run"
        )
    if session is not None and session.settled and group.tree(started.session_id) is None and not group.complete:
        raise NotErasable(
            f"session {started.session_id} has finished, and the log lacks records of its turns: repeat the command "
            "once its group is scored, at the latest after [assembler] group_deadline_s"
        )


async def _check_calls(role: Role, started: SessionStarted, sessions: Sequence[str]) -> None:
    """Raise NotErasable if a tool call of the sessions has no result yet: its worker could not write it any more. Calls
    below the workers' commit have one, and a call that a program made ends with the call that runs the program."""
    number = partition_of(started.rollout_id.encode(), role.settings.kafka.count(topics.TOOL_CALLS.partitions))
    calls, results = Partition(topics.TOOL_CALLS.name, number), Partition(topics.TOOL_RESULTS.name, number)
    commits = await role.log.commits(ConsumerGroup.SANDBOX.format(run=started.run_id), [calls])
    since = {place: commit.offset for place, commit in commits.items()}
    running: set[str] = set()
    async for record in records(role, [calls], await role.log.end_offsets([calls]), since=since):
        call = await role.events.decode_known(record) if record.key == started.rollout_id.encode() else None
        if isinstance(call, ToolCallRequested) and call.session_id in sessions and not call.caller:
            running.add(call.call_id)
    if not running:
        return
    async for record in records(role, [results], await role.log.end_offsets([results])):
        result = await role.events.decode_known(record) if record.key == started.rollout_id.encode() else None
        if isinstance(result, ToolCallCompleted):
            running.discard(result.call_id)
    if running:
        raise NotErasable(
            f"session {started.session_id} still runs: tool call {min(running)} has no result yet; repeat the command "
            "once it has, or end the run by `turnlog run close`"
        )


def _structure(started: SessionStarted, group: GroupFold, batches: Sequence[int]) -> SessionErased:
    """Return the record of the erasure, without who does it."""
    session, tree = group.session(started.session_id), group.tree(started.session_id)
    if session is not None and session.erased_unsettled:
        tree = None  # nothing of it was derived from its content
    has_turns = tree is not None and bool(tree.turns)
    turns = recorded_turns([t.id for t in tree.turns], tree.lineages, tree.segments) if tree and has_turns else ()
    refused = tree is not None and tree.refused
    refused_turns = tree.records.refused_turns() if tree is not None else ()
    has_structure = has_turns or refused or bool(refused_turns)
    return SessionErased(
        event_id=digest("SessionErased", started.session_id, int(has_structure), *batches),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=started.session_id,
        floor=started.floor,
        by="",
        turns=turns,
        lineages=recorded_lineages(tree.lineages) if tree and has_turns else (),
        duplicated_prefix_tokens=tree.segments.duplicated if tree and has_turns else 0,
        batches=tuple(batches),
        flags=tree.flags if tree and has_turns else (),
        refused=refused,
        refused_turns=refused_turns,
    )


async def _missing(sources: Sequence[Role], started: SessionStarted, outputs: Sequence[Event]) -> tuple[str, ...]:
    """Describe what the group's fold derives from the session's content and the log does not have."""
    group_id, session_id = started.group_id, started.session_id
    wanted = {
        event.event_id: f"the {type(event).__name__} of {getattr(event, 'session_id', '') or 'group ' + group_id}"
        for event in outputs
        if getattr(event, "session_id", session_id) == session_id
    }
    places = _output_places(sources[-1], group_id)
    for source in sources:
        async for record in records(source, places, await source.log.end_offsets(places)):
            if record.key == group_id.encode():
                event = await source.events.decode_known(record)
                wanted.pop(getattr(event, "event_id", ""), None)
    return tuple(wanted.values())


def _output_places(role: Role, group_id: str) -> list[Partition]:
    """Return the partitions to which the assembler writes what it derives from the group."""
    unit = _unit(role, group_id)
    places = [Partition(topic.name, unit) for topic in (topics.TREES, topics.SAMPLES, topics.GROUP_SCORES)]
    return [place for place in places if place in partitions(role, topics.BY_NAME[place.topic])]


async def _batches(role: Role, session_id: str) -> tuple[int, ...]:
    """Return the indexes of the batches that hold samples of the session."""
    formed = events(role, topics.BATCHES, names=(SampleBatchFormed.__name__,))
    return tuple(sorted({
        event.batch_index async for _, event in formed if any(row.session_id == session_id for row in event.samples)
    }))  # fmt: skip
