"""A session whose turns extend one another takes a short cut; it comes out as through the tree of its tokens."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from turnlog.processors.core.methods.rules import FoldRules

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
