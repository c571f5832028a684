"""Where a run stands: the version that the next draw meets, and how far the batcher may run ahead."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.each import each
from turnlog.processors.core.views.progress import OFF_CHAIN, BatchProgress
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    Event,
    SampleBatchFormed,
    SourcePosition,
    StepCompleted,
    Weighting,
    WeightVersionPublished,
)
from turnlog.schemas.types import BlobRef


def formed(draw: int, batch: int, position: int = 0) -> Event:
    """Of one group, whose only sample stands at twice the draw's index, its score behind it."""
    row = BatchSample("s", f"g{draw}", "s", 0, 0, 1, 1, 1, 0, 2 * draw)
    return SampleBatchFormed(
        event_id="b", run_id="r", batch_index=batch, draw_index=draw, part=0, parts=1, file=BlobRef("0", 0),
        rows_sha256="", samples=(row,), groups=(f"g{draw}",), weighting=Weighting.prompt, prompts=1, trajectories=1,
        trained_tokens=1, constant_length=0, masked={}, trainer_version=0, max_lag=0, dropped=(), whitening_mean=None,
        whitening_std=None, positions=(SourcePosition(0, position),), settings_sha256="",
    )  # fmt: skip


def skipped(draw: int, batch: int) -> Event:
    return BatchSkipped(
        event_id="b", run_id="r", batch_index=batch, draw_index=draw, reason="", groups=(), masked={}, dropped=(),
        positions=(), settings_sha256="",
    )  # fmt: skip


def published(version: int, batch: int) -> Event:
    return WeightVersionPublished(
        event_id="w", run_id="r", version=version, step=batch + 1, batch_index=batch, incarnation=0, kind="full",
        base_version=None, files=(), dtype="float32", checksums={}, checkpoint=None,
    )  # fmt: skip


def stepped(batch: int) -> Event:
    return StepCompleted(
        event_id="s", run_id="r", batch_index=batch, draw_index=batch, incarnation=0, step=0, loss=0.0, grad_norm=0.0,
        learning_rate=0.0, lag_max=0, tokens=0, trained_tokens=0, masked={}, skipped=False, reward_mean=0.0,
        logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


def progress(publish_every: int, *events: Event) -> BatchProgress:
    found = BatchProgress(publish_every=publish_every)
    for event in events:
        found.apply(event)
    return found


def test_the_next_draw_meets_one_version_more_per_draw_between_that_publishes() -> None:
    start = published(4, -1)
    assert progress(1, start).held_at_next_draw().number == 4
    assert progress(1, start, formed(0, 0), formed(1, 1)).held_at_next_draw().number == 6
    assert progress(1, start, formed(0, 0), formed(1, 1), published(5, 0)).held_at_next_draw().number == 6
    assert progress(2, start, formed(0, 0)).held_at_next_draw().number == 4
    assert progress(2, start, formed(0, 0), formed(1, 1), formed(2, 2)).held_at_next_draw().number == 5


def test_a_skipped_draw_counts_for_no_version_wherever_it_stands() -> None:
    """Else weights after every second draw would never go out when every second draw is skipped."""
    history = [published(0, -1), formed(0, 0), skipped(1, 1), formed(2, 2), skipped(3, 3)]
    assert progress(2, *history).held_at_next_draw().number == 1
    assert progress(2, *history, formed(4, 4)).held_at_next_draw().number == 1
    assert progress(2, *history, formed(4, 4), formed(5, 5), published(1, 2)).held_at_next_draw().number == 2


@pytest.mark.parametrize(
    ("batches", "ready", "ahead", "room"),
    [(1, 2, 0, True), (1, 2, 1, True), (1, 2, 2, False), (4, 2, 0, True), (4, 2, 1, False), (2, 4, 2, True)],
)
def test_a_draw_of_several_batches_fits_whole_or_waits(batches: int, ready: int, ahead: int, room: bool) -> None:
    history = [formed(index, index) for index in range(5 + ahead)]
    assert progress(1, *history, stepped(4)).room_for(batches, ready) is room


def test_a_taken_group_is_remembered_only_while_it_may_be_read_again() -> None:
    found = progress(1, formed(0, 0, 0), formed(1, 1, 0), formed(2, 2, 2))
    assert [found.is_taken(f"g{draw}") for draw in range(3)] == [False, True, True]
    found.forget("g1")
    assert [found.is_taken(f"g{draw}") for draw in range(3)] == [False, False, True]


def test_a_taken_group_is_remembered_until_a_position_is_behind_its_score() -> None:
    """A batcher of an earlier release may have left its positions among the records of a group that it had taken."""
    assert progress(1, formed(0, 0, 1)).is_taken("g0")
    assert not progress(1, formed(0, 0, 2)).is_taken("g0")


def test_a_taken_group_stands_where_the_last_of_its_samples_does_whether_that_trains_or_is_dropped() -> None:
    fallen = DroppedSample("s", "g1", "stale", 1, 0, 3)
    first = replace(formed(0, 0), parts=2, dropped=(fallen,))
    second = replace(formed(1, 1), draw_index=0, part=1, parts=2, positions=(SourcePosition(0, 4),))
    assert progress(1, first, second).is_taken("g1")


def test_weights_of_a_checkpoint_under_a_new_number_make_its_draws_due_again() -> None:
    history = [published(0, -1), formed(0, 0), formed(1, 1), formed(2, 2), published(1, 0), published(2, 1)]
    assert progress(1, *history).held_at_next_draw().number == 3
    assert progress(1, *history, published(3, 0)).held_at_next_draw().number == 5
    assert progress(1, *history, published(3, -1), *history).held_at_next_draw().number == 6


def test_a_question_looks_at_few_of_the_draws_however_long_the_run_was() -> None:
    class Counted(int):
        looks = 0

        def __lt__(self, other: int) -> bool:
            Counted.looks += 1
            return int(self) < int(other)

    found = progress(1, published(0, Counted(500)), *(formed(draw, Counted(draw), draw) for draw in range(1000)))
    Counted.looks = 0
    assert (found.held_at_next_draw().number, found.room_for(1, 1)) == (499, False)
    assert Counted.looks < 20


def of(incarnation: int, event: Event) -> Event:
    return replace(event, incarnation=incarnation)


def test_while_a_restarted_trainer_repeats_its_steps_nothing_needs_to_be_formed():
    history = [published(0, -1), *(formed(n, n) for n in range(3)), stepped(0), published(1, 0), stepped(1)]
    restarted = [of(1, published(2, -1)), of(1, stepped(0)), of(1, published(3, 0))]
    assert not progress(1, *history).repeats
    assert progress(1, *history, restarted[0]).repeats
    assert progress(1, *history, *restarted).repeats
    assert not progress(1, *history, *restarted, of(1, stepped(1))).repeats


def test_it_repeats_until_the_weights_of_the_last_repeated_step_are_read_too():
    """A step and its weights are one transaction over two topics: a reader may meet the step first."""
    history = [published(0, -1), *(formed(n, n) for n in range(3)), stepped(0), published(1, 0)]
    again = [of(1, published(2, -1)), of(1, stepped(0)), of(1, published(3, 0))]
    found = progress(1, *history, *again[:-1])
    assert found.held_at_next_draw({1}).lag(1) == OFF_CHAIN
    assert found.repeats
    found = progress(1, *history, *again)
    assert found.held_at_next_draw({1}).lag(1) == 2, "two draws wait that publish"
    assert not found.repeats


def test_a_successor_that_publishes_less_often_is_not_waited_for_longer_than_it_repeats():
    """Of draws 0 to 4 each was published; the successor, with every second one, publishes 1 and 3."""
    history = [published(0, -1), *(formed(n, n) for n in range(5))]
    history += [event for n in range(5) for event in (stepped(n), published(n + 1, n))]
    again = [of(1, event) for event in (published(6, -1), *map(stepped, range(5)), published(7, 1))]
    assert progress(2, *history, *again).repeats
    assert not progress(2, *history, *again, of(1, published(8, 3))).repeats


@each("seed", range(20))
def test_whether_it_repeats_does_not_depend_on_the_order_of_the_topics(seed: int):
    steps = [stepped(0), stepped(1), of(1, stepped(0)), of(1, stepped(1))]
    versions = [published(0, -1), published(1, 0), of(1, published(2, -1)), of(1, published(3, 0))]
    rng = random.Random(seed)
    mixed = []
    while steps or versions:
        mixed.append(rng.choice([part for part in (steps, versions) if part]).pop(0))
    assert not progress(1, *mixed).repeats


def trained(rng: random.Random, draws: int, every: int, checkpoint_every: int) -> tuple[list[Event], list[Event]]:
    """Steps and versions of a trainer that is killed up to three times; the weights of a step are always the same."""
    steps: list[Event] = []
    versions: list[Event] = []
    incarnation = checkpoint = done = 0

    def publish() -> None:
        version = replace(published(len(versions), done - 1), checksums={"w": str(done)})
        versions.append(of(incarnation, version))

    publish()
    while done < draws:
        steps.append(of(incarnation, stepped(done)))
        done += 1
        if done % every == 0:
            publish()
        if incarnation < 3 and rng.random() < 0.3:
            incarnation, done = incarnation + 1, checkpoint
            publish()
        elif done % checkpoint_every == 0:
            checkpoint = done
    return steps, versions


@each("seed", range(100))
def test_no_draw_meets_weights_that_a_restarted_trainer_still_publishes_again(seed: int):
    """Whichever topic is ahead; and at the end of all nothing is waited for."""
    rng = random.Random(seed)
    draws, every = rng.randint(4, 14), rng.choice([1, 1, 2, 3])
    steps, versions = trained(rng, draws, every, rng.choice([1, 2, 3, 5]))
    due = {n for n, version in enumerate(versions) if (version.batch_index + 1) % every == 0}
    found = progress(every, *(formed(n, n) for n in range(draws)))
    while steps or versions:
        found.apply(rng.choice([part for part in (steps, versions) if part]).pop(0))
        if found.version is not None and not found.repeats:
            known = due & set(range(found.version + 1))
            held = found.held_at_next_draw(known)
            assert OFF_CHAIN not in {held.lag(version) for version in known}
    assert not found.repeats
