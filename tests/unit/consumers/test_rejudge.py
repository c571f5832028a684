"""Recorded sessions judged again: new rewards, advantages and groups as they follow from them, and who is asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from tests.fakes.number_game import NumberGame
from tests.fakes.offers import offering
from tests.fakes.sessions import GroupName, Shape, whole_group
from tests.unit.infra.test_verifiers import Service, a_judge, by_length, service  # noqa: F401
from turnlog import cli
from turnlog.consumers.datasets import BadQuery, DatasetExists, NothingMatched
from turnlog.consumers.datasets.build import build, verify
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.replay.progress import ReplayState
from turnlog.consumers.replay.refold import Changes, Refold
from turnlog.consumers.replay.rejudge import (
    NoSuchRows,
    NotRerunnable,
    NoVerifier,
    Rejudged,
    Rerun,
    Verdicts,
    verifier_at,
)
from turnlog.environments import Player, Recipe
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Verdict
from turnlog.infra.environments.sources import UnknownRecipe
from turnlog.infra.environments.verifiers import EnvironmentVerifier, SandboxVerifier, WeightedSum
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.role import Role
from turnlog.schemas import ids, topics
from turnlog.schemas.events import Limits, Purpose, RewardAssigned, RolloutRequested, Sampling, TurnCompleted
from turnlog.verbs.replay import rows_asked

Make = Callable[..., Any]
SAYS = ("right", "wrong", "broken")
ASKED = b'[{"role": "user", "content": "what is it?"}]'
EXACT = FunctionVerifier("exact", "2", lambda episode: judged(episode))
FOND = FunctionVerifier("fond", "1", lambda episode: Verdict(judged(dataclasses.replace(episode, task=WRONG)).value))
"""Rewards what EXACT does not."""
WRONG = {"answer": "wrong"}
TESTS = SandboxVerifier(name="tests", version="1", calls="true")
BOTH = WeightedSum(name="both", version="1", parts=((EXACT, 1.0), (EnvironmentVerifier(name="env", version="1"), 1.0)))


def judged(episode: Episode) -> Verdict:
    """As a verifier sees it live."""
    said = episode.messages[-1]
    assert set(said) == {"role", "content"}
    assert (episode.outcome.value, episode.reason) == ("completed", "")
    if said["content"] == "broken":
        raise ValueError("cannot read it")
    return Verdict(float(said["content"] == episode.task["answer"]), {"exact": 1.0})


async def recorded(made: Any, groups: int = 2) -> None:
    """Groups in which every reward was 0, of sessions that end with each of SAYS."""
    await made.configure()
    for number in range(groups):
        name = f"group-{number}"
        floor = made.broker.log_of(
            Partition(topics.SESSIONS.name, partition_of(name.encode(), made.settings.kafka.groups))
        ).end
        story = whole_group(
            GroupName("run", name, floor, len(SAYS)), np.random.default_rng(number), turns=2, shape=Shape()
        )
        found = [
            dataclasses.replace(event, value=0.0) if isinstance(event, RewardAssigned) else event for event in story
        ]
        sessions = list(dict.fromkeys(event.session_id for event in found))
        await made.append(
            dataclasses.replace(
                event,
                new_messages=ASKED,
                response=json.dumps({"content": SAYS[sessions.index(event.session_id)]}).encode(),
            )
            if isinstance(event, TurnCompleted)
            else event
            for event in found
        )
        await made.append(
            [
                RolloutRequested(
                    event_id=f"asked {name}", run_id="run", group_id=name, floor=0, task_id="t",
                    rollout_id=ids.rollout_id(name, 0), rollout_index=0, group_size=3, draw=0, dataset="d",
                    dataset_epoch=0, index=0, recipe="example", purpose=Purpose.train,
                    task=json.dumps({"answer": "right"}).encode(), sampling=Sampling(), limits=Limits(),
                    min_weight_version=0,
                )
            ]
        )  # fmt: skip
    await made.fold()


async def rerun(role: Role, out: Path, state: Path) -> tuple[Verdicts, list[dict[str, Any]], dict[str, Any]]:
    verdicts = await Rerun(role, EXACT).run()
    await Refold(role, Changes(), out, state, verdicts=verdicts).run(fresh=True)
    rows = [row for file in sorted((out / "data").iterdir()) for row in parquet.read_table(file).to_pylist()]
    return verdicts, rows, json.loads((out / "manifest.json").read_text())


@pytest.mark.parametrize("source", ["topics", "archive"])
async def test_a_rerun_gives_the_rows_that_the_new_rewards_would_have_given(
    trained_run: Make, tmp_path: Path, source: str
) -> None:
    made = trained_run()
    await recorded(made)
    await made.archive()
    role = made.role() if source == "topics" else await made.archived()
    verdicts, rows, manifest = await rerun(role, tmp_path / "out", tmp_path / "state")
    trained = {(row["reward"], float(np.sign(max(row["advantages"], key=abs)))) for row in rows if any(row["trained"])}
    assert trained == {(1.0, 1.0), (0.0, -1.0)}  # those without a verdict are in no baseline
    told = manifest["query"]["rewards"]
    assert told == {
        "verifiers": ["exact:2"], "judged": 6, "changed": 2, "raised": 2, "lowered": 0, "failed": 2,
        "mean_before": 0.0, "mean_after": 0.5, "kept": {},
    }  # fmt: skip
    said = list(verdicts.lines())
    assert "6 sessions judged by exact:2: 2 rewards change (2 up, 0 down), 2 no longer have one" in said[0]
    assert sum("0 -> 1" in line for line in said) == 2
    assert sum("crashed: ValueError: cannot read it" in line for line in said) == 2
    recorded_rewards = [event for event in await made.read(topics.SESSIONS) if isinstance(event, RewardAssigned)]
    assert {event.value for event in recorded_rewards} == {0.0}  # the log is what it was


async def chosen(
    made: Any, out: Path, view: str, query: Query, source: str = "topics"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    role = made.role() if source == "topics" else await made.archived()
    verdicts = await Rerun(role, FOND).run()
    await Refold(role, Changes(), out, out.parent / "state", verdicts=verdicts, view=view, query=query).run()
    verify(out)
    rows = [row for file in sorted((out / "data").iterdir()) for row in parquet.read_table(file).to_pylist()]
    return rows, json.loads((out / "manifest.json").read_text())


async def test_sessions_are_compared_with_those_of_their_own_group_alone(
    trained_run: Make,
    tmp_path: Path,
    service: Service,  # noqa: F811
) -> None:
    made = trained_run()
    await recorded(made)
    service.answers = by_length
    role = made.role()
    verdicts = await Rerun(role, a_judge(service, opponents=2), at_once=3).run()
    said = {session: found.after for session, found in verdicts.found.items()}
    assert sorted(each.value for each in said.values() if isinstance(each, Verdict)) == [
        0.25,
        0.25,
        0.25,
        0.25,
        1.0,
        1.0,
    ]
    assert len(service.asked) == 2 * 3 * 2
    pairs = Query(pairs="all")
    await Refold(
        role, Changes(), tmp_path / "out", tmp_path / "state", verdicts=verdicts, view="preference", query=pairs
    ).run()
    rows = parquet.read_table(tmp_path / "out/data").to_pylist()
    assert sorted((row["chosen"][-1]["content"], row["rejected"][-1]["content"], row["margin"]) for row in rows) == [
        ("broken", "right", 0.75), ("broken", "right", 0.75), ("broken", "wrong", 0.75), ("broken", "wrong", 0.75)
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["topics", "archive"])
async def test_conversations_are_chosen_by_the_new_rewards(trained_run: Make, tmp_path: Path, source: str) -> None:
    made = trained_run()
    await recorded(made)
    await made.archive()
    best = Query(best_of_group=True)
    await build(made.role(), best, tmp_path / "before", view="sft", format="parquet")
    before = parquet.read_table(tmp_path / "before/data").to_pylist()
    assert [(row["messages"][-1]["content"], row["reward"]) for row in before] == [("right", 0.0)] * 2
    rows, manifest = await chosen(made, tmp_path / "out", "sft", best, source)
    assert [(row["messages"][-1]["content"], row["reward"]) for row in rows] == [("wrong", 1.0)] * 2
    assert (manifest["view"], manifest["removed"]) == ("sft", {"excluded": 2, "best_of_group": 2})
    assert manifest["query"]["rewards"]["verifiers"] == ["fond:1"]
    assert (manifest["query"]["best_of_group"], manifest["query"]["source"]) == (True, source)
    assert {each["topic"] for each in manifest["read"]} >= {"agent.turns", "agent.sessions", "segment-samples"}


async def test_pairs_are_those_that_the_new_rewards_set_apart(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await recorded(made)
    rows, manifest = await chosen(made, tmp_path / "out", "preference", Query(min_margin=0.5))
    assert [
        (row["chosen"][-1]["content"], row["rejected"][-1]["content"], row["margin"], row["rejected_reward"])
        for row in rows
    ] == [("wrong", "right", 1.0, 0.0)] * 2
    assert manifest["query"]["rewards"]["failed"] == manifest["removed"]["excluded"] == 2


async def test_a_group_that_is_scored_behind_the_cut_is_in_no_view(trained_run: Make, tmp_path: Path) -> None:
    """Nobody has judged it again, so that its rewards are the old ones."""
    made = trained_run()
    await recorded(made, groups=1)
    role = made.role()
    verdicts = await Rerun(role, FOND).run()
    work = Refold(role, Changes(), tmp_path / "out", tmp_path / "state", verdicts=verdicts, view="sft", until="1")
    with pytest.raises(NothingMatched):
        await work.run()
    assert not (tmp_path / "out").exists()


class Slow:
    """A verifier's function that counts whom it judged, and stops before one of them."""

    def __init__(self, stop: int | None) -> None:
        self.stop, self.asked = stop, list[str]()
        self.stopped, self.released = threading.Event(), threading.Event()

    def __call__(self, episode: Episode) -> Verdict:
        if len(self.asked) == self.stop:
            self.stopped.set()
            self.released.wait(30)
        self.asked.append(str(episode.messages[-1]["content"]))
        return judged(episode)


async def test_a_killed_rerun_asks_for_no_verdict_twice(trained_run: Make, tmp_path: Path) -> None:
    made = trained_run()
    await recorded(made)

    async def attempt(slow: Slow, version: str = "1", *, fresh: bool = False) -> Verdicts:
        state = ReplayState(tmp_path, {"rejudged": "run"}, every_s=0.0)
        state.load(fresh=fresh)
        return await Rerun(made.role(), FunctionVerifier("slow", version, slow), at_once=1, state=state).run()

    first = Slow(stop=4)
    killed = asyncio.create_task(attempt(first))
    assert await asyncio.to_thread(first.stopped.wait, 30)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    had = first.asked.copy()
    first.released.set()
    again = Slow(stop=None)
    verdicts = await attempt(again)
    assert len(again.asked) == 6 - verdicts.resumed
    assert again.asked.count("broken") == 2  # a failure may be another one's answer by now
    assert verdicts.resumed == sum(said != "broken" for said in had) > 0
    assert verdicts.summary() == (await attempt(Slow(stop=None), fresh=True)).summary()
    assert any("were judged by an unfinished rerun" in line for line in verdicts.lines())
    other = Slow(stop=None)
    assert (await attempt(other, version="2")).resumed == 0
    assert len(other.asked) == 6


async def test_the_same_reward_is_no_change_and_a_session_that_was_not_judged_keeps_its_own(trained_run: Make) -> None:
    made = trained_run()
    await recorded(made, groups=1)
    role = made.role()
    verdicts = await Rerun(role, FunctionVerifier("ok", "1", lambda _: Verdict(0.0))).run()
    assert verdicts.summary()["changed"] == 0
    other = next(event for event in await made.read(topics.SESSIONS) if isinstance(event, RewardAssigned))
    unknown = dataclasses.replace(other, session_id="unknown")
    assert verdicts.substitute_event(unknown) == unknown
    assert verdicts.substitute_event(other).verifier.name == "ok"  # type: ignore[attr-defined]


async def test_a_recipe_that_is_not_installed_here_is_named(trained_run: Make) -> None:
    made = trained_run()
    await recorded(made, groups=1)
    with pytest.raises(UnknownRecipe, match="no recipe 'example'"):
        await Rerun(made.role(), None).run()


def test_who_judges_is_found_by_name_and_what_is_over_is_refused_by_name() -> None:
    assert verifier_at(f"{__name__}:EXACT") is EXACT
    assert verifier_at("turnlog.plugins.recipes.calc:RECIPE").name == "calc"
    for name, said in (("TESTS", "'tests' judges by sandboxes"), ("BOTH", "'env' judges by what an environment")):
        with pytest.raises(NotRerunnable, match=said):
            verifier_at(f"{__name__}:{name}")
    with pytest.raises(NotRerunnable, match="'repair' judges by sandboxes"):
        verifier_at("turnlog.plugins.recipes.repair:RECIPE")
    for path in ("nowhere:X", f"{__name__}:NOTHING", f"{__name__}:SAYS", "calc"):
        with pytest.raises(NoVerifier):
            verifier_at(path)


def test_the_command_line_says_what_is_judged_and_where_to(capsys: pytest.CaptureFixture[str]) -> None:
    given = cli.parser().parse_args(
        ["log", "reward", "rerun", "out", "--verifier", "m:N", "--from", "archive", "--dry-run"]
    )
    assert (given.action, given.out, given.verifier, given.source) == ("rerun", Path("out"), "m:N", "archive")
    view = ["--view", "preference", "--pairs", "all"]
    assert rows_asked(cli.parser().parse_args(["log", "reward", "rerun", "--dry-run", *view])) == Query(pairs="all")
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["log", "reward", "rerun", "--help"])
    assert "Functions, services, judge models and sums" in capsys.readouterr().out


def test_rows_that_no_rerun_gives_are_refused_before_anybody_judges(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/manifest.json").write_text("{}")
    for words, error, said in (
        ([], NoSuchRows, "name a folder"),
        (["out", "--include-run", "other"], NoSuchRows, "only the sessions of the run of --run"),
        (["out", "--min-reward", "1"], NoSuchRows, "'min_reward': 1.0"),
        (["out", "--view", "preference", "--best", "2"], BadQuery, "best needs the view sft"),
        ([str(tmp_path / "there"), "--view", "sft"], DatasetExists, "--overwrite"),
    ):
        with pytest.raises(error, match=said):
            rows_asked(cli.parser().parse_args(["log", "reward", "rerun", *words]))


class Duel(Recipe):
    name = "example"
    players = (Player(name="a"), Player(name="b"))

    def messages(self, task: Any) -> list[Any]:
        return []

    def game(self, row: Any) -> NumberGame:
        return NumberGame()


DUEL = Duel()


async def test_sessions_of_a_game_keep_the_rewards_of_their_players(
    trained_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained_run()
    await recorded(made)
    with offering(tmp_path, monkeypatch, "duel", {"example": f"{__name__}:DUEL"}):
        verdicts = await Rerun(made.role(), EXACT).run()
    assert (verdicts.found, dict(verdicts.left)) == ({}, {"it is a game of several players": 6})
    [*_, reward] = [event for event in await made.read(topics.SESSIONS) if isinstance(event, RewardAssigned)]
    other = Verdicts({reward.session_id: Rejudged(reward.session_id, EXACT, 0.0, Verdict(1.0))})
    assert other.substitute_event(reward).value == 1.0
    of_player = dataclasses.replace(reward, player="a")
    assert other.substitute_event(of_player) is of_player, "it is no reward of the session"
