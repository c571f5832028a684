"""The game in words: what is seen, what solves it, and that playing again comes to the same."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.infra.environments.episodes import Episode
from turnlog.infra.environments.simulations import OVER, Played
from turnlog.infra.environments.tasks import TaskSource, played
from turnlog.plugins.recipes.household import (
    PLACES,
    RECIPE,
    THINGS,
    TURNS,
    House,
    demonstration,
    good_action,
    judge,
    task_row,
)
from turnlog.schemas.events import Outcome

TASK = {
    "prompt": "put key in sofa. places: bed, desk, fridge, sofa", "thing": "key", "goal": "sofa",
    "places": ["bed", "desk", "fridge", "sofa"], "lies": {"key": "desk", "cup": "desk", "pen": "bed", "soap": "bed"},
}  # fmt: skip
ACTIONS = st.builds(
    "{} {}".format, st.sampled_from(["go", "take", "put", "eat"]), st.sampled_from([*PLACES, *THINGS, ""])
)


def do(action: str) -> tuple[str, str]:
    return "act", json.dumps({"do": action})


def conversation(actions: list[str], answered: int | None = None) -> list[dict[str, Any]]:
    """The messages of a session that did these; the calls from `answered` on have no answer yet."""
    house, messages = Played(House(TASK)), [{"role": "user", "content": TASK["prompt"]}]
    for number, action in enumerate(actions):
        function = dict(zip(("name", "arguments"), do(action), strict=True))
        messages.append({"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": function}]})
        if answered is None or number < answered:
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": house.call(*do(action))})
    return messages


def test_only_the_place_where_one_stands_is_seen() -> None:
    house = Played(House(TASK))
    assert house.first == TASK["prompt"]
    told = [house.call(*do(action)) for action in ("take key", "go fridge", "take key", "go desk", "take key")]
    assert told == ["no", "fridge: nothing", "no", "desk: cup, key", "you have key"]
    assert [house.call(*do(action)) for action in ("take cup", "go moon", "put key")] == ["no", "no", "desk: cup, key"]
    assert (house.done, sum(house.rewards)) == (False, 0.0)


def test_a_thing_in_its_place_ends_the_game_with_the_reward() -> None:
    house = Played(House(TASK))
    told = [house.call(*do(action)) for action in ("go desk", "take key", "go sofa", "put key", "go bed")]
    assert told == ["desk: cup, key", "you have key", "sofa: nothing", "done", OVER]
    assert (house.done, house.rewards) == (True, [0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("{", "the arguments are no JSON object"), ("[1]", "the arguments are no JSON object"), ('{"do": 7}', "no"),
     ("{}", "no"), ("[" * 10_000, "the arguments are no JSON object")],
)  # fmt: skip
def test_what_a_model_writes_wrong_is_told_to_it(arguments: str, said: str) -> None:
    assert Played(House(TASK)).call("act", arguments) == said


@given(st.lists(ACTIONS, max_size=12), st.data())
def test_whoever_goes_on_stands_where_the_last_one_stood(actions: list[str], data: st.DataObject) -> None:
    answered = data.draw(st.integers(0, len(actions)))
    whole, part = Played(House(TASK)), played(RECIPE, TASK, conversation(actions, answered))
    assert part is not None
    for action in actions[:answered]:
        whole.call(*do(action))
    assert part.rewards == whole.rewards
    assert [part.call(*do(action)) for action in actions[answered:]] == [
        whole.call(*do(action)) for action in actions[answered:]
    ]


@pytest.mark.parametrize(
    ("actions", "value"),
    [(["go desk", "take key", "go sofa", "put key"], 1.0), (["go desk", "take key"], 0.0), ([], 0.0)],
)
def test_the_verdict_is_what_the_steps_came_to(actions: list[str], value: float) -> None:
    episode = Episode(task=TASK, messages=tuple(conversation(actions)), outcome=Outcome.completed, reason="")
    verdict = judge(episode)
    assert (verdict.value, verdict.components) == (value, {"solved": value, "steps": float(len(actions))})


def test_tasks_differ_and_each_can_be_solved_by_what_is_seen(tmp_path: Path) -> None:
    RECIPE.write_dataset(tmp_path / "tasks.jsonl", 200, 0)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert rows == list(itertools.islice(RECIPE.tasks(0), 200))
    assert len({json.dumps(row) for row in rows}) >= 190
    generator = random.Random(0)
    for row in rows:
        house, seen = Played(House(row)), [""]
        while not house.done:
            seen.append(house.call(*do(good_action(row, seen, generator))))
        assert len(seen) - 1 <= TURNS


def test_demonstrations_solve_about_half_of_their_tasks() -> None:
    generator = random.Random(0)
    told = [demonstration(generator).messages[-1]["content"] for _ in range(1000)]
    assert 400 < told.count("done") < 600


def test_the_row_of_another_task_is_the_recipes_own_error() -> None:
    assert isinstance(RECIPE, TaskSource)
    with pytest.raises(KeyError):
        played(RECIPE, {"prompt": "?"}, [])
    assert task_row(random.Random(1)) == task_row(random.Random(1))
