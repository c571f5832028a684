"""`turnlog role trace`: the spans of a run, the same ones for whoever makes them, and none left out by a kill."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.fakes.otlp_collector import Collector, collecting
from tests.fakes.sessions import bad_days
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.conftest import TrainedRun
from turnlog.cli import parser
from turnlog.infra.roles import is_unreachable
from turnlog.infra.roles.role import Role
from turnlog.plugins.exporters.spans import TraceSpan, is_sampled, span_of, trace_of
from turnlog.plugins.exporters.tracing import Collector as Otlp
from turnlog.plugins.exporters.tracing import CollectorFailed, SpanExporter, resource_of, tracing
from turnlog.schemas import topics
from turnlog.schemas.events import (
    Event,
    GroupScored,
    SampleBatchFormed,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.settings import ModelSettings, RunSettings, Settings, SettingsError, TraceSettings, TrainerSettings

SERVICE = {"service.name": "turnlog"}


class Kept:
    """An exporter that keeps what it was given."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def export(self, spans: Sequence[TraceSpan]) -> None:
        self.spans += spans


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    run = ToldRun(tmp_path_factory.mktemp("told"))
    asyncio.run(run.tell(4))
    return run.run


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


async def rounds(role: Role, exporter: SpanExporter, *, count: int = 2, marks: bool = False, batch: int = 512) -> None:
    async with tracing(role, exporter, marks=marks, batch=batch) as tracer:
        for _ in range(count):
            await tracer.turn()


async def whole(run: TrainedRun) -> list[TraceSpan]:
    """As one process makes them of the finished log."""
    kept = Kept()
    await rounds(run.role("trace"), kept)
    return kept.spans


def by_id(spans: Sequence[OtlpSpan]) -> dict[bytes, OtlpSpan]:
    """Raises AssertionError for two different spans of one id."""
    found: dict[bytes, OtlpSpan] = {}
    for span in spans:
        assert found.setdefault(span.span_id, span) == span
    return found


async def test_a_session_is_a_tree_of_turns_engine_calls_tool_calls_and_sandboxes(
    told: TrainedRun, collector: Collector
) -> None:
    await rounds(told.role("trace"), Otlp(TraceSettings(), collector.url, SERVICE))
    (first, *_) = [event for event in await told.read(topics.SESSIONS) if isinstance(event, SessionFinished)]
    own = {
        span.span_id: span for span in collector.spans if span.trace_id.hex() == trace_of("session", first.session_id)
    }

    def path(span: OtlpSpan) -> str:
        parent = own.get(span.parent_span_id)
        return f"{path(parent)} > {span.name}" if parent is not None else span.name

    paths = [path(span) for span in own.values()]
    (root,) = [span for span in own.values() if not span.parent_span_id]
    agent = root.name
    assert agent.startswith("invoke_agent ")
    turns = [event for event in await told.read(topics.TURNS) if event.session_id == first.session_id]
    answers = [event for event in await told.read(topics.TOOL_RESULTS)
               if event.session_id == first.session_id and isinstance(event, ToolCallCompleted)]  # fmt: skip
    assert paths.count(f"{agent} > turn") == paths.count(f"{agent} > turn > chat") == len(turns) > 1
    tools = [each for each in paths if " > turn > execute_tool " in each and not each.endswith("sandbox")]
    assert len(tools) == sum(each.endswith(" > sandbox") for each in paths) == len(answers) > 0
    learned = [each for each in paths if each.startswith(f"{agent} > rl.")]
    assert set(learned) == {f"{agent} > rl.reward", f"{agent} > rl.train"}
    assert len(paths) == 1 + 2 * len(turns) + 2 * len(answers) + len(learned)
    for span in own.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    (turn,) = [span for span in own.values() if span.span_id.hex() == span_of(turns[0].event_id)]
    assert isinstance(turns[0], TurnCompleted)
    (link,) = turn.links
    assert turns[0].traceparent == f"00-{link.trace_id.hex()}-{link.span_id.hex()}-00"
    assert not link.flags & 0xFF, "what another has sampled is not ours to say"
    assert sum(len(span.links) for span in own.values()) == 1, "no other turn of it was asked by a span"
    assert turn.end_time_unix_nano - turn.start_time_unix_nano == round(turns[0].total_s * 1e9)


async def test_steps_and_weights_have_traces_of_their_own(told: TrainedRun) -> None:
    spans = await whole(told)
    steps = [event for event in await told.read(topics.STEPS) if isinstance(event, StepCompleted)]
    (first, *_) = [span for span in spans if span.name == "step"]
    assert first.end_ns - first.start_ns == round(sum(steps[0].seconds.values()) * 1e9)
    assert sum(span.name == "step" for span in spans) == len(steps) > 1
    swaps = [span for span in spans if span.name == "swap weights"]
    assert len(swaps) == len(steps)
    published = {span.trace_id for span in spans if span.name == "publish weights"}
    assert {span.trace_id for span in swaps} <= published


async def test_rewards_and_batches_stand_in_the_traces_of_their_sessions(told: TrainedRun) -> None:
    spans = await whole(told)
    scored = [event for event in await told.read(topics.SAMPLES) if isinstance(event, GroupScored)]
    rollouts = {rollout.session_id: (group, rollout) for group in scored for rollout in group.rollouts}
    rewards = [span for span in spans if span.name == "rl.reward"]
    assert len(rewards) == len(rollouts) > 4
    roots = {span.trace_id: span for span in spans if span.name.startswith("invoke_agent")}
    for session_id, (group, rollout) in rollouts.items():
        trace = trace_of("session", session_id)
        (span,) = [each for each in rewards if each.trace_id == trace]
        assert span.parent_id == roots[trace].span_id
        assert span.attributes.get("rl.reward.score") == rollout.reward
        assert span.attributes.get("turnlog.advantage") == rollout.advantage
        assert span.attributes.get("turnlog.excluded_reason") == rollout.excluded_reason
        assert span.attributes["turnlog.group.status"] == group.status.value
        turns = [each for each in spans if each.trace_id == trace and each.name == "chat"]
        versions = [int(each.attributes["turnlog.weight_version.last"]) for each in turns]
        assert roots[trace].attributes.get("turnlog.weight_version.last") == max(versions, default=None)
    assert any("turnlog.excluded_reason" in span.attributes for span in rewards), "one session was lost"
    batches = [event for event in await told.read(topics.BATCHES) if isinstance(event, SampleBatchFormed)]
    trained = {
        (trace_of("session", row.session_id), batch.batch_index): sum(
            other.trained_tokens for other in batch.samples if other.session_id == row.session_id
        )
        for batch in batches
        for row in batch.samples
    }
    told_of = {(span.trace_id, span.attributes["turnlog.batch_index"]): span.attributes["turnlog.trained_tokens"]
               for span in spans if span.name == "rl.train"}  # fmt: skip
    assert told_of == trained != {}
    draws = [span for span in spans if span.name == "draw"]
    assert [span.attributes["rl.train.batch_size"] for span in draws] == [len(batch.samples) for batch in batches]
    dropped = sum(int(value) for span in draws for name, value in span.attributes.items() if ".dropped." in name)
    assert dropped == sum(len(batch.dropped) for batch in batches)


async def test_the_proposed_names_of_steps_and_weights_have_the_figures_of_the_records(told: TrainedRun) -> None:
    spans = await whole(told)
    steps = {event.step: event for event in await told.read(topics.STEPS) if isinstance(event, StepCompleted)}
    for span in (span for span in spans if span.name == "step"):
        event = steps[int(span.attributes["rl.loop.iteration"])]
        assert span.attributes["rl.train.loss"] == event.loss
        assert span.attributes["rl.train.tokens"] == event.trained_tokens
        assert span.attributes["rl.environment.reward.mean"] == event.reward_mean
    versions = {event.version: event for event in await told.read(topics.WEIGHTS)
                if isinstance(event, WeightVersionPublished)}  # fmt: skip
    for span in (span for span in spans if span.name == "publish weights"):
        files = versions[int(span.attributes["turnlog.weight_version"])].files
        assert span.attributes.get("rl.sync.bytes", 0) == sum(file.blob.size for file in files)
    assert {span.attributes["rl.sync.destination"] for span in spans if span.name == "swap weights"} != set()


def test_what_all_spans_of_a_run_share_names_system_run_algorithm_and_model() -> None:
    shared = resource_of(Settings(run=RunSettings(id="mine"), model=ModelSettings(path="/models/policy")))
    assert shared["rl.run.id"] == shared["service.instance.id"] == "mine"
    assert (shared["rl.system"], shared["rl.model.name"]) == ("turnlog", "policy")
    assert shared["rl.algorithm"] == Settings().trainer.algorithm
    external = resource_of(Settings(trainer=TrainerSettings(kind="external")))
    assert not {"rl.algorithm", "rl.model.name"} & set(external), "neither is known"


async def test_nothing_that_was_said_is_in_a_span(told: TrainedRun) -> None:
    said = {str(value) for span in await whole(told) for value in span.attributes.values()}
    assert not {text for text in said if len(text) > 64 or "\n" in text}


async def test_a_session_without_an_ordinary_end_and_a_failed_call_are_errors(
    told: TrainedRun, collector: Collector
) -> None:
    await rounds(told.role("trace"), Otlp(TraceSettings(), collector.url, SERVICE))
    finished = [event for event in await told.read(topics.SESSIONS) if isinstance(event, SessionFinished)]
    lost = {trace_of("session", each.session_id) for each in finished if each.outcome.value == "infra_failure"}
    roots = [span for span in collector.spans if span.name.startswith("invoke_agent")]
    assert {span.trace_id.hex() for span in roots if span.status.code == Status.STATUS_CODE_ERROR} == lost != set()


async def test_two_processes_make_the_same_spans(told: TrainedRun, collector: Collector) -> None:
    for _ in range(2):
        await rounds(told.role("trace"), Otlp(TraceSettings(), collector.url, SERVICE))
    half = len(collector.spans) // 2
    first, second = collector.spans[:half], collector.spans[half:]
    assert len(by_id(collector.spans)) == half
    assert sorted(map(bytes_of, first)) == sorted(map(bytes_of, second))


def bytes_of(span: OtlpSpan) -> bytes:
    return span.SerializeToString(deterministic=True)


def after_their_start(events: Iterator[Event]) -> Iterator[Event]:
    """Whatever writes of a session has read its SessionStarted."""
    started: set[str] = set()
    for event in events:
        if isinstance(event, SessionStarted):
            started.add(event.session_id)
        if not hasattr(event, "session_id") or event.session_id in started:
            yield event


@pytest.mark.parametrize("seed", range(4))
async def test_spans_do_not_depend_on_when_records_are_read(seed: int) -> None:
    """Over unlucky sessions, with rounds that end anywhere among their records."""
    rng, run, kept = random.Random(seed), TrainedRun(), Kept()
    events = list(after_their_start(bad_days(rng, groups=10, partitions=2)))
    async with tracing(run.role("trace"), kept, marks=False) as tracer:
        while events:
            count = rng.randrange(1, 12)
            await run.append(events[:count])
            del events[:count]
            await tracer.turn()
        await tracer.turn()
    assert len({span.span_id for span in kept.spans}) == len(kept.spans) > 20
    assert {span.span_id: span for span in kept.spans} == {span.span_id: span for span in await whole(run)}


async def test_a_kill_between_export_and_mark_repeats_spans_and_loses_none(
    told: TrainedRun, collector: Collector
) -> None:
    exporter = Otlp(TraceSettings(timeout_s=5.0), collector.url, SERVICE)
    failures: list[Exception] = []
    for taken in (1, 3, 6, None):  # the collector takes so many requests of this process, and refuses the next
        collector.at = None if taken is None else len(collector.requests) + taken
        try:
            await rounds(told.role("trace"), exporter, marks=True, batch=16)
        except CollectorFailed as error:
            failures.append(error)
    expected = await whole(told)
    assert [is_unreachable(each) for each in failures] == [True] * 3
    assert len(collector.spans) > len(expected)
    assert {each.hex() for each in by_id(collector.spans)} == {span.span_id for span in expected}
    before = len(collector.spans)
    await rounds(told.role("trace"), exporter, marks=True, batch=16)
    assert len(collector.spans) == before


async def test_who_goes_on_behind_a_mark_tells_each_session_whole() -> None:
    """Started anew after every few records, over sessions that are open across the starts."""
    run, rng, kept = TrainedRun(), random.Random(5), Kept()
    source = TrainedRun()
    await source.good_groups(groups=4, turns=2)
    events = [event for topic in (topics.SESSIONS, topics.TURNS) for event in await source.read(topic)]
    names = list(dict.fromkeys(event.session_id for event in events if hasattr(event, "session_id")))
    lines = [[event for event in events if getattr(event, "session_id", "") == name] for name in names]
    for line in lines:  # as they were written: started, turns, verdict, finish
        line.sort(key=lambda event: ("SessionStarted", "TurnCompleted", "RewardAssigned", "SessionFinished").index(
            type(event).__name__))  # fmt: skip
    while any(lines):
        await run.append([rng.choice([line for line in lines if line]).pop(0) for _ in range(1)])
        if rng.random() < 0.25:
            await rounds(run.role("trace"), kept, marks=True)
    await rounds(run.role("trace"), kept, marks=True)
    expected = {span.span_id: span for span in await whole(run)}
    assert {span.span_id: span for span in kept.spans} == expected
    assert all(expected[span.span_id] == span for span in kept.spans)


async def test_sampling_keeps_whole_traces_and_the_same_ones(told: TrainedRun) -> None:
    every = await whole(told)
    for ratio in (0.0, 0.4, 1.0):
        settings = dataclasses.replace(told.settings, trace=TraceSettings(ratio=ratio))
        some = await whole(dataclasses.replace(told, settings=settings))
        assert some == [span for span in every if is_sampled(span.trace_id, ratio)]
    assert 0 < sum(is_sampled(trace, 0.4) for trace in {span.trace_id for span in every}) < len(every)


async def test_a_token_is_sent_to_the_collector_alone(told: TrainedRun, collector: Collector) -> None:
    rules = TraceSettings(token="hush")
    await rounds(told.role("trace"), Otlp(rules, collector.url, SERVICE))
    assert {headers["authorization"] for headers in collector.headers} == {"Bearer hush"}
    assert "hush" not in repr(rules)
    assert all(b"hush" not in request.SerializeToString() for request in collector.requests)


async def test_a_header_of_opentelemetrys_own_variable_reaches_the_collector(
    told: TrainedRun, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does MLflow want the number of its experiment."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-mlflow-experiment-id=1")
    await rounds(told.role("trace"), Otlp(TraceSettings(), collector.url, SERVICE))
    assert {headers["x-mlflow-experiment-id"] for headers in collector.headers} == {"1"}


def test_without_an_address_the_command_says_where_to_put_one(tmp_path: Path) -> None:
    arguments = parser().parse_args(["role", "trace", "--until-end"])
    with pytest.raises(SettingsError, match=r"trace\.url is empty"):
        arguments.entry.call(Settings(), arguments)
