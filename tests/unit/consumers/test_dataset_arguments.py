"""Every option of `turnlog dataset build` reaches the query, and the page explains it with an example."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.each import each
from turnlog import cli
from turnlog.consumers.datasets.query import Query
from turnlog.verbs.dataset import command_of, query_of

PAGE = Path(__file__).parents[3] / "docs/datasets.md"
EVERY = {
    "--recipe": ("calc", {"recipes": ("calc",)}),
    "--dataset": ("tasks.jsonl", {"datasets": ("tasks.jsonl",)}),
    "--task-type": ("algebra", {"task_types": ("algebra",)}),
    "--task": ("t", {"tasks": ("t",)}),
    "--outcome": ("completed", {"outcomes": ("completed",)}),
    "--purpose": ("eval", {"purposes": ("eval",)}),
    "--environment-version": ("2", {"environment_versions": ("2",)}),
    "--expire-before": ("shop=2.1", {"expire_before": ("shop=2.1",)}),
    "--include-run": ("any", {"runs": ("any",)}),
    "--min-reward": ("0.5", {"min_reward": 0.5}),
    "--max-reward": ("0", {"max_reward": 0.0}),
    "--min-version": ("3", {"min_version": 3}),
    "--max-version": ("9", {"max_version": 9}),
    "--min-step": ("10", {"min_step": 10}),
    "--max-step": ("19", {"max_step": 19}),
    "--since": ("1970-01-01T00:00:01", {"since_ms": 1000}),
    "--until": ("1970-01-01T01:00:02+01:00", {"until_ms": 2000}),
    "--dedupe": ("tokens", {"dedupe": "tokens"}),
    "--best-of-group": (None, {"best_of_group": True}),
    "--best": ("2", {"best": 2}),
    "--pairs": ("all", {"pairs": "all"}),
    "--min-margin": ("0.25", {"min_margin": 0.25}),
}


@each("flag", EVERY)
def test_an_option_is_the_query_that_it_says(flag: str) -> None:
    value, wanted = EVERY[flag]
    words = ["dataset", "build", "out", flag, *([] if value is None else [value])]
    assert query_of(cli.parser().parse_args(words)) == Query(**wanted)  # type: ignore[arg-type]


@each("flag", [*EVERY, "--from", "--format"])
def test_the_command_of_the_card_is_the_query_again(flag: str) -> None:
    value = {"--from": "archive", "--format": "arrow"}.get(flag) or EVERY[flag][0]
    given = cli.parser().parse_args(
        ["dataset", "build", "out", "--view", "sft", flag, *([] if value is None else [value])]
    )
    again = cli.parser().parse_args(shlex.split(command_of("calc", query_of(given), given))[1:])
    assert query_of(again) == query_of(given)
    assert (again.view, again.format, again.source) == ("sft", given.format, given.source)
    assert again.run_id == "calc"
    several = cli.parser().parse_args(["dataset", "build", "out", "--task", "a b", "--task", "c", "--purpose", "any"])
    line = command_of("calc", query_of(several), several)
    assert line.endswith("--purpose any --task 'a b' --task c")


def test_without_options_everything_trained_on_passes() -> None:
    assert query_of(cli.parser().parse_args(["dataset", "build", "out"])) == Query()
    anything = cli.parser().parse_args(["dataset", "build", "out", "--purpose", "any"])
    assert query_of(anything) == Query(purposes=())


def test_an_option_given_twice_takes_either(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dataset", "build", "out", "--task", "a", "--task", "b", "--since", "5000"]
    assert query_of(cli.parser().parse_args(words)) == Query(tasks=("a", "b"), since_ms=5000)
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["dataset", "build", "out", "--since", "yesterday"])
    assert "'yesterday' is not an ISO 8601 time" in capsys.readouterr().err


def test_help_and_page_name_every_option_and_the_page_gives_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["dataset", "build", "--help"])
    offered = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--settings"}
    page = PAGE.read_text()
    assert set(EVERY) <= offered
    assert offered <= {flag for flag in offered if f"{flag}`" in page or f"{flag} " in page}
