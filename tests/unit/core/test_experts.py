"""Routed experts: tokens - 1 rows for every segment, each the row of the turn that sampled what it predicts."""

from __future__ import annotations

import hashlib
import io
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.errors import ExpertRowsDoNotCover
from turnlog.processors.core.experts import (
    BrokenExperts,
    ExpertsDoNotCover,
    NoExperts,
    assemble_experts,
    own_rows,
    pack_experts,
    unpack_experts,
)
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import ExpertsLayout, GroupStatus
from turnlog.schemas.types import BlobRef, int32s

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
POLICIES = ("prefix", "slime", "last-turn")


@dataclass
class Asked:
    prompt: str
    output: str
    base: int | None
    parent: tuple[int, int] | None
    """(turn, base_len) of storage."""
    aborted: bool
    routed: bool

    @property
    def whole(self):
        return self.prompt + self.output


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def sessions(draw, gaps=False):
    """Appends, branches, roots, compactions and retries; stored against any earlier turn, at any common length."""
    turns: list[Asked] = []
    for index in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from([None, *range(index)]))
        start = "" if before is None else turns[before].whole
        cut = draw(st.sampled_from([0, 0, 0, 0, 1, 3, len(start)]))
        prompt = (start[: len(start) - cut] + draw(st.text("ab", max_size=3))) or "a"
        parent = draw(st.sampled_from([None, *range(index)])) if draw(st.booleans()) else before
        if parent is not None:
            shared = common(turns[parent].whole, prompt)
            base_len = draw(st.sampled_from([shared, shared, shared, shared // 2]))
            parent = (parent, base_len) if base_len else None
        turns.append(
            Asked(prompt, draw(st.text("ab", max_size=4)), None if cut == len(start) else before, parent,
                  draw(st.integers(0, 9)) == 0, not gaps or draw(st.integers(0, 3)) > 0)
        )  # fmt: skip
    return turns


def routing(text, at, turn):
    """What the engine chose at a position: a function of the tokens up to there, and who asked."""
    return [zlib.crc32(text[: at + 1].encode()) % 300, turn]


def rows_of(asked, turn):
    start, count = own_rows(asked.parent[1] if asked.parent else 0, len(asked.whole))
    rows = [[routing(asked.whole, at, turn)] for at in range(start, start + count)]
    return np.array(rows, dtype=np.int32).reshape(count, 1, 2)


def told(story, turns, blobs):
    """The session's story with a blob for each turn that has rows."""
    record = story()
    for index, asked in enumerate(turns):
        more = {}
        if asked.routed:
            content, layout = pack_experts(rows_of(asked, index))
            ref = BlobRef(hashlib.sha256(content).hexdigest(), len(content))
            blobs[ref] = unpack_experts(content)
            more = {"experts": ref, "experts_layout": layout}
        parent = None if asked.parent is None else (record.id("a", asked.parent[0]), asked.parent[1])
        if parent is None and index:  # else the notation finds one
            parent = (None, 0)
        record.turn(
            "a", index, asked.prompt, asked.output, base=asked.base, aborted=asked.aborted, parent=parent,
            messages=[{"role": "user", "content": f"u{index}"}], response={"role": "assistant", "content": f"r{index}"},
            **more,
        )  # fmt: skip
    record.end("a", reward=1.0)
    return record


@given(turns=sessions(), policy=st.sampled_from(POLICIES))
def test_every_segment_of_every_route_has_the_rows_that_its_engine_computed(story, turns, policy) -> None:
    blobs = {}
    folded = told(story, turns, blobs).fold(replace(RULES, policy=policy))
    assert not folded.refused
    for sample in folded.samples:
        text = "".join(map(chr, int32s(sample.token_ids)))
        if len(text) == 1:
            continue
        assert sample.experts_gap == ""
        rows = assemble_experts(sample, blobs)
        assert rows.shape == (len(text) - 1, 1, 2)
        assert rows[:, 0, 0].tolist() == [routing(text, at, 0)[0] for at in range(len(text) - 1)]
        for span in sample.spans:
            sampled_by = rows[span.start - 1 : span.start - 1 + span.length, 0, 1]
            assert set(sampled_by.tolist()) == {span.turn.index}


@given(turns=sessions(gaps=True), policy=st.sampled_from(POLICIES))
def test_a_segment_with_a_turn_that_has_no_rows_has_none_and_says_so(story, turns, policy) -> None:
    blobs = {}
    folded = told(story, turns, blobs).fold(replace(RULES, policy=policy))
    for sample in folded.samples:
        named = {span.turn.index for span in sample.spans}
        if sample.experts:
            assert all(turns[index].routed for index in named)
            assemble_experts(sample, blobs)
        else:
            if any(turns[index].routed for index in named):
                assert sample.experts_gap == "turn_without_rows"
            with pytest.raises(NoExperts, match=sample.experts_gap or "none were recorded"):
                assemble_experts(sample, blobs)


def test_a_token_sampled_in_the_segment_keeps_its_row_although_another_turn_stores_what_follows(story) -> None:
    turns = [
        Asked("p", "AB", None, None, False, True),
        Asked("pA", "BC", None, (0, 2), True, True),  # cut off: it holds tokens that turn 2 is stored against
        Asked("pABC", "D", 0, (1, 4), False, True),
    ]
    blobs = {}
    (sample,) = told(story, turns, blobs).fold(RULES).samples
    assert [span.turn.index for span in sample.spans] == [0, 2]
    assert assemble_experts(sample, blobs)[:, 0, 1].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts_layout": ExpertsLayout(4, 1, 2, "uint8")}, "4 rows for positions 0 to 2, 3 rows"),
        ({"experts_layout": ExpertsLayout(2, 1, 2, "uint8")}, "2 rows for positions"),
        ({"experts": None}, "no blob"),
        ({"experts_layout": ExpertsLayout(3, 1, 2, "float32")}, "cannot hold"),
        ({"experts_layout": ExpertsLayout(3, 0, 2, "uint8")}, "cannot hold"),
        ({"experts": BlobRef("0" * 64, 5)}, "a blob of 5 bytes"),
    ],
)
def test_rows_that_are_not_the_turns_own_are_refused_and_the_session_is_excluded(story, change, says) -> None:
    record = story()
    fine = {"experts": BlobRef("0" * 64, 134), "experts_layout": ExpertsLayout(3, 1, 2, "uint8")}
    record.turn("a", 0, "pq", "AB", **{**fine, **change})
    record.end("a", reward=1.0)
    folded = record.fold(RULES)
    ((_, _, refusal),) = folded.refused
    assert isinstance(refusal, ExpertRowsDoNotCover)
    assert says in str(refusal)
    assert folded.score.status is GroupStatus.discarded
    assert folded.trees["a"].books.masked == {"refused": 2}


def test_turns_of_two_models_give_no_rows(story) -> None:
    record = story()
    record.turn("a", 0, "p", "AB", experts=BlobRef("0" * 64, 200), experts_layout=ExpertsLayout(2, 1, 2, "uint8"))
    record.turn(
        "a", 1, "pABq", "C", base=0, experts=BlobRef("1" * 64, 200), experts_layout=ExpertsLayout(2, 2, 2, "uint8")
    )
    record.end("a", reward=1.0)
    (sample,) = record.fold(RULES).samples
    assert (sample.experts, sample.experts_gap) == ((), "layouts_differ")


@given(st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**31 - 1]), st.integers(0, 3))
def test_a_blob_keeps_its_ids_in_the_narrowest_dtype(largest, count) -> None:
    rows = np.full((count, 2, 3), largest, dtype=np.int32)
    content, layout = pack_experts(rows)
    name = "uint8" if largest < 256 or not count else "uint16" if largest < 65536 else "int32"
    assert layout == ExpertsLayout(count, 2, 3, name)
    assert unpack_experts(content).tolist() == rows.tolist()
    assert len(content) - rows.size * np.dtype(name).itemsize == 128


@pytest.mark.parametrize("content", [b"", b"no array", pack_experts(np.zeros((1, 1, 1), np.int32))[0][:-1]])
def test_bytes_that_are_no_rows_are_refused(content) -> None:
    with pytest.raises(BrokenExperts):
        unpack_experts(content)
    with pytest.raises(BrokenExperts, match="from 0 on"):
        pack_experts(np.full((1, 1, 1), -1, np.int32))


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (np.zeros((4, 2), np.uint8), r"shape \(4, 2\) and dtype uint8"),
        (np.zeros((4, 2, 3), np.float32), r"shape \(4, 2, 3\) and dtype float32"),
    ],
)
def test_an_array_of_something_else_is_refused_with_what_it_is(numbers, says) -> None:
    file = io.BytesIO()
    np.save(file, numbers)
    with pytest.raises(BrokenExperts, match=says):
        unpack_experts(file.getvalue())


@pytest.mark.parametrize("damage", [{"row_count": 1}, {"row_start": 1}, {"target_start": 1}, {"row_count": 3}])
def test_references_that_do_not_cover_the_segment_are_refused(story, damage) -> None:
    blobs = {}
    turns = [Asked("p", "AB", None, None, False, True), Asked("pABq", "C", 0, (0, 3), False, True)]
    (sample,) = told(story, turns, blobs).fold(RULES).samples
    first, *rest = sample.experts
    broken = replace(sample, experts=(replace(first, **damage), *rest))
    with pytest.raises(ExpertsDoNotCover, match=sample.sample_id):
        assemble_experts(broken, blobs)
    with pytest.raises(ExpertsDoNotCover, match="2 rows for 4"):
        assemble_experts(replace(sample, experts=(first,)), blobs)
