"""The demos of recipes: what their demonstrations say, their policies may say."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from turnlog.infra.environments.sources import task_source, warm_start_of
from turnlog.settings import load

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("config", ["", "household.toml", "question.toml", "repair.toml"])
def test_a_turn_holds_whatever_a_demonstration_says_in_one(config: str, tmp_path: Path) -> None:
    feeder = load(CONFIGS / config if config else None, {}).feeder
    warm_start = warm_start_of(task_source(feeder.recipe))
    assert warm_start is not None
    warm_start.write_tokenizer(tmp_path)
    longest = 0
    for row in itertools.islice(warm_start.rows(tmp_path, 0), 1000):
        turns = [len(list(run)) for trained, run in itertools.groupby(row.mask) if trained]
        longest = max(longest, *turns)
        assert len(row.token_ids) <= feeder.max_context_tokens
    assert longest <= feeder.max_new_tokens
