"""Sessions as files for other programs: ATIF 1.8 by the validator of the format, traces of the Hub by its page."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atif import Trajectory

from tests.fakes.memory_log import MemoryLog
from tests.fakes.pictures import encoded, painted
from tests.fakes.stories import SYSTEM, Story, answer
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.conftest import TrainedRun
from turnlog import cli
from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.fate import events_at, tokens
from turnlog.consumers.index.indexer import build
from turnlog.consumers.index.reader import Index
from turnlog.infra.log import Reader
from turnlog.plugins.exporters.session_files import ENDINGS, session_files, write_files
from turnlog.schemas.events import Event, FinishReason, TokenSnapshot
from turnlog.verbs.session import session_ids

PICTURE = encoded(painted(28, 28))
PICTURE_SHA256 = hashlib.sha256(PICTURE).hexdigest()
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
TITLE = {"role": "assistant", "content": "Repair of a calendar"}
SUMMARY = "Summary so far: everything was looked at."


def compacted(story: Story, folder: Path) -> Iterator[Event]:
    """A session with all that a format may have no place for: a title before its first turn, an image, tools, malformed
    arguments, a sub-agent, a compaction whose history holds a message of the policy and a result of an old call, a
    branch, and a call whose result no request contains."""
    yield story.begun(folder, recipe="compacted")
    yield from story.said([{"role": "user", "content": "Name it."}], TITLE, agent_path="side/title")
    image = {"type": "image_url", "image_url": {"url": f"blob:{PICTURE_SHA256};{len(PICTURE)};image/png"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "Repair \u202eit."}, image]}
    look, records = story.called("bash", {"command": "ls"}, "weeks.py\n")
    broken = {"id": "broken", "type": "function", "function": {"name": "bash", "arguments": "{"}}
    turn, snapshot = story.said(
        [{"role": "system", "content": SYSTEM}, asked],
        {"role": "assistant", "content": "", "reasoning_content": "First I look.", "tool_calls": [look, broken]},
        finish=FinishReason.tool_calls,
    )  # fmt: skip
    yield from (
        dataclasses.replace(turn, tools=json.dumps(TOOLS).encode(), tools_sha256="of tools"),
        snapshot,
        *records,
    )
    first = story.turns[-1]
    yield from story.said([{"role": "user", "content": "Review it."}], {"role": "assistant", "content": "Well done."},
                          agent_path="main/a1")  # fmt: skip
    seen = [answer(look, "weeks.py\n"), answer(broken, "no JSON")]
    yield from _kept(story.said(seen, {"role": "assistant", "content": "Seen."}, base=first))
    yield from _kept(story.said(seen, {"role": "assistant", "content": "Seen again."}, base=first, kept=40))
    test, records = story.called("bash", {"command": "pytest"}, "7 passed\n")
    yield from _kept(story.said(
        [{"role": "system", "content": SYSTEM}, {"role": "assistant", "content": SUMMARY}, answer(look, "weeks.py\n")],
        {"role": "assistant", "content": "", "tool_calls": [test]}, finish=FinishReason.tool_calls,
    ))  # fmt: skip
    yield from records
    yield story.rewarded(0.5)
    yield story.finished()


def _kept(events: tuple[Any, Any]) -> tuple[Event, Event]:
    """The turn was offered the same tools as its base."""
    return dataclasses.replace(events[0], tools_sha256="of tools"), events[1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    """A run of four groups, and of one session of every kind of context."""
    found = ToldRun(tmp_path_factory.mktemp("told"))

    async def tell() -> None:
        await found.run.objects.put(PICTURE, media_type="image/png")
        await found.tell(4, more=lambda story: compacted(story, found.folder / "model"))

    asyncio.run(tell())
    return found


async def files_of(told: ToldRun, kind: str, where: str = "recipe = 'compacted'") -> list[tuple[Any, dict[str, bytes]]]:
    """(what the index holds of it, its files) of each session."""
    found = []
    with Index.open(told.index) as index:
        for row in index.rows(f"SELECT session_id FROM sessions WHERE {where} ORDER BY started_ms, session_id"):
            view = index.session(row["session_id"])
            assert view is not None
            files, _ = await session_files(told.run.role(), index, view, kind, "s.json")
            found.append((view, files))
    return found


def documents(files: dict[str, bytes]) -> list[Any]:
    """Validated by the format's own models, the last of a chain last."""
    names = [name for name in files if name.endswith(".json")]
    found = [Trajectory.model_validate_json(files[name]) for name in names]
    assert [each.continued_trajectory_ref for each in found] == [*names[1:], None]
    return found


def flat(trajectories: list[Any]) -> list[Any]:
    return [one for each in trajectories for one in (each, *(each.subagent_trajectories or ()))]


async def test_every_session_is_valid_atif_with_exactly_the_tokens_that_the_log_holds(told: ToldRun) -> None:
    sessions = await files_of(told, "atif", "true")
    assert len(sessions) == 17
    for view, files in sessions:
        whole = flat(documents(files))
        assert sum(each.final_metrics.total_completion_tokens for each in whole) == view.row.output_tokens
        assert {each.session_id for each in whole} == {view.row.session_id}
        assert whole[0].extra["session"]["reward"] == view.row.reward
        assert (whole[0].agent.name, whole[0].agent.model_name) == (view.row.agent.split("/")[0], view.row.model)
        sampled = {step.extra["at"]: step for each in whole for step in each.steps if step.metrics}
        with Index.open(told.index) as index:
            recorded = await tokens(told.run.role(), index, view)
        snapshots = await events_at(told.run.role(), [row["place"] for row in view.snapshots])
        assert len(sampled) == len(view.turns) == len(recorded)
        for row, turn in zip(sorted(view.turns, key=lambda row: row["turn_index"]), recorded, strict=True):
            metrics = next(step.metrics for step in sampled.values() if step.extra["turn"] == list(turn.turn))
            assert turn.turn == (row["epoch"], row["turn_index"])
            assert metrics.completion_token_ids == turn.ids.tolist()
            assert np.array_equal(np.array(metrics.logprobs, "<f4"), turn.logprobs)
            snapshot = snapshots[turn.place]
            assert isinstance(snapshot, TokenSnapshot)
            prompt = np.array(metrics.prompt_token_ids, "<i4")
            assert hashlib.sha256(prompt.tobytes()).hexdigest() == snapshot.prompt_sha256
            assert len(prompt) == metrics.prompt_tokens
            assert metrics.extra["weight_versions"] == [[each.version, each.length] for each in snapshot.version_spans]
            assert sum(count for _, count in metrics.extra["dispositions"]) == metrics.completion_tokens
            assert metrics.extra.get("advantage") == turn.advantage


async def test_calls_stand_with_what_came_of_them_and_sub_agents_with_the_step_before_them(told: ToldRun) -> None:
    [*_, (_, files)] = await files_of(told, "atif", "turns = 7 AND fate = 'trained'")
    [found] = documents(files)
    sources = [step.source for step in found.steps]
    assert sources == ["system", "user", *["agent"] * 4, "user", "agent", "agent"]
    look, test = found.steps[2], found.steps[3]
    assert {look.extra["kind"], found.steps[7].extra["kind"]} == {"root", "branch"}
    assert (look.extra["finish_reason"], found.steps[7].extra["boundary_reason"]) == ("tool_calls", "history_rewritten")
    assert {"environment", "sampling", "tokenizer_sha256"} <= set(found.agent.extra)
    assert (found.extra["as_of"]["run"], found.extra["session"]["recipe"]) == ("run", "repair")
    assert [call.arguments for call in look.tool_calls] == [{"command": "ls -R calendar_of_weeks tests"}]
    assert look.reasoning_content
    [result] = test.observation.results
    assert result.source_call_id == test.tool_calls[0].tool_call_id
    assert "1 failed" in result.content
    assert {name: result.extra[name] for name in ("status", "exit_code")} == {"status": "tool_error", "exit_code": 1}
    [reviewer] = found.subagent_trajectories
    assert [step.source for step in reviewer.steps] == ["system", "user", "agent"]
    assert (reviewer.extra["lineage"], reviewer.agent.extra["agent_path"]) == ("sub_agent", "reviewer")
    refs = [(step.step_id, ref.trajectory_id) for step in found.steps if step.observation
            for each in step.observation.results for ref in each.subagent_trajectory_ref or ()]  # fmt: skip
    assert refs == [(6, reviewer.trajectory_id)]
    became = {name for step in found.steps if step.metrics for name, _ in step.metrics.extra["dispositions"]}
    assert became == {"trained", "length_cut"}


async def test_a_compaction_and_a_branch_continue_in_documents_of_their_own(told: ToldRun) -> None:
    [(view, files)] = await files_of(told, "atif")
    assert sorted(files) == [f"images/{PICTURE_SHA256}.png", "s.cont-1.json", "s.cont-2.json", "s.json"]
    assert files[f"images/{PICTURE_SHA256}.png"] == PICTURE
    assert "\u202e" not in files["s.json"].decode()
    first, branch, after = documents(files)
    name = view.row.session_id
    assert [each.trajectory_id for each in (first, branch, after)] == [name, f"{name}.cont-1", f"{name}.cont-2"]
    assert [each.extra.get("continues") for each in (first, branch, after)] == [None, name, f"{name}.cont-1"]
    assert [each.agent.tool_definitions for each in (first, branch, after)] == [TOOLS, TOOLS, None]
    assert [part.type for part in first.steps[1].message] == ["text", "image"]
    assert first.steps[1].message[0].text == "Repair \u202eit."
    assert [each.trajectory_id for each in first.subagent_trajectories] == [f"{name}.side/title", f"{name}.main/a1"]
    look, broken = first.steps[2].tool_calls
    assert (look.arguments, look.extra, broken.arguments, broken.extra) == (
        {"command": "ls"},
        None,
        {},
        {"arguments": "{"},
    )
    results = first.steps[2].observation.results
    assert [each.content for each in results] == ["weeks.py\n", "no JSON", None]
    assert results[2].subagent_trajectory_ref[0].trajectory_id == f"{name}.main/a1"
    assert [bool(step.is_copied_context) for step in branch.steps] == [True, True, True, False]
    assert [step.metrics is None for step in branch.steps] == [True, True, True, False]
    assert [(step.source, step.message, bool(step.is_copied_context)) for step in after.steps] == [
        ("system", SYSTEM, False), ("agent", SUMMARY, True), ("system", "", False), ("agent", "", False),
    ]  # fmt: skip
    assert after.steps[2].observation.results[0].content == "weeks.py\n"
    assert after.steps[3].observation.results[0].content == "7 passed\n", "no request contains it, but the log does"


async def test_unlucky_sessions_are_valid_too(tmp_path: Path) -> None:
    run = TrainedRun()
    await run.bad_days()
    await build(run.role("index"), tmp_path / "index.sqlite")
    with Index.open(tmp_path / "index.sqlite") as index:
        names = [row["session_id"] for row in index.rows("SELECT session_id FROM sessions")]
        assert len(names) > 20
        for name in names:
            view = index.session(name)
            assert view is not None
            whole = flat(documents((await session_files(run.role(), index, view, "atif", "s.json"))[0]))
            totals = [each.final_metrics.total_completion_tokens for each in whole]
            assert sum(totals) == sum(row["output_tokens"] for row in view.turns)
            for lines in (await session_files(run.role(), index, view, "trace", "s.jsonl"))[0].values():
                told_by(lines)


def told_by(lines: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, messages), checked against the tables of https://huggingface.co/docs/hub/session-traces-format."""
    header, *rest = map(json.loads, lines.decode().splitlines())
    assert header["type"] == "session"
    assert all(isinstance(header[name], str) and header[name] for name in ("harness", "id", "name"))
    messages = []
    for line in rest:
        assert set(line) == {"type", "message"}
        assert line["type"] == "message"
        message = line["message"]
        assert set(message) <= {"role", "content", "reasoningContent", "toolCalls", "toolCallId", "timestamp", "model"}
        assert message["role"] in ("user", "assistant", "system", "tool")
        assert isinstance(message["content"], str)
        for call in message.get("toolCalls", ()):
            assert set(call) == {"id", "function"}
            assert {type(value) for value in call["function"].values()} == {str}
        messages.append(message)
    return header, messages


async def test_a_trace_has_each_message_once_and_a_file_per_agent(told: ToldRun) -> None:
    [(view, files)] = await files_of(told, "trace")
    assert list(files) == ["s.json", "s.agent-1.json", "s.agent-2.json"]
    header, messages = told_by(files["s.json"])
    assert (header["harness"], header["id"], header["reward"]) == ("turnlog", view.row.session_id, 0.5)
    assert "Repair \u202eit.".startswith(header["name"])
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "tool", "assistant", "system", "assistant",
        "tool", "assistant",
    ]  # fmt: skip
    asked, results = messages[2], messages[3:5]
    assert asked["reasoningContent"] == "First I look."
    assert [call["id"] for call in asked["toolCalls"]] == [each["toolCallId"] for each in results]
    assert [call["function"]["arguments"] for call in asked["toolCalls"]] == ['{"command": "ls"}', "{"]
    assert (messages[1]["content"], "timestamp" in messages[1]) == ("Repair \u202eit.\n[image]", False)
    assert {message["model"] for message in messages if "timestamp" in message} == {view.row.model}
    last = [told_by(files[f"s.agent-{number}.json"])[1][-1]["content"] for number in (1, 2)]
    assert last == [TITLE["content"], "Well done."]
    assert {told_by(files[f"s.agent-{number}.json"])[0]["parent"] for number in (1, 2)} == {view.row.session_id}


async def test_every_session_of_a_run_is_a_trace(told: ToldRun) -> None:
    for view, files in await files_of(told, "trace", "true"):
        spoken = [message for lines in files.values() for message in told_by(lines)[1] if "timestamp" in message]
        assert len(spoken) == len(view.turns)


class CountedLog(MemoryLog):
    """Counts its readers."""

    readers = 0

    @asynccontextmanager
    async def reader(self, **options: Any) -> AsyncIterator[Reader]:
        self.readers += 1
        async with super().reader(**options) as reader:
            yield reader


async def test_a_session_is_read_from_the_log_once_in_every_format(told: ToldRun) -> None:
    found = {}
    with Index.open(told.index) as index:
        view = index.session(index.rows("SELECT session_id FROM sessions WHERE turns = 7")[0]["session_id"])
        assert view is not None
        for kind in ENDINGS:
            log = CountedLog(told.run.broker)
            await session_files(told.run.role("session", log), index, view, kind, "s.json")
            found[kind] = log.readers
    assert set(found.values()) == {found["json"]}


def export(*words: str) -> argparse.Namespace:
    return cli.parser().parse_args(["log", "session", "export", *words])


def test_all_sessions_that_pass_the_filters_are_chosen_and_filters_need_all(told: ToldRun) -> None:
    with Index.open(told.index) as index:

        def chosen(*words: str) -> list[str]:
            return list(session_ids(index, export(*words, "--atif", "out")))

        everything = [row["session_id"] for row in index.rows("SELECT session_id FROM sessions ORDER BY started_ms")]
        assert sorted(chosen("--all")) == sorted(everything)
        [one] = chosen("--all", "--recipe", "compacted")
        assert chosen(one[:12]) == [one]
        good = index.rows("SELECT session_id FROM sessions WHERE reward >= 0.7 AND outcome = 'completed'")
        assert 0 < len(good) < len(everything)
        found = chosen("--all", "--min-reward", "0.7", "--outcome", "completed")
        assert sorted(found) == sorted(row["session_id"] for row in good)
        with pytest.raises(BadQuestion, match="--recipe: filters need --all"):
            chosen(one, "--recipe", "calc")
        with pytest.raises(BadQuestion, match="is a group"):
            chosen("group-1")
    for words in (
        ("--all", "x", "--atif", "out"),
        ("--atif", "out"),
        ("--all",),
        ("--all", "--atif", "a", "--trace", "b"),
    ):
        with pytest.raises(SystemExit):
            export(*words)


async def test_files_are_written_below_a_new_folder_in_every_format(told: ToldRun, tmp_path: Path) -> None:
    for kind, count in (("html", 1), ("json", 1), ("atif", 4), ("trace", 3)):
        [(view, files)] = await files_of(told, kind)
        write_files(tmp_path / kind / "new", files)
        assert view.row.session_id in (tmp_path / kind / "new/s.json").read_text()
        assert sum(path.is_file() for path in (tmp_path / kind).rglob("*")) == len(files) == count
