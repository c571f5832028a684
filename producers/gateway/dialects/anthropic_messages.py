"""API adapter for Anthropic messages: POST /v1/messages, and its count_tokens.

A request is converted to messages in the format of OpenAI's chat API before it is parsed. System messages between
others stay in place; prompts.py handles templates that allow only a leading one. Blocks are reduced to their content:
cache marks and unknown members are dropped, and an assistant's texts are concatenated, however a stream cut them.
Source: Anthropic's Messages API of 2023-06-01. Additions by turnlog are under the key `turnlog`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from prometheus_client import Counter
from starlette.responses import Response

from turnlog.producers.gateway.conversation import Conversation, RecordedTurn
from turnlog.producers.gateway.dialects.dialect import (
    IGNORED,
    MODEL,
    Constraint,
    Endpoint,
    Fields,
    NonTurnRequest,
    TurnRequest,
    about,
    count_ignored,
    parse_tools,
    stop_sequences,
)
from turnlog.producers.gateway.errors import BadRequest, ContextOverflow, GatewayError, ThreadNotHeld
from turnlog.producers.gateway.messages import BILLING, call_in, id_of_call, in_call_order, message_list, parts_of
from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning, Text
from turnlog.producers.gateway.requests import SigningKeys, object_of, refer, resolve_reference, typed_field
from turnlog.schemas.events.turns import FinishReason
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.schemas.types import TurnId

UNSIGNED = Counter(
    "turnlog_gateway_unsigned_thinking", "Thinking blocks of a last answer with a missing or foreign signature"
)
FIELDS: Fields = {
    "model": MODEL,
    "messages": (
        "honoured",
        "text, images, documents of text, tool_use, tool_result, thinking; `is_error` is what a result's text says",
    ),
    "system": ("honoured", ""),
    "tools": ("honoured", "functions; tools that the server would run are left out and counted"),
    "max_tokens": ("honoured", "up to the limit that the task's sampling sets, which also stands for an absent one"),
    "stop_sequences": (
        "honoured", "up to 64 texts; the client's text ends before them, their tokens stay on the log and train",
    ),
    "stream": ("honoured", ""),
    "tool_choice": ("honoured", "`auto`, `none`; others are constraints"),
    "output_config": ("honoured", "`format` is a constraint; `effort` has no effect: the model's template decides"),
    "disable_parallel_tool_use": ("limited", "of `tool_choice`: the policy decides how many calls it makes"),
    "thinking": ("limited", "the model's template decides; what is thought is shown in full"),
    "context_management": ("limited", "the history is what the client sends"),
    "thread": ("limited", "`create` has no effect; `continue` is refused, 404 `thread_not_found`: send all messages"),
    "compaction": ("refused", "ask for a summary as for anything else"),
    "temperature": ("limited", "the task's sampling decides, so that recorded log-probs are of one distribution"),
    "top_p": ("limited", "as temperature"),
    "top_k": ("limited", "as temperature"),
    "speed": ("without effect", ""),
    "service_tier": ("without effect", ""),
    "inference_geo": ("without effect", ""),
    "metadata": ("without effect", ""),
    "cache_control": ("without effect", "engines keep what they can"),
    "container": ("without effect", ""),
    "mcp_servers": ("without effect", ""),
}  # fmt: skip
STOPS = 64
"""Maximum number of stop sequences; each is searched in every text that is sent."""
ROLES = ("user", "assistant", "system")
UNPARSED = "unparsed_arguments"
"""Member of a sent `input` that holds arguments which are no JSON object, or nested too deep for an echo. It is
understood when it comes back."""
INPUT_DEPTH = MAX_DEPTH - 5
"""Maximum depth of an `input`; a body has five levels around it."""
STOPPED = {FinishReason.stop: "end_turn", FinishReason.tool_calls: "tool_use", FinishReason.length: "max_tokens"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
         429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
"""Error types by status; other refusals are invalid_request_error, other failures api_error."""


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """See Dialect.

    The signature of a thinking block proves that a turn produced this thinking. An echo with the signature of the last
    answer names the turn that it continues, even among turns with the same text. Without a valid signature, the block
    is matched by its text like any reasoning, and counted."""

    keys: SigningKeys
    path: ClassVar[str] = "/v1/messages"
    fields: ClassVar[Fields] = FIELDS

    def request(self, body: bytes, conversation: Conversation) -> TurnRequest:
        values = object_of(body)
        count_ignored(values, FIELDS)
        _check_state(values)
        history = ConvertedHistory()
        if system := values.get("system"):
            history.add({"role": "system", "content": system}, "system")
        for index, one in enumerate(message_list(values.get("messages"))):
            history.add(one, f"messages[{index}]")
        raw = in_call_order(history.raw)
        choice = typed_field(values, "tool_choice", dict, {})
        if choice.get("disable_parallel_tool_use"):
            IGNORED.labels("disable_parallel_tool_use").inc()
        return TurnRequest(
            api="messages",
            model=str(values.get("model") or ""),
            raw=raw,
            messages=conversation.messages.read(raw, history.places),
            tools=_tools(values.get("tools")),
            max_new_tokens=typed_field(values, "max_tokens", int, None),
            stream=values.get("stream") is True,
            include_usage=True,
            stop=stop_sequences(values.get("stop_sequences"), "stop_sequences", STOPS),
            calls=choice.get("type") != "none",
            constraints=_constraints(values, choice),
            base=self._find_base_turn(history.thinking),
            sha256=hashlib.sha256(body).hexdigest(),
            size=len(body),
        )

    def answer(
        self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str, decode: Callable[[Sequence[int]], str]
    ) -> AnthropicMessage:
        return AnthropicMessage(turn, session_id, model, lambda text: refer(turn, text, self.keys.first))

    @staticmethod
    def refusal(error: GatewayError) -> bytes:
        return orjson.dumps(_error_body(error))

    def endpoints(self) -> Sequence[Endpoint]:
        return (Endpoint("POST", f"{self.path}/count_tokens", self._count),)

    async def _count(self, asked: NonTurnRequest) -> Response:
        counted = await asked.prompt_tokens()
        return Response(orjson.dumps({"input_tokens": counted}), media_type="application/json")

    def _find_base_turn(self, thinking: Sequence[tuple[str, str]]) -> TurnId | None:
        """Return the turn whose thinking the last answer brings back, if every block of it has that turn's signature;
        else None."""
        turns = {resolve_reference(signature, text, *self.keys.accepted_keys) for text, signature in thinking}
        if None in turns:
            UNSIGNED.inc()
        return turns.pop() if len(turns) == 1 else None


@dataclass(slots=True)
class ConvertedHistory:
    """Messages in the format of OpenAI's chat API, converted one by one from Anthropic's."""

    raw: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """The client's name for each message."""
    thinking: list[tuple[str, str]] = field(default_factory=list)
    """(text, signature) of the thinking blocks of the last answer."""

    def add(self, one: Any, where: str) -> None:
        """Convert one message. Raises BadRequest."""
        role = one.get("role") if isinstance(one, dict) else None
        if role not in ROLES:
            raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
        content = one.get("content")
        if role == "assistant":
            self.thinking = []
        if isinstance(content, str):
            self._put({"role": role, "content": content}, where)
        elif role == "assistant":
            self._answer(_blocks(content, where), where)
        elif role == "user":
            self._add_user_blocks(_blocks(content, where), where)
        else:
            self._put({"role": role, "content": _content(content, where)}, where)

    def _add_user_blocks(self, blocks: Sequence[dict[str, Any]], where: str) -> None:
        """Convert a user's blocks. Results come first, because they follow the calls."""
        others = []
        for block in blocks:
            if block.get("type") == "tool_result":
                content = _content(block.get("content") or "", where)
                self._put({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content}, where)
            else:
                others.append(block)
        if others or not blocks:
            self._put({"role": "user", "content": _content(others, where)}, where)

    def _answer(self, blocks: Sequence[dict[str, Any]], where: str) -> None:
        said, calls = "", []
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                said += _text(block, "text", where)
            elif kind == "thinking":
                self.thinking.append((_text(block, "thinking", where), str(block.get("signature"))))
            elif kind == "tool_use":
                calls.append(_call(block, where))
            elif kind != "redacted_thinking":  # nobody can read these
                raise _unserved_block(kind, where)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if thought := "".join(text for text, _ in self.thinking):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self._put(message, where)

    def _put(self, message: dict[str, Any], where: str) -> None:
        self.raw.append(message)
        self.places.append(where)


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"{where}: content must be text or a list of blocks", param=where)
    return content


def _content(content: Any, where: str) -> Any:
    """Return a message's content; a single text as a string, except a billing line, which is recognised by its
    block."""
    if isinstance(content, str):
        return content
    parts = [_part(block, where) for block in _blocks(content, where)]
    text = parts[0].get("text") if len(parts) == 1 else None
    return parts if text is None or text.startswith(BILLING) else text


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    kind, source = block.get("type"), block.get("source")
    if kind in (
        "text",
        "tool_reference",
    ):  # a tool found by search is among the offered tools, so its name suffices
        return {"type": "text", "text": _text(block, "text" if kind == "text" else "tool_name", where)}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        above = [_text(block, name, where) for name in ("title", "context") if block.get(name)]
        return {"type": "text", "text": "\n".join([*above, _text(source, "data", where)])}
    if kind != "image" or not isinstance(source, dict):
        raise _unserved_block(kind, where)
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": source.get("url") or data}}


def _text(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise BadRequest(f"{where} has a block of type {block['type']!r} whose {name} is no text", param=where)
    return text


def _unserved_block(kind: Any, where: str) -> BadRequest:
    return BadRequest(
        f"{where} has a block of type {kind!r}; text, image, document (of text), tool_use, tool_result, thinking are "
        "served",
        param=where,
    )


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict) or not all(isinstance(block.get(name), str) for name in ("id", "name")):
        raise BadRequest(f"{where} has a tool_use that lacks an id, a name or an object as its input", param=where)
    unparsed = given.get(UNPARSED) if len(given) == 1 else None
    arguments = unparsed if isinstance(unparsed, str) else orjson.dumps(given).decode()
    return call_in(block["id"], ParsedCall(block["name"], arguments))


def _tools(raw: Any) -> list[Any] | None:
    """Return the functions in the format of OpenAI's chat API, or None. Raises BadRequest."""
    functions = []
    for index, tool in enumerate(parse_tools(raw)):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            IGNORED.labels("tools").inc()
            continue
        schema = tool.get("input_schema")
        if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
            raise BadRequest(f"{where} must have a name, and an object as its input_schema", param=where)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        functions.append({"type": "function", "function": function})
    return functions or None


def _check_state(values: dict[str, Any]) -> None:
    """Raise ThreadNotHeld or BadRequest for server-side history: a request carries its own history, and the session's
    turns are on the log."""
    thread = values.get("thread")
    if isinstance(thread, dict) and thread.get("type") == "continue":
        raise ThreadNotHeld("thread cannot be continued here: send all messages, system and tools", param="thread")
    if values.get("compaction") is not None:
        raise BadRequest("compaction is not served: ask for a summary as for anything else", param="compaction")


def _constraints(values: dict[str, Any], choice: Mapping[str, Any]) -> tuple[Constraint, ...]:
    """Return the constraints of a request. Raises BadRequest."""
    found = []
    if (kind := choice.get("type", "auto")) not in ("auto", "none"):
        named = {"any": "", "tool": choice.get("name")}.get(kind) if isinstance(kind, str) else None
        found.append(Constraint("tool_choice", tool=named if isinstance(named, str) else None))
    if shape := typed_field(values, "output_config", dict, {}).get("format"):
        schema = shape.get("schema") if isinstance(shape, dict) else None
        found.append(Constraint.to("output_config", schema))
    return tuple(found)


@dataclass(slots=True)
class AnthropicMessage:
    """See Answer."""

    id: TurnId
    session_id: str
    model: str
    sign: Callable[[str], str]
    blocks: int = 0
    """Number of blocks that were sent in full."""
    calls: int = 0
    """Number of calls that were sent."""
    _open: type[Part] | None = None
    _thought: str = ""
    """Thinking in the open block."""

    def whole(self, turn: RecordedTurn) -> bytes:
        content = [self._block(part) for part in parts_of(turn.told.response)]
        return orjson.dumps(
            {
                **self._envelope(content),
                **_stop_fields(turn),
                "usage": _usage(turn),
                "turnlog": about(self.session_id, turn),
            }
        )

    def beginning(self) -> bytes:
        """Return the first event. Token counts are sent at the end, when engines have reported them."""
        nothing = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._envelope([]), "stop_reason": None, "stop_sequence": None, "usage": nothing}
        return _event("message_start", message=message)

    def part(self, part: Part) -> bytes:
        sent = b""
        if type(part) is not self._open:
            empty = part if isinstance(part, ParsedCall) else type(part)("")
            sent = self._close_block() + _event(
                "content_block_start", index=self.blocks, content_block=self._block(empty, begun=True)
            )
            self._open = type(part)
        if isinstance(part, ParsedCall):
            sent += self._delta("input_json_delta", partial_json=_input(part).decode()) + self._close_block()
        elif isinstance(part, Reasoning):
            self._thought += part.text
            sent += self._delta("thinking_delta", thinking=part.text)
        else:
            sent += self._delta("text_delta", text=part.text)
        return sent

    def ending(self, turn: RecordedTurn) -> bytes:
        """Return the events with the stop reason and the token counts."""
        last = _event(
            "message_delta", delta=_stop_fields(turn), usage=_usage(turn), turnlog=about(self.session_id, turn)
        )
        return self._close_block() + last + _event("message_stop")

    def error_events(self, error: GatewayError) -> bytes:
        return _event("error", **_error_body(error))

    def _block(self, part: Part, *, begun: bool = False) -> dict[str, Any]:
        """Return a whole block, or one as it begins, without signature and input."""
        if isinstance(part, Text):
            return {"type": "text", "text": part.text}
        if isinstance(part, Reasoning):
            return {"type": "thinking", "thinking": part.text, "signature": "" if begun else self.sign(part.text)}
        named = id_of_call(self.session_id, self.id, self.calls)
        self.calls += 1
        given = {} if begun else orjson.Fragment(_input(part))
        return {"type": "tool_use", "id": named, "name": part.name, "input": given}

    def _close_block(self) -> bytes:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return b""
        signed = self._delta("signature_delta", signature=self.sign(self._thought)) if self._open is Reasoning else b""
        self._open, self._thought, self.blocks = None, "", self.blocks + 1
        return signed + _event("content_block_stop", index=self.blocks - 1)

    def _delta(self, kind: str, **more: str) -> bytes:
        return _event("content_block_delta", index=self.blocks, delta={"type": kind, **more})

    def _envelope(self, content: Sequence[Any]) -> dict[str, Any]:
        name = f"msg_{self.id.epoch[:16]}_{self.id.index}"
        return {"id": name, "type": "message", "role": "assistant", "model": self.model, "content": content}


def _input(call: ParsedCall) -> bytes:
    """Return arguments as the JSON object that an `input` must be."""
    try:
        parsed = None if deeper_than(call.arguments, INPUT_DEPTH) else orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        parsed = None
    return call.arguments.encode() if isinstance(parsed, dict) else orjson.dumps({UNPARSED: call.arguments})


def _stop_fields(turn: RecordedTurn) -> dict[str, Any]:
    if turn.finish_reason is FinishReason.stop and turn.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.told.stopped_by}
    return {"stop_reason": STOPPED[turn.finish_reason], "stop_sequence": None}


def _usage(turn: RecordedTurn) -> dict[str, Any]:
    """Return the token counts. Cached tokens do not count as input; thinking counts as output."""
    cached = min(turn.cached_tokens, turn.prompt_tokens)  # a resubmitted turn finds its own output cached, too
    return {
        "input_tokens": turn.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": turn.output_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }


def _error_body(error: GatewayError) -> dict[str, Any]:
    """Return an error in Anthropic's format. An overflow is worded as Anthropic does, because agents recognise that
    text and compact their history."""
    message = error.message
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.window} maximum"
    refused = error.type == "invalid_request_error"
    kind = TYPES.get(error.status, "invalid_request_error" if refused else "api_error")
    # The threads of the SDKs read this code, and then send the whole conversation.
    details = {"details": {"error_code": error.code}} if isinstance(error, ThreadNotHeld) else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + orjson.dumps({"type": kind, **data}) + b"\n\n"
