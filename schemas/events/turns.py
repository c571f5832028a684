"""Records of one turn: TurnCompleted, which people read, and TokenSnapshot, which training reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.types import BlobRef, Float32Payload, Int32Payload, JsonPayload, SessionEvent, TurnId, content


class FinishReason(StrEnum):
    """Why the engine stopped."""

    error = "error"
    stop = "stop"
    tool_calls = "tool_calls"
    length = "length"
    abort = "abort"


CUT_OFF = frozenset({FinishReason.abort, FinishReason.error})
"""Finish reasons of turns whose output is incomplete."""


class Boundary(StrEnum):
    """Kinship of a turn's prompt to its base: extends it exactly, diverges from it, or has none."""

    root = "root"
    append = "append"
    branch = "branch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCompleted(SessionEvent):
    """Messages, usage and timing of one turn."""

    turn: TurnId
    """Id of this turn."""
    request_sha256: str
    """Hex sha256 of the request's body."""
    api: str
    """chat, responses or messages."""
    agent_path: str | None = None
    """Agent that made the request, if the harness tells: empty or "main" for the main agent, "side" (or a path that
    begins with it) for a side call, "player/NAME" (or a path below it) for a player, anything else for a sub-agent. A
    path whose last component is "compaction" is a request for a summary of the history."""
    base_turn: TurnId | None = None
    """The turn whose messages and response this request continues; null for a root."""
    base_echo: JsonPayload | None = field(default=None, metadata=content(b"{}"))
    """Members of the base's response (name, content, tool_calls) that the client sent back changed, as it sent them;
    null if it changed nothing. The recorded response itself stays unchanged."""
    system_sha256: str
    """Hex sha256 of the leading system messages in canonical form, so that equal messages have equal hashes."""
    tools_sha256: str
    """Hex sha256 of the tool schemas as JSON with sorted keys."""
    new_messages: JsonPayload = field(metadata=content(b"[]"))
    """Messages of the request that follow those of the base."""
    tools: JsonPayload | None = field(default=None, metadata=content(b"[]"))
    """The tool schemas, if they differ from the base's."""
    response: JsonPayload = field(metadata=content(b'{"content":"[erased]","role":"assistant"}'))
    """The assistant message as sent. The `id` of each of its tool_calls is the call_id of its ToolCallRequested."""
    finish_reason: FinishReason
    """Reason why the engine stopped."""
    stopped_by: str | None = field(default=None, metadata=content(b"[erased]"))
    """Stop sequence of the client before which the text ends; the tokens continue to the point where the engine
    stopped."""
    ill_formed_calls: int = 0
    """Number of blocks of the output that look like tool calls but are malformed; they stay text."""
    aborted: bool
    """True if the client was gone, or the engine failed, before the end."""
    prompt_tokens: int
    """Tokens of the whole prompt."""
    output_tokens: int
    """Sampled tokens."""
    reasoning_tokens: int = 0
    """Output tokens up to the end of the reasoning."""
    cached_tokens: int
    """Prompt tokens that came from the engine's cache."""
    weight_version_first: int
    """Weight version that sampled the first token; without a token, the version of the engine."""
    weight_version_last: int
    """Weight version that sampled the last token; without a token, the version of the engine."""
    queue_s: float
    """Seconds until an engine was chosen."""
    first_token_s: float
    """Seconds from the request to the first token."""
    total_s: float
    """Seconds from the request to the record."""
    engine_id: str
    """Id of the engine that sampled last."""
    traceparent: str = ""
    """Span of the agent that made the request, in W3C Trace Context format without its flags: 00-TRACE-SPAN-00. Empty
    if the request named none."""
    waited_s: float = 0.0
    """Seconds of total_s in which nothing was sampled for the turn: no engine served it, its engine was paused for new
    weights, or the engine died and its output was lost."""
    redacted: dict[str, int] = field(default_factory=dict)
    """Number of placeholders of secrets in new_messages, tools and response, by kind; empty if redaction is off."""
    summary_turn: TurnId | None = None
    """Turn whose answer the new messages of this root quote: it summarised the history that this turn goes on from."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`length` consecutive output tokens sampled by weight version `version`."""

    version: int
    """Weight version that sampled the tokens."""
    length: int
    """Number of output tokens."""
    kv_version: int | None = None
    """Weight version that computed the cached prompt, if it differs from `version`. If the whole prompt was cached, the
    newer weights recompute only its last position, which yields the first token; the cache entry of that position stays
    the older version's."""
    engine_kind: str = ""
    """Kind of the engine that sampled the tokens, sglang or vllm. Written only by gateways of a mixed fleet: [engine]
    kind and kinds name several kinds, or engines of several kinds have reported. Empty otherwise."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image in the prompt and the token positions that it takes."""

    image: BlobRef
    """The picture."""
    position: int
    """Index in the prompt of the first token of the image."""
    tokens: int
    """Number of tokens of the image."""


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """What a turn's blob of routed experts holds, so that a fold can check it without fetching it."""

    rows: int
    """Positions: one less than the number of the turn's tokens, minus those that the storage parent provides."""
    layers: int
    """Layers that have experts."""
    top_k: int
    """Experts per token and layer."""
    dtype: str
    """uint8, uint16 or int32, little-endian: the narrowest type that holds the largest id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSnapshot(SessionEvent):
    """The tokens of one turn: a delta to `parent_turn`, the output ids, their log-probs and weight versions."""

    turn: TurnId
    """Id of this turn."""
    parent_turn: TurnId | None
    """Storage parent: the turn with the longest common token prefix."""
    base_len: int
    """Number of tokens taken from the prompt + output of parent_turn."""
    delta_ids: Int32Payload = field(metadata=content())
    """Prompt ids after base_len. prompt = (parent prompt + output)[:base_len] + delta."""
    output_ids: Int32Payload = field(metadata=content())
    """Output ids as sampled, including the stop token."""
    output_logprobs: Float32Payload = field(metadata=content())
    """Log-probs of the engine in nats, one per output id."""
    version_spans: tuple[VersionSpan, ...]
    """Spans that cover output_ids exactly."""
    boundary: Boundary
    """Prefix relation to the base: append, branch or root."""
    boundary_reason: str
    """first, append, tools_changed, history_rewritten, template_not_incremental, new_conversation, or reopened (the
    assistant's last message is continued, without the id that ended it)."""
    prompt_sha256: str
    """Hex sha256 of the whole prompt as little-endian int32 ids."""
    temperature: float
    """Sampling temperature."""
    logprob_kind: str
    """Kind of `output_logprobs`: at_temperature or raw."""
    experts: BlobRef | None = None
    """Blob in NumPy's npy format, [rows, layers, top_k]: the experts that the engine chose at positions max(base_len -
    1, 0) to len - 2 of prompt + output."""
    images: tuple[ImageRef, ...] = ()
    """Images in the prompt that the storage parent does not contain whole, by position in the whole prompt."""
    experts_layout: ExpertsLayout | None = None
    """Layout of `experts`."""
    redacted: bool = False
    """True if the turn saw or sampled secrets that its records must not show: ids that would show them are 0, and the
    turn trains in no sample."""
    constrained: bool = False
    """True if a grammar in the engine restricted the choice of tokens, so that the log-probs are not those of the
    distribution that was sampled from."""


def sampled_tokens(snapshot: TokenSnapshot) -> int:
    """Return the number of output tokens of a snapshot, computed from the size of output_ids, so that broken version
    spans do not matter."""
    ids = snapshot.output_ids
    return (ids.size if isinstance(ids, BlobRef) else len(ids)) // 4
