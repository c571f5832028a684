"""Lag along the chain of publications: the same bytes are as old under their new number as under their old one."""

from __future__ import annotations

import dataclasses
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


def announced(version: int, step: int, *, incarnation: int = 0, bytes_of: str = "") -> WeightVersionPublished:
    """The first record of a version that ranks send to engines."""
    event = published(version, step, incarnation=incarnation)
    digests = {"w": f"digest of {step}{bytes_of}"}
    return dataclasses.replace(event, checksums={}, digests=digests, state="announced", transport="direct")


def stored(event: WeightVersionPublished, *, bytes_of: str = "") -> WeightVersionPublished:
    """The second record of an announced version."""
    checksums = {"w": f"{event.step}{bytes_of}"}
    return dataclasses.replace(event, event_id="stored", checksums=checksums, digests={}, state="durable")


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


ANNOUNCED = [published(0, 0), *(announced(version, version) for version in range(1, 5))]
"""Versions 0 to 4 of a trainer that sends to engines; none but version 0 has files."""


def first_of(event: WeightVersionPublished, of: WeightVersionPublished) -> WeightVersionPublished:
    """The version that a trainer starts from, which has checksums and digests."""
    return dataclasses.replace(event, digests=of.digests)


def test_the_second_record_of_a_version_moves_nothing_and_says_that_it_is_stored():
    found = chain(*ANNOUNCED)
    assert found.unstored == {1, 2, 3, 4}
    before = found.expected_version(1, range(5))
    for event in (stored(ANNOUNCED[2]), stored(ANNOUNCED[4]), stored(ANNOUNCED[4]), ANNOUNCED[4], ANNOUNCED[1]):
        found.apply(event)
    assert found.expected_version(1, range(5)) == before
    assert (found.version, found.batch, found.unstored) == (4, 3, {1, 3})


def test_samples_of_a_version_that_no_file_holds_are_on_the_chain():
    held = chain(*ANNOUNCED).expected_version(0, range(5))
    assert lags(held, *range(5)) == [4, 3, 2, 1, 0]


def test_an_announced_version_that_died_with_its_trainer_is_off_the_chain_until_its_digests_are_announced_again():
    found = chain(*ANNOUNCED, first_of(published(5, 2, incarnation=1), ANNOUNCED[2]))
    assert lags(found.expected_version(0, range(6)), 1, 2, 3, 4, 5) == [1, 0, OFF_CHAIN, OFF_CHAIN, 0]
    found.apply(announced(6, 3, incarnation=1))
    assert lags(found.expected_version(0, range(7)), 2, 3, 4, 5, 6) == [1, 0, OFF_CHAIN, 1, 0]
    found.apply(announced(7, 4, incarnation=1, bytes_of="other"))
    assert lags(found.expected_version(0, range(8)), 3, 4, 6, 7) == [1, OFF_CHAIN, 1, 0]
    assert found.unstored == {1, 2, 3, 4, 6, 7}


def test_weights_are_recognised_by_either_hash_when_the_way_to_engines_changes_between_generations():
    """A run of an earlier release, then direct, then through the store: the durable record joins the hashes."""
    direct = [first_of(published(5, 2, incarnation=1), announced(5, 2)), announced(6, 3, incarnation=1)]
    found = chain(*BEFORE, *direct)
    assert lags(found.expected_version(0, range(7)), 2, 3, 5, 6) == [1, OFF_CHAIN, 1, 0]
    found.apply(stored(direct[1]))  # its checksums are those of version 3
    assert lags(found.expected_version(0, range(7)), 2, 3, 4, 5, 6) == [1, 0, OFF_CHAIN, 1, 0]
    for version, step in ((7, 2), (8, 3)):
        found.apply(published(version, step, incarnation=2))
    assert lags(found.expected_version(0, range(9)), 2, 3, 5, 6, 7, 8) == [1, 0, 1, 0, 1, 0]
    found.apply(first_of(published(9, 2, incarnation=3), announced(9, 2)))
    found.apply(announced(10, 3, incarnation=3))
    assert lags(found.expected_version(0, range(11)), 2, 3, 6, 8, 9, 10) == [1, 0, 0, 0, 1, 0]


def test_a_second_record_is_kept_for_a_version_that_is_off_the_chain():
    found = chain(*ANNOUNCED, stored(ANNOUNCED[3]), published(5, 2, incarnation=1), stored(ANNOUNCED[4]))
    for version, step in ((6, 3), (7, 4)):
        found.apply(published(version, step, incarnation=1))
    assert lags(found.expected_version(0, range(8)), 3, 4, 6, 7) == [1, 0, 1, 0]


@given(st.randoms(use_true_random=False))
def test_whatever_dies_where_announced_versions_have_the_lags_of_stored_ones(rng: random.Random):
    """Each generation chooses its way to engines. Some announced versions get files later, some never."""
    found, step_of, step, version = WeightChain(), {}, 0, 0
    for incarnation in range(rng.randint(1, 5)):
        first, direct, waiting = rng.randint(0, step), rng.random() < 0.7, []
        for step in range(first, first + rng.randint(1, 6)):
            event = announced(version, step, incarnation=incarnation)
            if not direct or step == first:
                event = first_of(published(version, step, incarnation=incarnation), event)
            else:
                waiting.append(event)
            found.apply(event)
            if waiting and rng.random() < 0.5:
                found.apply(stored(waiting.pop(0)))
            step_of[version] = step
            version += 1
    held = found.expected_version(0, step_of)
    for number, steps in step_of.items():
        assert held.lag(number) == (step - steps if steps <= step else OFF_CHAIN)
