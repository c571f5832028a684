"""Engines: which of them may serve a turn, folded from engine-status, and the sampling of one turn on them.

A session stays on the engine that rendezvous hashing assigns to it, so that its prefix stays in that engine's cache. An
overloaded engine is skipped in favour of the least loaded one, and a failed one rests behind a circuit breaker, which
is half open after a while. An engine's `abort` is not a stop: prompt + partial output are submitted again for the
remaining tokens, and the version spans show both weights. A natural stop that races an abort is a stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import Counter, Histogram

from turnlog.infra.engines.kinds import WITHOUT_IMAGES, Connect, connect_engine
from turnlog.infra.engines.protocol import (
    Adapter,
    Engine,
    EngineAborted,
    EngineDead,
    EngineImage,
    EngineRefused,
    EngineSlow,
    Generate,
    Grammar,
    OutputChunk,
)
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.turns import Ids
from turnlog.processors.core.views.fleet import DRAINING, GONE, RELEASED, SERVING, Fleet
from turnlog.processors.core.views.progress import WeightChain
from turnlog.producers.gateway.errors import EngineFailed, NoEngine, VersionGone
from turnlog.producers.gateway.expert_rows import TurnRows
from turnlog.schemas import ids
from turnlog.schemas.events import (
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    WeightVersionPublished,
)
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.events.turns import VersionSpan
from turnlog.schemas.topics import ENGINES, WEIGHTS

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
ENGINE_S = Histogram("turnlog_gateway_engine_seconds", "Duration of an engine call", ("engine",), buckets=SECONDS)
RESUBMITTED = Counter("turnlog_gateway_resubmitted", "Engine calls continued elsewhere or after an abort", ("cause",))


log = logging.getLogger(__name__)

REST_S, LONGEST_REST_S = 0.5, 15.0
RELEASED_S = 5.0
"""Minimum seconds after an engine was last seen `released` (its GPU is lent to the trainer) before a turn fails with
NoEngine."""
SILENCE_S = 2.0
"""Seconds of silence after which an engine is probed, and within which it must answer the probe."""
PAUSED = ("pause", "load", "check", "resume")
"""Phases of a weight update in which the engine samples nothing."""
PAUSES = 64
"""Number of past weight updates with which an engine's requests are compared."""
OVERLOAD = 32
"""A session leaves its own engine if that has this many more requests in flight than the least loaded one."""


@dataclass(slots=True)
class LiveEngine:
    """An engine, as known from the log and from our own requests."""

    id: str
    url: str
    state: str
    version: int
    client: Engine
    kind: str = "sglang"
    base_version: int | None = None
    """Version of the base weights if `version` is an adapter; else None."""
    in_flight: int = 0
    failures: int = 0
    failed_at: float = float("-inf")
    """Time at which the breaker last opened, by the clock of Engines. Requests that began before belong to that
    outage."""
    rests_until: float = float("-inf")
    heard: float = 0.0
    """Event-loop time of the last sign of life."""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts by which running requests are aborted."""
    listening: asyncio.Task[None] | None = None
    pauses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PAUSES))
    """Recent intervals in which it sampled nothing, by the clock of Engines."""
    away_since: float | None = None
    """Start of the current interval in which it samples nothing, because its GPU is lent to the trainer or it does not
    answer; else None."""

    swaps_since: float | None = None
    """Time since when a published version has been neither loaded nor refused here, so that the engine may be paused
    for it; else None."""

    def served_s(self, since: float, until: float, *, running: bool = False) -> float:
        """Return the seconds of a request in which the engine sampled; for a `running` request, those in which it
        certainly did."""
        open_since = (self.away_since, self.swaps_since if running else None)
        away = _apart([*self.pauses, *((start, until) for start in open_since if start is not None)])
        return max(0.0, until - since - sum(max(0.0, min(until, end) - max(since, start)) for start, end in away))

    def update_pauses(self, event: Event, now: float) -> None:
        """Update the intervals without sampling from a record of engine-status."""
        if event.state not in (SERVING, DRAINING):
            self.away_since = now if self.away_since is None else self.away_since
        elif self.away_since is not None:
            self.pauses.append((self.away_since, now))
            self.away_since = None
        elif isinstance(event, EngineWeightsLoaded):
            self.pauses.append((now - sum(event.seconds.get(phase, 0.0) for phase in PAUSED), now))
        if isinstance(event, EngineWeightsLoaded | EngineWeightsRefused):
            self.swaps_since = None

    @property
    def adapter(self) -> Adapter | None:
        """Adapter that a request must name, or None."""
        return None if self.base_version is None else Adapter(str(self.version), str(self.base_version))

    @asynccontextmanager
    async def heard_of(self) -> AsyncIterator[None]:
        """Watch the engine while the block runs a request. Raises EngineDead in the block once the engine is silent,
        because a stopped process, or a host that is gone, keeps its connections open."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as call:
                self.heard = loop.time()
                self.calls.add(call)
                self.in_flight += 1
                if self.listening is None or self.listening.done():
                    self.listening = asyncio.create_task(self._listen(loop))
                try:
                    yield
                finally:
                    self.in_flight -= 1
                    self.calls.discard(call)
        except TimeoutError:
            raise EngineDead(f"{self.url} is silent: no answer in {SILENCE_S:g} s") from None

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Probe the engine after each silence while requests run."""
        while self.calls:
            if (left := self.heard + SILENCE_S - loop.time()) > 0:
                await asyncio.sleep(left)
                continue
            try:
                await self.client.alive(timeout_s=SILENCE_S)
            except EngineDead:
                for call in self.calls:
                    call.reschedule(loop.time())
                return
            self.heard = loop.time()


def _apart(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the same time as spans that do not overlap."""
    reached = float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            yield max(start, reached), end
            reached = end


@dataclass(frozen=True, slots=True)
class WeightRequirement:
    """Weights from which a turn may be sampled."""

    least: int = -1
    pinned: int | None = None

    def accepts(self, engine: LiveEngine, chain: WeightChain) -> bool:
        """Return whether the engine serves and its weights qualify: exactly the pinned ones, or those of `least` or of
        a later step, whatever their numbers."""
        fits = not chain.is_older(engine.version, self.least) if self.pinned is None else engine.version == self.pinned
        return engine.state == SERVING and fits

    def is_gone(self, engines: Collection[LiveEngine]) -> bool:
        """Return whether the pinned weights are gone for good, because all engines have later ones."""
        there = [engine.version for engine in engines if engine.state != "gone"]
        return self.pinned is not None and bool(there) and min(there) > self.pinned

    def check(self, piece: OutputChunk) -> None:
        """Raise VersionGone if tokens come from other weights than the pinned ones, which were changed during the
        request."""
        other = [label for label, _ in piece.versions if self.pinned is not None and label != str(self.pinned)]
        if other:
            raise VersionGone(f"the engine's weights became version {other[0]} in the middle of a turn of {self}")

    def __str__(self) -> str:
        return f"weight version >= {self.least}" if self.pinned is None else f"weight version {self.pinned} exactly"


@dataclass(slots=True)
class EnginePool:
    """All engines of the run. `connect` makes a client of a URL and a kind; `clock` returns seconds."""

    connect: Connect = connect_engine
    clock: Callable[[], float] = time.monotonic
    kinds: set[str] = field(default_factory=set)
    """Kinds of engines that the settings name or that have reported, those of engines that are gone included."""
    live: dict[str, LiveEngine] = field(default_factory=dict)
    chain: WeightChain = field(default_factory=WeightChain)
    """Weight versions that were published."""
    fleet: Fleet = field(default_factory=Fleet)
    """Engines according to the log."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, event: Event) -> None:
        """Fold one record of weight-versions or of engine-status, whose records repeat url, state and version."""
        if isinstance(event, WeightVersionPublished):
            self.chain.apply(event)
            for each in self.live.values():
                if each.swaps_since is None and self.chain.is_news(event.version, each.version):
                    each.swaps_since = self.clock()
            self._wake()
            return
        self.fleet.apply(event)
        known = self.fleet.engines[event.engine_id]
        self.kinds.add(known.kind)
        engine = self.live.get(known.id)
        if engine is None:
            client = self.connect(known.url, known.kind)
            engine = LiveEngine(known.id, known.url, known.state, known.version, client, known.kind)
            self.live[known.id] = engine
        elif (engine.url, engine.kind) != (known.url, known.kind):
            engine.client = self.connect(known.url, known.kind)
            engine.url, engine.kind = known.url, known.kind
        engine.state, engine.version = known.state, known.version
        engine.base_version = self.fleet.reports[known.id].base_version
        engine.update_pauses(event, self.clock())
        engine.failures, engine.rests_until = 0, float("-inf")
        self._wake()

    @property
    def is_mixed(self) -> bool:
        """Whether the run has engines of several kinds, so that records name the kind that sampled a token."""
        return len(self.kinds) > 1

    async def choose(
        self, session_id: str, wanted: WeightRequirement, *, timeout_s: float, images: bool = False
    ) -> LiveEngine:
        """Return the engine for a turn; wait for one that may serve it. The wait has no limit while an engine's GPU is
        lent to the trainer for a step. A turn with `images` gets an engine of a kind that takes them, if the run has
        one. Raises NoEngine."""
        deadline = self.clock() + timeout_s
        while True:
            now = self.clock()
            if any(engine.state == RELEASED for engine in self.live.values()):
                deadline = max(deadline, now + RELEASED_S)
            suited = self._engines_for(images)
            able = [engine for engine in suited if wanted.accepts(engine, self.chain)]
            awake = [engine for engine in able if engine.rests_until <= now]
            if awake:
                return self._choose_engine(session_id, awake)
            if wanted.is_gone(suited):
                raise VersionGone(f"{self._why(wanted, 0)}, and weights do not go back")
            if now >= deadline:
                raise NoEngine(self._why(wanted, timeout_s))
            rest = min((engine.rests_until for engine in able), default=deadline)
            await self._change(min(rest, deadline) - now)

    def record_failure(self, engine: LiveEngine, began: float, error: EngineDead) -> None:
        """Open the breaker after a failed request that began at `began`. The engine rests, longer each time that it is
        found dead after a rest. All requests that were in flight when it died are one outage."""
        if began <= engine.failed_at:
            return
        rest = min(REST_S * 2**engine.failures, LONGEST_REST_S)
        engine.failures += 1
        engine.failed_at = self.clock()
        engine.rests_until = engine.failed_at + rest
        log.warning("engine %s gets no requests for %.1f s: %s", engine.id, rest, error)

    def record_success(self, engine: LiveEngine) -> None:
        """Close the breaker: the engine is alive."""
        engine.failures, engine.rests_until = 0, float("-inf")

    async def close(self) -> None:
        """Close every client."""
        for engine in self.live.values():
            if engine.listening is not None:
                engine.listening.cancel()
            await engine.client.close()

    def _engines_for(self, images: bool) -> list[LiveEngine]:
        """Return the engines whose kind takes the request; all if no engine that is there does, since one that refuses
        it says why."""
        every = list(self.live.values())
        return [one for one in every if images and one.kind not in WITHOUT_IMAGES and one.state != GONE] or every

    def _choose_engine(self, session_id: str, engines: list[LiveEngine]) -> LiveEngine:
        own = max(engines, key=lambda engine: ids.digest(session_id, engine.id)) if len(engines) > 1 else engines[0]
        idlest = min(engines, key=lambda engine: engine.in_flight)
        return idlest if own.in_flight > idlest.in_flight + OVERLOAD else own

    def _why(self, wanted: WeightRequirement, timeout_s: float) -> str:
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


def side_engines(specs: Sequence[str], kind: str, connect: Connect) -> dict[str, EnginePool]:
    """Return the engines of [gateway] side_engines (auxiliary models) by pattern, all of one kind.
    Nothing reports their status: they serve until they are found dead."""
    found: dict[str, EnginePool] = {}
    for pattern, _, url in (one.partition("=") for one in specs):
        named = f"side/{url}"
        engines = found.setdefault(pattern, EnginePool(connect))
        engines.live[named] = LiveEngine(named, url, "serving", -1, connect(url, kind), kind)
    return found


async def follow(engines: EnginePool, log_: Log, events: EventLog, *, current: asyncio.Event) -> None:
    """Fold engine-status and weight-versions forever. Sets `current` once the records that were there at the start are
    folded."""
    partitions = [Partition(ENGINES.name, 0), Partition(WEIGHTS.name, 0)]
    async with log_.reader() as reader:
        ends = await assign_from_start(log_, reader, partitions)
        while True:
            if caught_up(reader, ends):
                current.set()
            for record in await reader.poll(timeout_s=1.0):
                if (event := await events.decode_known(record)) is not None:
                    engines.apply(event)


class Departure(asyncio.Event):
    """Event that all clients of a turn have left. It calls a function, so that no task has to wait for it."""

    _left: Callable[[], object] | None = None

    def then(self, left: Callable[[], object] | None) -> None:
        """Call `left` once, as soon as the event is set; None calls nothing from now on."""
        self._left = left
        if self.is_set():
            self.set()

    def set(self) -> None:
        """See asyncio.Event."""
        super().set()
        left, self._left = self._left, None
        if left is not None:
            left()


RESUBMISSIONS = 32
"""Maximum number of engine requests for one turn; aborts and engine deaths cause more than one."""


@dataclass(slots=True)
class Draft:
    """Output of a turn so far, over all its engine requests."""

    started: float
    """Event-loop time of admission."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""
    """The outcome: stop, length, abort, dead or error; empty while a request runs."""
    cached_tokens: int = 0
    engine_id: str = ""
    engine_version: int = -1
    queue_s: float = 0.0
    first_token_s: float = 0.0
    failure: Exception | None = None
    """Cause of a draft that has tokens and ended in `error`."""
    served_s: float = 0.0
    """Seconds in which an engine sampled for it, over the requests that have ended."""
    call: tuple[LiveEngine, float] | None = None
    """The engine whose request runs, and the start of that request by the clock of Engines."""

    sampled_at: float = 0.0
    """Time at which that request last returned tokens, by the same clock."""

    @contextmanager
    def served_by(self, engine: LiveEngine, clock: Callable[[], float]) -> Iterator[None]:
        """Measure the sampling time of an engine request. Tokens that a dead engine had sampled and not sent are lost,
        and their time does not count."""
        began = self.sampled_at = clock()
        self.call = engine, began
        try:
            yield
        finally:
            until = self.sampled_at if self.finish == "dead" else clock()
            self.served_s, self.call = self.served_s + engine.served_s(began, until), None

    def own_s(self, now: float) -> float:
        """Return the seconds in which an engine sampled for the turn until `now`, by the clock of Engines. The rest of
        its life is waiting time."""
        if self.call is None:
            return self.served_s
        engine, began = self.call
        return self.served_s + engine.served_s(began, now, running=True)

    def versions(self) -> tuple[int, int]:
        """Return the weight versions of the first and the last token."""
        if not self.spans:
            return self.engine_version, self.engine_version
        return self.spans[0].version, self.spans[-1].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples drafts on live engines."""

    engines: EnginePool
    timeout_s: float
    ends: Sequence[int]
    eos: frozenset[int] = frozenset()
    """Ids at which engines stop by themselves."""
    vocabulary: int = 2**31
    """Size of the model's vocabulary. An output with an id from here on is rejected, since it could not be prompted
    again."""
    keyed: bool = False
    """True if engines keep the cache of old weights ([engine] update = in_place). Requests then share it only within
    one weight version."""
    policy: bool = True
    """False for auxiliary models, whose weights have no version here."""

    async def sample(
        self,
        session_id: str,
        prompt: Ids,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        wanted: WeightRequirement,
        stream: bool,
        gone: Departure,
        progress: Callable[[list[int]], None],
        experts: TurnRows | None = None,
        images: tuple[EngineImage, ...] = (),
        stop: tuple[str, ...] = (),
        grammar: Grammar | None = None,
        stopped: Callable[[list[int]], bool] = lambda _: False,
        draft: Draft | None = None,
    ) -> Draft:
        """Sample a turn's output. `progress` is called with new ids. `stopped` returns whether an output contains one
        of `stop`, even if one request returned its beginning and another its end. `draft` is a new draft that the
        caller observes. Raises EngineFailed, NoEngine if there is no token."""
        loop = asyncio.get_running_loop()
        draft = draft or Draft(loop.time())
        stops = dict.fromkeys((*sampling.stop_token_ids, *self.ends))
        try:
            for attempt in range(RESUBMISSIONS):
                left = self.timeout_s - (loop.time() - draft.started)
                engine = await self._engine(draft, session_id, wanted, left, images=bool(images), first=attempt == 0)
                request = Generate(
                    rid=secrets.token_hex(16),
                    input_ids=np.concatenate((prompt, np.array(draft.ids, dtype=np.int32))) if draft.ids else prompt,
                    temperature=sampling.temperature,
                    max_new_tokens=max_new_tokens - len(draft.ids),
                    stop_token_ids=tuple(stops),
                    stop=stop,
                    grammar=grammar,
                    experts_from=experts.next if experts is not None else None,
                    images=images,
                    cache_key=str(engine.version) if self.keyed else "",
                    adapter=engine.adapter,
                )
                with draft.served_by(engine, self.engines.clock), _aborted_when(gone, engine, request.rid):
                    await self._call(engine, request, draft, wanted, stream, progress, experts, max(1.0, left))
                draft.finish = _resolve_finish(draft, self.eos.union(stops), max_new_tokens, stopped)
                if draft.finish in ("stop", "length") and experts is not None:
                    experts.demand(len(prompt) + len(draft.ids))
                if draft.finish in ("stop", "length") or (draft.finish == "abort" and gone.is_set()):
                    return draft
                if grammar is not None and draft.ids:
                    raise EngineAborted("cut off under a grammar, which cannot be continued: ask again")
                RESUBMITTED.labels(draft.finish).inc()
            raise EngineAborted(f"cut off {RESUBMISSIONS} times: publish weights less often ([trainer] publish_every)")
        except (EngineRefused, EngineAborted, NoEngine) as error:
            failure = error if isinstance(error, NoEngine) else EngineFailed(f"engine {draft.engine_id}: {error}")
            if not draft.ids:
                raise failure from error
            draft.finish, draft.failure = "error", failure
            return draft

    async def _engine(
        self, draft: Draft, session_id: str, wanted: WeightRequirement, left: float, *, images: bool, first: bool
    ) -> LiveEngine:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        engine = await self.engines.choose(session_id, wanted, timeout_s=max(0.0, left), images=images)
        if first:
            draft.queue_s = loop.time() - asked
        draft.engine_id, draft.engine_version = engine.id, engine.version
        return engine

    async def _call(
        self,
        engine: LiveEngine,
        request: Generate,
        draft: Draft,
        wanted: WeightRequirement,
        stream: bool,
        progress: Callable[[list[int]], None],
        experts: TurnRows | None,
        timeout_s: float,
    ) -> None:
        """Run one engine request into the draft. Raises EngineRefused, VersionGone."""
        loop = asyncio.get_running_loop()
        begun, began, before, kind = loop.time(), self.engines.clock(), len(draft.ids), engine.kind
        labels: tuple[tuple[str, int], ...] = ()
        rows: bytes | None = None
        try:
            async with engine.heard_of():
                async for piece in engine.client.generate(request, stream=stream, timeout_s=timeout_s):
                    engine.heard = loop.time()
                    self._check(piece, engine, request, len(draft.ids) - before)
                    wanted.check(piece)
                    self._add(draft, piece, loop.time())
                    labels = piece.versions or labels
                    rows = piece.experts
                    progress(piece.ids)
                    draft.finish = piece.finish or ""
            self.engines.record_success(engine)
        except EngineDead as error:
            draft.finish = "dead"
            self._check_time(error, engine, began)
            self.engines.record_failure(engine, began, error)
        finally:
            ENGINE_S.labels(engine.id).observe(loop.time() - begun)
            kv = int(request.cache_key) if request.cache_key else None
            if self.policy:
                kind = kind if self.engines.is_mixed else ""
                _extend(draft.spans, _spans(labels, len(draft.ids) - before, engine, kv, kind))
        if experts is not None and rows is not None:
            experts.take(rows, len(request.input_ids) + len(draft.ids) - before)

    def _check_time(self, error: EngineDead, engine: LiveEngine, began: float) -> None:
        """Raise EngineRefused if the engine is alive but needs longer than a turn may take. A repeated request would
        take as long, and the time that a session waits for engines never counts towards its deadline."""
        sampled_s = engine.served_s(began, self.engines.clock())
        if isinstance(error, EngineSlow) and sampled_s > self.timeout_s / 2:
            raise EngineRefused(
                f"{engine.url} sampled for {sampled_s:.0f} s and did not finish: raise [engine] request_timeout_s "
                f"({self.timeout_s:g} s), or ask for fewer tokens (max_new_tokens)"
            )

    def _check(self, piece: OutputChunk, engine: LiveEngine, request: Generate, sampled: int) -> None:
        """Check a piece of output; `sampled` is the number of the request's tokens before it. Raises EngineRefused,
        EngineDead."""
        if sampled + len(piece.ids) > request.max_new_tokens:
            raise EngineRefused(
                f"more than the {request.max_new_tokens} tokens that {engine.url} was asked for: it ignores "
                "sampling_params.max_new_tokens; use an engine that respects it"
            )
        if max(piece.ids, default=0) >= self.vocabulary:
            raise EngineRefused(
                f"token {max(piece.ids)} is outside the vocabulary of {self.vocabulary}: [model] path is not the model "
                f"that {engine.url} serves"
            )
        if self.policy:
            _check_labels(piece, engine)

    def _add(self, draft: Draft, piece: OutputChunk, now: float) -> None:
        if piece.ids and not draft.ids:
            draft.first_token_s = now - draft.started
        draft.ids += piece.ids
        draft.sampled_at = self.engines.clock() if piece.ids else draft.sampled_at
        draft.logprobs += piece.logprobs
        draft.cached_tokens = max(draft.cached_tokens, piece.cached_tokens)


def _resolve_finish(draft: Draft, ends: Set[int], max_new_tokens: int, stopped: Callable[[list[int]], bool]) -> str:
    """Return how the draft ended. An output that was complete when it was aborted or its engine died is complete."""
    if draft.finish in ("abort", "dead"):
        if draft.ids and (draft.ids[-1] in ends or stopped(draft.ids)):
            return "stop"
        if len(draft.ids) >= max_new_tokens:
            return "length"
    return draft.finish


@contextmanager
def _aborted_when(gone: Departure, engine: LiveEngine, rid: str) -> Iterator[None]:
    """Abort the engine's request once all clients have left, while the block runs."""
    aborting: list[asyncio.Task[None]] = []
    gone.then(lambda: aborting.append(asyncio.create_task(_abort(engine, rid))))
    try:
        yield
    finally:
        gone.then(None)
        for each in aborting:
            each.cancel()


async def _abort(engine: LiveEngine, rid: str) -> None:
    try:
        await engine.client.abort(rid)
    except EngineDead:
        return  # the request itself sees it


def _check_labels(piece: OutputChunk, engine: LiveEngine) -> None:
    """Raise EngineDead or EngineRefused for a label that names no version. An engine that restarted serves the weights
    of its model folder under such a label until its loader arrives, whatever version it is registered with."""
    label = next((label for label, _ in piece.versions if not label.isdecimal()), None)
    if label is None:
        return
    if engine.version >= 0:
        raise EngineDead(f"{engine.url} samples with weights labelled {label!r}, not version {engine.version}: it "
                         "restarted, and its weight loader has not reloaded it yet")  # fmt: skip
    raise EngineRefused(
        f"weights labelled {label!r} at {engine.url} have no version: start the engine with --weight-version N, or let "
        "its weight loader load a published version"
    )


def _spans(
    labels: Sequence[tuple[str, int]], count: int, engine: LiveEngine, kv: int | None, kind: str
) -> list[VersionSpan]:
    """Return the version spans of one request's tokens. `kv` is the version of the weights that computed the cache.
    Raises EngineRefused for an engine that never reported a version."""

    def span(version: int, length: int) -> VersionSpan:
        return VersionSpan(version, length, None if kv == version else kv, kind)

    spans = [span(int(label), length) for label, length in labels if length]
    missing = count - sum(span.length for span in spans)
    if missing < 0:
        raise EngineRefused(f"version spans {labels} cover more than the {count} tokens that were sampled")
    if missing and engine.version < 0:
        raise EngineRefused(f"{engine.url} does not say with which weights it sampled, and is registered with none")
    if missing:
        spans.append(span(engine.version, missing))
    return spans


def _extend(spans: list[VersionSpan], more: Sequence[VersionSpan]) -> None:
    for span in more:
        if spans and dataclasses.replace(spans[-1], length=span.length) == span:
            spans[-1] = dataclasses.replace(span, length=spans[-1].length + span.length)
        else:
            spans.append(span)
