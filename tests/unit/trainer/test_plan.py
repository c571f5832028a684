"""What the settings say of learning, checked before any rank starts."""

from __future__ import annotations

import pytest

from turnlog.settings import SettingsError, from_tables
from turnlog.trainer.plan import learning_plan


def test_the_rate_falls_linearly_over_the_steps_of_all_draws_and_not_below_its_floor() -> None:
    settings = from_tables(
        {
            "feeder": {"draws": 4},
            "batcher": {"updates_per_draw": 2},
            "trainer": {"learning_rate": 0.8, "min_learning_rate_ratio": 0.25},
        },
        {},
        source="test",
    )
    plan = learning_plan(settings)
    assert [plan.learning_rate(step) for step in (0, 2, 6, 7, 100)] == pytest.approx([0.8, 0.6, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(("world_size", "legal"), [(1, False), (3, False), (4, True), (8, True)])
def test_ranks_that_do_not_make_whole_copies_of_the_model_are_refused_by_name(world_size: int, legal: bool) -> None:
    trainer = {"tensor_parallel": 2, "pipeline_parallel": 2, "world_size": world_size}
    settings = from_tables({"trainer": trainer}, {}, source="test")
    if legal:
        assert learning_plan(settings).world_size == world_size
        return
    with pytest.raises(SettingsError, match=rf"trainer\.world_size must be a multiple of .* = 4, got {world_size}"):
        learning_plan(settings)
