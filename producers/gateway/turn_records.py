"""A sampled turn as it is kept and as it is written: the conversation's Turn, TurnCompleted, TokenSnapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from turnlog.producers.gateway.conversation import Turn, continued
from turnlog.producers.gateway.generation import Draft
from turnlog.producers.gateway.images import by_reference
from turnlog.producers.gateway.messages import message, system_digest
from turnlog.producers.gateway.plans import Plan
from turnlog.producers.gateway.requests import ChatRequest
from turnlog.producers.gateway.sessions import Session
from turnlog.schemas.events.turns import ExpertsLayout, FinishReason, TokenSnapshot, TurnCompleted
from turnlog.schemas.ids import turn_event_id
from turnlog.schemas.types import BlobRef, TurnId, pack_float32s, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash


class Stored(NamedTuple):
    """Where a turn's tokens are stored against, and its routed experts."""

    parent: Turn | None
    base_len: int
    prompt: _Hash
    """sha256 over the prompt as little-endian int32."""
    experts: BlobRef | None = None
    layout: ExpertsLayout | None = None


def recorded_turn(
    request: ChatRequest,
    plan: Plan,
    draft: Draft,
    turn: TurnId,
    response: dict[str, Any],
    *,
    gone: bool,
    stored: Stored,
) -> Turn:
    """The turn as the conversation keeps it. `gone`: every client has left."""
    raw = request.raw[plan.kept :]
    return Turn(
        id=turn,
        base=plan.base,
        request_sha256=request.sha256,
        tools_sha256=plan.tools_sha256,
        system_sha256=system_digest(request.messages),
        new_raw=[by_reference(one) for one in raw] if plan.images else raw,
        new=request.messages[plan.kept :],
        response_raw=response,
        response=message(response, "response"),
        finish_reason=_finish_reason(draft, response),
        aborted=gone or draft.finish == "error",
        cached_tokens=draft.cached_tokens,
        output_tokens=len(draft.ids),
        versions=draft.versions(),
        hashed=continued(stored.prompt, draft.ids),
        boundary_reason=plan.reason,
        total=len(plan.prompt) + len(draft.ids),
        images=plan.images,
        covered=stored.experts is not None and (stored.parent is None or stored.parent.covered),
    )


def completed(session: Session, request: ChatRequest, plan: Plan, draft: Draft, turn: Turn) -> TurnCompleted:
    """What people and dashboards read."""
    started = session.started
    changed = plan.base is None or plan.base.tools_sha256 != plan.tools_sha256
    return TurnCompleted(
        event_id=turn_event_id("TurnCompleted", session.id, turn.id.epoch, turn.id.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn.id,
        request_sha256=turn.request_sha256,
        api="chat",
        agent_path=plan.agent_path,
        base_turn=plan.base.id if plan.base else None,
        system_sha256=turn.system_sha256,
        tools_sha256=turn.tools_sha256,
        new_messages=orjson.dumps(turn.new_raw),
        tools=orjson.dumps(request.tools) if request.tools and changed else None,
        response=orjson.dumps(turn.response_raw),
        finish_reason=turn.finish_reason,
        aborted=turn.aborted,
        prompt_tokens=len(plan.prompt),
        output_tokens=turn.output_tokens,
        cached_tokens=turn.cached_tokens,
        weight_version_first=turn.versions[0],
        weight_version_last=turn.versions[1],
        queue_s=draft.queue_s,
        first_token_s=draft.first_token_s,
        total_s=asyncio.get_running_loop().time() - draft.started,
        engine_id=draft.engine_id,
    )


def snapshot(session: Session, plan: Plan, draft: Draft, turn: Turn, stored: Stored) -> TokenSnapshot:
    """What training reads: the delta to the storage parent, and what the engine sampled."""
    started = session.started
    delta: Sequence[int] = plan.prompt[stored.base_len :]
    return TokenSnapshot(
        event_id=turn_event_id("TokenSnapshot", session.id, turn.id.epoch, turn.id.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn.id,
        parent_turn=stored.parent.id if stored.parent else None,
        base_len=stored.base_len,
        delta_ids=pack_int32s(delta),
        output_ids=pack_int32s(draft.ids),
        output_logprobs=pack_float32s(draft.logprobs),
        version_spans=tuple(draft.spans),
        boundary=plan.boundary,
        boundary_reason=plan.reason,
        prompt_sha256=stored.prompt.hexdigest(),
        temperature=started.sampling.temperature,
        logprob_kind="at_temperature" if started.sampling.temperature else "raw",
        experts=stored.experts,
        experts_layout=stored.layout,
        images=tuple(image for image in plan.images if image.position + image.tokens > stored.base_len),
    )


def _finish_reason(draft: Draft, response: dict[str, Any]) -> FinishReason:
    if draft.finish == "stop" and response.get("tool_calls"):
        return FinishReason.tool_calls
    return FinishReason(draft.finish)
