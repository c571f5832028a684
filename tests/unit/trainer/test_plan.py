"""What the settings say of learning, checked before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from turnlog.settings import SettingsError, from_tables
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE
from turnlog.trainer.plan import LearnerOptions, check_layout, check_unchanged, learning_plan


def test_the_rate_falls_linearly_over_the_steps_of_all_draws_to_its_floor() -> None:
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
    assert [plan.learning_rate(step) for step in (0, 2, 6, 7, 8, 100)] == pytest.approx(
        [0.8, 0.65, 0.35, 0.275, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0.2, 0.4, 0.6, 0.6, 0.45, 0.375, 0.15, 0.15]),
        ("cosine", [0.2, 0.4, 0.6, 0.6, 0.4875, 0.375, 0.15, 0.15]),
        ("constant", [0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]),
    ],
)
def test_the_rate_rises_to_the_schedule_and_ends_at_its_share(schedule: str, rates: list[float]) -> None:
    """Eight steps: two of warm-up, and the rate itself at the third."""
    trainer = {
        "learning_rate": 0.6,
        "min_learning_rate_ratio": 0.25,
        "warmup_steps": 2,
        "learning_rate_schedule": schedule,
    }
    plan = learning_plan(from_tables({"feeder": {"draws": 8}, "trainer": trainer}, {}, source="test"))
    assert [plan.learning_rate(step) for step in (0, 1, 2, 2, 4, 5, 8, 9)] == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize(("world_size", "legal"), [(1, False), (3, False), (4, True), (8, True)])
def test_ranks_that_do_not_make_whole_copies_of_the_model_are_refused_by_name(world_size: int, legal: bool) -> None:
    trainer = {"tensor_parallel": 2, "pipeline_parallel": 2, "world_size": world_size}
    settings = from_tables({"trainer": trainer}, {}, source="test")
    if legal:
        assert learning_plan(settings).world_size == world_size
        return
    with pytest.raises(SettingsError, match=rf"trainer\.world_size must be a multiple of .* = 4, got {world_size}"):
        learning_plan(settings)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"context_parallel": 2, "world_size": 3}, "tensor_parallel x pipeline_parallel x context_parallel = 2, got 3"),
        ({"expert_parallel": 4, "world_size": 2}, "expert_parallel x pipeline_parallel = 4, got 2"),
        ({"sequence_parallel": True}, "sequence_parallel needs tensor_parallel above 1"),
    ],
)
def test_settings_that_make_no_layout_are_refused_by_name(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        learning_plan(from_tables({"trainer": trainer}, {}, source="test"))


@pytest.mark.parametrize(
    ("options", "mixture", "message"),
    [
        ({"tensor_parallel": 3}, False, r"tensor_parallel = 3 does not divide the model's attention heads \(4\)"),
        ({"tensor_parallel": 4}, False, r"tensor_parallel = 4 does not divide the model's key-value heads \(2\)"),
        ({"pipeline_parallel": 3}, False, r"pipeline_parallel = 3 does not divide the model's layers \(2\)"),
        ({"expert_parallel": 3}, True, r"expert_parallel = 3 does not divide the model's experts \(4\)"),
        ({"expert_parallel": 2}, False, "expert_parallel = 2 is not supported for a model without experts"),
        ({"tensor_parallel": 2, "expert_parallel": 2}, True, "mixture of experts needs trainer.sequence_parallel"),
        ({"tensor_parallel": 2, "sequence_parallel": True}, True, "and trainer.expert_parallel above 1"),
    ],
)
def test_a_model_that_the_ranks_cannot_share_is_refused_by_name(
    options: dict[str, int], mixture: bool, message: str
) -> None:
    with pytest.raises(LayoutUnfit, match=message):
        check_layout(TINY_MIXTURE if mixture else TINY, LearnerOptions(**options))


def test_a_model_of_ones_own_takes_small_steps_and_half_the_memory_where_it_has_a_device() -> None:
    own = {"model": {"path": "/models/policy"}}
    for device, dtype in ((False, "float32"), (True, "bfloat16")):
        plan = learning_plan(from_tables(own, {}, source="test"), cuda=device)
        assert (plan.learning_rate(0), plan.options.dtype) == (1e-6, dtype)
        assert (plan.recorded["learning_rate"], plan.recorded["dtype"]) == ("1e-06", f'"{dtype}"')
    said = {"learning_rate": 2e-5, "dtype": "float32"}
    plan = learning_plan(from_tables({**own, "trainer": said}, {}, source="test"))
    assert (plan.learning_rate(0), plan.options.dtype) == (2e-5, "float32")
    with pytest.raises(SettingsError, match=r"dtype is auto and trainer\.launcher is ray"):
        learning_plan(from_tables({**own, "trainer": {"launcher": "ray"}}, {}, source="test"))


def test_a_checkpoint_that_was_trained_with_other_settings_is_gone_on_from_only_when_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plan(**trainer: Any) -> Any:
        return learning_plan(from_tables({"trainer": trainer}, {}, source="test"))

    before = plan().recorded
    check_unchanged(before, plan(threads=1, checkpoint_every=3), "step-8")
    check_unchanged({"beta1": "0.9"}, plan(clip_low=0.3), "step-8")  # an earlier release knew no more
    with pytest.raises(
        SettingsError, match=r"step-8 .*: trainer\.clip_low 0\.2 -> 0\.3, trainer\.beta1 0\.9 -> 0\.8\. Set"
    ):
        check_unchanged(before, plan(clip_low=0.3, beta1=0.8), "step-8")
    check_unchanged(before, plan(clip_low=0.3, allow_changes=True), "step-8")
    longer = {"feeder": {"draws": 60}, "batcher": {"updates_per_draw": 2}}
    with pytest.raises(SettingsError, match=r"feeder\.draws x batcher\.updates_per_draw 30 -> 120\. Set them back"):
        check_unchanged(before, learning_plan(from_tables(longer, {}, source="test")), "step-8")
    constant = {"learning_rate_schedule": "constant"}
    flat = learning_plan(from_tables({**longer, "trainer": constant}, {}, source="test"))
    check_unchanged(plan(**constant).recorded, flat, "step-8")
    assert "trainer.clip_low 0.2 -> 0.3" in caplog.text
