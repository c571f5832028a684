"""`turnlog env check`: what is sound, and each way in which a task is not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.offers import offering
from turnlog import cli
from turnlog.environments import (
    AgentSession,
    CommandAgent,
    Episode,
    FunctionAgent,
    FunctionVerifier,
    Message,
    Observation,
    Opening,
    Recipe,
    SandboxCall,
    SandboxVerifier,
    Task,
    TaskRow,
    Verdict,
)
from turnlog.schemas.events import SandboxSpec

ANSWER = "blue"


def last(episode: Episode) -> Verdict:
    """The reward that the row says for the message that the row says."""
    said = str(episode.messages[-1]["content"])
    return Verdict(float(episode.task["rewards"].get(said, "0")))


class Words(Recipe):
    """One row for each way in which a task may be sound or not."""

    name = "words"
    verifier = FunctionVerifier("last", "1", last)

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        for name, rewards in (
            ("sound", {ANSWER: "1"}),
            ("unsolved", {ANSWER: "0.5"}),
            ("generous", {ANSWER: "1", "": "1"}),
            ("nan", {ANSWER: "nan"}),
            ("raises", {ANSWER: "one"}),
        ):
            yield {"id": name, "prompt": "the colour?", "rewards": rewards}
        yield {"id": "lacking", "prompt": "the colour?", "rewards": {}, "unsolvable": "by a row"}
        yield {"id": "unknown", "prompt": "the colour?", "rewards": {}, "unsolvable": True}

    def solution(self, row: TaskRow) -> Sequence[Message] | None:
        if row.get("unsolvable") == "by a row":
            raise KeyError("expr")
        return None if row.get("unsolvable") else [{"role": "assistant", "content": ANSWER}]


class Written(Recipe):
    """A program must write a file; another one in its place does, or does nothing."""

    name = "written"
    agent = CommandAgent(name="writer", version="1", argv=("sh", "-c", "echo red > colour"))
    verifier = SandboxVerifier(name="file", version="1", calls="grep -q blue colour")
    sandbox = SandboxSpec()

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        yield {"id": "only", "prompt": "write blue"}

    def solution(self, row: TaskRow) -> CommandAgent:
        return CommandAgent(name="oracle", version="1", argv=("sh", "-c", "echo blue > colour"))


async def ask_once(session: AgentSession) -> Verdict:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "the colour?"}]
        answer = await client.chat.completions.create(model=session.model, messages=messages)
    return Verdict(float(answer.choices[0].message.content == ANSWER))


class Asking(Written):
    """The agent is a function, with a client of its own; it has no solution."""

    name = "asking"
    agent = FunctionAgent("asks", "1", ask_once)  # type: ignore[assignment]
    solution = None  # type: ignore[assignment]


class Stepping(Words):
    """Steps are calls on the log, the first of which opens the environment."""

    name = "stepping"

    def task(self, row: TaskRow) -> Task:
        return Task(
            id=row["id"],
            row=row,
            messages=({"role": "user", "content": "paint"},),
            verifier=FunctionVerifier("seen", "1", lambda episode: Verdict(float("BLUE" in str(episode.messages)))),
            environment=self.environment,
            sandbox_tools=("python",),
            opening=SandboxCall("python", {"code": "print('a wall')"}),
            opened=lambda answer: Opening(messages=({"role": "user", "content": answer.output},)),
            text_action=lambda text: SandboxCall("python", {"code": f"print({text!r}.upper())"}),
            observe=lambda call, answer: Observation(answer.output, done="BLUE" in answer.output),
            solution=lambda: [{"role": "assistant", "content": "blue"}],
        )


WORDS, WRITTEN, ASKING, STEPPING = Words(), Written(), Asking(), Stepping()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run the verb; its exit status and what it prints as JSON, by task."""
    points = {name.lower(): f"{__name__}:{name}" for name in ("WORDS", "WRITTEN", "ASKING", "STEPPING")}

    def check(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = cli.main(["env", "check", *arguments, "--json"])
        return status, {task["task"]: task for task in json.loads(capsys.readouterr().out)}

    monkeypatch.chdir(tmp_path)
    with offering(tmp_path, monkeypatch, "colours", points):
        yield check


def test_a_task_is_sound_if_its_solution_gets_1_and_doing_nothing_gets_0(run: Any) -> None:
    status, found = run("words")
    assert status == 1
    assert {name: task["ok"] for name, task in found.items()} == {
        "sound": True, "unsolved": False, "generous": False, "nan": False, "raises": False, "lacking": False,
        "unknown": False,
    }  # fmt: skip
    rewards = {name: (task["solution"]["reward"], task["empty agent"]["reward"]) for name, task in found.items()}
    assert rewards == {
        "sound": (1.0, 0.0), "unsolved": (0.5, 0.0), "generous": (1.0, 1.0), "nan": (None, 0.0), "raises": (None, 0.0),
        "lacking": (None, 0.0), "unknown": (None, 0.0),
    }  # fmt: skip
    assert "ValueError" in found["raises"]["solution"]["why"]
    assert "raises KeyError: 'expr'" in found["lacking"]["solution"]["why"]
    assert "no solution: --empty-only" in found["unknown"]["solution"]["why"]
    assert not math.isnan(found["nan"]["solution"]["seconds"])


@pytest.mark.parametrize("source", ["written", "stepping", "calc", "household"])
def test_programs_and_environments_are_checked_as_they_are_trained(run: Any, source: str) -> None:
    status, found = run(source, "--tasks", "2")
    assert (status, [task["ok"] for task in found.values()]) == (0, [True] * len(found))
    assert all(task["solution"]["reward"] == 1.0 for task in found.values())


def test_an_agent_without_a_solution_can_be_checked_for_doing_nothing(run: Any) -> None:
    status, found = run("asking")
    assert (status, found["only"]["ok"], found["only"]["empty agent"]["reward"]) == (1, False, 0.0)
    status, found = run("asking", "--empty-only")
    assert (status, found["only"]["ok"]) == (0, True)


def test_the_tasks_of_a_file_are_checked_in_place_of_the_sources_own(run: Any, tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": "?", "rewards": {ANSWER: "1"}} for name in "abc"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, found = run("words", "--dataset", "rows.jsonl", "--tasks", "2")
    assert (status, sorted(found)) == (0, ["a", "b"])


def test_the_table_says_what_is_wrong(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "check", "words"]) == 1
    shown = capsys.readouterr().out
    assert "1 of 7 tasks are sound, 6 are not" in shown
    assert "0.5 !" in shown
