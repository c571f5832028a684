"""[feeder] mix: which recipes and datasets a run draws from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.fakes.offers import offering
from turnlog.infra.environments.sources import UnknownRecipe
from turnlog.infra.environments.verifiers import JudgeVerifier, WeightedSum
from turnlog.infra.environments.verifiers.kinds import NeedsGroup
from turnlog.plugins.recipes.calc import Calc
from turnlog.producers.tasks import BadMix, eval_tasks, sources
from turnlog.settings import EvalSettings, FeederSettings, RunSettings, Settings


def settings(folder: Path, *mix: str) -> Settings:
    return dataclasses.replace(
        Settings(), run=RunSettings(id="r", directory=str(folder)), feeder=FeederSettings(mix=mix)
    )


def test_each_recipe_writes_tasks_of_its_own_or_reads_the_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a:b.jsonl"
    file.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n')
    own, other, read = sources(settings(tmp_path, "calc:3", "household:0.5", f"calc:1:{file}"))
    assert (own.recipe, own.weight, own.dataset.name.partition("@")[0]) == ("calc", 3.0, "tasks-calc.jsonl")
    assert (other.recipe, other.weight) == ("household", 0.5)
    assert (read.recipe, len(read.dataset.rows)) == ("calc", 1)
    assert sources(settings(tmp_path, "calc:3"))[0].dataset == own.dataset, "a run keeps its tasks"


def test_without_a_mix_there_is_one_source_and_its_file_is_named_as_ever(tmp_path: Path) -> None:
    (one,) = sources(settings(tmp_path))
    assert (one.recipe, one.weight, one.dataset.name.partition("@")[0]) == ("calc", 1.0, "tasks.jsonl")


@pytest.mark.parametrize("entry", ["calc", "calc:", ":1", "calc:0", "calc:-1", "calc:nan", "calc:inf", "calc:x:f"])
def test_an_entry_that_is_none_is_refused_and_named(tmp_path: Path, entry: str) -> None:
    with pytest.raises(BadMix, match="must be RECIPE:WEIGHT") as refused:
        sources(settings(tmp_path, "calc:1", entry))
    assert repr(entry) in str(refused.value)


def test_two_entries_with_one_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadMix, match=r"two entries draw from tasks-calc\.jsonl@"):
        sources(settings(tmp_path, "calc:1", "calc:2"))


def test_a_recipe_that_nobody_offers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownRecipe, match="no recipe 'nobody'"):
        sources(settings(tmp_path, "nobody:1"))


CRITIC = JudgeVerifier(name="critic", version="1", base_url="http://127.0.0.1:9/v1", model="m", rubric="", opponents=4)


class Rivals(Calc):
    name = "rivals"
    verifier = WeightedSum(name="rivals", version="1", parts=((CRITIC, 1.0),))


RIVALS = Rivals()


def test_a_recipe_whose_verifier_needs_the_whole_group_is_refused_before_a_task_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = dataclasses.replace(settings(tmp_path), eval=EvalSettings(every=1, recipe="rivals"))
    with offering(tmp_path, monkeypatch, "rivals", {"rivals": f"{__name__}:RIVALS"}):
        with pytest.raises(NeedsGroup, match="recipe 'rivals': verifier 'critic' compares the sessions of a group"):
            sources(settings(tmp_path, "rivals:1"))
        with pytest.raises(NeedsGroup, match="reward rerun"):
            eval_tasks(evaluated)
    assert not list(tmp_path.glob("*.jsonl"))
