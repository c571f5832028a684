"""Tasks of reasoning-gym through turnlog are scored as by reasoning-gym itself, and no answer runs code."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.environments import BadSource, Episode, Verdict, task_source
from turnlog.plugins.reasoning_gym.answers import FORMULAS, LITERALS, AnswerFormat, is_safe
from turnlog.plugins.reasoning_gym.calculator import USAGE, calculate
from turnlog.plugins.reasoning_gym.process import ReasoningGymError, ReasoningGymProcess, reasoning_gym
from turnlog.plugins.reasoning_gym.source import ReasoningGym
from turnlog.schemas.events import Outcome

SEED = 7
NO_OWN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose entries have many right answers, of which reasoning-gym gives none."""
OTHERS = ("42", "nonsense zz", "[1, 2]", "x + 1")
UPSTREAM = """
import json, os, sys, types
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
try:
    import pycosat
except ModuleNotFoundError:
    sys.modules["pycosat"] = types.ModuleType("pycosat")
import reasoning_gym

found = {}
for name in json.load(sys.stdin):
    dataset = reasoning_gym.create_dataset(name, seed=SEED, size=2)
    entry, scores = dataset[0], []
    for answer in (entry["answer"], *OTHERS):
        try:
            scores.append(float(dataset.score_answer(answer.strip(), entry)) if answer is not None else None)
        except Exception:
            scores.append("raises")
    found[name] = [entry["question"], entry["answer"], scores]
json.dump(found, answers)
""".replace("SEED", str(SEED)).replace("OTHERS", repr(OTHERS))
"""Entries and scores by reasoning-gym alone."""


def source(text: str) -> ReasoningGym:
    found = task_source(f"reasoning-gym {text}")
    assert isinstance(found, ReasoningGym)
    return found


def score(gym: ReasoningGym, row: Any, said: str) -> Verdict:
    """The verdict about a session whose last message is `said`."""
    task = gym.task(row)
    messages = (*task.messages, {"role": "assistant", "content": said})
    return gym.verifier.judge(Episode(task=row, messages=messages, outcome=Outcome.completed, reason=""))


def first_rows() -> Iterator[tuple[str, ReasoningGym, Any]]:
    for name in sorted(reasoning_gym().tasks()):
        gym = source(f"tasks={name} seed={SEED} size=2")
        row = next(gym.tasks(0))
        yield name, gym, json.loads(json.dumps(row))  # as a file of rows holds it


def solved(gym: Any, row: Any) -> Any:
    """The solution of a row."""
    task = gym.task(row)
    return None if task.solution is None else task.solution()


def test_every_task_is_scored_as_by_reasoning_gym_alone() -> None:
    names = sorted(reasoning_gym().tasks())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UPSTREAM],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},  # isomorphic_strings takes letters in the order of a set
    )
    upstream = json.loads(done.stdout)
    assert len(upstream) >= 103
    own = set()
    for name, gym, row in first_rows():
        question, answer, (own_score, *scores) = upstream[name]
        assert row["prompt"] == f"{question}\n{AnswerFormat.tags.rule}", name
        assert row["entry"]["answer"] == answer, name
        if answer is None:
            own.add(name)
            assert solved(gym, row) is None
        else:
            solution = solved(gym, row)
            assert isinstance(solution, list)
            assert score(gym, row, solution[0]["content"]).value == own_score == 1.0, name
        for said, expected in zip(OTHERS, scores, strict=True):
            verdict = score(gym, row, f"I think <answer>{said}</answer>")
            assert verdict.value == (0.0 if expected == "raises" else expected), (name, said)
            assert verdict.components["unscorable"] == (expected == "raises" or not is_safe(name, said)), (name, said)
        assert score(gym, row, "<answer></answer>").value <= 0.05, name
        silent = score(gym, row, str(answer))
        assert (silent.value, silent.components["answered"]) == (0.0, 0.0), name
    assert own == NO_OWN_ANSWER


def test_rows_go_on_without_repeats_and_are_the_same_in_every_process() -> None:
    gym = source("tasks=chain_sum:3,gcd size=4")
    rows = list(itertools.islice(gym.tasks(1), 60))
    assert len({row["id"] for row in rows}) == 60
    assert 30 < sum(row["task"] == "chain_sum" for row in rows) < 57
    assert rows == list(itertools.islice(gym.tasks(1), 60))
    assert {row["id"] for row in rows}.isdisjoint(row["id"] for row in itertools.islice(gym.tasks(2), 60))
    other = ReasoningGymProcess(sys.executable)
    assert other.entry("chain_sum", dict(rows[0]["config"]), 0) == reasoning_gym().entry(
        "chain_sum", dict(rows[0]["config"]), 0
    )
    other.close()


def test_fields_of_the_configuration_reach_the_tasks_that_have_them() -> None:
    gym = source("tasks=chain_sum,products max_terms=2 chain_sum__max_digits=1")
    configs = {row["task"]: row["config"] for row in itertools.islice(gym.tasks(0), 30)}
    assert {key: configs["chain_sum"][key] for key in ("max_terms", "max_digits")} == {"max_terms": 2, "max_digits": 1}
    assert "max_digits" not in configs["products"]


@each(
    ("text", "reason"),
    [
        ("tasks=nope", "no task 'nope'"),
        ("tasks=gcd:0", "weight '0'"),
        ("tasks=gcd format=xml", "format='xml' must be one of tags, line"),
        ("tasks=gcd tool=hammer", "tool='hammer'"),
        ("tasks=gcd size=0", "size=0: must"),
        ("tasks=gcd colour=red", "no task of gcd has such a field"),
        ("tasks=chain_sum min_terms=9 max_terms=2", "max_terms must be >= min_terms"),
        ("tasks=gcd python=/nowhere/python", "python=PATH"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_legal(text: str, reason: str) -> None:
    with pytest.raises(BadSource, match=reason):
        task_source(f"reasoning-gym {text}")


def test_zebra_puzzles_need_pycosat() -> None:
    if "zebra_puzzles" in reasoning_gym().tasks():
        assert next(source("tasks=zebra_puzzles").tasks(0))["entry"]["answer"]
    else:
        with pytest.raises(BadSource, match="zebra_puzzles needs pycosat"):
            source("tasks=zebra_puzzles")


@each("task", [*sorted(LITERALS), *sorted(FORMULAS)])
def test_no_answer_runs_code(task: str) -> None:
    trace = Path(f"/tmp/turnlog-answer-{task}")
    gym = source(f"tasks={task} seed={SEED}")
    row = next(gym.tasks(0))
    for code in (
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"[open({str(trace)!r}, 'w')]",
        f"open(chr(47)+{str(trace)[1:]!r}, 'w')",
        "exec(chr(49))",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "x.__class__",
    ):
        assert score(gym, row, f"<answer>{code}</answer>").value <= 0.01
        assert not is_safe(task, code)
    assert not trace.exists()


@each(
    ("task", "answer"),
    [
        ("spiral_matrix", "[1, 2, -3]"),
        ("spiral_matrix", "1 2 3"),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"),
        ("countdown", "(100 - 75) * 6 / 3.5"),
        ("simple_integration", "x**2/2 + sin(x)*exp(2*x) + C"),
        ("polynomial_multiplication", "6*x**2*y - 1"),
        ("gcd", "__import__('os')"),
    ],
)
def test_ordinary_answers_are_scored(task: str, answer: str) -> None:
    assert is_safe(task, answer)


def test_an_answer_that_computes_for_ever_scores_0_and_the_next_one_is_scored() -> None:
    process = ReasoningGymProcess(sys.executable, score_cpu_s=1)
    config = {"seed": SEED, "size": 2}
    entry = process.entry("countdown", config, 0)
    found = process.score("countdown", config, entry, "9**9**9**9")
    assert found.value < 0.1
    assert process.score("countdown", config, entry, entry["answer"]).value == 1.0
    process.close()


def test_a_process_that_died_is_started_again_and_a_broken_row_is_no_reward() -> None:
    process = ReasoningGymProcess(sys.executable)
    config = {"seed": SEED, "size": 2}
    entry = process.entry("gcd", config, 0)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.score("gcd", config, entry, entry["answer"]).value == 1.0
    process.close()
    for broken in ({"question": "?"}, {**entry, "answer": ["no", "text"]}):  # the fault of the row, not of the answer
        with pytest.raises(ReasoningGymError):
            process.score("chain_sum", config, broken, "1")
    process.close()


def test_an_idle_process_ends_and_is_started_again() -> None:
    process = ReasoningGymProcess(sys.executable, idle_s=0.1)
    config = {"seed": SEED, "size": 2}
    entry = process.entry("gcd", config, 0)
    assert process._process is not None
    assert process._process.wait() == 0
    assert process.entry("gcd", config, 0) == entry
    process.close()


def test_an_answer_is_the_last_of_the_message() -> None:
    assert AnswerFormat.tags.answer_in("<answer>1</answer> no, <answer>\n2 3\n</answer>") == "2 3"
    assert AnswerFormat.tags.answer_in("<answer>1") is None
    assert AnswerFormat.line.answer_in("Answer: 1\nAnswer: 2\n3") == "2\n3"
    assert AnswerFormat.line.answer_in("2") is None
    for style in AnswerFormat:
        assert style.answer_in(style.format_answer("a b")) == "a b"


@each(
    ("expression", "value"),
    [
        ("1 + 2", "3"),
        ("-3 - 4", "-7"),
        ("6 / 3", "2"),
        ("7/2", "3.5"),
        ("5 % 0", USAGE),
        ("2 ** 3", USAGE),
        ("1 + 2 + 3", USAGE),
        ("f(1) + 2", USAGE),
        (None, USAGE),
        ("1+" * 400, USAGE),
    ],
)
def test_the_calculator_takes_one_step_of_whole_numbers(expression: Any, value: str) -> None:
    assert calculate(expression) == value


def test_the_calculator_answers_in_the_runner() -> None:
    gym = source("tasks=chain_sum max_digits=1 max_terms=3 format=line tool=calculator")
    task = gym.task(next(gym.tasks(0)))
    assert task.tool_call("calculator", '{"expression": "2 + 3"}') == "5"
    assert task.tool_call("calculator", "[]") == "the arguments are no JSON object"
    assert task.tool_call("hammer", "{}") == "there is no tool 'hammer'"


def test_demonstrations_of_the_tiny_policies_are_right_about_half_of_the_time() -> None:
    for text, least, most in (("max_terms=2", 0.35, 0.55), ("min_terms=3 max_terms=3 tool=calculator", 0.3, 0.55)):
        gym = source(f"tasks=chain_sum max_digits=1 format=line {text}")
        assert gym.warm_start is not None
        assert gym.demo_rise == 0.15
        right = 0
        for demonstration in itertools.islice(gym.warm_start.demonstrations(0), 200):
            words = demonstration.messages[0]["content"].splitlines()[0].split(": ")[1].removesuffix(" =").split()
            value = int(words[0])
            for operator, term in zip(words[1::2], words[2::2], strict=True):
                value += int(term) if operator == "+" else -int(term)
            right += demonstration.messages[-1]["content"] == f"Answer: {value}"
        assert least < right / 200 < most
    assert source("tasks=chain_sum").warm_start is None
    assert source("tasks=gcd").demo_rise == 0.0
