"""`turnlog lineage` as people see it: its tables and JSON, and what it says to arguments that make no sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.sessions import GroupName, SessionStory, Shape
from tests.unit.consumers.conftest import TrainedRun
from tests.unit.consumers.test_lineage import all_stepped, batches_of, influence_of, lineage_of, made
from turnlog.cli import parser
from turnlog.consumers.index import BadQuestion
from turnlog.infra.code_version import code_version
from turnlog.infra.log import Partition, partition_of
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.events import Event
from turnlog.settings import Settings

WEIGHTS = """\
weights 1 of run run: 4 sessions of 2 tasks, 32 tokens, mean reward 0.250
run version generation batches steps skipped tokens
run 1 0 0 1 0 32
run 0 0 0 0 0
run run started from a model folder that was not recorded
made of sessions tokens reward
source example, dataset not recorded 4 32 0.250
verifier example/1 4 32 0.250
environment example/1, image none, root not recorded, policy not recorded, packages not recorded 4 32 0.250
agent example/1 4 32 0.250
engine not recorded 4 32 0.250
code feeder not recorded 4 32 0.250
gateway CODE 4 32 0.250
rewards CODE 4 32 0.250
weight loader not recorded 4 32 0.250
assembler CODE, fold version FOLD 4 32 0.250
batcher CODE 4 32
trainer CODE 4 32
task task of group-0 2 16 0.000
task of group-1 2 16 0.500
"""
"""The table without its lines and its columns' widths, which depend on the length of the code version."""


def said(own: Settings, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    arguments = parser().parse_args(["lineage", *words])
    assert arguments.entry.call(own, arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
async def small(tmp_path: Path) -> Settings:
    """A run of four groups and two steps."""
    run = TrainedRun()
    await run.good_days(groups=4)
    await all_stepped(run)
    return await made(tmp_path, run)


async def test_the_table_of_weights(
    small: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = said(small, capsys, "--weights", "1")
    words = (" ".join(line.replace("─", "").split()) for line in text.splitlines())
    plain = "".join(f"{line}\n" for line in words if line)
    assert plain == WEIGHTS.replace("CODE", code_version()).replace("FOLD", FOLD_VERSION)


async def test_json_has_every_version_and_sessions_are_lines(
    small: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads(said(small, capsys, "--weights", "latest", "--json"))
    assert (body["run"], body["weights"], body["since"]) == ("run", 2, None)
    assert body["totals"] == {
        "sessions": 8, "groups": 4, "tokens": 64, "masked": 0, "compared": 0, "steps": 2, "skipped": 0, "tasks": 4,
        "reward": body["totals"]["reward"],
    }  # fmt: skip
    assert [link["version"] for link in body["runs"][0]["chain"]] == [0, 1, 2]
    assert body["runs"][0]["as_of"]["run"] == "run"
    lines = [json.loads(line) for line in said(small, capsys, "--weights", "latest", "--sessions").splitlines()]
    assert sum(line["tokens"] for line in lines) == 64
    since = json.loads(said(small, capsys, "--weights", "2", "--since", "1", "--json"))
    assert since["totals"]["tokens"] == 32
    told = json.loads(said(small, capsys, "--session", lines[0]["session_id"][:20], "--json"))
    assert told["session"] == lines[0]["session_id"]
    assert "weight versions that first contain it: " in said(small, capsys, "--session", lines[0]["session_id"])


@pytest.mark.parametrize(
    "words",
    [
        (), ("--weights",), ("--weights", "x"), ("--weights", "-1"), ("--weights", "1e3"), ("--weights", "٣"),
        ("--weights", "9" * 40), ("--weights", "1", "--since", "x"), ("--weights", "1", "--session", "s"),
        ("--weights", "1", "--json", "--sessions"), ("--dataset",), ("--session",),
    ],
)  # fmt: skip
def test_arguments_that_are_none_are_refused_by_the_command_line(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["lineage", *words])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--weights", "7"), "versions 0 to 2"), (("--weights", "1", "--since", "2"), "before 1"),
        (("--weights", "1", "--since", "9"), "versions 0 to 2"), (("--session", "nobody"), "nothing"),
        (("--session", "group-0"), "is a group"), (("--session", "s", "--since", "1"), "--since needs --weights"),
        (("--session", "s", "--sessions"), "--sessions needs --weights or --dataset"),
        (("--dataset", "d", "--in", "."), "--in needs --session"),
    ],
)  # fmt: skip
async def test_questions_without_an_answer_say_why(
    small: Settings, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    with pytest.raises(BadQuestion, match=why):
        said(small, capsys, *words)


def group_with_a_silent_member(run: TrainedRun, number: int) -> Iterator[Event]:
    """A group of two sessions, one of which never asks the policy for anything."""
    name = f"group-{number}"
    floor = run.broker.log_of(Partition(topics.SESSIONS.name, partition_of(name.encode(), 2))).end
    group = GroupName("run", name, floor, 2)
    for index, turns in enumerate((2, 0)):
        story = SessionStory(group, index, np.random.default_rng(number))
        yield story.started()
        for _ in range(turns):
            yield from story.turn(Shape())
        yield story.rewarded(float(index))
        yield story.finished()


async def test_a_member_without_trained_tokens_counts_in_the_baseline(tmp_path: Path) -> None:
    run = TrainedRun()
    await run.configure()
    for number in range(2):
        await run.append(group_with_a_silent_member(run, number))
    await run.fold()
    await run.draw()
    await all_stepped(run)
    own = await made(tmp_path, run)
    found = lineage_of(own, 1)
    assert (found.total("sessions"), found.total("compared")) == (2, 2)
    (batch,) = await batches_of(run)
    trained = {row.session_id for row in batch.samples}
    sessions = {each.session_id for each in await run.read(topics.SESSIONS) if hasattr(each, "session_id")}
    (silent, _) = sorted(sessions - trained)
    shown = influence_of(own, silent)
    assert (shown.samples, shown.siblings, shown.direct) == ([], 1, [1])
    assert [(effect.how, effect.tokens) for effect in shown.effects] == [("compared", 0)]
