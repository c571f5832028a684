"""A session whose turns extend one another takes a short cut; it comes out as through the tree of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fakes.sessions import GroupName, SessionStory, Shape, whole_group
from turnlog.infra.log import Record
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.unit import SEEN, Done, LowWaterMarks, UnitFold
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import TurnTokenDelta, tokens
from turnlog.schemas.topics import TOPIC_OF

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
TURNS = st.tuples(st.text("ab", max_size=3), st.text("AB", max_size=3), st.sampled_from([1.0, 1.0, 1.0, 0.5]))


def session(story, turns, short: int):
    """The turns, each stored against the one before it, `short` tokens before that one's end."""
    s, whole = story(), ""
    for index, (delta, output, temperature) in enumerate(turns):
        base_len = len(whole) - short
        parent = (s.id("a", index - 1), base_len) if index and base_len > 0 else None
        prompt = whole + delta or "s"
        s.turn("a", index, prompt, output, base=index - 1 if index else None, parent=parent, temperature=temperature)
        whole = prompt + output
    s.end("a", reward=1.0)
    return s.fold(RULES)


@given(turns=st.lists(TURNS, min_size=1, max_size=6))
@settings(deadline=None, phases=[Phase.generate])
def test_a_chain_is_cut_as_the_tree_of_its_tokens_cuts_it(story, turns) -> None:
    assert session(story, turns, 0).bodies == session(story, turns, 1).bodies


@pytest.mark.parametrize(("second", "segments"), [(1.0, 1), (0.5, 2)])
def test_a_chain_at_two_temperatures_is_two_rows(story, second: float, segments: int) -> None:
    folded = session(story, [("ab", "A", 1.0), ("b", "B", second)], 0)
    assert len(folded.trees["a"].segments) == segments
    assert folded.trees["a"].duplicated_prefix_tokens == (0 if segments == 1 else 3)


def test_the_tokens_of_a_chain_are_the_arrays_of_its_turns() -> None:
    """Neither copied nor sliced: a sample's only copy is the one that joins them."""
    story = SessionStory(GroupName("r", "g", 0, 1), 0, np.random.default_rng(0))
    story.started()
    turns: list[TurnTokenDelta] = []
    for offset in range(3):
        _, snapshot = story.turn(Shape(4, 3))
        turns.append(tokens(snapshot, offset, turns[-1] if turns else None))
    pieces = turns[-1].prefix(turns[-1].length)
    own = [array for turn in turns for array in (turn.delta, turn.output)]
    assert [any(piece is array for array in own) for piece in pieces] == [True] * 6
    assert [len(piece) for piece in turns[-1].prefix(13)] == [4, 3, 4, 2], "cut within the second turn's output"


def test_records_that_make_nothing_due_have_one_result() -> None:
    marks = LowWaterMarks.start(INPUTS)
    fold = UnitFold(marks, Done(), lambda name, at: GroupFold(name, at, RULES), run_id="r", horizon_records=10)
    offsets = dict.fromkeys(INPUTS, 0)
    results = []
    for event in whole_group(GroupName("r", "g", 0, 1), np.random.default_rng(0), turns=2, shape=Shape()):
        topic = TOPIC_OF[type(event).__name__].name
        record = Record(topic, 0, offsets[topic], b"g", b"", (), 0)
        offsets[topic] += 1
        assert fold.wants(record)
        results.append(fold.take(record, event))
    assert [taken is SEEN for taken in results] == [True] * 6 + [False]
    assert not fold.wants(record)
