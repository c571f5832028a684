"""One generation by the policy: what people read (TurnCompleted) and what training reads (TokenSnapshot)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.types import BlobRef, Float32Payload, Int32Payload, JsonPayload, TurnId


class FinishReason(StrEnum):
    """Why the engine stopped."""

    error = "error"
    stop = "stop"
    tool_calls = "tool_calls"
    length = "length"
    abort = "abort"


CUT_OFF = frozenset({FinishReason.abort, FinishReason.error})
"""Of turns that are not all of what the policy would have said."""


class Boundary(StrEnum):
    """Kinship of a turn's prompt to its base: extends it exactly, diverges from it, or has none."""

    root = "root"
    append = "append"
    branch = "branch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCompleted:
    """Messages, usage and timing of one turn."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    turn: TurnId
    """Which turn this is."""
    request_sha256: str
    """Hex sha256 of the request's body."""
    api: str
    """chat | responses | messages"""
    agent_path: str | None = None
    """Who asked, where the harness says so: empty or "main", a side call ("side" and more), or else a sub-agent."""
    base_turn: TurnId | None = None
    """The turn whose messages and response this request continues; null for a root."""
    base_echo: JsonPayload | None = None
    """The members of the base's response (name, content, tool_calls) that the client sent back changed, as it sent
    them; null where it changed nothing. What was said stays what it was."""
    system_sha256: str
    """Of the leading system messages, canonical; equal for equal ones."""
    tools_sha256: str
    """Of the tool schemas as JSON with sorted keys."""
    new_messages: JsonPayload
    """The request's messages beyond those of the base."""
    tools: JsonPayload | None = None
    """The tool schemas, when they differ from the base's."""
    response: JsonPayload
    """The assistant message as sent. Each of its tool_calls has as `id` the call_id of its ToolCallRequested."""
    finish_reason: FinishReason
    """Why the engine stopped."""
    stopped_by: str | None = None
    """The client's stop sequence before which its text ends; the tokens go on to where the engine stopped."""
    ill_formed_calls: int = 0
    """Blocks of the output that look like tool calls and are none: they stay text."""
    aborted: bool
    """The client was seen gone, or the engine failed, before the end."""
    prompt_tokens: int
    """Of the whole prompt."""
    output_tokens: int
    """Sampled."""
    reasoning_tokens: int = 0
    """Of the output, up to the end of its reasoning."""
    cached_tokens: int
    """Of the prompt, from the engine's cache."""
    weight_version_first: int
    """That sampled the first token; without one, that of the engine."""
    weight_version_last: int
    """That sampled the last one; without one, that of the engine."""
    queue_s: float
    """Seconds until an engine was chosen."""
    first_token_s: float
    """Seconds from the request to the first token."""
    total_s: float
    """Seconds from the request to the record."""
    engine_id: str
    """Of the engine that sampled last."""
    traceparent: str = ""
    """The agent's span that asked, as W3C Trace Context writes it, without its flags: 00-TRACE-SPAN-00; empty where the
    request named none."""
    waited_s: float = 0.0
    """Of total_s, seconds in which nothing sampled for the turn: no engine served it, its engine was paused for new
    weights, or it died and what it had sampled was lost."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`length` consecutive output tokens sampled by weight version `version`."""

    version: int
    """Weight version."""
    length: int
    """Output tokens."""
    kv_version: int | None = None
    """Weight version of the cached prompt, where it is another. Of a prompt that was cached whole, the newer weights
    compute its last position once more and give the first token; what is cached of that position stays the older one's.
    """


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image in the prompt and the token positions that it takes."""

    image: BlobRef
    """The picture."""
    position: int
    """First of its tokens, as an index into the prompt."""
    tokens: int
    """How many."""


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """What a turn's blob of routed experts holds, so that a fold can check it without fetching it."""

    rows: int
    """Positions: one less than the turn's tokens, less those that its storage parent gives."""
    layers: int
    """With experts."""
    top_k: int
    """Experts per token and layer."""
    dtype: str
    """uint8 | uint16 | int32, little-endian: the narrowest that holds the largest id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSnapshot:
    """The tokens of one turn: a delta to `parent_turn`, the output ids, their log-probs and weight versions."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    turn: TurnId
    """Which turn this is."""
    parent_turn: TurnId | None
    """Storage parent: the turn with the longest common token prefix."""
    base_len: int
    """Tokens taken from parent_turn's prompt + output."""
    delta_ids: Int32Payload
    """Prompt ids after base_len. prompt = (parent prompt + output)[:base_len] + delta."""
    output_ids: Int32Payload
    """As sampled, stop token included."""
    output_logprobs: Float32Payload
    """One per output id, nats, of the engine."""
    version_spans: tuple[VersionSpan, ...]
    """Cover output_ids exactly."""
    boundary: Boundary
    """Kinship to the base: append, branch or root."""
    boundary_reason: str
    """first | append | tools_changed | history_rewritten | template_not_incremental | new_conversation | reopened: the
    assistant's last message is continued, without the id that ended it"""
    prompt_sha256: str
    """Hex sha256 of the whole prompt as little-endian int32 ids."""
    temperature: float
    """Of sampling."""
    logprob_kind: str
    """at_temperature | raw"""
    experts: BlobRef | None = None
    """NumPy's npy format, [rows, layers, top_k]: the experts that the engine chose at positions max(base_len - 1, 0) to
    len - 2 of prompt + output."""
    images: tuple[ImageRef, ...] = ()
    """Images in the prompt that the storage parent does not give whole, by position in the whole prompt."""
    experts_layout: ExpertsLayout | None = None
    """Of `experts`."""
    constrained: bool = False
    """An engine's grammar chose among the tokens: their log-probs are not those of what was sampled from."""


def sampled_tokens(snapshot: TokenSnapshot) -> int:
    """Output tokens of a snapshot by the size of its output_ids, whatever the version spans of a broken one say."""
    ids = snapshot.output_ids
    return (ids.size if isinstance(ids, BlobRef) else len(ids)) // 4
