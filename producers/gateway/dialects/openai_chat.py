"""OpenAI chat completions: POST /v1/chat/completions.

Source: OpenAI's chat completion and chat.completion.chunk objects. What turnlog adds to them stands under `turnlog`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client import Counter

from turnlog.producers.gateway import BadRequest, GatewayError
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.dialects.dialect import TurnRequest
from turnlog.producers.gateway.messages import Message, normalised
from turnlog.producers.gateway.requests import object_of, typed
from turnlog.schemas.events.turns import FinishReason
from turnlog.schemas.types import TurnId

IGNORED = Counter("turnlog_gateway_ignored_fields", "Request fields that were not honoured", ("field",))
HONOURED = frozenset(
    {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
)  # fmt: skip
COUNTED = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "top_logprobs", "logit_bias",
        "frequency_penalty", "presence_penalty", "response_format", "tool_choice", "parallel_tool_calls", "user",
        "store", "metadata", "reasoning_effort", "service_tier", "chat_template_kwargs",
    }
)  # fmt: skip
"""Ignored fields that have a label of their own; the rest count as "other", since a label must not be a client's."""
SHOWN = {FinishReason.stop: "stop", FinishReason.tool_calls: "tool_calls", FinishReason.length: "length"}
"""Those of whole turns, the only ones that are answers."""
DONE = b"data: [DONE]\n\n"


class OpenAIChat:
    """See Dialect."""

    path = "/v1/chat/completions"

    def request(self, body: bytes, read: Callable[[Any], tuple[Message, ...]] = normalised) -> TurnRequest:
        values = object_of(body)
        for name in values.keys() - HONOURED:
            IGNORED.labels(name if name in COUNTED else "other").inc()
        tools = values.get("tools") or None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise BadRequest("tools must be a list of objects", param="tools")
        limits = [typed(values, name, int, None) for name in ("max_completion_tokens", "max_tokens")]
        options = values.get("stream_options")
        return TurnRequest(
            api="chat",
            raw=values.get("messages") or [],
            messages=read(values.get("messages")),
            tools=tools,
            max_new_tokens=min((limit for limit in limits if limit is not None), default=None),
            stream=values.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            sha256=hashlib.sha256(body).hexdigest(),
        )

    def answer(self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str) -> ChatCompletion:
        return ChatCompletion(turn, session_id, model, request.include_usage)

    def refusal(self, error: GatewayError) -> bytes:
        return orjson.dumps(error.body())


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """See Answer."""

    id: TurnId
    session_id: str
    model: str
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, turn: Turn) -> bytes:
        choice = {
            "index": 0,
            "message": turn.response_raw,
            "logprobs": None,
            "finish_reason": SHOWN[turn.finish_reason],
        }
        return orjson.dumps(
            {
                **self._envelope("chat.completion"),
                "choices": [choice],
                "usage": _usage(turn),
                "turnlog": self._about(turn),
            }
        )

    def beginning(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def ending(self, turn: Turn, sent: str) -> bytes:
        """The rest of the content, tool calls, finish reason, usage, [DONE]."""
        response = turn.response_raw
        parts = []
        if rest := (response["content"] or "")[len(sent) :]:
            parts.append(self.text(rest))
        if calls := response.get("tool_calls"):
            parts.append(self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}))
        parts.append(self._chunk({}, finish_reason=SHOWN[turn.finish_reason], turnlog=self._about(turn)))
        if self.include_usage:
            parts.append(self._chunk(None, usage=_usage(turn)))
        return b"".join([*parts, DONE])

    def failed(self, error: GatewayError) -> bytes:
        return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE

    def _chunk(self, delta: dict[str, Any] | None, *, finish_reason: str | None = None, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        return (
            b"data: " + orjson.dumps({**self._envelope("chat.completion.chunk"), "choices": choices, **more}) + b"\n\n"
        )

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id.epoch[:16]}-{self.id.index}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _about(self, turn: Turn) -> dict[str, Any]:
        """The turn's id, how it really ended, its weight versions."""
        return {
            "session_id": self.session_id,
            "epoch": turn.id.epoch,
            "index": turn.id.index,
            "finish_reason": turn.finish_reason.value,
            "weight_version_first": turn.versions[0],
            "weight_version_last": turn.versions[1],
        }


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.total,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }
