"""Marks: what a commit says, what is refused."""

from __future__ import annotations

import pytest

from turnlog.processors.core.fold.unit import (
    BrokenMetadata,
    Done,
    FoldName,
    LowWater,
    LowWaterMarks,
    MigrationNeeded,
    decode_marks,
    encode_marks,
)
from turnlog.schemas.events import Event

TOPICS = ("spine", "data")
FOLD = FoldName("1", "a" * 64)
MARKS = LowWaterMarks({"spine": 3, "data": 5}, {"spine": 10, "data": 7}, tree_low=2, score_low=4, horizon=1)


class CountingFold:
    """Complete at its third record; one tree at its second."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.complete = False
        self.count = 0

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        self.first.setdefault(topic, offset)
        self.count += 1
        return []

    def trees(self) -> frozenset[str]:
        return frozenset({"session"} if self.count > 1 else ())

    def key(self) -> object:
        return self.count


def commits(marks: LowWaterMarks, fold: FoldName = FOLD) -> dict[str, tuple[int, str]]:
    return {topic: (marks.low[topic], encode_marks(marks, fold, topic)) for topic in TOPICS}


def low_water(marks: LowWaterMarks | None = None, done: Done | None = None, horizon_records: int = 2) -> LowWater:
    return LowWater(
        marks or LowWaterMarks.start(TOPICS),
        done or Done(),
        lambda group, floor: CountingFold(),
        spine="spine",
        horizon_records=horizon_records,
    )


def fold(water: LowWater, topic: str, group: str, floor: int) -> None:
    offset = water.position[topic]
    state = water.open_group(group, floor)
    if state is not None:
        state.apply(topic, offset, None)
    water.pass_over(topic, offset)


def test_marks_survive_the_metadata_of_the_commit() -> None:
    assert decode_marks(commits(MARKS), TOPICS, FOLD) == MARKS


def test_a_unit_without_any_commit_has_no_marks() -> None:
    assert decode_marks({}, TOPICS, FOLD) is None


def test_metadata_fits_the_broker_at_the_largest_offsets() -> None:
    far = dict.fromkeys(TOPICS, 2**63 - 1)
    marks = LowWaterMarks(far, far, tree_low=2**63 - 1, score_low=2**63 - 1, horizon=2**63 - 1)
    assert len(encode_marks(marks, FOLD, "spine").encode()) < 400


def test_metadata_that_the_broker_would_refuse_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BrokenMetadata, match="shorten the fold version"):
        encode_marks(MARKS, FoldName("1" * 4096, "a"), "spine")


def test_a_commit_on_some_topics_only_is_broken() -> None:
    half = {"spine": commits(MARKS)["spine"]}
    with pytest.raises(BrokenMetadata, match="data has no commit, spine has"):
        decode_marks(half, TOPICS, FOLD)


@pytest.mark.parametrize("metadata", ["", "hello", "[]", "3", '{"fold":"1"}'])
def test_metadata_of_another_program_is_broken(metadata: str) -> None:
    with pytest.raises(BrokenMetadata, match="was not written by an assembler"):
        decode_marks(dict.fromkeys(TOPICS, (0, metadata)), TOPICS, FOLD)


def test_commits_of_two_transactions_are_broken() -> None:
    mixed = commits(MARKS)
    mixed["data"] = commits(LowWaterMarks(MARKS.low, MARKS.high, horizon=9))["data"]
    with pytest.raises(BrokenMetadata, match="not of one transaction"):
        decode_marks(mixed, TOPICS, FOLD)


def test_another_fold_version_names_both() -> None:
    with pytest.raises(MigrationNeeded, match=r"fold version 1, the run recorded 2"):
        decode_marks(commits(MARKS), TOPICS, FoldName("2", FOLD.settings_sha256))


def test_other_settings_name_both_hashes() -> None:
    with pytest.raises(MigrationNeeded, match=f"settings_sha256 {'a' * 64}, the run recorded {'b' * 64}"):
        decode_marks(commits(MARKS), TOPICS, FoldName("1", "b" * 64))


def test_an_open_group_holds_the_mark_of_each_topic_at_its_first_record() -> None:
    water = low_water()
    fold(water, "spine", "a", 0)
    fold(water, "spine", "b", 0)
    fold(water, "data", "b", 0)
    fold(water, "data", "b", 0)
    water.close("a", 0)
    water.note_score("a", 0)
    assert water.advance((0, 1)).low == {"spine": 1, "data": 0}


def test_without_open_groups_the_marks_stand_at_the_position() -> None:
    water = low_water()
    fold(water, "spine", "a", 0)
    water.close("a", 0)
    water.note_score("a", 0)
    marks = water.advance((0, 1))
    assert marks.low == marks.high == {"spine": 1, "data": 0}


def test_an_open_group_holds_the_horizon_at_its_floor() -> None:
    water = low_water(horizon_records=2)
    fold(water, "spine", "a", 0)
    for _ in range(9):
        fold(water, "spine", "b", 1)
    assert water.advance((0, 0)).horizon == 0
    water.close("a", 0)
    water.note_score("a", 0)
    assert water.advance((0, 1)).horizon == 1


def test_a_forgotten_group_is_late_and_a_remembered_one_is_done() -> None:
    water = low_water(horizon_records=2)
    for group in ("old", "new"):
        fold(water, "spine", group, 0 if group == "old" else 7)
        water.close(group, 0 if group == "old" else 7)
        water.note_score(group, 0)
    for _ in range(8):
        fold(water, "spine", "open", 5)
    water.advance((0, 2))
    assert not water.is_done("old")
    assert water.is_done("new")
    assert water.open_group("old", 0) is None
    assert water.late == 1


def test_the_first_remembered_score_is_where_a_restart_reads_from() -> None:
    water = low_water(horizon_records=0)
    for at, group in enumerate(("a", "b", "c")):
        fold(water, "spine", group, at)
        water.close(group, at)
        water.note_score(group, 10 + at)
    fold(water, "spine", "open", 1)
    assert water.advance((0, 13)).score_low == 11


def test_a_tree_is_new_once_while_its_group_is_open() -> None:
    water = low_water()
    fold(water, "spine", "a", 0)
    fold(water, "spine", "a", 0)
    assert water.new_tree("session")
    water.note_tree("session", 6)
    assert water.advance((7, 0)).tree_low == 6
    assert not water.new_tree("session")
    water.close("a", 0)
    water.note_score("a", 0)
    assert water.advance((7, 1)).tree_low == 7, "its group is done: a restart skips it by key"


def test_marks_are_not_taken_before_an_output_was_sent() -> None:
    water = low_water()
    fold(water, "spine", "a", 0)
    fold(water, "spine", "a", 0)
    water.new_tree("session")
    with pytest.raises(AssertionError, match="was not sent"):
        water.advance((7, 0))


def test_refolding_ends_when_every_topic_has_passed_what_was_folded() -> None:
    water = low_water(LowWaterMarks({"spine": 0, "data": 0}, {"spine": 1, "data": 2}))
    fold(water, "spine", "a", 0)
    fold(water, "data", "a", 0)
    assert water.refolding
    assert water.is_repeated("data", 1)
    fold(water, "data", "a", 0)
    assert not water.refolding
    assert not water.is_repeated("data", 2)
