"""How far into the dataset a checkpoint is: what a fork's feeder passes over, and what it asks for first."""

from __future__ import annotations

from turnlog.schemas.events import GroupRequested, Purpose, RunParent, RunPlace
from turnlog.verbs.run_fork import position

PARENT = RunParent(
    run_id="p",
    checkpoint="step-00000002-i0",
    step=2,
    draws=2,
    dataset="d@1",
    places=10,
    left=(RunPlace(0, 3),),
    last=RunPlace(0, 9),
)


def asked(*rows: int, draw: int = 0, dataset: str = "d@1") -> list[GroupRequested]:
    """Groups `gROW` of epoch 0, in this order."""
    return [
        GroupRequested(
            event_id=f"g{row}.{draw}", run_id="r", group_id=f"g{row}.{draw}", draw=draw, dataset=dataset,
            dataset_epoch=0, index=row, purpose=Purpose.train, group_size=1,
        )
        for row in rows
    ]  # fmt: skip


def test_what_was_asked_for_behind_the_last_one_that_was_seen_is_still_fresh() -> None:
    assert position(asked(0, 1, 2, 3, 4), {"g0.0", "g1.0"}, None) == ("d@1", 2, (), RunPlace(0, 1))


def test_a_group_that_was_overtaken_is_asked_for_first() -> None:
    assert position(asked(0, 1, 2, 3), {"g0.0", "g2.0"}, None) == ("d@1", 3, (RunPlace(0, 1),), RunPlace(0, 2))


def test_a_task_whose_second_group_was_trained_is_behind() -> None:
    requests = [*asked(0, 1), *asked(0, draw=1), *asked(2)]
    assert position(requests, {"g0.1", "g1.0"}, None) == ("d@1", 2, (), RunPlace(0, 1))


def test_nothing_asked_for_and_nothing_seen() -> None:
    assert position([], (), None) == ("", 0, (), None)
    assert position(asked(0), (), None) == ("d@1", 0, (), None)


def test_a_fork_of_a_fork_counts_from_its_parent_on() -> None:
    assert position(asked(3, 10, 11), {"g3.0", "g10.0"}, PARENT) == ("d@1", 11, (), RunPlace(0, 10))
    assert position(asked(3, 10, 11), {"g11.0"}, PARENT) == (
        "d@1",
        12,
        (RunPlace(0, 3), RunPlace(0, 10)),
        RunPlace(0, 11),
    )
    assert position([], (), PARENT) == ("d@1", 10, (RunPlace(0, 3),), RunPlace(0, 9))


def test_another_dataset_begins_at_its_own_beginning() -> None:
    assert position(asked(0, 1, dataset="e@1"), {"g0.0"}, PARENT) == ("e@1", 1, (), RunPlace(0, 0))
