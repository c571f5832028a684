"""Segmentation compared with a restatement that keeps whole prompts and follows the words of docs/folds.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.fold_versions import VERSIONS, FoldVersion
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import shared_prefix
from turnlog.schemas.types import TurnId

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


@dataclass
class Naive:
    prompt: str
    output: str
    base: int | None
    aborted: bool
    temperature: float

    @property
    def whole(self) -> str:
        return self.prompt + self.output


@st.composite
def conversations(draw) -> list[Naive]:
    """Prompts over two letters that extend, cut or leave earlier turns, so that prefixes meet often."""
    turns: list[Naive] = []
    for index in range(draw(st.integers(1, 9))):
        start = draw(st.sampled_from([turn.whole for turn in turns] or [""]))
        kept = start[: len(start) - draw(st.sampled_from([0, 0, 0, 1, 2, len(start)]))]
        prompt = kept + draw(st.text("ab", max_size=2))
        base = draw(st.sampled_from([None, *range(index)]))
        turns.append(
            Naive(prompt or "a", draw(st.text("ab", max_size=3)), base, draw(st.integers(0, 9)) == 0,
                  draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])))
        )  # fmt: skip
    return turns


def restated(turns: list[Naive], undelivered: set[int], version: FoldVersion) -> tuple[set[int], list[list[int]], int]:
    """(taken out, segments, duplicated context) by the words, in O(turns^2 x tokens)."""
    continued = {turn.base for turn in turns}
    leaves = [i for i in range(len(turns)) if i not in continued]
    out = {i for i in leaves if turns[i].aborted or i in undelivered}
    could = [j for j in range(len(turns)) if not (version.retries_need_answers and j in out)]
    answered = [j for j in could if j in continued or j == max(could)]
    out |= {i for i in leaves if any(j > i and turns[j].prompt == turns[i].prompt for j in answered)}
    kept = [i for i in range(len(turns)) if i not in out]
    extends: dict[int, int] = {}
    for j in kept:
        for i in kept:
            fits = i < j and turns[j].prompt.startswith(turns[i].whole) and turns[i].temperature == turns[j].temperature
            if fits and (j not in extends or len(turns[i].whole) >= len(turns[extends[j]].whole)):
                extends[j] = i

    def subtree(i: int) -> int:
        return len(turns[i].output) + sum(subtree(j) for j in kept if extends.get(j) == i)

    segments: list[list[int]] = []
    for j in kept:
        rivals = [i for i in kept if j in extends and extends.get(i) == extends[j]]
        if rivals and j == max(rivals, key=lambda i: (subtree(i), -i)):
            next(segment for segment in segments if extends[j] in segment).append(j)
        else:
            segments.append([j])
    duplicated = 0
    for first, *_ in segments:
        shared = [prefix(turns[first].prompt, turns[i].whole) for i in kept if i < first]
        duplicated += max(shared, default=0)
    return out, segments, duplicated


def prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
@given(turns=conversations(), undelivered=st.sets(st.integers(0, 8), max_size=2), data=st.data())
def test_segments_agree_with_the_words_whatever_the_storage_parents(story, version, turns, undelivered, data):
    s = story()
    s.start("a")
    for index, turn in enumerate(turns):
        parent = None
        if index and data.draw(st.booleans()):
            holder = data.draw(st.integers(0, index - 1))
            longest = prefix(turn.prompt, turns[holder].whole)
            parent = (TurnId("start/a", holder), data.draw(st.integers(0, longest)))
        s.turn("a", index, turn.prompt, turn.output, base=turn.base, aborted=turn.aborted, parent=parent,
               temperature=turn.temperature, tools=True)  # fmt: skip
    named_undelivered = [i for i in undelivered if i < len(turns)]
    s.end("a", reward=1.0, undelivered=named_undelivered)
    folded = s.fold(replace(RULES, version=version))
    out, segments, duplicated = restated(turns, set(named_undelivered), version)
    tree = folded.trees["a"]
    assert [[turn.index for turn in segment.turns] for segment in tree.segments] == segments
    assert tree.duplicated_prefix_tokens == duplicated
    assert sum(tree.books.masked.values()) == sum(len(turns[i].output) for i in out)
    for sample in folded.samples:
        last = turns[segments[sample.segment_index][-1]]
        text = "".join(chr(token) for token in memoryview(sample.token_ids).cast("i"))
        assert text == last.whole
        for span in sample.spans:
            turn = turns[span.turn.index]
            assert turn.prompt == text[: len(turn.prompt)]
            assert (
                text[span.start : span.start + span.length]
                == turn.output[span.start - len(turn.prompt) :][: span.length]
            )


@pytest.mark.parametrize("turns", [1, 3, 50])
def test_what_is_kept_of_a_session_is_linear_in_its_tokens(story, turns):
    s = story()
    whole = "s" * 100
    for index in range(turns):
        s.turn("a", index, whole + "u", "oo", base=index - 1 if index else None)
        whole += "uoo"
    group = s.fold(RULES).group
    kept = group._records["a"].snapshots.values()
    assert sum(turn.delta.nbytes + turn.output.nbytes for turn in kept) == 4 * len(whole)


@given(conversations(), st.data())
def test_what_two_turns_share_is_found_without_building_either(story, turns, data):
    s = story()
    s.start("a")
    for index, turn in enumerate(turns):
        parent = None
        if index:
            holder = data.draw(st.integers(0, index - 1))
            parent = (TurnId("start/a", holder), data.draw(st.integers(0, prefix(turn.prompt, turns[holder].whole))))
        s.turn("a", index, turn.prompt, turn.output, parent=parent)
    group = s.fold(RULES).group
    kept = [group._records["a"].snapshots["start/a", index] for index in range(len(turns))]
    for one, held in zip(turns, kept, strict=True):
        for other, asked in zip(turns, kept, strict=True):
            expected = prefix(one.whole, other.prompt)
            assert shared_prefix(held, held.length, asked, asked.prompt_len) == expected
