"""Generate docs/events.md from the catalogue and the event classes: topics and records for people."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args

from turnlog.schemas.avsc import avro_schema, field_types
from turnlog.schemas.events import ALL, MaskReason
from turnlog.schemas.topics import CATALOGUE

HEAD = """\
# Events and topics

Avro records, namespace `turnlog.v1`, in the Confluent wire format: byte 0, 4-byte big-endian schema id, Avro body. The
registry's subject is the record's short name (`TurnCompleted`). Arrays of numbers are `bytes`, packed little-endian;
`logicalType` names the packing. Nothing expires, and only `session-keys` is compacted. Runs with `[erasure]` encrypt
what sessions say and see ([erasure.md](erasure.md)). This page is generated (`make docs`);
[attach.md](attach.md) says how to read without turnlog.

| topic | key | partitions | records |
|---|---|---|---|
"""
RULES = """
## Rules for every record

**Headers.** `record`: the record's short name, so that a reader can skip what it does not need. `writer`: the
instance of the role that wrote it. `output_tokens`, only on TokenSnapshot: the number of ids in `output_ids`, in
decimal digits. The time of writing is Kafka's timestamp; it is not in the body.

**Ids** are 32 hex digits, the first half of sha256 over canonical JSON: an array of strings and integers, in UTF-8,
without spaces, nothing escaped that JSON does not demand. The rollout_id of a group's first rollout is the beginning
of sha256('["rollout","GROUP_ID",0]'). `record` stands for the record's name.

| id | the array |
|---|---|
{ids}
A record that is written again has the same `event_id`: keep results under it. Records of engine-status, and
EngineWeightsAwaited, have a new one each time.

**Weight versions.** With `[trainer] publish = "direct"` a version has two records, or only the first: `state` announced
has `digests` and no files; durable has files and `checksums`. The later record of a version replaces the earlier one.
`weight-transfers` says which engines take part in a transfer; engine-status says which of them have the version.

**Counters** begin at 0: `rollout_index`, `attempt` of a session, `turn.index`, `call_seq`, `segment_index`, `draw`,
`dataset_epoch`, `index`, `batch_index`, `draw_index`, `part`, `incarnation`, `version`. Those that count what has been
done begin at 1: `step`, and `attempt` of a tool call.

**Tool calls and turns.** `TurnCompleted.response.tool_calls[].id` is the `call_id` of ToolCallRequested, -Started and
-Completed. The `new_messages` of the turn that goes on hold the answer under that `tool_call_id`.

**Fields that many records have**, unless a record documents them itself:

| field | |
|---|---|
{shared}
**Masked tokens** are counted by reason: {reasons}.
"""
IDS = {
    "`task_id`": '"task", dataset, index',
    "`group_id`": '"group", run_id, task_id, draw',
    "`rollout_id`": '"rollout", group_id, rollout_index',
    "`session_id`": '"session", rollout_id, attempt',
    "`call_id`": '"call", session_id, turn.epoch, turn.index, place in tool_calls from 0, "agent"',
    "`call_id` of a requeued call": '"requeued", event_id of the DeadLetter, times it was requeued before',
    "`sample_id`": '"sample", session_id, segment_index',
    "`event_id` of TurnCompleted, TokenSnapshot": "record, session_id, turn.epoch, turn.index",
    "`event_id` of SessionStarted, TurnTreeAssembled": "record, session_id",
    "`event_id` of SessionAdopted": "record, session_id, epoch before it, name of the gateway's process: its instance, "
    "`-` and eight random hex digits that no record holds, so that each take-over is another; take it as it stands",
    "`event_id` of SessionFinished": "record, session_id, epoch",
    "`event_id` of a SessionFinished by the reaper": 'record, session_id, epoch, "expired"',
    "`event_id` of RewardAssigned, RewardFailed": "record, session_id, verifier.name, verifier.version",
    "`event_id` of GroupClosed": "record, group_id, reason, seen",
    "`event_id` of RolloutRequested": "record, rollout_id",
    "`event_id` of GroupRequested, GroupScored, GroupEmitted": "record, group_id",
    "`event_id` of SegmentSample": "record, sample_id",
    "`event_id` of ToolCallRequested, ToolCallCancelled": "record, call_id",
    "`event_id` of ToolCallStarted": '"tool-call-started", call_id, attempt',
    "`event_id` of ToolCallCompleted": '"tool-call-completed", call_id, attempt',
    "`event_id` of SampleBatchFormed, BatchSkipped": "record, run_id, batch_index",
    "`event_id` of StepCompleted": "record, run_id, batch_index, incarnation",
    "`event_id` of TenantCommandReceived, TenantCommandCompleted": "record, request_id",
    "`event_id` of TenantStateSaved": "record, run_id, executed, folder",
    "`event_id` of WeightVersionPublished": "record, run_id, version",
    "`event_id` of a version's second WeightVersionPublished": 'record, run_id, version, "durable"',
    "`event_id` of WeightTransferBegun": "record, run_id, version, attempt",
    "`event_id` of RunConfigured": "record, run_id",
    "`event_id` of SkipRequested": "record, topic, partition, offset",
    "`event_id` of DeadLetter": '"dead-letter", topic, partition, offset',
}
"""Id -> the array that it is the digest of (schemas.ids)."""
SHARED = {
    "event_id": "Id of this record.",
    "run_id": "Id of the run.",
    "task_id": "Id of the task, which is a row of the dataset.",
    "group_id": "Id of the group: the rollouts of one task that were drawn together.",
    "rollout_id": "Id of the rollout: one attempt of the policy at a task.",
    "session_id": "Id of the session: one execution of a rollout. A retry is a new session.",
    "call_id": "Id of the tool call.",
    "sample_id": "Id of the training row.",
    "floor": "End offset of the group's agent.sessions partition, read before the rollout was admitted.",
    "kind": "Kind of the engine: sglang or vllm.",
    "settings_sha256": "Hash of the recorded settings, as in RunConfigured.",
    "fold_version": "Version of the fold rules, as in RunConfigured.",
    "worker": "Name of the sandbox worker.",
    "engine_id": "Id of the engine. No two engines have the same id at the same time.",
    "url": "URL of the engine.",
    "state": "starting, serving, released, draining, silent or gone.",
    "version": "Weight version served; -1 before the first.",
}
"""Meaning of a field in every record that does not document it itself."""


def catalogue_page() -> str:
    """Render the whole page."""
    rows = [
        f"| `{topic.name}` | {topic.key} | {topic.partitions} | {', '.join(topic.records)} |\n" for topic in CATALOGUE
    ]
    rules = RULES.format(
        ids="".join(f"| {name} | {array} |\n" for name, array in IDS.items()),
        shared="".join(f"| `{name}` | {note} |\n" for name, note in SHARED.items()),
        reasons=", ".join(reason for reason in MaskReason if reason is not MaskReason.unknown),
    )
    records = "".join(_record(name, cls, "##") for name, cls in ALL.items())
    nested = "".join(_record(cls.__name__, cls, "###") for cls in nested_records())
    return HEAD + "".join(rows) + rules + records + "\n## Records inside records\n" + nested


def nested_records() -> list[type]:
    """Return every dataclass that is a field of another record, in the order in which they are found."""
    found: dict[type, None] = {}
    waiting = list(ALL.values())
    while waiting:
        for kind in field_types(waiting.pop(0)).values():
            inside = [arm for arm in _arms(kind) if is_dataclass(arm) and arm not in found]
            found |= dict.fromkeys(inside)
            waiting += inside
    return list(found)


def _arms(kind: Any) -> Iterator[type]:
    """Yield the classes that an annotation is made of."""
    if arguments := get_args(kind):
        for one in arguments:
            yield from _arms(one)
    elif isinstance(kind, type):
        yield kind


def _record(name: str, cls: type, level: str) -> str:
    notes = _notes(cls)
    fields = [
        f"| `{field['name']}` | {_type(field['type'])} | {notes.get(field['name'], SHARED.get(field['name'], ''))} |\n"
        for field in avro_schema(cls)["fields"]
    ]
    return f"\n{level} {name}\n\n{inspect.getdoc(cls)}\n\n| field | type | |\n|---|---|---|\n" + "".join(fields)


def _notes(cls: type) -> dict[str, str]:
    """Return field -> the string literal that follows it in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            notes[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split()).replace("|", "\\|")
    return notes


def _type(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if isinstance(kind, list):
        return " or ".join(_type(arm) for arm in kind)
    if kind["type"] == "array":
        return f"list of {_type(kind['items'])}"
    if kind["type"] == "map":
        return f"map of {_type(kind['values'])}"
    if "logicalType" in kind:
        return f"{kind['type']} ({kind['logicalType']})"
    if kind["type"] == "enum":
        return " / ".join(kind["symbols"])
    if "fields" in kind:
        return f"{kind['name']}{{{', '.join(field['name'] for field in kind['fields'])}}}"
    return str(kind["type"])


if __name__ == "__main__":
    print(catalogue_page(), end="")
