"""Admission: how many groups may be alive, which come next, and that the order of facts does not matter."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.producers.admission import (
    Admission,
    AdmissionRules,
    DueGroup,
    PassRates,
    Readiness,
    RowVisit,
    TaskDataset,
    nth_place,
    position_of,
)
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    Event,
    GroupEmitted,
    GroupRequested,
    GroupScored,
    GroupStatus,
    Purpose,
    SampleBatchFormed,
    StepCompleted,
    TreeBooks,
    Weighting,
    WeightVersionPublished,
)
from turnlog.schemas.types import BlobRef

RULES = AdmissionRules(prompts_per_draw=2, draws=5, max_lag=0, publish_every=1, sources=(TaskDataset("d", 3),), seed=0)


DATASETS = ("d", "e", "f")


def requested(due: DueGroup, purpose: Purpose = Purpose.train) -> GroupRequested:
    dataset = DATASETS[due.place.source]
    group = f"{'g' if dataset == 'd' else dataset}{due.place.epoch}.{due.place.row}.{due.draw}"
    return GroupRequested(
        event_id=group, run_id="r", group_id=group, draw=due.draw, dataset=dataset,
        dataset_epoch=due.place.epoch, index=due.place.row, purpose=purpose, group_size=1,
    )  # fmt: skip


def scored(group: str, status: GroupStatus) -> GroupScored:
    return GroupScored(
        event_id=group, run_id="r", group_id=group, floor=0, task_id="t", purpose=Purpose.train, rollouts=(),
        baseline=None, std=None, estimator="grpo/1", status=status, reason="", samples=1,
        books=TreeBooks(0, 0, {}), fold_version="1", settings_sha256="",
    )  # fmt: skip


def emitted(group: str, *rewards: float, status: GroupStatus = GroupStatus.trained) -> GroupEmitted:
    return GroupEmitted(
        event_id=group, run_id="r", group_id=group, floor=0, purpose=Purpose.train, status=status, reason="",
        samples=1, books=TreeBooks(0, 0, {}), fold_version="3", settings_sha256="", rewards=rewards,
    )  # fmt: skip


def formed(draw: int, batch: int, groups: list[str], live: list[str], part: int = 0, parts: int = 1) -> Event:
    rows = tuple(BatchSample(g, g, g, 0, 0, 1, 1, 1, 0, 0) for g in live)
    return SampleBatchFormed(
        event_id=f"b{batch}", run_id="r", batch_index=batch, draw_index=draw, part=part, parts=parts,
        file=BlobRef("0", 0), rows_sha256="", samples=rows, groups=tuple(groups), weighting=Weighting.prompt,
        prompts=len(live), trajectories=len(live), trained_tokens=len(live), constant_length=0, masked={},
        trainer_version=0, max_lag=0, dropped=(), whitening_mean=None, whitening_std=None, positions=(),
        settings_sha256="",
    )  # fmt: skip


def skipped(draw: int, batch: int, groups: list[str]) -> BatchSkipped:
    return BatchSkipped(
        event_id=f"b{batch}", run_id="r", batch_index=batch, draw_index=draw, reason="", groups=tuple(groups),
        masked={}, dropped=(), positions=(), settings_sha256="",
    )  # fmt: skip


def stepped(draw: int, batch: int) -> StepCompleted:
    return StepCompleted(
        event_id=f"s{batch}", run_id="r", batch_index=batch, draw_index=draw, incarnation=0, step=batch + 1, loss=0.0,
        grad_norm=0.0, learning_rate=0.0, lag_max=0, tokens=1, trained_tokens=1, masked={}, skipped=False,
        reward_mean=0.0, logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={},
        world_size=1,
    )  # fmt: skip


def published(version: int, step: int | None = None, incarnation: int = 0) -> WeightVersionPublished:
    """`step`: as many as its number where nobody says."""
    step = version if step is None else step
    return WeightVersionPublished(
        event_id=f"w{version}", run_id="r", version=version, step=step, batch_index=step - 1, incarnation=incarnation,
        kind="full", base_version=None, files=(), dtype="float32", checksums={}, checkpoint=None,
    )  # fmt: skip


def ask(admission: Admission, history: list[Event] | None = None) -> list[str]:
    """Ask for what is due; the groups."""
    groups = []
    for due in admission.due():
        event = requested(due)
        admission.apply(event)
        groups.append(event.group_id)
        if history is not None:
            history.append(event)
    return groups


def test_one_draw_is_admitted_before_anything_is_trained() -> None:
    admission = Admission(RULES)
    assert ask(admission) == ["g0.0.0", "g0.1.0"]
    assert admission.due() == []


def test_a_trained_draw_makes_room_for_the_next() -> None:
    admission = Admission(RULES)
    first = ask(admission)
    for group in first:
        admission.apply(scored(group, GroupStatus.trained))
    admission.apply(formed(0, 0, first, first))
    assert admission.due() == []
    admission.apply(stepped(0, 0))
    assert (admission.draws_trained, admission.publications_after(-1), admission.publications_after(0)) == (1, 1, 0)
    assert len(ask(admission)) == 2


@pytest.mark.parametrize(("max_lag", "publish_every", "groups"), [(0, 1, 2), (1, 1, 4), (2, 1, 6), (2, 2, 10)])
def test_lag_lets_groups_run_ahead_by_whole_draws_but_not_past_the_last(
    max_lag: int, publish_every: int, groups: int
) -> None:
    rules = AdmissionRules(
        prompts_per_draw=2,
        draws=5,
        max_lag=max_lag,
        publish_every=publish_every,
        sources=(TaskDataset("d", 3),),
        seed=0,
    )
    admission = Admission(rules)
    ask(admission)
    assert admission.open == groups


def test_a_discarded_group_is_drawn_again_behind_the_fresh_tasks_of_its_epoch() -> None:
    admission = Admission(RULES)
    first = ask(admission)
    admission.apply(scored(first[1], GroupStatus.discarded))
    assert ask(admission) == ["g0.2.0"]
    assert admission.due() == []
    admission.apply(scored("g0.2.0", GroupStatus.discarded))
    assert ask(admission) == ["g0.1.1"]
    admission.apply(scored("g0.1.1", GroupStatus.discarded))
    assert ask(admission) == ["g0.2.1"]
    assert admission.given_up == 1, "row 1, which was drawn again once"
    admission.apply(scored("g0.2.1", GroupStatus.discarded))
    assert [due.place.epoch for due in admission.due()] == [1]
    assert admission.given_up == 2


def test_without_repeats_a_discarded_task_comes_again_in_the_next_epoch() -> None:
    admission = Admission(dataclasses.replace(RULES, prompts_per_draw=1, discarded_repeats=0))
    visits = []
    for _ in range(6):
        visits += ask(admission)
        admission.apply(scored(visits[-1], GroupStatus.discarded))
    assert visits[:3] == ["g0.0.0", "g0.1.0", "g0.2.0"]
    assert sorted(visits[3:]) == ["g1.0.1", "g1.1.1", "g1.2.1"]
    assert admission.given_up == 6


@pytest.mark.parametrize("repeats", [0, 1, 3])
@pytest.mark.parametrize("teaching", [1, 3, 99])
def test_a_run_trains_all_its_draws_though_most_of_its_tasks_are_always_discarded(repeats: int, teaching: int) -> None:
    rules = dataclasses.replace(RULES, draws=50, sources=(TaskDataset("d", 100),), discarded_repeats=repeats)
    admission, waiting, draws = Admission(rules), [], 0
    while not admission.is_finished:
        for group in ask(admission):
            row = int(group.split(".")[1])
            teaches = row >= 100 - teaching
            admission.apply(scored(group, GroupStatus.trained if teaches else GroupStatus.discarded))
            waiting += [group] * teaches
        if len(waiting) == rules.prompts_per_draw:
            admission.apply(formed(draws, draws, waiting, waiting))
            admission.apply(stepped(draws, draws))
            waiting, draws = [], draws + 1
        assert admission.requested_count <= 100 * (100 // teaching + 2) * (repeats + 1)
    assert draws == 50


def test_a_group_that_a_draw_dropped_is_drawn_again_first_however_often() -> None:
    admission = Admission(dataclasses.replace(RULES, prompts_per_draw=1, draws=99, discarded_repeats=0))
    (group,) = ask(admission)
    for draw in range(5):
        admission.apply(skipped(draw, draw, [group]))
        (group,) = ask(admission)
        assert group == f"g0.0.{draw + 1}"
    assert admission.given_up == 0


def test_a_group_dropped_whole_by_a_manifest_is_drawn_again_for_the_next_draw() -> None:
    """Its slot was in the draw that trained without it: given back now, the new group would be a version behind."""
    admission = Admission(RULES)
    first = ask(admission)
    admission.apply(formed(0, 0, first, first[:1]))
    assert admission.due() == []
    admission.apply(stepped(0, 0))
    assert admission.due() == [DueGroup(RowVisit(0, 1), 1), DueGroup(RowVisit(0, 2), 0)]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_however_many_groups_draws_drop_no_more_run_ahead(max_lag: int) -> None:
    rules = AdmissionRules(
        prompts_per_draw=2, draws=99, max_lag=max_lag, publish_every=1, sources=(TaskDataset("d", 3),), seed=0
    )
    admission = Admission(rules)
    running: list[str] = []
    for draw in range(50):
        running += ask(admission)
        assert len(running) == admission.open == 2 * (max_lag + 1)
        taken, running = running[:2], running[2:]
        admission.apply(formed(draw, draw, taken, taken[:1]))
        admission.apply(stepped(draw, draw))


def test_a_group_may_be_as_old_as_the_draw_allows_that_it_has_a_slot_in() -> None:
    """Two draws per version, lag 1: of three draws ahead, the third one meets the next version."""
    rules = AdmissionRules(
        prompts_per_draw=1, draws=9, max_lag=1, publish_every=2, sources=(TaskDataset("d", 9),), seed=0
    )
    admission = Admission(rules)
    assert [due.versions_ahead for due in admission.due()] == [0, 0, 1]
    groups = ask(admission)
    admission.apply(formed(0, 0, groups[:1], groups[:1]))
    admission.apply(stepped(0, 0))
    assert admission.publications_after(-1) == 0
    assert [due.versions_ahead for due in admission.due()] == [1]
    groups += ask(admission)
    admission.apply(scored(groups[2], GroupStatus.discarded))
    admission.apply(formed(1, 1, groups[1:2], groups[1:2]))
    admission.apply(stepped(1, 1))
    assert [admission.publications_after(batch) for batch in (-1, 0, 1)] == [1, 1, 0]
    assert [(due.draw, due.versions_ahead) for due in admission.due()] == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("ahead", "max_lag", "oldest"), [(0, 0, 7), (1, 1, 7), (0, 1, 6), (2, 1, 8), (0, 9, 0)])
def test_engines_must_serve_a_version_that_is_not_stale_in_that_draw(ahead: int, max_lag: int, oldest: int) -> None:
    readiness = Readiness()
    for version in range(8):
        readiness.apply(published(version))
    assert readiness.version_for(versions_ahead=ahead, max_lag=max_lag) == oldest


@pytest.mark.parametrize(
    ("ahead", "max_lag", "oldest"), [(0, 0, 4), (1, 0, 5), (1, 1, 4), (1, 2, 1), (2, 2, 4), (9, 12, 0), (3, 1, 6)]
)
def test_versions_are_counted_along_the_chain_when_a_trainer_went_back(ahead: int, max_lag: int, oldest: int) -> None:
    """Versions 2 and 3 are of steps that the trainer has lost; 4 is the weights of version 2 again."""
    readiness = Readiness()
    for version in range(4):
        readiness.apply(published(version))
    readiness.apply(published(4, step=2, incarnation=1))
    assert readiness.version_for(versions_ahead=ahead, max_lag=max_lag) == oldest
    assert (readiness.version, readiness.batch) == (4, 1)


def test_a_group_in_a_later_part_of_its_draw_was_not_dropped() -> None:
    admission = Admission(RULES)
    first = ask(admission)
    admission.apply(formed(0, 0, first, first[:1], part=0, parts=2))
    admission.apply(formed(0, 1, first[1:], first[1:], part=1, parts=2))
    assert (admission.open, admission.slots, admission.due()) == (0, 2, [])
    admission.apply(stepped(0, 0))
    assert admission.draws_trained == 0
    admission.apply(stepped(0, 1))
    assert (admission.draws_trained, admission.publications_after(0), admission.publications_after(1)) == (1, 1, 0)


def test_a_skipped_draw_gives_all_its_slots_back_and_does_not_count() -> None:
    admission = Admission(RULES)
    first = ask(admission)
    admission.apply(skipped(0, 0, first))
    assert [due.draw for due in admission.due()] == [1, 1]
    assert admission.draws_trained == 0


def test_evaluation_is_outside_admission() -> None:
    admission = Admission(RULES)
    admission.apply(requested(DueGroup(RowVisit(0, 0), 0), Purpose.eval))
    assert (admission.open, len(admission.due())) == (0, 2)


def test_epochs_after_the_first_are_shuffled_by_the_seed_and_visit_every_row() -> None:
    rows = 50
    assert [nth_place(n, rows, 1) for n in range(rows)] == [RowVisit(0, row) for row in range(rows)]
    second = [nth_place(rows + n, rows, 1).row for n in range(rows)]
    assert sorted(second) == list(range(rows))
    assert second != list(range(rows))
    assert second == [nth_place(rows + n, rows, 1).row for n in range(rows)]
    assert second != [nth_place(rows + n, rows, 2).row for n in range(rows)]


def test_a_row_that_comes_again_is_another_draw_of_the_same_task() -> None:
    admission = Admission(
        AdmissionRules(prompts_per_draw=4, draws=1, max_lag=0, publish_every=1, sources=(TaskDataset("d", 2),), seed=0)
    )
    assert sorted((d.place, d.draw) for d in admission.due()) == [
        (RowVisit(0, 0), 0), (RowVisit(0, 1), 0), (RowVisit(1, 0), 1), (RowVisit(1, 1), 1),
    ]  # fmt: skip


MIXED = dataclasses.replace(
    RULES, prompts_per_draw=8, max_lag=9, draws=10,
    sources=(TaskDataset("d", 7, weight=3.0), TaskDataset("e", 5, weight=1.0), TaskDataset("f", 50, weight=4.0)),
)  # fmt: skip


def test_fresh_tasks_come_from_several_datasets_by_their_weights_at_every_moment() -> None:
    due = [one.place.source for one in Admission(MIXED).due()]
    for end in range(1, len(due) + 1):
        for source, rows in enumerate(MIXED.sources):
            assert abs(due[:end].count(source) - end * rows.weight / 8) < 1.5
    assert [due.count(source) for source in range(3)] == [30, 10, 40]


def test_rows_of_the_same_number_in_two_datasets_are_two_tasks() -> None:
    rules = dataclasses.replace(RULES, prompts_per_draw=4, sources=(TaskDataset("d", 2), TaskDataset("e", 2)))
    admission = Admission(rules)
    assert [(due.place, due.draw) for due in admission.due()] == [
        (RowVisit(0, 0, 0), 0), (RowVisit(0, 0, 1), 0), (RowVisit(0, 1, 0), 0), (RowVisit(0, 1, 1), 0),
    ]  # fmt: skip
    groups = ask(admission)
    admission.apply(scored(groups[1], GroupStatus.discarded))
    assert admission.due()[0].place.source == 0, "no epoch of the dataset that it came from is through"
    admission.apply(skipped(0, 0, groups[:1]))
    assert admission.due()[0] == DueGroup(RowVisit(0, 0, 0), 1), "drawn again from the dataset that it came from"


def test_what_is_drawn_again_changes_no_share_of_fresh_tasks() -> None:
    rules = dataclasses.replace(
        RULES, prompts_per_draw=1, draws=99, sources=(TaskDataset("d", 99), TaskDataset("e", 99))
    )
    admission, fresh = Admission(rules), []
    for draw in range(20):
        (group,) = ask(admission)
        fresh.append(group[0])
        admission.apply(skipped(2 * draw, 2 * draw, [group]))
        (again,) = ask(admission)
        assert again[:-1] == group[:-1]
        admission.apply(formed(2 * draw + 1, 2 * draw + 1, [again], [again]))
        admission.apply(stepped(2 * draw + 1, 2 * draw + 1))
    assert "".join(fresh) == "ge" * 10


def test_discarded_tasks_of_two_datasets_come_again_at_the_end_of_each_ones_epoch() -> None:
    rules = dataclasses.replace(RULES, prompts_per_draw=1, draws=99, sources=(TaskDataset("d", 2), TaskDataset("e", 4)))
    admission, asked = Admission(rules), []
    for _ in range(10):
        (group,) = ask(admission)
        asked.append(group)
        admission.apply(scored(group, GroupStatus.discarded))
    assert asked[:6] == ["g0.0.0", "e0.0.0", "g0.1.0", "e0.1.0", "g0.0.1", "g0.1.1"]
    assert asked[6].startswith("g1.")
    assert asked[7] == "e0.2.0"


@dataclass
class World:
    """A run in which groups fail, draws are cut and trained at random."""

    rules: AdmissionRules
    choose: random.Random
    history: list[Event] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    draw: int = 0

    def lives(self, admission: Admission, steps: int) -> None:
        for _ in range(steps):
            self.open += ask(admission, self.history)
            for event in self._happens():
                self.history.append(event)
                admission.apply(event)
            assert admission.slots <= admission.limit

    def _happens(self) -> list[Event]:
        if self.open and self.choose.random() < 0.7:
            group = self.open.pop(self.choose.randrange(len(self.open)))
            failed = self.choose.random() < 0.3
            if not failed:
                self.waiting.append(group)
            return [scored(group, GroupStatus.discarded if failed else GroupStatus.trained)]
        if len(self.waiting) < self.rules.prompts_per_draw:
            return []
        groups, self.waiting = self.waiting[: self.rules.prompts_per_draw], self.waiting[self.rules.prompts_per_draw :]
        live = [group for group in groups if self.choose.random() < 0.7]
        draw, self.draw = self.draw, self.draw + 1
        if not live:
            return [skipped(draw, draw, groups)]
        return [formed(draw, draw, groups, live), stepped(draw, draw)]


def lived(seed: int, max_lag: int, steps: int, *, mixed: bool = False) -> tuple[World, Admission]:
    sources = (TaskDataset("d", 5), TaskDataset("e", 3, weight=0.4))[: 1 + mixed]
    rules = AdmissionRules(
        prompts_per_draw=3, draws=6, max_lag=max_lag, publish_every=1, sources=sources, seed=seed
    )  # fmt: skip
    world, admission = World(rules, random.Random(seed)), Admission(rules)
    world.lives(admission, steps)
    return world, admission


@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 150), st.booleans())
def test_a_new_feeder_knows_the_same_whatever_order_topics_come_in_and_however_often(
    seed: int, max_lag: int, steps: int, mixed: bool
) -> None:
    world, admission = lived(seed, max_lag, steps, mixed=mixed)
    shuffled = [*world.history, *world.history]
    random.Random(seed).shuffle(shuffled)
    again = Admission(world.rules)
    for event in shuffled:
        again.apply(event)
    assert (again.open, again.slots, again.limit) == (admission.open, admission.slots, admission.limit)
    assert again.due() == admission.due()


@given(st.integers(0, 10_000), st.integers(0, 2))
def test_every_run_trains_all_its_draws_and_asks_for_no_group_twice(seed: int, max_lag: int) -> None:
    world, admission = lived(seed, max_lag, 1500)
    asked = [event.group_id for event in world.history if isinstance(event, GroupRequested)]
    assert admission.is_finished
    assert len(asked) == len(set(asked)) == admission.requested_count


@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 150))
def test_fresh_rows_are_asked_for_in_order(seed: int, max_lag: int, steps: int) -> None:
    world, _ = lived(seed, max_lag, steps)
    places = [RowVisit(e.dataset_epoch, e.index) for e in world.history if isinstance(e, GroupRequested)]
    fresh = list(dict.fromkeys(places))
    assert fresh == [nth_place(n, world.rules.sources[0].count, world.rules.seed) for n in range(len(fresh))]


def test_a_fork_asks_first_for_what_its_parent_left_and_goes_on_behind_what_it_passed() -> None:
    rules = dataclasses.replace(RULES, sources=(TaskDataset("d", 10, passed=4, left=frozenset({RowVisit(0, 1)})),))
    admission = Admission(rules)
    first = admission.due()
    assert [due.place for due in first] == [RowVisit(0, 1), RowVisit(0, 4)]
    for due in first:
        admission.apply(requested(due))
    admission.apply(skipped(0, 0, ["g0.1.0"]))
    assert [(due.place, due.draw) for due in admission.due()] == [(RowVisit(0, 1), 1)], (
        "what was left fails as any other"
    )
    wider = Admission(dataclasses.replace(rules, max_lag=1))
    for due in first:
        wider.apply(requested(due))
    assert [due.place for due in wider.due()] == [RowVisit(0, 5), RowVisit(0, 6)]


def test_groups_from_outside_take_no_slot_and_are_not_asked_for_again() -> None:
    admission = Admission(dataclasses.replace(RULES, max_lag=1))
    for event in (scored("outside", GroupStatus.trained), scored("other", GroupStatus.discarded)):
        admission.apply(event)
    due = admission.due()
    assert len(due) == admission.limit == 4
    for one in due:
        admission.apply(requested(one))
    before = admission.slots
    admission.apply(scored("late", GroupStatus.discarded))
    assert (admission.slots, admission.open, admission.due()) == (before, 4, [])
    assert not admission.knows("outside")


CHOOSY = dataclasses.replace(RULES, draws=20, pass_rates=PassRates(low=0.2, high=0.8, epochs=1))


def drawn(admission: Admission, draw: int, rewards: dict[int, tuple[float, ...]]) -> list[str]:
    """One draw, asked for, scored by row and trained: its groups."""
    groups = []
    for due in admission.due():
        event = requested(due)
        admission.apply(event)
        admission.apply(emitted(event.group_id, *rewards.get(due.place.row, ())))
        groups.append(event.group_id)
    admission.apply(formed(draw, draw, groups, groups))
    admission.apply(stepped(draw, draw))
    return groups


def test_a_task_that_none_or_all_passed_is_passed_over_for_some_epochs() -> None:
    admission = Admission(dataclasses.replace(CHOOSY, prompts_per_draw=1))
    rewards = {0: (0.0, 0.0), 1: (1.0, 0.0), 2: (1.0, 1.0)}
    visits = [drawn(admission, draw, rewards)[0].removesuffix(".0").split(".")[:2] for draw in range(9)]
    assert [row for epoch, row in visits if epoch == "g0"] == ["0", "1", "2"]
    assert [row for epoch, row in visits if epoch == "g1"] == ["1"]
    assert sorted(row for epoch, row in visits if epoch == "g2") == ["0", "1", "2"]
    assert [row for epoch, row in visits if epoch == "g3"] == ["1"]
    assert admission.passed_over == 4, "rows 0 and 2 in the epochs 1 and 3"


def test_a_group_that_failed_is_drawn_again_only_if_its_task_would_teach() -> None:
    admission = Admission(CHOOSY)
    first, second = ask(admission)
    admission.apply(emitted(first, 1.0, 1.0, status=GroupStatus.discarded))
    admission.apply(emitted(second, 1.0, 0.0, status=GroupStatus.discarded))
    assert ask(admission) == ["g0.2.0", "g0.1.1"], "row 0 gives way to a fresh task"


def test_without_rates_a_failed_group_is_drawn_again_whatever_passed() -> None:
    admission = Admission(RULES)
    first, second = ask(admission)
    admission.apply(emitted(second, 0.0, 0.0, status=GroupStatus.discarded))
    admission.apply(emitted(first, 1.0, 1.0, status=GroupStatus.discarded))
    assert ask(admission) == ["g0.2.0", "g0.0.1"]
    admission.apply(scored("g0.2.0", GroupStatus.discarded))
    assert ask(admission) == ["g0.1.1"]


def test_passing_over_is_the_same_whichever_topic_is_read_first() -> None:
    first, second = Admission(CHOOSY), Admission(CHOOSY)
    history: list[Event] = []
    groups = ask(first, history)
    history += [emitted(groups[0], 0.0, 0.0, status=GroupStatus.discarded), formed(0, 0, groups[1:], groups[1:])]
    for event in history[2:]:
        first.apply(event)
    history += [requested(due) for due in first.due()]
    for event in reversed(history):
        second.apply(event)
    for event in history:
        first.apply(event)
    assert first.due() == second.due()
    assert first.passed_over == second.passed_over


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 3))
def test_a_place_says_its_position(position: int, rows: int, seed: int) -> None:
    assert position_of(nth_place(position, rows, seed), rows, seed) == position


def test_a_fork_goes_on_behind_the_tasks_that_its_parent_passed_over() -> None:
    rules = dataclasses.replace(CHOOSY, sources=(dataclasses.replace(RULES.sources[0], passed=4),))
    assert [due.place for due in Admission(rules).due()] == [nth_place(4, 3, 0), nth_place(5, 3, 0)]
