"""Planted secrets through feeder, runner, gateway and sandbox worker on real servers; only the engine is in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import types
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.offers import offering
from tests.integration.test_runner_live import (
    publish_first_weights,
    read,
    settings,  # noqa: F401
    started,
)
from turnlog.environments import FunctionVerifier, Recipe, Task, TaskRow, Verdict
from turnlog.infra.history import records
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.producers import feeder, runner
from turnlog.producers.gateway.app import Gateway, serving
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.redaction_settings import RedactionSettings
from turnlog.sandbox_workers import worker
from turnlog.schemas import topics
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    RolloutRequested,
    SegmentSample,
    SessionFinished,
    TokenSnapshot,
    ToolCallCompleted,
    ToolCallRequested,
    TurnCompleted,
    TurnTreeAssembled,
)
from turnlog.schemas.types import int32s
from turnlog.settings import Settings

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(600)]
TASK = "task.owner" + "@mail.example"
OUTPUT = "printed.name" + "@mail.example"
ARGUMENT = "called.name" + "@mail.example"
ANSWER = "said.name" + "@mail.example"
EVIDENCE = "judged.name" + "@mail.example"
INPUTS, OUTPUTS = (TASK, OUTPUT), (ARGUMENT, ANSWER)
PRINTS = "print('@mail.example'.join(('printed.name', '')))"
PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
OFFERED = types.SimpleNamespace()
"""`source`: what the installed package offers."""


def judge(episode: Any) -> Verdict:
    """Reward each episode, and quote an address as evidence."""
    return Verdict(1.0, evidence={"quoted": EVIDENCE})


class Leaky(Recipe):
    """A recipe whose task names somebody, and whose tool prints an address."""

    name = "leaky"
    sandbox_tools = ("python",)
    verifier = FunctionVerifier("leaky", "1", judge)

    def task(self, row: TaskRow) -> Task:
        return Task(
            id="t", row=row, messages=({"role": "user", "content": row["prompt"]},), verifier=self.verifier,
            environment=self.environment, tools=(PYTHON,), sandbox_tools=("python",),
        )  # fmt: skip


def speaks(prompt: str) -> str:
    """Call the tool with an address in its arguments, then say another one."""
    if "tool\n" in prompt:
        return f"done, {ANSWER}"
    call = {"name": "python", "arguments": {"code": f"{PRINTS}  # {ARGUMENT}"}}
    return f"<tool_call>{json.dumps(call).replace('@', chr(92) + 'u0040')}</tool_call>"


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with offering(tmp_path, monkeypatch, "leaky", {"leaky": f"{__name__}:OFFERED.source"}):
        OFFERED.source = Leaky()
        yield


async def stored_text(role: Role) -> str:
    """Return all records of all topics and the text of all token ids."""
    texts, known = [], await role.log.topics()
    tokens = TextTokens(Path(role.settings.model.path))
    for topic in topics.CATALOGUE:
        name = topic.name
        if name not in known:
            continue
        partitions = [Partition(name, number) for number in range(known[name].partitions)]
        ends = await role.log.end_offsets(partitions)
        async with aclosing(records(role, partitions, ends)) as written:
            async for record in written:
                texts.append((record.value or b"").decode(errors="replace"))
                event = await role.events.decode(record)
                if isinstance(event, TokenSnapshot):
                    texts += [tokens.literal(int32s(one).tolist()) for one in (event.delta_ids, event.output_ids)]
    return "\n".join(texts).replace("\\u0040", "@")


async def serve(role: Role, engine: MemoryEngine) -> None:
    """Run the gateway with an engine in memory behind it."""
    url = role.settings.gateway.url
    with closing(create_server(("127.0.0.1", int(url.rpartition(":")[2])))) as listener:
        served = await Gateway.create(role, url, connect=lambda *_: engine)
        async with served.current(), serving(served, listener):
            await role.stopping.wait()


async def unless_ended(running: list[asyncio.Task[None]], wanted: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Await `wanted`. Raise what a role raises that ends before."""
    asked = asyncio.ensure_future(wanted)
    await asyncio.wait([asked, *running], return_when=asyncio.FIRST_COMPLETED)
    for ended in (task for task in running if task.done()):
        asked.cancel()
        ended.result()
    return await asked


@dataclass(frozen=True)
class Played:
    """What a draw of two rollouts left behind."""

    records: dict[type, list[Any]]
    shown: str
    """All records of all topics, with the texts of token ids."""
    tree: TurnTreeAssembled
    """Tree of one session, and its samples."""
    samples: list[SegmentSample]


async def play(redacting: Settings, engine: MemoryEngine) -> Played:
    """Run a draw of two rollouts through feeder, runner, gateway and sandbox worker."""
    roles = (
        ("gateway", partial(serve, engine=engine)),
        ("sandbox", worker.main),
        ("runner", runner.main),
        ("feeder", feeder.main),
    )
    numbers = {RolloutRequested: 2, ToolCallRequested: 2, ToolCallCompleted: 2, TokenSnapshot: 4, TurnCompleted: 4}
    async with AsyncExitStack() as stack:
        role = await stack.enter_async_context(open_role("test", redacting))
        await publish_first_weights(role)
        running = [await stack.enter_async_context(started(name, main, redacting)) for name, main in roles]
        finishes = await unless_ended(running, read(role, SessionFinished, 2))
        records: dict[type, list[Any]] = {kind: await read(role, kind, number) for kind, number in numbers.items()}
        tree, samples = await folded(role, finishes[0].session_id)
        return Played({**records, SessionFinished: finishes}, await stored_text(role), tree, samples)


@pytest.mark.parametrize(("inputs", "outputs"), [("mask", "off"), ("mask", "drop"), ("drop", "drop"), ("off", "drop")])
async def test_no_topic_and_no_log_line_holds_a_planted_secret(
    settings: Settings,  # noqa: F811
    tmp_path: Path,
    offered: None,
    caplog: pytest.LogCaptureFixture,
    inputs: Any,
    outputs: Any,
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": f"write to {TASK}"}) + "\n")
    replace = dataclasses.replace
    settings = replace(
        settings,
        redaction=RedactionSettings(inputs=inputs, outputs=outputs),
        feeder=replace(settings.feeder, recipe="leaky", dataset=str(tasks), group_size=2, draws=1, max_new_tokens=200),
        batcher=replace(settings.batcher, prompts_per_draw=1),
    )
    tokens = TextTokens(Path(settings.model.path))
    engine = MemoryEngine(vocabulary=384, context=512)
    engine.script = lambda prompt: tokens.encode(speaks(tokens.literal(prompt)) + "<|im_end|>")
    caplog.set_level(logging.DEBUG, "turnlog")
    played = await play(settings, engine)
    records = played.records
    assert {finish.outcome for finish in records[SessionFinished]} == {Outcome.completed}
    covered = {EVIDENCE, *(INPUTS if inputs != "off" else ()), *(OUTPUTS if outputs != "off" else ())}
    assert sorted(one for one in covered if one in played.shown or one in caplog.text) == []
    masked = [
        b"[redacted:email:" in text
        for text in (records[RolloutRequested][0].task, records[ToolCallCompleted][0].output)
    ]
    assert masked == [inputs != "off"] * 2
    assert (b"[redacted:email:" in records[ToolCallRequested][0].arguments) == (outputs != "off")
    asked = [list(one.input_ids) for one in engine.requests]
    if inputs == "mask":
        assert [text for text in map(tokens.literal, asked) if TASK in text or OUTPUT in text] == []
    check_tokens(played, asked, redacts=outputs != "off")


def check_tokens(played: Played, asked: list[list[int]], *, redacts: bool) -> None:
    """Check that the sample has the tokens that the engine saw, or that it was dropped as redacted."""
    tree, samples = played.tree, played.samples
    if redacts:
        assert tree.books.masked == {"redacted": tree.books.sampled}
        assert (samples, tree.books.trained) == ([], 0)
    else:
        assert {snapshot.redacted for snapshot in played.records[TokenSnapshot]} == {False}
        assert len(samples) == 1
        rows = int32s(samples[0].token_ids).tolist()
        assert any(rows[: len(one)] == one and len(one) > len(rows) // 2 for one in asked)
        assert tree.books.trained == tree.books.sampled
    assert sum(turn.output_tokens for turn in played.records[TurnCompleted]) == 2 * tree.books.sampled


async def folded(role: Role, session_id: str) -> tuple[TurnTreeAssembled, list[SegmentSample]]:
    """Return (tree, samples) of a session, from the records of its group on the log."""
    names = ("SessionStarted", "SessionAdopted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    known, found = await role.log.topics(), []
    for name in dict.fromkeys(topics.TOPIC_OF[one].name for one in names):
        partitions = [Partition(name, number) for number in range(known[name].partitions)]
        ends = await role.log.end_offsets(partitions)
        async with aclosing(records(role, partitions, ends)) as written:
            async for record in written:
                found.append((name, record.offset, await role.events.decode(record)))
    event = next(one for _, _, one in found if isinstance(one, RewardAssigned))
    fold = GroupFold(event.group_id, 0, FoldRules(run_id=role.settings.run.id, settings_sha256="s" * 64, min_valid=1))
    outputs: list[Any] = []
    for name, offset, one in found:
        if type(one).__name__ in names:
            outputs += fold.apply(name, offset, one)
    (tree,) = [out for out in outputs if isinstance(out, TurnTreeAssembled) and out.session_id == session_id]
    return tree, [out for out in outputs if isinstance(out, SegmentSample) and out.session_id == session_id]
