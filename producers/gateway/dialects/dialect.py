"""What a dialect is: an API that agents speak, read into one kind of request, and turns answered in its shape, whole or
as server-sent events. The last byte leaves after the turn is on the log.

To add one, write its module here and enter it in `dialects` of app.py. Inside the gateway, and on the log, messages
have the shape of OpenAI's chat: a dialect whose requests differ makes such messages of them before they are read.
Sources: ASGI HTTP 2.3 (http.disconnect); `x-should-retry` and `retry-after-ms` as the SDKs of OpenAI and Anthropic read
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as Sent
from starlette.types import Receive, Scope, Send

from turnlog.producers.gateway import ERRORS, BadRequest, GatewayError, SessionEnded
from turnlog.producers.gateway.conversation import Conversation, Turn
from turnlog.producers.gateway.images import Admitted, Picture
from turnlog.producers.gateway.messages import Message, parts_of
from turnlog.producers.gateway.parsers.parser import Call, Part, Reasoning, Text
from turnlog.producers.gateway.prompts import UNKNOWN
from turnlog.producers.gateway.sessions import Running, Session
from turnlog.schemas.types import TurnId, float32s

IGNORED = Counter("turnlog_gateway_ignored_fields", "Request fields that were not honoured", ("field",))

Fields = Mapping[str, tuple[str, str]]
"""Field of a request -> what becomes of it (honoured, limited, without effect, refused), and how."""
MODEL = ("honoured", "names the policy, whatever it is, but for names of `[gateway] side_engines`")


class Constraint(NamedTuple):
    """A field that would constrain what is sampled."""

    field: str
    json_schema: str | None = None
    """What the output would be held to; None: another thing, or one that no grammar of engines says."""
    tool: str | None = None
    """The tool that the output would be a call of, "" for any; None: another thing, as above."""

    @classmethod
    def to(cls, field: str, schema: Any) -> Constraint:
        """To JSON that fits a schema as the client gave it."""
        return cls(field, orjson.dumps(schema).decode() if isinstance(schema, dict) else None)


def openai_constraints(choice: Any, field: str, shape: Any, schema: Any) -> tuple[Constraint, ...]:
    """What OpenAI's `tool_choice` and format of an answer would hold it to; `schema`: of a format of type
    json_schema."""
    found = []
    if (choice or "auto") not in ("auto", "none"):
        named = choice.get("function", choice) if isinstance(choice, dict) else None
        tool = "" if choice == "required" else named.get("name") if isinstance(named, dict) else None
        found.append(Constraint("tool_choice", tool=tool if isinstance(tool, str) else None))
    shape = shape or {"type": "text"}
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind != "text":
        given = {"type": "object"} if kind == "json_object" else schema if kind == "json_schema" else None
        found.append(Constraint.to(field, given))
    return tuple(found)


def offered(raw: Any) -> list[dict[str, Any]]:
    """The tools of a request as they came. Raises BadRequest."""
    if not isinstance(raw or [], list) or not all(isinstance(tool, dict) for tool in raw or ()):
        raise BadRequest("tools must be a list of objects", param="tools")
    return raw or []


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, in any dialect."""

    api: str
    """As TurnCompleted has it."""
    model: str
    """As the client calls it."""
    raw: list[Any]
    """messages in the shape of OpenAI's chat"""
    messages: tuple[Message, ...]
    tools: list[Any] | None
    """In the shape of OpenAI's chat."""
    custom: frozenset[str] = frozenset()
    """Names of those whose calls the client takes as one text, the argument `input`."""
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    """In a stream."""
    stop: tuple[str, ...] = ()
    """Texts before which the client's text ends. Their tokens stay on the log."""
    calls: bool = True
    """Whether what looks like a tool call is one; else it stays text."""
    logprobs: bool = False
    """The client wants them, and the sampled tokens."""
    token_ids: bool = False
    """The client wants the ids of the output."""
    references: bool = False
    """The client wants to send reasoning back as a reference to its turn."""
    constraints: tuple[Constraint, ...] = ()
    """Whether they hold is the session's to say."""
    base: TurnId | None = None
    """The turn that the request names as the one it continues; else it is found by the messages."""
    sha256: str
    """Of the body's bytes."""
    size: int
    """How many those are."""
    traceparent: str = ""
    """As TurnCompleted has it."""
    images: Mapping[str, Admitted] = field(default_factory=dict)
    """By sha256, once they are in the store."""

    @property
    def pictures(self) -> list[Picture]:
        """Every image of the messages, in order."""
        return [picture for one in self.messages for picture in one.pictures]


class Answer(Protocol):
    """One turn in a dialect's shape, whole or as the data of server-sent events; it belongs to one response, and may
    keep what it has sent."""

    def whole(self, turn: Turn) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def beginning(self) -> bytes:
        """Sent at once, before anything is sampled."""
        ...

    def part(self, part: Part) -> bytes:
        """More of what is said: text or reasoning that goes on, or a whole call."""
        ...

    def ending(self, turn: Turn) -> bytes:
        """After the last part."""
        ...

    def failed(self, error: GatewayError) -> bytes:
        """In place of the ending."""
        ...


class Asked(NamedTuple):
    """A request about a session that asks for no turn."""

    request: Request
    session: Session
    prompt_tokens: Callable[[], Awaitable[int]]
    """Of the prompt that a turn would submit now, if the body asked for one. Raises BadRequest, ImagesNotServed,
    ContextOverflow."""


class Endpoint(NamedTuple):
    """What a dialect serves beside turns."""

    method: str
    path: str
    """As Starlette writes it."""
    answer: Callable[[Asked], Awaitable[Response]]
    """Raises GatewayError."""


class Dialect(Protocol):
    """One API."""

    path: ClassVar[str]
    """Where turns are asked for."""
    fields: ClassVar[Fields]
    """One that is not here is counted as "other" and has no effect."""

    def request(self, body: bytes, conversation: Conversation) -> TurnRequest:
        """`conversation`: of the session, which reads messages that it knows faster. Runs in a thread where the body is
        large. Raises BadRequest naming the field."""
        ...

    def answer(
        self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str, decode: Callable[[Sequence[int]], str]
    ) -> Answer:
        """The shape of the answer to a request. `decode`: the text of ids."""
        ...

    def refusal(self, error: GatewayError) -> bytes:
        """The body of an answer without a turn."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """Beside turns."""
        ...


class TurnResponse(Response):
    """Waits for `running` (or has a recorded turn already) and answers with it."""

    def __init__(
        self, turn: Running | Turn, request: TurnRequest, dialect: Dialect, *, session_id: str, model: str,
        decode: Callable[[Sequence[int]], str], keep_alive_s: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._turn = turn
        self._dialect = dialect
        self._answer = dialect.answer(request, turn.id, session_id=session_id, model=model, decode=decode)
        self._stream = request.stream
        self._session_id = session_id
        self._keep_alive_s = keep_alive_s
        if isinstance(turn, Running):
            turn.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. A client that leaves is noticed while the turn runs: the last one takes the engine request along."""
        left = asyncio.Event()
        watch = asyncio.create_task(self._watch(receive, left))
        try:
            if self._stream:
                await self._events(send, left)
            else:
                await self._whole(send, left)
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive, left: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        if isinstance(self._turn, Running):
            self._turn.leave()

    async def _recorded(self, left: asyncio.Event) -> Turn | None:
        """None when the client has left a turn that was cut off. Raises SessionEnded, and whatever the turn raised."""
        turn = await asyncio.shield(self._turn.task) if isinstance(self._turn, Running) else self._turn
        if turn.whole:
            return turn
        if left.is_set():
            return None
        raise SessionEnded(f"session {self._session_id} was finished while this turn was sampled")

    async def _whole(self, send: Send, left: asyncio.Event) -> None:
        try:
            turn = await self._recorded(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await _send(send, error.status, self._dialect.refusal(error), *retry_headers(error))
            return
        if turn is not None:
            await _send(send, 200, self._answer.whole(turn))
            turn.handed_over |= not left.is_set()

    async def _events(self, send: Send, left: asyncio.Event) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        await send(_body(self._answer.beginning()))
        running = self._turn if isinstance(self._turn, Running) else None
        unsent = Unsent()
        if running is not None:
            await self._follow(running, unsent, send, left)
        try:
            turn = await self._recorded(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await send(_body(self._answer.failed(error), last=True))
            return
        if turn is not None:
            rest = unsent.of(parts_of(turn.response_raw) if running is None else running.parts)
            last = [*map(self._answer.part, rest), self._answer.ending(turn)]
            await send(_body(b"".join(last), last=True))
            turn.handed_over |= not left.is_set()

    async def _follow(self, running: Running, unsent: Unsent, send: Send, left: asyncio.Event) -> None:
        """Send what is said as it becomes certain, until the turn is on the log."""
        while not running.task.done():
            changed = running.changed
            if new := [self._answer.part(part) for part in unsent.of(running.parts)]:
                await send(_body(b"".join(new)))
            if running.task.done() or changed.is_set():
                continue
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                if not left.is_set():
                    await send(_body(b": keep-alive\n\n"))


@dataclass(slots=True)
class Unsent:
    """How much of growing parts has gone out."""

    _sent: int = 0
    """Parts that are done."""
    _of_next: int = 0
    """Characters of the next."""

    def of(self, parts: Sequence[Part]) -> Iterator[Part]:
        """What has not gone out yet. The last part may grow."""
        for part in parts[self._sent :]:
            if isinstance(part, Call):
                yield part
            elif more := part.text[self._of_next :]:
                yield type(part)(more)
            if part is parts[-1] and isinstance(part, Text | Reasoning):
                self._of_next = len(part.text)
                return
            self._sent, self._of_next = self._sent + 1, 0


def count_ignored(values: Iterable[str], fields: Fields) -> None:
    """Count the fields of a request that are not honoured. A label must not be a client's: unknown ones are "other"."""
    for name in values:
        treatment, _ = fields.get(name, ("", ""))
        if treatment not in ("honoured", "refused"):
            IGNORED.labels(name if treatment else "other").inc()


def stop_sequences(raw: Any, name: str, most: int) -> tuple[str, ...]:
    """A text, or a list of them. Raises BadRequest."""
    stops = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(stops, list) or len(stops) > most or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest(f"{name} must be a text, or a list of up to {most} texts, none of them empty", param=name)
    return tuple(stops)


def about(session_id: str, turn: Turn) -> dict[str, Any]:
    """What turnlog adds to an answer: the turn's id, how it really ended, its weight versions."""
    return {
        "session_id": session_id,
        "epoch": turn.id.epoch,
        "index": turn.id.index,
        "finish_reason": turn.finish_reason.value,
        "stopped_by": turn.stopped_by,
        "weight_version_first": turn.versions[0],
        "weight_version_last": turn.versions[1],
        "own_s": turn.own_s,
    }


def logprobs_of(turn: Turn, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Of every sampled token, as recorded (a side engine's are not), in the shape that OpenAI's APIs share."""
    content = []
    for token, logprob in zip(turn.output.tolist(), float32s(turn.logprobs).tolist(), strict=bool(turn.logprobs)):
        text = decode([token])
        data = None if UNKNOWN in text else list(text.encode())  # a part of a character has no text of its own
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return content


def retry_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Whether a client should ask again, and after how long: SDKs go by it whatever the status says."""
    headers = [(b"x-should-retry", b"true" if error.retry else b"false")]
    if error.retry:
        headers.append((b"retry-after-ms", str(error.retry_after_ms).encode()))
    return headers


def _start(status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> Sent:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *more]}


def _body(data: bytes, *, last: bool = False) -> Sent:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def _send(send: Send, status: int, data: bytes, *more: tuple[bytes, bytes]) -> None:
    await send(_start(status, b"application/json", (b"content-length", str(len(data)).encode()), *more))
    await send(_body(data, last=True))
