"""Lag along the chain of publications: the same bytes are as old under their new number as under their old one."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.views.progress import OFF_CHAIN, HeldVersion, WeightChain, recorded_version
from turnlog.schemas.events import WeightVersionPublished


def published(version: int, step: int, *, incarnation: int = 0, bytes_of: str = "") -> WeightVersionPublished:
    """Weights after `step` steps; the same `bytes_of` are the same bytes."""
    return WeightVersionPublished(
        event_id="w", run_id="r", version=version, step=step, batch_index=step - 1, incarnation=incarnation,
        kind="full", base_version=None, files=(), dtype="float32", checksums={"w": f"{step}{bytes_of}"},
        checkpoint=None,
    )  # fmt: skip


def chain(*events: WeightVersionPublished) -> WeightChain:
    found = WeightChain()
    for event in events:
        found.apply(event)
    return found


BEFORE = [published(version, version) for version in range(5)]
"""Versions 0 to 4, of steps 0 to 4; then the trainer is killed and goes on from the checkpoint of step 2."""


def lags(held: HeldVersion, *versions: int) -> list[int]:
    return [held.lag(version) for version in versions]


def test_without_a_death_lag_is_the_difference_of_the_numbers_and_is_recorded_all_the_same():
    held = chain(*BEFORE).expected_version(1, range(5))
    assert (held.number, lags(held, *range(5))) == (5, [5, 4, 3, 2, 1])
    assert held.recorded_lags((4, 0, 4)) == {"0": 5, "4": 1}


def test_weights_that_are_published_again_are_as_old_as_they_were():
    held = chain(*BEFORE, published(5, 2, incarnation=1)).expected_version(0, range(6))
    assert held.number == 5
    assert lags(held, 0, 1, 2, 5) == [2, 1, 0, 0]
    assert lags(held, 3, 4) == [OFF_CHAIN, OFF_CHAIN]


def test_the_repeated_steps_take_their_dead_twins_back_onto_the_chain():
    again = [published(5 + n, 2 + n, incarnation=1) for n in range(3)]
    held = chain(*BEFORE, *again).expected_version(1, range(8))
    assert (held.number, lags(held, *range(8))) == (8, [5, 4, 3, 2, 1, 3, 2, 1])


def test_a_version_has_the_steps_of_its_weights_behind_it_while_they_are_on_the_chain():
    found = chain(*BEFORE, published(5, 2, incarnation=1))
    assert [found.step_of(version) for version in (0, 2, 5, 3, 4, 9)] == [0, 2, 2, None, None, None]


def test_weights_that_came_out_otherwise_are_others():
    again = [published(5, 2, incarnation=1), published(6, 3, incarnation=1, bytes_of="other")]
    held = chain(*BEFORE, *again).expected_version(0, range(7))
    assert lags(held, 2, 5, 6) == [1, 1, 0]
    assert lags(held, 3, 4) == [OFF_CHAIN, OFF_CHAIN]


def test_a_reader_of_the_manifest_alone_finds_the_same_lags():
    held = chain(*BEFORE, published(5, 2, incarnation=1)).expected_version(2, range(6))
    again = recorded_version(held.number, held.recorded_lags(range(6)))
    assert lags(again, *range(6)) == lags(held, *range(6))
    assert recorded_version(7, {}).lag(4) == 3


@given(st.randoms(use_true_random=False))
def test_whatever_dies_where_lag_is_the_distance_of_steps_when_repeats_give_the_same_bytes(rng: random.Random):
    """One publication per step, checkpoints anywhere behind, any number of deaths."""
    found, step_of, step, version = WeightChain(), {}, 0, 0
    for incarnation in range(rng.randint(1, 5)):
        first = rng.randint(0, step)
        for step in range(first, first + rng.randint(1, 6)):
            found.apply(published(version, step, incarnation=incarnation))
            found.apply(published(version, step, incarnation=incarnation))
            step_of[version] = step
            version += 1
    held = found.expected_version(0, step_of)
    for number, steps in step_of.items():
        assert held.lag(number) == (step - steps if steps <= step else OFF_CHAIN)


def test_what_a_step_trains_is_held_against_the_weights_that_are_really_there():
    """Formed for version 5 of the dead incarnation, stepped by the live one that stands on step 2 again."""
    found = chain(*BEFORE, published(5, 2, incarnation=1))
    assert found.largest_lag([2, 5]) == 0
    assert found.largest_lag([1, 2]) == 1
    assert found.largest_lag([4]) == 1  # of no step of the live one: by number
    assert found.largest_lag([]) == 0
