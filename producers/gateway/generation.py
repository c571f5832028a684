"""Sampling one turn: an engine is chosen, its pieces are gathered, what an abort or a death cut off is continued.

An engine's `abort` is not a stop: prompt + partial output are submitted again for the tokens that are left, and the
version spans show both weights. A natural stop that races an abort is a stop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from turnlog.infra.engine import EngineAborted, EngineDead, EngineImage, EngineRefused, Generate, Piece
from turnlog.producers.gateway.engines import Engines, LiveEngine, Wanted
from turnlog.producers.gateway.errors import EngineFailed, NoEngine
from turnlog.producers.gateway.experts import TurnRows
from turnlog.producers.gateway.metrics import ENGINE_S, RESUBMITTED
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.events.turns import VersionSpan

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
