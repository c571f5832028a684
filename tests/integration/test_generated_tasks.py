"""Sessions of the sources `textarena` and `reasoning-gym` through a real runner and gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from tests.integration.conftest import Stage
from turnlog.environments import task_source
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.plugins.textarena.source import game_row
from turnlog.schemas.events import Outcome, RewardAssigned, RewardFailed

HANOI = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
"""The seven moves of three disks."""
LIMITS = {"max_turns": 9, "max_context_tokens": 8192}


CONTEXT = 8192


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the stage with a longer context, since games tell much."""
    folder = tmp_path_factory.mktemp("model")
    RECIPE.warm_start.write_tokenizer(folder)
    config = RECIPE.warm_start.model.config() | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def long_stage(stage: Stage) -> Stage:
    engine = dataclasses.replace(stage.settings.engine, context=CONTEXT)
    stage.settings = dataclasses.replace(stage.settings, engine=engine)
    stage.engine.context = CONTEXT
    return stage


def next_move(prompt: str) -> str:
    return HANOI[prompt.count("assistant\n") - 1]


@pytest.mark.parametrize("moves", [None, 1, 4])
async def test_a_game_is_won_by_messages_also_under_a_second_runner(long_stage: Stage, moves: int | None) -> None:
    reached = asyncio.Event()

    def policy(prompt: str) -> str:
        if moves is not None and prompt.count("assistant\n") > moves:
            reached.set()
        return next_move(prompt)

    long_stage.policy = policy
    await long_stage.request(recipe="textarena game=TowerOfHanoi-v0", task=game_row("TowerOfHanoi-v0", 1), **LIMITS)
    async with long_stage.gateway():
        if moves is not None:
            async with long_stage.running():
                await asyncio.wait_for(reached.wait(), 20)
        async with long_stage.running(instance="r-2"):
            [finish] = await long_stage.finished(1)
    assert (finish.outcome, len(finish.turns)) == (Outcome.completed, len(HANOI))
    [reward] = await long_stage.said(RewardAssigned)
    assert (reward.value, reward.components["done"], reward.components["actions"]) == (1.0, 1.0, 7.0)


async def test_a_game_that_runs_out_of_turns_is_truncated_and_has_no_reward_of_its_own(long_stage: Stage) -> None:
    long_stage.policy = next_move
    row = game_row("TowerOfHanoi-v0", 1)
    await long_stage.request(recipe="textarena game=TowerOfHanoi-v0", task=row, **{**LIMITS, "max_turns": 3})
    async with long_stage.gateway(), long_stage.running():
        [finish] = await long_stage.finished(1)
    assert (finish.outcome, finish.reason) == (Outcome.truncated, "max_turns")
    [reward] = await long_stage.said(RewardAssigned)
    assert (reward.value, reward.components["done"], reward.components["actions"]) == (0.0, 0.0, 3.0)


async def test_a_row_of_a_game_that_cannot_be_played_is_no_failure_of_the_agent(long_stage: Stage) -> None:
    row = {"id": "x", "prompt": "?", "game": "Klondike-v0", "seed": 1}
    await long_stage.request(recipe="textarena game=TowerOfHanoi-v0", task=row, **LIMITS)
    async with long_stage.gateway(), long_stage.running():
        finishes = await long_stage.finished(2)
    assert {one.outcome for one in finishes} == {Outcome.infra_failure}
    assert "Klondike-v0 cannot be imported" in finishes[0].reason
    assert await long_stage.said(RewardAssigned) == []


@pytest.mark.parametrize(("said", "value"), [("Answer: {}", 1.0), ("{}", 0.0), ("Answer: 99999", 0.0)])
async def test_an_answer_is_rewarded_by_the_entry_of_its_row(long_stage: Stage, said: str, value: float) -> None:
    text = "reasoning-gym tasks=chain_sum max_terms=2 max_digits=1 format=line"
    row = dict(next(task_source(text).tasks(1)))
    long_stage.policy = lambda prompt: said.format(row["entry"]["answer"])
    await long_stage.request(recipe=text, task=row, **LIMITS)
    async with long_stage.gateway(), long_stage.running():
        [finish] = await long_stage.finished(1)
    assert (finish.outcome, len(finish.turns)) == (Outcome.completed, 1)
    [reward] = await long_stage.said(RewardAssigned)
    assert reward.value == value


async def test_a_row_that_reasoning_gym_cannot_score_has_no_reward(long_stage: Stage) -> None:
    text = "reasoning-gym tasks=chain_sum max_terms=2 max_digits=1 format=line"
    row = dict(next(task_source(text).tasks(1)))
    row["entry"] = {**json.loads(json.dumps(row["entry"])), "answer": ["no", "text"]}
    long_stage.policy = lambda prompt: "Answer: 1"
    await long_stage.request(recipe=text, task=row, **LIMITS)
    async with long_stage.gateway(), long_stage.running():
        await long_stage.finished(1)
    assert await long_stage.said(RewardAssigned) == []
    [failure] = await long_stage.said(RewardFailed)
    assert "reasoning-gym" in str(failure)
