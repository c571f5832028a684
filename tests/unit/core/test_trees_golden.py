"""Trees, segments, lineages and books, drawn as text (the notation is in conftest.py)."""

from __future__ import annotations

from dataclasses import replace

from turnlog.processors.core.assembler import FoldRules
from turnlog.schemas.events import Outcome

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_turns_that_extend_each_other_are_one_segment(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "AB")
    s.turn("a", 1, "sqABr", "CD", base=0)
    s.turn("a", 2, "sqABrCDt", "E", base=1)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1,2: sq<AB>r<CD>t<E>
        a 5 = 5 trained
    """)


def test_a_rewritten_history_opens_a_segment_and_keeps_the_loss_of_the_one_it_left(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "thinkA")
    s.turn("a", 1, "sqAr", "B", base=0)  # the template dropped the reasoning
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 main 0: sq<thinkA>
        a1* main 1: sqAr<B>
        a 7 = 7 trained
    """)
    assert folded.trees["a"].duplicated_prefix_tokens == 2
    assert [(segment.tokens, segment.trained, segment.context) for segment in folded.trees["a"].segments] == [
        (8, 6, 2),
        (5, 1, 4),
    ]


def test_the_branch_with_most_output_tokens_takes_the_segment(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAx", "B", base=0)
    s.turn("a", 2, "sqAy", "CC", base=0)
    s.turn("a", 3, "sqAxBz", "DD", base=1)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1,3: sq<A>x<B>z<DD>
        a1 main 2: sqAy<CC>
        a 6 = 6 trained
    """)


def test_equal_branches_are_taken_by_the_earlier_turn(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAx", "B", base=0)
    s.turn("a", 2, "sqAy", "C", base=0)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0,1: sq<A>x<B>
        a1* main 2: sqAy<C>
        a 3 = 3 trained
    """)


def test_a_retried_answer_that_nobody_saw_is_undelivered(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sq", "BB")
    s.turn("a", 2, "sqBBr", "C", base=1)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 1,2: sq<BB>r<C>
        a 4 = 3 trained + 1 undelivered
    """)


def test_a_leaf_that_the_finish_names_undelivered_is_taken_out_but_a_continued_turn_is_not(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.end("a", reward=1.0, undelivered=(0, 1))
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0: sq<A>
        a 2 = 1 trained + 1 undelivered
    """)


def test_an_aborted_turn_counts_only_when_it_was_continued(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A", aborted=True)
    s.turn("a", 1, "sqAr", "B", base=0)
    s.turn("a", 2, "sqArBt", "CCC", base=1, aborted=True)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1: sq<A>r<B>
        a 5 = 2 trained + 3 aborted
    """)


def test_sub_agents_are_trained_and_side_calls_are_not(story, drawn):
    s = story()
    s.turn("a", 0, "title?", "T", tools=False, system="titles")
    s.turn("a", 1, "sq", "A")
    s.turn("a", 2, "explore", "B", system="explorer")
    s.turn("a", 3, "sqAr", "C", base=1)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 side_call 0: (7 tokens)
        a1* main 1,3: sq<A>r<C>
        a2 sub_agent 2: explore<B>
        a 4 = 3 trained + 1 side_call
    """)
    assert [sample.segment_index for sample in folded.samples] == [1, 2]
    assert {sample.segment_count for sample in folded.samples} == {3}
    settings = replace(RULES, train_sub_agents=False, train_side_calls=True)
    assert drawn(s.fold(settings)) == picture("""
        a0 side_call 0: title?<T>
        a1* main 1,3: sq<A>r<C>
        a2 sub_agent 2: (8 tokens)
        a 4 = 3 trained + 1 side_call
    """)


def test_a_root_with_mains_system_prompt_is_a_compaction_and_holds_the_anchor(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.turn("a", 2, "summary", "C")
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0,1: sq<A>r<B>
        a1* main 2: summary<C>
        a 3 = 3 trained
    """)


def test_an_agent_path_overrides_the_guess(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A", agent_path="side/title")
    s.turn("a", 1, "mq", "B", agent_path="main")
    s.turn("a", 2, "xq", "C", agent_path="explore")
    s.turn("a", 3, "yq", "D", agent_path="explore")
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 side_call 0: (3 tokens)
        a1* main 1: mq<B>
        a2 sub_agent 2: xq<C>
        a3 sub_agent 3: yq<D>
        a 4 = 3 trained + 1 side_call
    """)
    assert [node.lineage for node in folded.trees["a"].nodes] == [0, 1, 2, 2]


def test_what_the_finish_does_not_name_is_counted_as_not_named(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.adopt("a")
    s.turn("a", (0, 7), "sqAz", "ZZZ", base=(0, 0))  # a zombie of the first epoch
    s.turn("a", (1, 0), "sqAr", "B", base=(0, 0))
    s.end("a", reward=1.0, turns=[s.id("a", (0, 0)), s.id("a", (1, 0))])
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,0: sq<A>r<B>
        a 5 = 2 trained + 3 not_named
    """)


def test_a_truncated_session_can_lose_its_last_turn_or_its_place(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0)
    s.end("a", reward=1.0, outcome=Outcome.truncated)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1: sq<A>r<BB>
        a 3 = 3 trained
    """)
    assert drawn(s.fold(replace(RULES, truncated="mask_last_turn"))) == picture("""
        a0* main 0,1: sq<A>r{BB}
        a 3 = 1 trained + 2 excluded_outcome
    """)
    score = s.fold(replace(RULES, truncated="exclude")).score
    assert (score.status, score.reason, score.rollouts[0].excluded_reason) == (
        "discarded",
        "too_few_valid",
        "truncated",
    )
