"""The laws of the fold, over random histories of one group: interleaving, repeats, refolding, books."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from turnlog.processors.core.fold.group import GroupFold, fold_history, offline
from turnlog.processors.core.fold.trajectories import VALID
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.runtime.watch import GroupWatch, ReaperLimits
from turnlog.schemas.events import (
    Expects,
    GroupClosed,
    GroupStatus,
    Outcome,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
)
from turnlog.schemas.types import TurnId

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, fork_threshold_tokens=2)
BY_POLICY = [replace(RULES, policy=name) for name in ("prefix", "slime", "last-turn")]
every_policy = pytest.mark.parametrize("rules", BY_POLICY, ids=lambda rules: rules.policy)
TOPICS = ("agent.sessions", "agent.turns", "agent.token-snapshots")
PATHS = [
    *[None] * 20, "main", "player/w", "player/b", "player/w/agent/x", "side/player/user", "side/title",
    "side/compaction", "main/compaction", "player/b/compaction",
]  # fmt: skip
OUTCOMES = [*[Outcome.completed] * 4, Outcome.truncated, Outcome.agent_error, Outcome.infra_failure, Outcome.expired]


def seeded(examples):
    """Random histories from a seed: hypothesis chooses seeds, so a failure names the one to run again."""
    return lambda test: settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )(given(st.integers(0, 2**40).map(Random))(test))


def act(rng, s, session, bases):
    """One random thing that happens to a running session."""
    what = rng.choice(["turn", "turn", "turn", "turn", "adopt", "zombie", "bad"])
    if what == "adopt":
        s.adopt(session)
        return
    texts = s.texts.get(session, {})
    epoch = 0 if what == "zombie" else len(s.epochs[session]) - 1
    index = 50 + len(texts) if what == "zombie" else len(texts)
    base = rng.choice([None, *bases[session][-4:]])
    prompt = "sq" if base is None else "".join(texts[base])
    prompt = (prompt[: len(prompt) - rng.choice([0, 0, 0, 1])] + letters(rng, "ab", 2)) or "s"
    place = None if base is None else (s.epochs[session].index(base.epoch), base.index)
    bad = {"prompt_sha256": "0" * 64} if what == "bad" else {}
    said = [{"role": rng.choice(["user", "tool", "assistant"]), "content": letters(rng, "xy", 1)} for _ in range(2)]
    summary = rng.choice(bases[session]) if bases[session] and rng.random() < 0.2 else None
    s.turn(
        session, (epoch, index), prompt, letters(rng, "AB", 3), base=place, aborted=rng.random() < 0.1,
        agent_path=rng.choice(PATHS), tools=rng.random() < 0.7, system=rng.choice(["sys", "sys", "other"]),
        summary=summary and (s.epochs[session].index(summary.epoch), summary.index),
        messages=said[: rng.randint(0, 2)], response={"role": "assistant", "content": letters(rng, "xy", 1)}, **bad,
    )  # fmt: skip
    if what != "zombie" and (not bad or rng.random() < 0.3):
        bases[session].append(TurnId(s.epochs[session][epoch], index))


def letters(rng, alphabet, most):
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(0, most)))


def finish(rng, s, session, bases):
    if rng.random() < 0.3:
        s.finish(session, epoch=0, outcome=Outcome.cancelled, turns=[])  # counts only in epoch 0
    if rng.random() < 0.3:
        s.reward(session, rng.choice([0.0, 1.0, 0.5, float("nan")]))
    players = tuple(rng.sample(["w", "b"], rng.choice([0, 0, 0, 1, 2])))
    expects = Expects(reward=not players or rng.random() < 0.5, players=players)
    outcome = rng.choice(OUTCOMES)
    expects = expects if outcome in VALID else None
    s.finish(session, outcome=outcome, turns=bases[session], final=rng.random() < 0.8, expects=expects)
    s.reward(session, rng.choice([0.0, 1.0, 0.5]))
    for player in sorted(players):
        if rng.random() < 0.1:
            s.fail(session, player)
        s.reward(session, rng.choice([0.0, 1.0, 0.5, 0.25, float("nan")] if rng.random() < 0.1 else [0.0, 1.0]), player)


def history(rng, story, closes=True):
    """A finished or unfinished group with retries, adoptions, zombies, bad records and closes."""
    size = rng.randint(1, 3)
    s = story(size=size, step=rng.randint(1, 3))
    running, made, bases = [], 0, defaultdict(list)
    for _ in range(rng.randint(5, 40)):
        if made < size and (not running or rng.random() < 0.2):
            s.start(f"s{made}", rollout=made)
            running.append((f"s{made}", made, 0))
            made += 1
        elif running and rng.random() < 0.2:
            session, rollout, attempt = running.pop(rng.randrange(len(running)))
            finish(rng, s, session, bases)
            if rng.random() < 0.3:
                retry = f"s{rollout}x{attempt + 1}"
                s.start(retry, rollout=rollout, attempt=attempt + 1)
                running.append((retry, rollout, attempt + 1))
        elif running:
            act(rng, s, rng.choice(running)[0], bases)
        if closes and made and rng.random() < 0.05:
            s.close(*(session for session in s.epochs if rng.random() < 0.7), seen=rng.choice([None, None, 3]))
    if rng.random() < 0.6:
        for session, _, _ in running:
            finish(rng, s, session, bases)
    if closes and made and rng.random() < 0.2:
        s.close(
            *sorted({e.session_id for e in s.topics[TOPICS[0]] if isinstance(e, SessionFinished)}), reason="deadline"
        )
    return s


def interleaved(rng, s):
    """The same topics, read in another order."""
    streams = {topic: [record for record in s.arrivals if record[0] == topic] for topic in TOPICS}
    records = []
    while any(streams.values()):
        topic = rng.choice([topic for topic in TOPICS if streams[topic]])
        count = rng.randint(1, len(streams[topic]))
        records += streams[topic][:count]
        del streams[topic][:count]
    return records


def written_twice(rng, s):
    """Some records stand in their topic once more, later."""
    records = []
    for topic in TOPICS:
        stream = [event for name, _, event in s.arrivals if name == topic]
        for _ in range(rng.randint(0, 3) if stream else 0):
            source = rng.randrange(len(stream))
            stream.insert(rng.randint(source + 1, len(stream)), stream[source])
        records += [(topic, offset, event) for offset, event in enumerate(stream)]
    return records


@every_policy
@seeded(120)
def test_every_interleaving_of_the_topics_gives_the_same_outputs(story, folded, rules, rng):
    s = history(rng, story)
    live = s.fold(rules)
    again = folded(interleaved(rng, s), rules)
    assert live.bodies == again.bodies
    assert [live.group.complete] * 2 == [again.group.complete, live.group.complete]


@every_policy
@seeded(120)
def test_records_that_come_again_at_their_offsets_change_nothing(story, folded, rules, rng):
    s = history(rng, story)
    live, group, outputs, done = s.fold(rules), None, [], 0
    while done < len(s.arrivals):
        upto = rng.randint(done + 1, len(s.arrivals))
        result = folded(s.arrivals[rng.randint(0, done) : upto], rules, group)
        group, done = result.group, upto
        outputs += result.outputs
    assert outputs == live.outputs


@every_policy
@seeded(120)
def test_records_that_are_written_twice_change_nothing(story, folded, rules, rng):
    s = history(rng, story, closes=False)
    assert s.fold(rules).bodies == folded(written_twice(rng, s), rules).bodies


@every_policy
@seeded(120)
def test_a_refold_from_the_low_water_marks_is_the_live_state(story, folded, rules, rng):
    s = history(rng, story)
    records = interleaved(rng, s)
    upto = rng.randint(1, len(records))
    live = folded(records[:upto], rules).group
    again = GroupFold("g", 5, rules)
    for topic in rng.sample(TOPICS, 3):
        folded([r for r in records[:upto] if r[0] == topic and r[1] >= live.first.get(topic, 0)], rules, again)
    if not live.complete:
        assert again.key() == live.key()
    assert (again.complete, again.trees()) == (live.complete, live.trees())


@every_policy
@seeded(120)
def test_every_output_token_is_in_the_books_once(story, rules, rng):
    s = history(rng, story)
    result = s.fold(rules)
    for tree in result.trees.values():
        assert tree.books.sampled == tree.books.trained + sum(tree.books.masked.values())
    if not result.group.complete:
        return
    books, score = result.score.books, result.score
    assert books.sampled == books.trained + sum(books.masked.values())
    spans = [(x.session_id, span) for x in result.samples for span in x.spans if span.trained]
    assert books.trained == sum(span.length for _, span in spans)
    assert len({(session, span.turn, span.start) for session, span in spans}) == len(spans)
    assert score.status is not GroupStatus.discarded or set(books.masked) <= {"discarded_group"}
    sampled = {}
    for _, offset, event in s.arrivals:
        if isinstance(event, TokenSnapshot):
            sampled.setdefault((event.session_id, event.turn), (offset, len(event.output_ids) // 4))
    named = {
        (e.session_id, turn)
        for _, _, e in s.arrivals
        if isinstance(e, SessionFinished) and e.session_id in result.trees
        for turn in e.turns
        if result.trees[e.session_id].outcome is e.outcome
    }
    end = max((sampled[turn][0] for turn in named), default=-1)
    assert books.sampled == sum(count for offset, count in sampled.values() if offset <= end)


def bad_day(rng, s):
    """(topic, event) of a story some of whose records are lost, written twice, or contradicted."""
    log = []
    for topic, _, event in s.arrivals:
        if topic != TOPICS[0] and rng.random() < 0.05:
            continue
        log += [(topic, event)] * (1 + (rng.random() < 0.1))
        if isinstance(event, SessionStarted | SessionAdopted) and rng.random() < 0.3:
            other = replace(event, event_id=event.event_id + "!")
            wrong = isinstance(event, SessionStarted) and replace(other, task_id="other")
            log.insert(rng.randint(0, len(log)), (topic, rng.choice([event, other, wrong or other])))
        if isinstance(event, SessionFinished) and rng.random() < 0.1:
            log.insert(-1, (topic, replace(event, turns=(*event.turns, TurnId("never opened", 0)))))
    return log


def reaped(rng, log, folded, rules):
    """The records of a log with what a reaper writes that has read it up to some point."""
    watch, ends, group, records = GroupWatch(), Counter(), None, []

    def write(topic, event):
        nonlocal group
        records.append((topic, ends[topic], event))
        ends[topic] += 1
        result = folded(records[-1:], rules, group)
        group = result.group
        watch.saw(event, 0.0, refused=bool(result.refused))

    late = rng.randint(0, len(log))
    for topic, event in log[:late]:
        write(topic, event)
    due = watch.overdue(2.0, caught_up_at=0.0, limits=ReaperLimits(silence_s=9.0, deadline_s=1.0), seen=ends[TOPICS[0]])
    for close in [event for event in due if isinstance(event, GroupClosed)]:
        write(TOPICS[0], close)
    for topic, event in log[late:]:
        write(topic, event)
    return records


@every_policy
@seeded(60)
def test_the_reapers_close_gives_the_same_outputs_in_every_interleaving(story, folded, rules, rng):
    """It names every session whose turns are all on the log, so no tree of another one can come, early or late."""
    records = reaped(rng, bad_day(rng, history(rng, story, closes=False)), folded, rules)
    live = folded(records, rules)
    streams = [[record for record in records if record[0] == topic] for topic in TOPICS]
    for order in itertools.permutations(streams):
        again = folded([record for stream in order for record in stream], rules)
        assert again.bodies == live.bodies
        assert again.group is None or again.group.complete == live.group.complete


@seeded(120)
def test_a_failed_session_changes_no_baseline_no_advantage_and_no_sample_of_its_siblings(story, rng):
    def group(with_failure):
        s, inner = story(size=3 if with_failure else 2), Random(seed)
        for rollout in (0, 1):
            s.start(f"s{rollout}", rollout=rollout)
            bases = defaultdict(list)
            for _ in range(inner.randint(1, 5)):
                act(inner, s, f"s{rollout}", bases)
            s.end(f"s{rollout}", reward=inner.choice([0.0, 1.0]), turns=bases[f"s{rollout}"])
        if with_failure:
            s.start("failed", rollout=2)
            s.turn("failed", 0, "sq", "A")
            s.reward("failed", 9.0)
            s.finish("failed", outcome=failure)
        return s.fold(RULES)

    seed, failure = rng.random(), rng.choice([Outcome.infra_failure, Outcome.expired, Outcome.cancelled])
    clean, failed = group(with_failure=False), group(with_failure=True)
    assert clean.samples == failed.samples
    assert clean.score.rollouts == failed.score.rollouts[:2]
    assert (clean.score.baseline, clean.score.std) == (failed.score.baseline, failed.score.std)


@seeded(100)
def test_an_advantage_does_not_depend_on_how_trajectories_are_cut(story, rng):
    def group(rewards):
        s = story(size=len(rewards))
        for rollout, reward in enumerate(rewards):
            for index in range(rng.randint(1, 4)):
                s.turn(f"s{rollout}", index, "abcdef"[index], "X")
            s.end(f"s{rollout}", reward=reward)
        return s.fold(RULES)

    rewards = [rng.choice([0.0, 0.25, 1.0]) for _ in range(rng.randint(2, 4))]
    some, other = group(rewards), group(rewards)
    assert some.score.rollouts == other.score.rollouts
    for result in (some, other):
        by_session = {rollout.session_id: rollout.advantage for rollout in result.score.rollouts}
        assert all(sample.advantage == by_session[sample.session_id] for sample in result.samples)


@seeded(50)
def test_offline_folds_what_the_stream_folded(story, rng):
    s = history(rng, story)
    live = s.fold(RULES)
    records = [(topic, 0, offset, event) for topic, offset, event in interleaved(rng, s)]
    assert {out.event_id: out for out in offline(records, RULES)} == live.bodies
    assert (fold_history(records, RULES).open == {}) == live.group.complete


def test_one_rollout_in_three_segments_and_one_in_one_share_the_baseline(story):
    s = story(size=2)
    for index, prompt in enumerate(("p", "q", "r")):
        s.turn("a", index, prompt, "X")
    s.turn("b", 0, "p", "Y")
    s.end("a", reward=1.0)
    s.end("b", reward=0.0)
    folded = s.fold(FoldRules(run_id="r", settings_sha256="s" * 64, estimator="dr_grpo"))
    assert [sample.advantage for sample in folded.samples] == [0.5, 0.5, 0.5, -0.5]
    assert (folded.score.baseline, folded.score.std, folded.score.status) == (0.5, None, GroupStatus.trained)


def test_groups_do_not_see_each_other(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=1.0)
    rules = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
    mine = [(topic, 0, offset, event) for topic, offset, event in s.arrivals]
    theirs = [(topic, 0, offset + 1, replace(event, group_id="h")) for topic, offset, event in s.arrivals]
    mixed = [record for pair in zip(mine, theirs, strict=True) for record in pair]
    assert [out for out in offline(mixed, rules) if out.group_id == "g"] == offline(mine, rules)
