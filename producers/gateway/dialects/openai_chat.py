"""API adapter for OpenAI chat completions: POST /v1/chat/completions.

Source: OpenAI's chat completion and chat.completion.chunk objects. Additions by turnlog are under the key `turnlog`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from turnlog.producers.gateway.conversation import Conversation, RecordedTurn
from turnlog.producers.gateway.dialects.dialect import (
    MODEL,
    Constraint,
    Endpoint,
    Fields,
    TurnRequest,
    about,
    count_ignored,
    logprobs_of,
    openai_constraints,
    parse_tools,
    stop_sequences,
)
from turnlog.producers.gateway.errors import BadRequest, GatewayError
from turnlog.producers.gateway.messages import call_in, id_of_call, in_call_order, message_list
from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning
from turnlog.producers.gateway.requests import object_of, typed_field
from turnlog.schemas.events.turns import FinishReason
from turnlog.schemas.types import TurnId

FIELDS: Fields = {
    "model": MODEL,
    "messages": ("honoured", "text and images; results of parallel calls in the order of their calls, by id"),
    "tools": ("honoured", ""),
    "max_tokens": ("honoured", "up to the limit that the task's sampling sets"),
    "max_completion_tokens": ("honoured", "the smaller of the two"),
    "stream": ("honoured", ""),
    "stream_options": ("honoured", "`include_usage`"),
    "n": ("honoured", "1; more is refused: a session is one line of turns, ask again for another answer"),
    "stop": (
        "honoured",
        "up to 4 texts; the client's text ends before them, their tokens stay on the log and train",
    ),
    "logprobs": ("honoured", "of every sampled token, as recorded"),
    "top_logprobs": ("limited", "of the sampled token alone"),
    "return_token_ids": ("honoured", "`token_ids` of the choice, as on the log"),
    "tool_choice": ("honoured", "`auto`, `none`; others are constraints"),
    "response_format": ("honoured", "`text`; JSON and its schemas are constraints"),
    "parallel_tool_calls": ("limited", "the policy decides how many calls it makes"),
    "temperature": ("limited", "the task's sampling decides, so that recorded log-probs are of one distribution"),
    "top_p": ("limited", "as temperature"),
    "top_k": ("limited", "as temperature"),
    "min_p": ("limited", "as temperature"),
    "seed": ("limited", "as temperature"),
    "logit_bias": ("limited", "as temperature"),
    "frequency_penalty": ("limited", "as temperature"),
    "presence_penalty": ("limited", "as temperature"),
    "reasoning_effort": ("limited", "the model's template decides"),
    "chat_template_kwargs": ("limited", "the model's template decides"),
    "user": ("without effect", ""),
    "store": ("without effect", "every turn is on the log"),
    "metadata": ("without effect", ""),
    "service_tier": ("without effect", ""),
}
STOPS = 4
NOT_LAST: Mapping[str, Any] = {"finish_reason": None}
SHOWN = {FinishReason.stop: "stop", FinishReason.tool_calls: "tool_calls", FinishReason.length: "length"}
"""Finish reasons of completed turns, the only ones that are answers."""
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class OpenAIChat:
    """See Dialect."""

    path: ClassVar[str] = "/v1/chat/completions"
    fields: ClassVar[Fields] = FIELDS

    def request(self, body: bytes, conversation: Conversation) -> TurnRequest:
        values = object_of(body)
        count_ignored(values, FIELDS)
        tools = parse_tools(values.get("tools")) or None
        if typed_field(values, "n", int, 1) != 1:
            raise BadRequest("n must be 1: ask again for another answer", param="n")
        raw = in_call_order(message_list(values.get("messages")))
        limits = [typed_field(values, name, int, None) for name in ("max_completion_tokens", "max_tokens")]
        options = values.get("stream_options")
        return TurnRequest(
            api="chat",
            model=str(values.get("model") or ""),
            raw=raw,
            messages=conversation.messages.read(raw),
            tools=tools,
            max_new_tokens=min((limit for limit in limits if limit is not None), default=None),
            stream=values.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            stop=stop_sequences(values.get("stop"), "stop", STOPS),
            constraints=_constraints(values),
            calls=values.get("tool_choice") != "none",
            logprobs=values.get("logprobs") is True,
            token_ids=values.get("return_token_ids") is True,
            sha256=hashlib.sha256(body).hexdigest(),
            size=len(body),
        )

    def answer(
        self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str, decode: Callable[[Sequence[int]], str]
    ) -> ChatCompletion:
        return ChatCompletion(turn, session_id, model, request, decode)

    def refusal(self, error: GatewayError) -> bytes:
        return orjson.dumps(error.body())

    def endpoints(self) -> Sequence[Endpoint]:
        return ()


@dataclass(slots=True)
class ChatCompletion:
    """See Answer."""

    id: TurnId
    session_id: str
    model: str
    request: TurnRequest
    decode: Callable[[Sequence[int]], str]
    created: int = field(default_factory=lambda: int(time.time()))
    calls: int = 0
    """Number of calls that were sent."""

    def whole(self, turn: RecordedTurn) -> bytes:
        choice = {
            "index": 0,
            "message": turn.told.response,
            "logprobs": self._logprobs(turn),
            "finish_reason": SHOWN[turn.finish_reason],
        }
        if self.request.token_ids:
            choice["token_ids"] = list(turn.told.ids)
        return orjson.dumps(
            {
                **self._envelope("chat.completion"),
                "choices": [choice],
                "usage": _usage(turn),
                "turnlog": about(self.session_id, turn),
            }
        )

    def beginning(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        if isinstance(part, ParsedCall):
            named = id_of_call(self.session_id, self.id, self.calls)
            call = {"index": self.calls, **call_in(named, part)}
            self.calls += 1
            return self._chunk({"tool_calls": [call]})
        return self._chunk({"reasoning_content" if isinstance(part, Reasoning) else "content": part.text})

    def ending(self, turn: RecordedTurn) -> bytes:
        """Return the events with finish reason and usage, and [DONE]."""
        parts = []
        last: dict[str, Any] = {"finish_reason": SHOWN[turn.finish_reason]}
        if self.request.logprobs:
            last["logprobs"] = self._logprobs(turn)
        if self.request.token_ids:
            last["token_ids"] = list(turn.told.ids)
        parts.append(self._chunk({}, last, turnlog=about(self.session_id, turn)))
        if self.request.include_usage:
            parts.append(self._chunk(None, usage=_usage(turn)))
        return b"".join([*parts, DONE])

    def error_events(self, error: GatewayError) -> bytes:
        return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE

    def _logprobs(self, turn: RecordedTurn) -> dict[str, Any] | None:
        return {"content": logprobs_of(turn, self.decode), "refusal": None} if self.request.logprobs else None

    def _chunk(self, delta: dict[str, Any] | None, last: Mapping[str, Any] = NOT_LAST, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, **last}]
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


def _constraints(values: Mapping[str, Any]) -> tuple[Constraint, ...]:
    shape = values.get("response_format")
    named = shape.get("json_schema") if isinstance(shape, dict) else None
    schema = named.get("schema") if isinstance(named, dict) else None
    return openai_constraints(values.get("tool_choice"), "response_format", shape, schema)


def _usage(turn: RecordedTurn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.total,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
    }
