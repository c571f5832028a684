"""Images by reference: whichever turn's delta brought one, a segment that has its tokens has it, at its place."""

from __future__ import annotations

import pytest

from turnlog.processors.core.errors import ImageOutOfPlace
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import ImageRef
from turnlog.schemas.types import BlobRef, int32s

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
CAT, DOG = BlobRef("c" * 64, 10, "image/png"), BlobRef("d" * 64, 10, "image/png")


def seen(folded):
    """{tokens of each sample: what its image tokens show}, an image's tokens being #."""
    found = {}
    for sample in folded.samples:
        text = "".join(map(chr, int32s(sample.token_ids)))
        found[text] = [(image.image.sha256[0], image.position) for image in sample.images]
        for image in sample.images:
            assert set(text[image.position : image.position + image.tokens]) == {"#"}
        assert text.count("#") == sum(image.tokens for image in sample.images)
    return found


def test_an_image_stays_visible_in_every_later_turn_of_its_lineage(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##Ar", "B", base=0)
    record.turn("a", 2, "q##ArBs###", "C", base=1, images=(ImageRef(DOG, 7, 3),))
    record.turn("a", 3, "q##ArBs###Ct", "D", base=2)
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##ArBs###CtD": [("c", 1), ("d", 7)]}


def test_an_image_that_begins_where_the_earlier_turn_ends_continues_its_lineage(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##A###", "B", base=0, images=(ImageRef(DOG, 4, 3),))
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##A###B": [("c", 1), ("d", 4)]}


def test_a_branch_sees_what_stands_before_it_and_not_what_stands_after(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##Ar###", "B", base=0, images=(ImageRef(DOG, 5, 3),))
    record.turn("a", 2, "q##As", "C", base=0)
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##AsC": [("c", 1)], "q##Ar###B": [("c", 1), ("d", 5)]}


def test_a_compaction_that_drops_the_image_has_none(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "qz", "B")
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##A": [("c", 1)], "qzB": []}


def test_a_prefix_that_ends_inside_an_image_does_not_carry_it(story) -> None:
    record = story()
    record.turn("a", 0, "q####", "A", images=(ImageRef(CAT, 1, 4),))
    record.turn("a", 1, "q##", "B", images=(ImageRef(DOG, 1, 2),))  # stored against turn 0 up to q##
    record.turn("a", 2, "q##Br", "C", base=1)
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q####A": [("c", 1)], "q##BrC": [("d", 1)]}


def test_another_image_of_the_same_size_is_another_segment_although_all_tokens_are_equal(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    of_cat = record.id("a", 0)
    record.turn("a", 1, "q##Ar", "B", parent=(of_cat, 1), images=(ImageRef(DOG, 1, 2),))
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##A": [("c", 1)], "q##ArB": [("d", 1)]}


def test_an_image_where_the_same_tokens_were_none_is_another_segment(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A")
    record.turn("a", 1, "q##Ar", "B", parent=(record.id("a", 0), 1), images=(ImageRef(CAT, 1, 2),))
    record.end("a", reward=1.0)
    samples = record.fold(RULES).samples
    assert [(len(sample.token_ids) // 4, len(sample.images)) for sample in samples] == [(4, 0), (6, 1)]


def test_a_question_about_another_image_is_no_retry(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##", "B", parent=(record.id("a", 0), 1), images=(ImageRef(DOG, 1, 2),))
    record.end("a", reward=1.0)
    folded = record.fold(RULES)
    assert seen(folded) == {"q##A": [("c", 1)], "q##B": [("d", 1)]}
    assert folded.trees["a"].books.masked == {}


def test_a_turn_stored_against_a_side_branch_has_the_images_of_its_own_tokens(story) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##Ar###s", "X", base=0, aborted=True, images=(ImageRef(DOG, 5, 3),))
    record.turn("a", 2, "q##Ar###t", "B", base=0, parent=(record.id("a", 1), 8))
    record.end("a", reward=1.0)
    assert seen(record.fold(RULES)) == {"q##Ar###tB": [("c", 1), ("d", 5)]}


@pytest.mark.parametrize(
    ("images", "at"),
    [
        ((ImageRef(CAT, 6, 2),), "at 6 with 2 tokens"),  # beyond the prompt of 7
        ((ImageRef(CAT, -1, 2),), "at -1"),
        ((ImageRef(CAT, 5, 0),), "with 0 tokens"),
        ((ImageRef(CAT, 1, 2),), "at 1 with 2 tokens, 3 are taken"),  # the parent gives it already
        ((ImageRef(CAT, 4, 2), ImageRef(DOG, 5, 2)), "at 5 with 2 tokens, 6 are taken"),
    ],
)
def test_an_image_that_is_not_where_it_says_is_refused(story, images, at) -> None:
    record = story()
    record.turn("a", 0, "q##", "A", images=(ImageRef(CAT, 1, 2),))
    record.turn("a", 1, "q##Ar##", "B", base=0, images=images)
    record.end("a", reward=1.0)
    folded = record.fold(RULES)
    ((_, _, refusal),) = folded.refused
    assert isinstance(refusal, ImageOutOfPlace)
    assert at in str(refusal)
    assert folded.trees["a"].books.masked == {"refused": 2}
