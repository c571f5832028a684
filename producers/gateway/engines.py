"""Engines: which of them may serve a turn, folded from engine-status, and the sampling of one turn on them.

A session stays on the engine that rendezvous hashing gives it, so that its prefix stays in that engine's cache; an
overloaded one is passed over for the least loaded, one that failed rests behind a breaker (half open after a while).
An engine's `abort` is not a stop: prompt + partial output are submitted again for the tokens that are left, and the
version spans show both weights. A natural stop that races an abort is a stop. Routed experts (R3) are asked for turn by
turn, and what the calls of a turn gave is stitched.

NoRouting   [gateway] routed_experts is on, and the model is no mixture of experts
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Histogram

from turnlog.infra.engine import Engine, EngineAborted, EngineDead, EngineImage, EngineRefused, Generate, Piece, SGLang
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.experts import own_rows
from turnlog.producers.gateway import EngineFailed, NoEngine
from turnlog.schemas import UndecodableRecord, ids
from turnlog.schemas.events import Event
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.events.turns import VersionSpan
from turnlog.schemas.topics import ENGINES

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
ENGINE_S = Histogram("turnlog_gateway_engine_seconds", "One engine call", ("engine",), buckets=SECONDS)
RESUBMITTED = Counter("turnlog_gateway_resubmitted", "Engine calls continued elsewhere or after an abort", ("cause",))

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""How configurations of Qwen, DeepSeek and Mixtral models say how many experts a layer has."""


class NoRouting(Exception):
    """Remedy: [gateway] routed_experts auto or off, or another [model] path."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Shape of a model's routing, and whether a turn without its rows is refused."""

    layers: int
    top_k: int
    required: bool

    def turn(self, base_len: int) -> TurnRows:
        """The collector of a turn that takes `base_len` tokens from its storage parent."""
        return TurnRows(self, own_rows(base_len, base_len)[0])


@dataclass(slots=True)
class TurnRows:
    """Rows of one turn, from position `start` on, over all engine calls."""

    routing: Routing
    start: int
    chunks: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The first position that is still wanted: an engine call asks from here on."""
        return self.start + sum(len(chunk) for chunk in self.chunks)

    def take(self, content: bytes, length: int) -> None:
        """Add what a call gave; `length`: prompt + output so far. Raises EngineRefused unless these are the rows of
        `next` to length - 2."""
        width, count = self.routing.layers * self.routing.top_k, length - 1 - self.next
        if len(content) != 4 * width * count:
            raise EngineRefused(
                f"the engine gave {len(content)} bytes of routed experts for {count} positions of {self.routing.layers}"
                f" layers x {self.routing.top_k}: is [model] path the model that it serves?"
            )
        ids = np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False)
        self.chunks.append(ids.reshape(count, self.routing.layers, self.routing.top_k))

    def rows(self, length: int) -> NDArray[np.int32] | None:
        """The turn's own rows [rows, layers, top_k] where it has `length` tokens; None where some are missing."""
        if self.next != length - 1:
            return None
        return np.concatenate([np.empty((0, self.routing.layers, self.routing.top_k), np.int32), *self.chunks])

    def demand(self, length: int) -> None:
        """Raises EngineRefused where rows are required and missing."""
        if self.routing.required and self.next != length - 1:
            raise EngineRefused(
                "it returns no routed experts: start it with --enable-return-routed-experts, or set [gateway] "
                "routed_experts = auto"
            )


def routing_of(config: Mapping[str, Any], wanted: str) -> Routing | None:
    """The routing that [gateway] routed_experts asks for of a model with this config.json. Raises NoRouting."""
    text = config.get("text_config") or config
    experts = max(int(text.get(name) or 0) for name in EXPERT_COUNTS)
    layers, top_k = int(text.get("num_hidden_layers") or 0), int(text.get("num_experts_per_tok") or 0)
    if min(experts, layers, top_k) < 1:
        if wanted == "on":
            raise NoRouting(
                f"[gateway] routed_experts is on, but config.json names {experts} experts, {top_k} per token, in "
                f"{layers} layers: set it to auto or off, or [model] path to a mixture of experts"
            )
        return None
    return None if wanted == "off" else Routing(layers, top_k, required=wanted == "on")


log = logging.getLogger(__name__)

REST_S, LONGEST_REST_S = 0.5, 15.0
OVERLOAD = 32
"""Requests in flight beyond the least loaded engine's at which a session leaves its own engine."""


@dataclass(slots=True)
class LiveEngine:
    """One engine as the log and our own requests know it."""

    id: str
    url: str
    state: str
    version: int
    client: Engine
    in_flight: int = 0
    failures: int = 0
    failed_at: float = float("-inf")
    """When the breaker opened last, by the clock of Engines; requests that began before are of that outage."""
    rests_until: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which weights a turn may be sampled from."""

    least: int = -1
    pinned: int | None = None

    def accepts(self, engine: LiveEngine) -> bool:
        """Whether the engine serves, with weights that fit."""
        fits = engine.version >= self.least if self.pinned is None else engine.version == self.pinned
        return engine.state == "serving" and fits

    def __str__(self) -> str:
        return f"weight version >= {self.least}" if self.pinned is None else f"weight version {self.pinned} exactly"


@dataclass(slots=True)
class Engines:
    """All engines of the run. `connect` makes a client of a URL; `clock` counts seconds."""

    connect: Callable[[str], Engine] = SGLang
    clock: Callable[[], float] = time.monotonic
    live: dict[str, LiveEngine] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, event: Event) -> None:
        """Fold one record of engine-status; every one repeats url, state and version."""
        engine = self.live.get(event.engine_id)
        if engine is None:
            engine = LiveEngine(event.engine_id, event.url, event.state, event.version, self.connect(event.url))
            self.live[event.engine_id] = engine
        elif engine.url != event.url:
            engine.url, engine.client = event.url, self.connect(event.url)
        engine.state, engine.version = event.state, event.version
        engine.failures, engine.rests_until = 0, float("-inf")
        self._wake()

    async def choose(self, session_id: str, wanted: Wanted, *, timeout_s: float) -> LiveEngine:
        """The engine for a turn, waiting for one that may serve it. Raises NoEngine."""
        deadline = self.clock() + timeout_s
        while True:
            now = self.clock()
            able = [engine for engine in self.live.values() if wanted.accepts(engine)]
            awake = [engine for engine in able if engine.rests_until <= now]
            if awake:
                return self._preferred(session_id, awake)
            if now >= deadline:
                raise NoEngine(self._why(wanted, timeout_s))
            rest = min((engine.rests_until for engine in able), default=deadline)
            await self._change(min(rest, deadline) - now)

    def failed(self, engine: LiveEngine, began: float, error: EngineDead) -> None:
        """Open the breaker for a request that began then: the engine rests, longer each time that it is found dead
        after a rest. Requests that were in flight when it died are one outage, however many they are."""
        if began <= engine.failed_at:
            return
        rest = min(REST_S * 2**engine.failures, LONGEST_REST_S)
        engine.failures += 1
        engine.failed_at = self.clock()
        engine.rests_until = engine.failed_at + rest
        log.warning("engine %s rests for %.1f s: %s", engine.id, rest, error)

    def served(self, engine: LiveEngine) -> None:
        """Close the breaker: it is alive."""
        engine.failures, engine.rests_until = 0, float("-inf")

    async def close(self) -> None:
        """Release every client."""
        for engine in self.live.values():
            await engine.client.close()

    def _preferred(self, session_id: str, engines: list[LiveEngine]) -> LiveEngine:
        own = max(engines, key=lambda engine: ids.digest(session_id, engine.id)) if len(engines) > 1 else engines[0]
        idlest = min(engines, key=lambda engine: engine.in_flight)
        return idlest if own.in_flight > idlest.in_flight + OVERLOAD else own

    def _why(self, wanted: Wanted, timeout_s: float) -> str:
        known = ", ".join(f"{each.id} is {each.state} with {each.version}" for each in self.live.values())
        return f"no engine with {wanted} within {timeout_s:g} s ({known or 'none is registered'}); see `turnlog status`"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


async def follow(engines: Engines, log_: Log, events: EventLog, *, current: asyncio.Event) -> None:
    """Fold engine-status from its start, for ever; sets `current` when what was there is folded."""
    partition = Partition(ENGINES.name, 0)
    starts = await log_.start_offsets([partition])
    end = (await log_.end_offsets([partition]))[partition]
    async with log_.reader() as reader:
        reader.assign(starts)
        while True:
            if reader.position(partition) >= end:
                current.set()
            for record in await reader.poll(timeout_s=1.0):
                try:
                    engines.apply(await events.decode(record))
                except UndecodableRecord as error:
                    log.warning("passed over %s[%d]@%d: %s", record.topic, record.partition, record.offset, error)


RESUBMISSIONS = 32
"""Aborts and deaths that one turn survives."""


@dataclass(slots=True)
class Draft:
    """Output so far, over all engine calls of the turn."""

    started: float
    """Event loop time of admission."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""
    """stop | length | abort | error"""
    cached_tokens: int = 0
    engine_id: str = ""
    engine_version: int = -1
    queue_s: float = 0.0
    first_token_s: float = 0.0
    failure: Exception | None = None
    """Why a draft with tokens ended in `error`."""

    def versions(self) -> tuple[int, int]:
        """Weight version of the first and of the last token."""
        if not self.spans:
            return self.engine_version, self.engine_version
        return self.spans[0].version, self.spans[-1].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Runs drafts on live engines."""

    engines: Engines
    timeout_s: float
    end_of_turn: int | None
    eos: frozenset[int] = frozenset()
    """Ids at which engines stop unasked."""

    async def sample(
        self,
        session_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        wanted: Wanted,
        stream: bool,
        gone: asyncio.Event,
        progress: Callable[[list[int]], None],
        experts: TurnRows | None = None,
        images: tuple[EngineImage, ...] = (),
    ) -> Draft:
        """The turn's output; `progress` is told of new ids. Raises EngineFailed, NoEngine when there is no token."""
        loop = asyncio.get_running_loop()
        draft = Draft(loop.time())
        stops = dict.fromkeys((*sampling.stop_token_ids, *([] if self.end_of_turn is None else [self.end_of_turn])))
        try:
            for attempt in range(RESUBMISSIONS):
                left = self.timeout_s - (loop.time() - draft.started)
                engine = await self._engine(draft, session_id, wanted, left, first=attempt == 0)
                request = Generate(
                    rid=uuid.uuid4().hex,
                    input_ids=[*prompt, *draft.ids],
                    temperature=sampling.temperature,
                    max_new_tokens=max_new_tokens - len(draft.ids),
                    stop_token_ids=tuple(stops),
                    experts_from=experts.next if experts is not None else None,
                    images=images,
                )
                await self._call(engine, request, draft, stream, gone, progress, experts, max(1.0, left))
                draft.finish = _ended(draft, self.eos.union(stops), max_new_tokens)
                if draft.finish in ("stop", "length") and experts is not None:
                    experts.demand(len(prompt) + len(draft.ids))
                if draft.finish in ("stop", "length") or (draft.finish == "abort" and gone.is_set()):
                    return draft
                RESUBMITTED.labels(draft.finish).inc()
            raise EngineAborted(f"cut off {RESUBMISSIONS} times; do weight updates pause with mode `retract`?")
        except (EngineRefused, EngineAborted, NoEngine) as error:
            failure = error if isinstance(error, NoEngine) else EngineFailed(f"engine {draft.engine_id}: {error}")
            if not draft.ids:
                raise failure from error
            draft.finish, draft.failure = "error", failure
            return draft

    async def _engine(self, draft: Draft, session_id: str, wanted: Wanted, left: float, *, first: bool) -> LiveEngine:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        engine = await self.engines.choose(session_id, wanted, timeout_s=max(0.0, left))
        if first:
            draft.queue_s = loop.time() - asked
        draft.engine_id, draft.engine_version = engine.id, engine.version
        return engine

    async def _call(
        self,
        engine: LiveEngine,
        request: Generate,
        draft: Draft,
        stream: bool,
        gone: asyncio.Event,
        progress: Callable[[list[int]], None],
        experts: TurnRows | None,
        timeout_s: float,
    ) -> None:
        """One engine call into the draft. Raises EngineRefused."""
        loop = asyncio.get_running_loop()
        begun, began, before = loop.time(), self.engines.clock(), len(draft.ids)
        labels: tuple[tuple[str, int], ...] = ()
        rows: bytes | None = None
        watch = asyncio.create_task(_abort_when_gone(gone, engine, request.rid))
        engine.in_flight += 1
        try:
            async for piece in engine.client.generate(request, stream=stream, timeout_s=timeout_s):
                if len(draft.ids) - before + len(piece.ids) > request.max_new_tokens:
                    raise EngineRefused(
                        f"more than the {request.max_new_tokens} tokens that {engine.url} was asked for: it ignores "
                        "sampling_params.max_new_tokens; serve with an engine that keeps it"
                    )
                _check_labels(piece, engine)
                self._add(draft, piece, loop.time())
                labels = piece.versions or labels
                rows = piece.experts
                progress(piece.ids)
                draft.finish = piece.finish or ""
            self.engines.served(engine)
        except EngineDead as error:
            draft.finish = "dead"
            self.engines.failed(engine, began, error)
        finally:
            watch.cancel()
            engine.in_flight -= 1
            ENGINE_S.labels(engine.id).observe(loop.time() - begun)
            _extend(draft.spans, _spans(labels, len(draft.ids) - before, engine))
        if experts is not None and rows is not None:
            experts.take(rows, len(request.input_ids) + len(draft.ids) - before)

    def _add(self, draft: Draft, piece: Piece, now: float) -> None:
        if piece.ids and not draft.ids:
            draft.first_token_s = now - draft.started
        draft.ids += piece.ids
        draft.logprobs += piece.logprobs
        draft.cached_tokens = max(draft.cached_tokens, piece.cached_tokens)


def _ended(draft: Draft, ends: Set[int], max_new_tokens: int) -> str:
    """How the draft ended: what an abort or a death found finished is finished."""
    if draft.finish in ("abort", "dead"):
        if draft.ids and draft.ids[-1] in ends:
            return "stop"
        if len(draft.ids) >= max_new_tokens:
            return "length"
    return draft.finish


async def _abort_when_gone(gone: asyncio.Event, engine: LiveEngine, rid: str) -> None:
    await gone.wait()
    try:
        await engine.client.abort(rid)
    except EngineDead:
        return  # the call itself sees it


def _check_labels(piece: Piece, engine: LiveEngine) -> None:
    """Raises EngineDead, EngineRefused for a label that names no version: an engine that restarted serves the weights
    of its model folder under such a one until its loader comes, whatever it is registered with."""
    label = next((label for label, _ in piece.versions if not label.isdecimal()), None)
    if label is None:
        return
    if engine.version >= 0:
        raise EngineDead(f"{engine.url} samples with weights labelled {label!r}, not version {engine.version}: it "
                         "restarted, and its weight loader has yet to come")  # fmt: skip
    raise EngineRefused(
        f"weights labelled {label!r} at {engine.url} have no version: start the engine with --weight-version N, or let "
        "its weight loader load a published version"
    )


def _spans(labels: Sequence[tuple[str, int]], count: int, engine: LiveEngine) -> list[VersionSpan]:
    """Version spans of one call's tokens. Raises EngineRefused for an engine that never said."""
    spans = [VersionSpan(int(label), length) for label, length in labels if length]
    missing = count - sum(span.length for span in spans)
    if missing < 0:
        raise EngineRefused(f"version spans {labels} cover more than the {count} tokens that were sampled")
    if missing and engine.version < 0:
        raise EngineRefused(f"{engine.url} does not say with which weights it sampled, and is registered with none")
    if missing:
        spans.append(VersionSpan(engine.version, missing))
    return spans


def _extend(spans: list[VersionSpan], more: Sequence[VersionSpan]) -> None:
    for span in more:
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].length + span.length)
        else:
            spans.append(span)
