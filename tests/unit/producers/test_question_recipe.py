"""Questions over a small library: what a search finds, what solves a question, and what is no answer."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.infra.environments.episodes import Episode
from turnlog.infra.environments.sources import task_source as installed
from turnlog.infra.environments.tasks import TaskSource
from turnlog.plugins.recipes.question import ASKS, FOUND, KINDS, RECIPE, demonstration, judge, library
from turnlog.schemas.events import Outcome

TASKS = list(itertools.islice(RECIPE.tasks(0), 60))


def search(query: Any) -> str:
    found = RECIPE.tool_call("search", json.dumps({"query": query}))
    assert isinstance(found, str)
    return found


def conversation(task: dict[str, Any], searches: int, answer: str) -> Episode:
    """A session that searched for one hop after the other, and then answered."""
    messages: list[dict[str, Any]] = RECIPE.messages(task)
    sought = ["book " + re.findall(r"'The (\w+) Letters'", task["prompt"])[0], *task["hops"]]
    asks = [("teacher", "was a pupil of"), ("born", "was born in the town"), ("river", "lies on the river")]
    wanted = [words for asked, words in asks if asked in task["prompt"]]
    for number, name in enumerate(sought[:searches]):
        query = name if not number else f"{name} {wanted[number - 1]}"
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}"}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": search(query)},
        ]
    messages.append({"role": "assistant", "content": answer})
    return Episode(task=task, messages=tuple(messages), outcome=Outcome.completed, reason="")


@each("task", TASKS, ids=lambda task: "-".join(task["hops"]))
def test_one_search_for_each_hop_finds_the_answer(task: dict[str, Any]) -> None:
    verdict = judge(conversation(task, len(task["hops"]), f"I looked it up.\nAnswer: {task['answer']}."))
    assert (verdict.value, verdict.components["hops_found"]) == (1.0, 1.0), verdict
    assert verdict.components["searches"] == len(task["hops"])


def test_questions_have_two_or_three_hops_and_no_search_for_the_question_alone_answers_most_of_them() -> None:
    assert {len(task["hops"]) for task in TASKS} == {2, 3}
    at_once = [task["answer"] in search(task["prompt"]) for task in TASKS]
    assert sum(at_once) < len(TASKS) / 4


@pytest.mark.parametrize("said", ["", "Answer:", "Answer: somebody else", "{answer} it is not"])
def test_what_is_no_answer_is_worth_nothing(said: str) -> None:
    task = TASKS[0]
    assert judge(conversation(task, 1, said.format(answer=task["answer"]))).value == 0.0


def test_a_session_that_was_cut_off_or_still_calls_its_tool_has_not_answered() -> None:
    task = TASKS[0]
    whole = conversation(task, 0, task["answer"])
    assert judge(whole).value == 1.0
    cut = Episode(task=task, messages=whole.messages, outcome=Outcome.truncated, reason="max_turns")
    calling = (*whole.messages[:-1], {**whole.messages[-1], "tool_calls": [{"id": "c"}]})
    assert judge(cut).value == 0.0
    assert judge(Episode(task=task, messages=calling, outcome=Outcome.completed, reason="")).value == 0.0


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"query": 3}', "{}", "[" * 5000])
def test_a_call_that_is_none_is_told_how_to_call(arguments: str) -> None:
    assert RECIPE.tool_call("search", arguments) == ASKS
    assert RECIPE.tool_call("find", '{"query": "a"}') == ASKS


def test_a_search_takes_any_words() -> None:
    assert search("") == search("?! 漢字 xyzzy") == "nothing fits"
    town = next(iter(library().river_of))
    assert search(town).splitlines()[0].count(town) == 1
    assert len(search("was born in the town of " * 10_000).splitlines()) == FOUND


def test_the_recipe_is_offered_and_its_tasks_are_a_function_of_the_seed(tmp_path: Path) -> None:
    assert installed("question") is RECIPE
    assert isinstance(RECIPE, TaskSource)
    for name in ("a", "b"):
        RECIPE.write_dataset(tmp_path / name, 5, 7)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert list(itertools.islice(RECIPE.tasks(1), 5)) != TASKS[:5]


def test_demonstrations_answer_some_of_their_questions_and_make_up_no_name() -> None:
    generator, known = random.Random(0), library()
    answers = {re.findall(r"\w+", fact)[-1] for fact in known.documents}
    asked = {kind(known, book)[0]: kind(known, book)[1][-1] for kind in KINDS for book in known.author_of}
    right = 0
    for _ in range(400):
        messages = demonstration(generator).messages
        answer = messages[-1]["content"].removeprefix("Answer: ")
        assert answer in answers
        right += answer == asked[messages[0]["content"].partition("\n")[0]]
    assert 0.2 < right / 400 < 0.4
