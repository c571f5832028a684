"""`turnlog role trace`: send the spans of a run (spans.py) to an OpenTelemetry collector by OTLP over HTTP, at least
once.

The position is stored as commits of the consumer group. They stay below the first record of each open session, and only
advance past spans that the collector has accepted. So a successor after a kill sends a few spans again, with the same
ids, and none is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import Counter

from turnlog import __version__
from turnlog.infra.blobs import inlined
from turnlog.infra.history import caught_up
from turnlog.infra.log import Commit, Partition, Reader, Record, Transactor
from turnlog.infra.roles import Unreachable
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import ACCESS
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.plugins.exporters import OutletError, library
from turnlog.plugins.exporters.spans import Traces, TraceSpan
from turnlog.schemas.events import (
    BatchSkipped,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    GroupScored,
    SampleBatchFormed,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    ToolCallRequested,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.setting_types import SettingsError
from turnlog.settings import Settings, TraceSettings

READ_S, EXPORT_S, MARK_S = (STAGE_S.labels("trace", stage) for stage in ("read", "export", "mark"))
SPANS = Counter("turnlog_traced_spans", "Spans that the collector has accepted, including repeats")
EXTRA = "traces"
TOLD = (
    SessionStarted, SessionAdopted, SessionFinished, TurnCompleted, ToolCallRequested, ToolCallCompleted, GroupScored,
    SampleBatchFormed, BatchSkipped, StepCompleted, WeightVersionPublished, EngineWeightsLoaded, EngineWeightsRefused,
)  # fmt: skip
BATCH = 512
"""Maximum number of spans in one request."""


class CollectorFailed(OutletError, Unreachable):
    """The collector did not accept spans. Remedy: check [trace] url, token and ca_file; the cause is in the log."""


class SpanExporter(Protocol):
    """Destination of spans."""

    def export(self, spans: Sequence[TraceSpan]) -> None:
        """Send spans, and return once they are accepted. Raises CollectorFailed."""
        ...


class Collector:
    """OTLP over HTTP, by OpenTelemetry's own exporter, which retries for `timeout_s`."""

    def __init__(self, rules: TraceSettings, url: str, service: Mapping[str, str]) -> None:
        """`url`: the address without /v1/traces. Raises NoLibrary."""
        self._url = f"{url.rstrip('/')}/v1/traces"
        self._sdk = library("opentelemetry.sdk.trace", EXTRA)
        self._api = library("opentelemetry.trace", EXTRA)
        scope = library("opentelemetry.sdk.util.instrumentation", EXTRA).InstrumentationScope
        self._common = {
            "resource": library("opentelemetry.sdk.resources", EXTRA).Resource(dict(service)),
            "instrumentation_scope": scope("turnlog", __version__),
        }
        otlp = library("opentelemetry.exporter.otlp.proto.http.trace_exporter", EXTRA)
        self._exporter = otlp.OTLPSpanExporter(
            self._url, certificate_file=rules.ca_file or None, timeout=rules.timeout_s,
            headers={"authorization": f"Bearer {rules.token}"} if rules.token else None,
        )  # fmt: skip

    def export(self, spans: Sequence[TraceSpan]) -> None:
        taken = self._exporter.export([self._readable(span) for span in spans])
        if taken.name != "SUCCESS":
            raise CollectorFailed(f"{self._url} did not accept {len(spans)} spans; see the log for the reason")

    def close(self) -> None:
        """Close connections."""
        self._exporter.shutdown()

    def _readable(self, span: TraceSpan) -> Any:
        status = self._api.Status(self._api.StatusCode.ERROR, span.error) if span.error else self._api.Status()
        return self._sdk.ReadableSpan(
            span.name, self._context(span.trace_id, span.span_id), attributes=dict(span.attributes), status=status,
            parent=self._context(span.trace_id, span.parent_id) if span.parent_id else None,
            links=[self._api.Link(self._context(*link, remote=True)) for link in span.links],
            start_time=span.start_ns, end_time=span.end_ns, **self._common,
        )  # fmt: skip

    def _context(self, trace_id: str, span_id: str, *, remote: bool = False) -> Any:
        """`remote`: whether the span belongs to another program; only that program knows whether it is sampled."""
        flags = self._api.TraceFlags(self._api.TraceFlags.DEFAULT if remote else self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=flags)


class Tracer:
    """Reads a run in rounds (spans.Traces), sends the spans, then commits its position."""

    def __init__(
        self, role: Role, reader: Reader, exporter: SpanExporter, transactor: Transactor | None, *, batch: int = BATCH
    ) -> None:
        """`transactor` is None for an archive: then no position is committed. `batch`: maximum number of spans in one
        request."""
        self._batch = batch
        self._role, self._reader, self._exporter, self._transactor = role, reader, exporter, transactor
        self._group = ConsumerGroup.TRACE.format(run=role.settings.run.id)
        self._traces = Traces(
            role.settings.trace.ratio, content=role.events.keys is None or role.settings.trace.content
        )
        self._places: list[Partition] = []
        self._marked: dict[Partition, Commit] = {}
        self.exported = 0

    async def open(self) -> None:
        """Continue at the position that the last tracer committed, or begin at the start of the log."""
        known = await self._role.log.topics()
        topics = [topic.name for topic in ACCESS["trace"].consumes if topic.name in known]
        self._places = [Partition(name, number) for name in topics for number in range(known[name].partitions)]
        starts = await self._role.log.start_offsets(self._places)
        if self._transactor is not None:
            self._marked = await self._role.log.commits(self._group, self._places)
        at = {place: max(start, self._marked.get(place, Commit(0)).offset) for place, start in starts.items()}
        self._reader.assign(at)

    async def turn(self) -> None:
        """Run one round: read to the present ends, send the spans, commit. Raises CollectorFailed, LogError,
        RegistryUnavailable, BlobError."""
        ends = await self._role.log.end_offsets(self._places)
        spans = await self._read()
        while not caught_up(self._reader, ends):
            self._role.health.beat()
            spans += await self._read()
            if len(spans) >= self._batch:
                spans = await self._hand_over(spans)
        await self._hand_over([*spans, *self._traces.settle()])
        await self._mark()

    @property
    def open_sessions(self) -> int:
        """Number of sessions whose spans have not been sent, because they are not finished."""
        return self._traces.open

    async def _read(self) -> list[TraceSpan]:
        records = await self._reader.poll(timeout_s=0.5)
        if not records:
            return []
        with READ_S.time():
            return await self._collect_spans(records)

    async def _collect_spans(self, records: Sequence[Record]) -> list[TraceSpan]:
        spans: list[TraceSpan] = []
        async for record, event in self._role.run_events(records):
            if isinstance(event, TOLD):
                if isinstance(event, TurnCompleted):
                    event = await inlined(event, self._role.blobs)
                place = Partition(record.topic, record.partition)
                spans += self._traces.take(place, record.offset, record.timestamp_ms, event)
        return spans

    async def _hand_over(self, spans: Sequence[TraceSpan]) -> list[TraceSpan]:
        for first in range(0, len(spans), self._batch):
            self._role.health.beat()
            batch = spans[first : first + self._batch]
            with EXPORT_S.time():
                await asyncio.to_thread(self._exporter.export, batch)
            self.exported += len(batch)
            SPANS.inc(len(batch))
        return []

    async def _mark(self) -> None:
        if self._transactor is None:
            return
        marks = {}
        for place in self._places:
            position = self._reader.position(place)
            low = self._traces.low_water(place, position)
            marks[place] = Commit.low_water(low, high=position).keeping(self._marked.get(place))
        moved = {place: mark for place, mark in marks.items() if mark != self._marked.get(place)}
        if moved:
            with MARK_S.time():
                await self._transactor.begin()
                await self._transactor.offsets(self._group, moved)
                await self._transactor.commit()
            self._marked = marks


@asynccontextmanager
async def tracing(
    role: Role, exporter: SpanExporter, *, marks: bool = True, batch: int = BATCH
) -> AsyncIterator[Tracer]:
    """Open a tracer on a role's log. With `marks` it commits its position and fences off its predecessor."""
    async with AsyncExitStack() as stack:
        owner = TransactionalId.TRACE.format(run=role.settings.run.id)
        transactor = await stack.enter_async_context(role.log.transactor(owner)) if marks else None
        reader = await stack.enter_async_context(role.log.reader(patient=True))
        tracer = Tracer(role, reader, exporter, transactor, batch=batch)
        await tracer.open()
        yield tracer


def collector_of(settings: Settings, url: str) -> Collector:
    """Return the collector at `url`, else at [trace] url. Raises SettingsError if both are empty."""
    to = url or settings.trace.url
    if not to:
        raise SettingsError("trace.url is empty: name a collector there or with --to")
    return Collector(settings.trace, to, resource_of(settings))


def resource_of(settings: Settings) -> dict[str, str]:
    """Return the attributes that all spans of a run share. Those named `rl.` are of the proposal for reinforcement
    learning (open-telemetry/semantic-conventions-genai issue 88). The algorithm of an external trainer and the name of
    an environment's own model are unknown, and left out."""
    shared = {
        "service.name": "turnlog", "service.instance.id": settings.run.id, "rl.system": "turnlog",
        "rl.system.version": __version__, "rl.run.id": settings.run.id,
    }  # fmt: skip
    if settings.trainer.kind == "megatron":
        shared["rl.algorithm"] = settings.trainer.algorithm
    if settings.model.path:
        shared["rl.model.name"] = Path(settings.model.path).name
    return shared
