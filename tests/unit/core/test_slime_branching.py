"""Policy slime, case by case: its public behaviour in branching, and its edge cases, drawn as text.

A message is written role(text): s(S)u(q)a(call)t(4); a prompt ends with the opening a( and a reply with ). So a client
that echoes what it was told extends the tokens exactly, and `drift` is what happens to a prompt that does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.each import each
from turnlog.processors.core.batches.draws import DrawRules, PlacedSample, trim
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.schemas.events import FinishReason, Weighting

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1, policy="slime")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
LONG = 1024


@dataclass(frozen=True)
class Turn:
    said: str
    """The request: `s:S u:q a:call t:4`."""
    reply: str
    drift: tuple[str, str] = ("", "")
    """(rendered, what stands there in its place)"""
    finish: str = "stop"


def turn(said: str, reply: str, *drift: str, finish: str = "stop") -> Turn:
    return Turn(said, reply, drift or ("", ""), finish)


def parts(said: str) -> list[tuple[str, str]]:
    return [tuple(word.split(":")) for word in said.replace("_", "\0").split()]


def rendered(said: str) -> str:
    return "".join(f"{role}({text})" for role, text in parts(said)).replace("\0", " ")


def message(role: str, text: str) -> dict[str, str]:
    return {"role": ROLES[role], "content": text.replace("\0", " ")}


def tell(s, turns: list[Turn], session: str, deltas: bool) -> None:
    """Write the turns; with `deltas` each names the base that its messages continue, as a gateway does."""
    said_after: list[list[tuple[str, str]]] = []
    for index, one in enumerate(turns):
        words = parts(one.said)
        bases = [b for b, after in enumerate(said_after) if words[: len(after)] == after] if deltas else []
        base = max(bases, key=lambda b: (len(said_after[b]), b), default=None)
        said_after.append([*words, ("a", one.reply)])
        s.turn(
            session, index, (rendered(one.said) + "a(").replace(*one.drift), one.reply + ")" if one.reply else "",
            base=base, messages=[message(*word) for word in words[0 if base is None else len(said_after[base]) :]],
            response=message("a", one.reply), system=words[0][1] if words else "S",
            finish_reason=FinishReason(one.finish),
        )  # fmt: skip


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def four_turns(**drifts: tuple[str, str]) -> list[Turn]:
    line, turns = "s:S u:q", []
    for index in range(6):
        turns.append(turn(line, f"A{index}", *drifts.get(f"at{index}", ())))
        line += f" a:A{index} t:{index}"
    return turns


CASES: dict[str, tuple[list[Turn], int, str]] = {
    "1.1 one turn": ([turn("s:S u:q", "ok")], LONG, """
        a0* main 0: s(S)u(q)a(<ok)>
        a 3 = 3 trained
    """),
    "1.2 a call and its answer": ([turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done")], LONG, """
        a0* main 0,1: s(S)u(q)a(<call)>t(4)a(<done)>
        a 10 = 10 trained
    """),
    "1.3 two system prompts": ([turn("s:SA u:q", "A"), turn("s:SB u:q", "B")], LONG, """
        a0* main 0: s(SA)u(q)a(<A)>
        a1 sub_agent 1: s(SB)u(q)a(<B)>
        a 4 = 4 trained
    """),
    "1.4 one system prompt, two users": ([turn("s:S u:A", "a1"), turn("s:S u:B", "b1")], LONG, """
        a0 main 0: s(S)u(A)a(<a1)>
        a1* main 1: s(S)u(B)a(<b1)>
        a 6 = 6 trained
    """),
    "1.5 one prompt, two replies": ([turn("s:S u:q", "a1"), turn("s:S u:q", "a2")], LONG, """
        a0 main 0: s(S)u(q)a(<a1)>
        a1* main 1: s(S)u(q)a(<a2)>
        a 6 = 6 trained
    """),
    "1.6 one call, two answers: the call trains with the first": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:x", "ax"), turn("s:S u:q a:call t:y", "ay")], LONG, """
        a0 main 0,1: s(S)u(q)a(<call)>t(x)a(<ax)>
        a1* main 2: s(S)u(q)a(call)t(y)a(<ay)>
        a 11 = 11 trained
    """),
    "1.7 the same messages, a token spliced into the second prompt": (
        [turn("s:S u:q", "a1"), turn("s:S u:q", "a2", "u(q)", "u(q)~")], LONG, """
        a0 main 0: s(S)u(q)a(<a1)>
        a1* main 1: s(S)u(q)~a(<a2)>
        a 6 = 6 trained
    """),
    "1.8 two answers in one turn": ([turn("s:S u:q", "call"), turn("s:S u:q a:call t:A t:B", "done")], LONG, """
        a0* main 0,1: s(S)u(q)a(<call)>t(A)t(B)a(<done)>
        a 10 = 10 trained
    """),
    "1.10 an empty reply at the length limit": ([turn("s:S u:q", "", finish="length")], LONG, """
        a0* main 0: (10 tokens)
        a 0 = 0 trained
    """),
    "2.3 drift before the last reply forks": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "u(q)", "u(Q)")], LONG, """
        a0 main 0: s(S)u(q)a(<call)>
        a1* main 1: s(S)u(Q)a(call)t(4)a(<done)>
        a 10 = 10 trained
    """),
    "2.4 drift inside the last reply, a short turn: realigned": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "call)", "call]")], LONG, """
        a0* main 1: s(S)u(q)a(call]t(4)a(<done)>
        a 10 = 5 trained + 5 realigned
    """),
    "2.5 the same under a threshold of 1 forks": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "call)", "call]")], 1, """
        a0 main 0: s(S)u(q)a(<call)>
        a1* main 1: s(S)u(q)a(call]t(4)a(<done)>
        a 10 = 10 trained
    """),
    "2.6 the same under a threshold of 0 forks": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "call)", "call]")], 0, """
        a0 main 0: s(S)u(q)a(<call)>
        a1* main 1: s(S)u(q)a(call]t(4)a(<done)>
        a 10 = 10 trained
    """),
    "2.7 drift inside an earlier reply forks": (
        [turn("s:S u:q", "a1"), turn("s:S u:q a:a1 t:1", "a2"),
         turn("s:S u:q a:a1 t:1 a:a2 t:2", "a3", "a1)", "a1]")], LONG, """
        a0 main 0,1: s(S)u(q)a(<a1)>t(1)a(<a2)>
        a1* main 2: s(S)u(q)a(a1]t(1)a(a2)t(2)a(<a3)>
        a 9 = 9 trained
    """),
    "2.11 a foreign assistant message is replayed": (
        [turn("s:S u:q", "a1"), turn("s:S u:q a:a1 t:1", "a2"),
         turn("s:S u:q a:a1 t:1 a:a2 a:foreign u:x", "a3")], LONG, """
        a0* main 0,1,2: s(S)u(q)a(<a1)>t(1)a(<a2)>a(foreign)u(x)a(<a3)>
        a 9 = 9 trained
    """),
    "3.1 a reply comes back rewritten: its turn gives way": (
        [turn("s:S u:q", "ok"), turn("s:S u:q a:ok_ t:1", "done")], LONG, """
        a0* main 1: s(S)u(q)a(ok )t(1)a(<done)>
        a 8 = 5 trained + 3 rewritten
    """),
    "3.2 the same under a threshold of 1 is a second leaf": (
        [turn("s:S u:q", "ok"), turn("s:S u:q a:ok_ t:1", "done")], 1, """
        a0 main 0: s(S)u(q)a(<ok)>
        a1* main 1: s(S)u(q)a(ok )t(1)a(<done)>
        a 8 = 8 trained
    """),
    "3.3 the same under a threshold of 0 is a second leaf": (
        [turn("s:S u:q", "ok"), turn("s:S u:q a:ok_ t:1", "done")], 0, """
        a0 main 0: s(S)u(q)a(<ok)>
        a1* main 1: s(S)u(q)a(ok )t(1)a(<done)>
        a 8 = 8 trained
    """),
    "3.4 two replies stand there: a rewrite is ambiguous": (
        [turn("s:S u:q", "a1"), turn("s:S u:q", "a2"), turn("s:S u:q a:a3 t:1", "done")], LONG, """
        a0 main 0: s(S)u(q)a(<a1)>
        a1 main 1: s(S)u(q)a(<a2)>
        a2* main 2: s(S)u(q)a(a3)t(1)a(<done)>
        a 11 = 11 trained
    """),
    "3.5 the rewritten text is replayed once more": (
        [turn("s:S u:q", "ok"), turn("s:S u:q a:ok5 t:1", "second"),
         turn("s:S u:q a:ok5 t:1 a:second t:2", "third")], LONG, """
        a0* main 1,2: s(S)u(q)a(ok5)t(1)a(<second)>t(2)a(<third)>
        a 16 = 13 trained + 3 rewritten
    """),
    "3.6 one leaf drifts, another does not": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:x", "ax2"), turn("s:S u:q a:call t:y", "ay2"),
         turn("s:S u:q a:call t:x a:ax2 t:z", "ax3", "u(q)", "u(Q)")], LONG, """
        a0 main 0,1: s(S)u(q)a(<call)>t(x)a(<ax2)>
        a1* main 3: s(S)u(Q)a(call)t(x)a(ax2)t(z)a(<ax3)>
        a2 main 2: s(S)u(q)a(call)t(y)a(<ay2)>
        a 17 = 17 trained
    """),
    "3.7 two shared turns, three branches": (
        [turn("s:S u:q", "a1"), turn("s:S u:q a:a1 t:1", "a2"),
         *(turn(f"s:S u:q a:a1 t:1 a:a2 t:{x}", f"end{x}") for x in "pqr")], LONG, """
        a0 main 0,1,2: s(S)u(q)a(<a1)>t(1)a(<a2)>t(p)a(<endp)>
        a1 main 3: s(S)u(q)a(a1)t(1)a(a2)t(q)a(<endq)>
        a2* main 4: s(S)u(q)a(a1)t(1)a(a2)t(r)a(<endr)>
        a 21 = 21 trained
    """),
    "3.8 drift in the new answer is none, but the turn after it forks, and so does a rewritten start": (
        four_turns(at3=("t(2)", "t(2~)"), at5=("u(q)", "u(Q)")), LONG, """
        a0 main 0,1,2,3: s(S)u(q)a(<A0)>t(0)a(<A1)>t(1)a(<A2)>t(2~)a(<A3)>
        a1 main 4: s(S)u(q)a(A0)t(0)a(A1)t(1)a(A2)t(2)a(A3)t(3)a(<A4)>
        a2* main 5: s(S)u(Q)a(A0)t(0)a(A1)t(1)a(A2)t(2)a(A3)t(3)a(A4)t(4)a(<A5)>
        a 18 = 18 trained
    """),
    "4.3 no messages: no place in the tree": ([turn("", "lost"), turn("s:S u:q", "ok")], LONG, """
        a0* main 1: s(S)u(q)a(<ok)>
        a 8 = 3 trained + 5 unrouted
    """),
    "4.6 an output as long as the threshold forks": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "d", "call)", "call]")], 2, """
        a0 main 0: s(S)u(q)a(<call)>
        a1* main 1: s(S)u(q)a(call]t(4)a(<d)>
        a 7 = 7 trained
    """),
    "4.6 a shorter one realigns": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "d", "call)", "call]")], 3, """
        a0* main 1: s(S)u(q)a(call]t(4)a(<d)>
        a 7 = 2 trained + 5 realigned
    """),
    "the same reply twice, then continued: the first one is": (
        [turn("s:S u:q", "ok"), turn("s:S u:q", "ok"), turn("s:S u:q a:ok t:1", "done")], LONG, """
        a0* main 0,2: s(S)u(q)a(<ok)>t(1)a(<done)>
        a1 main 1: s(S)u(q)a(<ok)>
        a 11 = 11 trained
    """),
    "the next prompt ends inside the last reply": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call", "done", "a(call)a(", "a(ca")], LONG, """
        a0* main 1: s(S)u(q)a(ca<done)>
        a 10 = 5 trained + 5 realigned
    """),
    "the next prompt is shorter than the first": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "u(q)a(call)t(4)a(", "")], LONG, """
        a0 main 0: s(S)u(q)a(<call)>
        a1* main 1: s(S)<done)>
        a 10 = 10 trained
    """),
    "the last reply is gone from the prompt": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "call)t(4)a(", "")], LONG, """
        a0* main 1: s(S)u(q)a(<done)>
        a 10 = 5 trained + 5 realigned
    """),
    "a turn that the first leaf realigned away is trained by no other": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:x", "ax", "call)", "call]"),
         turn("s:S u:q a:call t:y", "ay")], LONG, """
        a0 main 1: s(S)u(q)a(call]t(x)a(<ax)>
        a1* main 2: s(S)u(q)a(call)t(y)a(<ay)>
        a 11 = 6 trained + 5 realigned
    """),
    "two turns realigned in a row": (
        [turn("s:S u:q", "a1"), turn("s:S u:q a:a1 t:1", "a2", "a1)", "a1]"),
         turn("s:S u:q a:a1 t:1 a:a2 t:2", "a3", "a1)t(1)a(a2)", "a1]t(1)a(a2]")], LONG, """
        a0* main 2: s(S)u(q)a(a1]t(1)a(a2]t(2)a(<a3)>
        a 9 = 3 trained + 6 realigned
    """),
    "an unrelated assistant text in place of a reply takes its place all the same": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:other t:1", "done")], LONG, """
        a0* main 1: s(S)u(q)a(other)t(1)a(<done)>
        a 10 = 5 trained + 5 rewritten
    """),
    "a prefill is extended": ([turn("s:S u:q a:pre", "fix", "pre)a(", "pre")], LONG, """
        a0* main 0: s(S)u(q)a(pre<fix)>
        a 4 = 4 trained
    """),
    "an empty reply after turns that trained": (
        [turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "", finish="length")], LONG, """
        a0* main 0,1: s(S)u(q)a(<call)>t(4)a(
        a 5 = 5 trained
    """),
}  # fmt: skip


@each("deltas", [False, True], ids=["whole", "deltas"])
@each("name", CASES)
def test_a_case_of_branching_comes_out_as_with_slime(story, drawn, name, deltas):
    turns, threshold, golden = CASES[name]
    s = story()
    tell(s, turns, "a", deltas)
    s.end("a", reward=1.0)
    folded = s.fold(replace(RULES, fork_threshold_tokens=threshold))
    assert folded.refused == []
    assert drawn(folded) == picture(golden)
    assert {sample.reward for sample in folded.samples} <= {1.0}, "each sample has the whole reward"


def told(story, *turns: Turn, threshold: int = LONG, reward: float = 1.0):
    s = story()
    tell(s, list(turns), "a", deltas=True)
    s.end("a", reward=reward)
    return s.fold(replace(RULES, fork_threshold_tokens=threshold))


def test_1_9_sessions_do_not_see_each_other(story, drawn):
    s = story(size=2)
    tell(s, [turn("s:S u:q", "a1")], "a", deltas=True)
    tell(s, [turn("s:S u:q", "b1")], "b", deltas=True)
    s.end("a", reward=1.0)
    s.end("b", reward=0.0)
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0: s(S)u(q)a(<a1)>
        a 3 = 3 trained
        b0* main 0: s(S)u(q)a(<b1)>
        b 3 = 3 trained
    """)


def test_2_1_and_2_2_log_probs_stand_at_their_tokens_and_zeros_elsewhere(story):
    (sample,) = told(story, turn("s:S u:q", "c"), turn("s:S u:q a:c t:4", "d")).samples
    row = trim(PlacedSample(sample, 0, 0), HeldVersion(1), draw_rules(max_tokens=99))
    assert row.logprobs.tolist() == [0.0] * 10 + [-0.5, -1.5] + [0.0] * 6 + [-0.5, -1.5]
    assert row.trained.tolist() == [0] * 10 + [1, 1] + [0] * 6 + [1, 1]
    assert sample.reward == 1.0


def test_2_8_and_2_9_every_sample_of_a_session_has_its_reward_and_one_advantage(story):
    drifted = told(story, turn("s:S u:q", "call"), turn("s:S u:q a:call t:4", "done", "u(q)", "u(Q)"), reward=0.25)
    leaves = told(story, turn("s:S u:q", "a1"), turn("s:S u:q", "a2"), reward=0.25)
    for folded in (drifted, leaves):
        assert [sample.reward for sample in folded.samples] == [0.25, 0.25]
        assert len({sample.advantage for sample in folded.samples}) == 1


def test_2_10_a_shared_turn_is_context_without_log_probs_in_the_second_sample(story):
    turns = (turn("s:S u:q", "c"), turn("s:S u:q a:c t:x", "X"), turn("s:S u:q a:c t:y", "Y"))
    first, second = told(story, *turns).samples
    rows = [trim(PlacedSample(sample, 0, 0), HeldVersion(1), draw_rules(max_tokens=99)) for sample in (first, second)]
    assert [row.trained_tokens for row in rows] == [4, 2]
    assert rows[1].logprobs[10:12].tolist() == [0.0, 0.0]
    assert [span.turn.index for span in second.spans] == [2]


def test_2_12_records_that_come_again_give_nothing(story, folded):
    s = story()
    tell(s, [turn("s:S u:q", "ok")], "a", deltas=True)
    s.end("a", reward=1.0)
    first = s.fold(RULES)
    assert folded(s.arrivals, RULES, first.group).outputs == []


@pytest.mark.parametrize("name", ["4.2 too few", "4.5 none"])
def test_4_2_and_4_5_a_turn_without_its_log_probs_is_refused_and_never_filled_with_zeros(story, name):
    s = story()
    tell(s, [turn("s:S u:q", "call")], "a", deltas=True)
    s.turn("a", 1, "s(S)u(q)a(call)t(4)a(", "done)", base=0, messages=[message("t", "4")],
           response=message("a", "done"), output_logprobs=b"" if "none" in name else b"\0" * 8)  # fmt: skip
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    ((_, _, error),) = folded.refused
    assert type(error).__name__ == "LogprobLengthMismatch"
    assert folded.trees["a"].books.masked == {"refused": 10}


def test_4_4_a_session_that_never_started_gives_nothing(story, folded):
    s = story()
    tell(s, [turn("s:S u:q", "ok")], "a", deltas=True)
    s.end("a", reward=1.0)
    without = [record for record in s.arrivals if type(record[2]).__name__ != "SessionStarted"]
    assert folded(without, RULES).outputs == []


def test_a_long_reply_loses_everything_to_a_short_next_one_and_the_books_say_so(story):
    whole, drift = "x" * 4999, ("x)t", "x]t")
    short = told(story, turn("s:S u:q", whole), turn(f"s:S u:q a:{whole} t:1", "d", *drift))
    assert (short.trees["a"].books.trained, short.trees["a"].books.masked) == (2, {"realigned": 5000})
    long = told(story, turn("s:S u:q", whole), turn(f"s:S u:q a:{whole} t:1", "y" * 1023, *drift))
    assert (long.trees["a"].books.trained, long.trees["a"].books.masked) == (6024, {})
    assert long.trees["a"].duplicated_prefix_tokens == 10 + 4999


def test_a_sample_longer_than_the_limit_is_cut_and_never_of_negative_length(story):
    """slime's max_sample_tokens below the leading prompt makes a response_length of -2."""
    (sample,) = told(story, turn("s:S u:q", "ok")).samples
    row = trim(PlacedSample(sample, 0, 0), HeldVersion(1), draw_rules(max_tokens=4))
    assert (len(row.token_ids), len(row.trained), row.trained_tokens) == (4, 4, 0)
    assert row.masked == {"length_cut": 3}


def test_a_turn_at_another_temperature_forks_because_a_row_has_one(story):
    s = story()
    tell(s, [turn("s:S u:q", "call")], "a", deltas=True)
    s.turn("a", 1, "s(S)u(q)a(call)t(4)a(", "done)", base=0, messages=[message("t", "4")],
           response=message("a", "done"), temperature=0.5)  # fmt: skip
    s.end("a", reward=1.0)
    assert [segment.tokens for segment in s.fold(RULES).trees["a"].segments] == [15, 26]


def test_what_no_agent_saw_is_not_routed(story, drawn):
    s = story()
    tell(s, [turn("s:S u:q", "a1"), turn("s:S u:q", "a2"), turn("s:S u:q a:a1 t:1", "done")], "a", deltas=True)
    s.end("a", reward=1.0, undelivered=(1,))
    assert drawn(s.fold(RULES)) == picture("""
        a0* main 0,2: s(S)u(q)a(<a1)>t(1)a(<done)>
        a 11 = 8 trained + 3 undelivered
    """)


def draw_rules(max_tokens: int) -> DrawRules:
    return DrawRules(
        prompts_per_draw=1, updates_per_draw=1, max_lag=0, max_tokens=max_tokens, weighting=Weighting.token,
        constant_length=1, version_mask="none", min_valid=1,
    )  # fmt: skip
