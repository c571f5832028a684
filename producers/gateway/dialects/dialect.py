"""What a dialect is: an API that agents speak, read into one kind of request, and turns answered in its shape, whole or
as server-sent events. The last byte leaves after the turn is on the log.

To add one, write its module here and enter it in DIALECTS of app.py. Inside the gateway, and on the log, messages have
the shape of OpenAI's chat: a dialect whose requests differ makes such messages of them before they are read.
Source: ASGI HTTP 2.3 (http.disconnect).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message as Sent
from starlette.types import Receive, Scope, Send

from turnlog.producers.gateway import ERRORS, GatewayError, SessionEnded
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.images import Admitted, Picture
from turnlog.producers.gateway.messages import Message, normalised, settled
from turnlog.producers.gateway.sessions import Running
from turnlog.schemas.types import TurnId


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, in any dialect."""

    api: str
    """As TurnCompleted has it."""
    raw: list[Any]
    """messages as they came"""
    messages: tuple[Message, ...]
    tools: list[Any] | None
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    """In a stream."""
    sha256: str
    """Of the body's bytes."""
    images: Mapping[str, Admitted] = field(default_factory=dict)
    """By sha256, once they are in the store."""

    @property
    def pictures(self) -> list[Picture]:
        """Every image of the messages, in order."""
        return [picture for one in self.messages for picture in one.pictures]


class Answer(Protocol):
    """One turn in a dialect's shape, whole or as the data of server-sent events."""

    def whole(self, turn: Turn) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def beginning(self) -> bytes:
        """Sent at once, before anything is sampled."""
        ...

    def text(self, text: str) -> bytes:
        """More of the content."""
        ...

    def ending(self, turn: Turn, sent: str) -> bytes:
        """All that is missing of a turn of whose content `sent` has gone out."""
        ...

    def failed(self, error: GatewayError) -> bytes:
        """In place of the ending."""
        ...


class Dialect(Protocol):
    """One API."""

    path: str
    """Where turns are asked for."""

    def request(self, body: bytes, read: Callable[[Any], tuple[Message, ...]] = normalised) -> TurnRequest:
        """`read` makes messages of what came. Raises BadRequest naming the field."""
        ...

    def answer(self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str) -> Answer:
        """The shape of the answer to a request."""
        ...

    def refusal(self, error: GatewayError) -> bytes:
        """The body of an answer without a turn."""
        ...


class TurnResponse(Response):
    """Waits for `running` (or has a recorded turn already) and answers with it."""

    def __init__(
        self, turn: Running | Turn, request: TurnRequest, dialect: Dialect, *, session_id: str, model: str,
        keep_alive_s: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._turn = turn
        self._dialect = dialect
        self._answer = dialect.answer(request, turn.id, session_id=session_id, model=model)
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
            await _send(send, error.status, self._dialect.refusal(error))
            return
        if turn is not None:
            await _send(send, 200, self._answer.whole(turn))
            turn.handed_over |= not left.is_set()

    async def _events(self, send: Send, left: asyncio.Event) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        await send(_body(self._answer.beginning()))
        sent = ""
        if isinstance(self._turn, Running):
            sent = await self._follow(self._turn, send, left)
        try:
            turn = await self._recorded(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await send(_body(self._answer.failed(error), last=True))
            return
        if turn is not None:
            await send(_body(self._answer.ending(turn, sent), last=True))
            turn.handed_over |= not left.is_set()

    async def _follow(self, running: Running, send: Send, left: asyncio.Event) -> str:
        """Send content as it becomes certain, until the turn is on the log; what was sent."""
        sent = ""
        while not running.task.done():
            changed = running.changed
            if len(ready := running.text[: settled(running.text)]) > len(sent):
                await send(_body(self._answer.text(ready[len(sent) :])))
                sent = ready
            if running.task.done() or changed.is_set():
                continue
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                if not left.is_set():
                    await send(_body(b": keep-alive\n\n"))
        return sent


def _start(status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> Sent:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *more]}


def _body(data: bytes, *, last: bool = False) -> Sent:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def _send(send: Send, status: int, data: bytes) -> None:
    await send(_start(status, b"application/json", (b"content-length", str(len(data)).encode())))
    await send(_body(data, last=True))
