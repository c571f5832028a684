"""Trees, segments, lineages and books, drawn as text (the notation is in conftest.py)."""

from __future__ import annotations

import gc
from dataclasses import replace

from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import RadixNode
from turnlog.schemas.events import FinishReason, Outcome

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


def test_two_agents_that_ask_the_same_are_no_retry(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A", agent_path="main")
    s.turn("a", 1, "Xgo", "B", agent_path="main/a1")
    s.turn("a", 2, "Xgo", "C", agent_path="main/a2")
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0: sq<A>
        a1 sub_agent 1: Xgo<B>
        a2 sub_agent 2: Xgo<C>
        a 3 = 3 trained
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


def test_a_turn_that_a_grammar_held_is_context_and_never_trained(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, constrained=True)
    s.turn("a", 2, "sqArBBt", "C", base=1)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1,2: sq<A>r{BB}t<C>
        a 4 = 2 trained + 2 constrained
    """)


def test_a_row_with_withheld_tokens_is_dropped_and_the_row_after_it_trains(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "--", base=0, redacted=True)
    s.turn("a", 2, "smt", "C", base=1)  # the masked history, rendered anew
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0,1: (6 tokens)
        a1* main 2: smt<C>
        a 4 = 1 trained + 3 redacted
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


def test_a_branch_is_context_and_a_segment_of_its_own(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BBB", base=0)
    s.turn("a", 2, "sqAx", "C", base=0)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 main 0,1: sq<A>r<BBB>
        a1* main 2: sqAx<C>
        a 5 = 5 trained
    """)
    assert folded.trees["a"].duplicated_prefix_tokens == 3


def test_a_compaction_in_the_middle_leaves_a_closed_segment_that_trains(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "AA")
    s.turn("a", 1, "sqAAr", "BB", base=0)
    s.turn("a", 2, "sqAArBBsummarise", "SUM", base=1, tools=False)
    s.turn("a", 3, "sSUM", "CC")
    s.turn("a", 4, "sSUMCCt", "DD", base=3)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0,1,2: sq<AA>r<BB>summarise<SUM>
        a1* main 3,4: sSUM<CC>t<DD>
        a 11 = 11 trained
    """)


def test_a_history_rewritten_in_the_middle_opens_a_segment_from_there(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.turn("a", 2, "sqA[cut]", "C", base=0)  # the harness dropped an old tool result
    s.turn("a", 3, "sqA[cut]Cu", "D", base=2)
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,2,3: sq<A>[cut]<C>u<D>
        a1 main 1: sqAr<B>
        a 4 = 4 trained
    """)


def test_other_tools_are_another_prompt_from_the_start_and_the_same_lineage(story, drawn):
    s = story()
    s.turn("a", 0, "T1sq", "A")
    s.turn("a", 1, "T2sqAr", "B", base=0)
    s.turn("a", 2, "T2sqArBt", "C", base=1)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 main 0: T1sq<A>
        a1* main 1,2: T2sqAr<B>t<C>
        a 3 = 3 trained
    """)
    assert {node.lineage for node in folded.trees["a"].nodes} == {0}


def test_reasoning_that_the_template_strips_turn_by_turn_costs_context_and_no_signal(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "(hm)A")
    s.turn("a", 1, "sqAr", "(so)B", base=0)
    s.turn("a", 2, "sqArBt", "(ok)C", base=1)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 main 0: sq<(hm)A>
        a1 main 1: sqAr<(so)B>
        a2* main 2: sqArBt<(ok)C>
        a 15 = 15 trained
    """)
    assert folded.trees["a"].duplicated_prefix_tokens == 2 + 4


def test_a_sub_agent_between_turns_of_main_is_a_segment_and_main_stays_whole(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "Xgo", "x", system="explorer")
    s.turn("a", 2, "sqAr", "B", base=0)
    s.turn("a", 3, "Xgoxr", "y", base=1, system="explorer")
    s.turn("a", 4, "sqArBt", "C", base=2)
    s.turn("a", 5, "Xgoxryt", "z", base=3, system="explorer")  # it outlives main
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,2,4: sq<A>r<B>t<C>
        a1 sub_agent 1,3,5: Xgo<x>r<y>t<z>
        a 6 = 6 trained
    """)


def test_parallel_sub_agents_with_one_system_prompt_are_lineages_of_their_own(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "X1", "p", system="explorer")
    s.turn("a", 2, "X2", "q", system="explorer")
    s.turn("a", 3, "X2qr", "s", base=2, system="explorer")
    s.turn("a", 4, "X1pr", "t", base=1, system="explorer")
    s.turn("a", 5, "sqAr", "B", base=0)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0* main 0,5: sq<A>r<B>
        a1 sub_agent 1,4: X1<p>r<t>
        a2 sub_agent 2,3: X2<q>r<s>
        a 6 = 6 trained
    """)
    assert [node.lineage for node in folded.trees["a"].nodes] == [0, 1, 2, 2, 1, 0]


def test_nested_paths_are_agents_below_main_and_a_path_that_begins_with_side_is_a_side_call(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A", agent_path="")
    s.turn("a", 1, "sX", "x", agent_path="main/a1")  # main's own system prompt: the path alone tells them apart
    s.turn("a", 2, "sY", "y", agent_path="main/a1/b1")
    s.turn("a", 3, "sqAr", "B", base=0, agent_path="main")
    s.turn("a", 4, "title", "T", agent_path="side-title")
    s.turn("a", 5, "sXxr", "z", base=1, agent_path="main/a1")  # the sub-agent ends last
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,3: sq<A>r<B>
        a1 sub_agent 1,5: sX<x>r<z>
        a2 sub_agent 2: sY<y>
        a3 side_call 4: (6 tokens)
        a 6 = 5 trained + 1 side_call
    """)


def test_among_agents_with_paths_main_is_the_first_root_without_one(story, drawn):
    s = story()
    s.turn("a", 0, "Xgo", "x", agent_path="explore")
    s.turn("a", 1, "sq", "A", tools=False)
    s.turn("a", 2, "title", "T", tools=False, system="titles")
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 sub_agent 0: Xgo<x>
        a1* main 1: sq<A>
        a2 side_call 2: (6 tokens)
        a 3 = 2 trained + 1 side_call
    """)


def test_without_a_main_lineage_no_segment_is_the_anchor(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A", agent_path="explore")
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert folded.trees["a"].anchor_segment is None
    assert drawn(folded) == picture("""
        a0 sub_agent 0: sq<A>
        a 1 = 1 trained
    """)


def test_the_anchor_is_the_last_turn_of_main_that_an_agent_saw(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "short", "B")  # a compaction: main goes on here
    s.turn("a", 2, "Xgo", "x", system="explorer")
    s.turn("a", 3, "shortBr", "C", base=1)
    s.end("a", reward=1.0, undelivered=(3,))
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0: sq<A>
        a1* main 1: short<B>
        a2 sub_agent 2: Xgo<x>
        a 4 = 3 trained + 1 undelivered
    """)


def test_a_turn_that_was_aborted_and_resumed_carries_both_versions(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "ABCD", versions=(3, 3, 4, 4))
    s.turn("a", 1, "sqABCDr", "EF", base=0, versions=(4, 5))
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0* main 0,1: sq<AB><CD>r<E><F>
        a 6 = 6 trained
    """)
    assert [span.version for span in folded.samples[0].spans] == [3, 4, 4, 5]


def test_a_turn_cut_off_in_the_middle_trains_and_what_closes_it_is_context(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "AB", finish_reason=FinishReason.length)
    s.turn("a", 1, "sqAB.r", "C", base=0)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0* main 0,1: sq<AB>.r<C>
        a 3 = 3 trained
    """)
    assert [node.finish_reason for node in folded.trees["a"].nodes] == ["length", "stop"]


def test_what_the_client_prefilled_is_context_and_what_was_sampled_after_it_trains(story, drawn):
    s = story()
    s.turn("a", 0, "sqpre", "FIX")
    s.turn("a", 1, "sqpreFIXr", "B", base=0)
    s.turn("a", 2, "sqpreFIXrB", "C", base=1)  # the reply itself sent back to be continued
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,1,2: sqpre<FIX>r<B><C>
        a 5 = 5 trained
    """)


def test_an_empty_output_is_a_turn_with_nothing_to_train(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "", base=0)
    s.turn("a", 2, "sqArt", "B", base=1)
    s.turn("a", 3, "other", "")
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 main 0,1,2: sq<A>rt<B>
        a1* main 3: (5 tokens)
        a 2 = 2 trained
    """)
    assert [sample.segment_index for sample in folded.samples] == [0]


def test_two_hundred_turns_are_one_segment(story, drawn):
    s = story()
    whole, picture_of = "s", "s"
    for index in range(200):
        s.turn("a", index, whole + "u", "o", base=index - 1 if index else None)
        whole += "uo"
        picture_of += "u<o>"
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    numbers = ",".join(map(str, range(200)))
    assert drawn(folded) == f"a0* main {numbers}: {picture_of}\na 200 = 200 trained"
    assert folded.trees["a"].duplicated_prefix_tokens == 0


def test_two_gateways_share_a_session_and_the_zombie_writes_for_nobody(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.adopt("a")
    s.turn("a", (0, 1), "sqAr", "ZZ", base=(0, 0))  # the first gateway still works
    s.turn("a", (1, 0), "sqAr", "B", base=(0, 0))
    s.finish("a", epoch=0, outcome=Outcome.infra_failure, turns=[s.id("a", (0, 0)), s.id("a", (0, 1))])
    s.turn("a", (1, 1), "sqArBt", "C", base=(1, 0))
    s.end("a", reward=1.0, turns=[s.id("a", (0, 0)), s.id("a", (1, 0)), s.id("a", (1, 1))])
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,0,1: sq<A>r<B>t<C>
        a 5 = 3 trained + 2 not_named
    """)


def test_records_that_come_late_or_again_change_no_picture(story, drawn, folded):
    s = story(size=2)
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.turn("b", 0, "sq", "C")
    s.end("a", reward=1.0)
    s.end("b", reward=0.0)
    golden = picture("""
        a0* main 0,1: sq<A>r<B>
        a 2 = 2 trained
        b0* main 0: sq<C>
        b 1 = 1 trained
    """)
    assert drawn(s.fold(RULES)) == golden
    again = folded([record for record in s.arrivals for _ in range(2)], RULES)
    assert drawn(again) == golden
    reversed_topics = sorted(s.arrivals, key=lambda record: record[0], reverse=True)  # turns, snapshots, spine last
    late = folded([*reversed_topics, *s.arrivals], RULES)
    assert drawn(late) == golden


def test_a_close_that_races_with_the_last_finish_gives_one_picture_in_either_order(story, drawn):
    def races(first):
        s = story(size=2)
        s.turn("a", 0, "sq", "A")
        s.turn("b", 0, "sq", "B")
        s.end("a", reward=1.0)
        seen = s.arrivals[-1][1] + 1
        if first == "close":
            s.close("a", seen=seen)
        s.end("b", reward=0.0)
        if first == "finish":
            s.close("a", seen=seen)  # void: a record of the group came in between
        return drawn(s.fold(RULES))

    assert races("close") == picture("""
        a0* main 0: sq<A>
        a 1 = 1 trained
    """)
    assert races("finish") == picture("""
        a0* main 0: sq<A>
        a 1 = 1 trained
        b0* main 0: sq<B>
        b 1 = 1 trained
    """)


def test_one_story_under_each_policy(story, drawn):
    s = story()
    asked = {"role": "user", "content": "q"}
    s.turn("a", 0, "sq", "(hm)A", messages=[asked], response={"role": "assistant", "content": "A"})
    s.turn("a", 1, "sqAr", "BB", base=0, messages=[{"role": "tool", "content": "r"}], response={"content": "B"})
    s.turn("a", 2, "sqArBBt", "C", base=1, messages=[{"role": "tool", "content": "t"}], response={"content": "C"})
    s.end("a", reward=1.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0 main 0: sq<(hm)A>
        a1* main 1,2: sqAr<BB>t<C>
        a 8 = 8 trained
    """)
    assert drawn(s.fold(replace(RULES, policy="slime"))) == picture("""
        a0* main 1,2: sqAr<BB>t<C>
        a 8 = 3 trained + 5 realigned
    """)
    assert drawn(s.fold(replace(RULES, policy="slime", fork_threshold_tokens=2))) == picture("""
        a0 main 0: sq<(hm)A>
        a1* main 1,2: sqAr<BB>t<C>
        a 8 = 8 trained
    """)
    assert drawn(s.fold(replace(RULES, policy="last-turn"))) == picture("""
        a0 main 0: sq<(hm)A>
        a1 main 1: sqAr<BB>
        a2* main 2: sqArBBt<C>
        a 8 = 8 trained
    """)


def test_a_turn_stored_against_one_that_gives_it_no_token_is_a_root(story, drawn):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "t", "B", parent=(None, 0), parent_turn=s.id("a", 0))
    s.end("a", reward=1.0)
    folded = s.fold()
    assert (folded.refused, folded.trees["a"].books.trained) == ([], 2)


def test_a_forgotten_session_leaves_nothing_for_the_collector_of_garbage(story) -> None:
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "B", base=0)
    s.turn("a", 2, "sqAt", "C", base=0)
    s.end("a", reward=1.0)
    gc.collect()
    gc.disable()
    try:
        s.fold(RULES)
        assert not [each for each in gc.get_objects() if type(each) is RadixNode]
    finally:
        gc.enable()
