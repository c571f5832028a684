"""Books on every level: they agree with the fold on bad days, and a record that lies is found and named."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.each import each
from tests.fakes.sessions import bad_days
from turnlog.processors.core.audit import Books, Ledgers
from turnlog.processors.core.audit import follow_manifests as drawn_accounts
from turnlog.processors.core.batches.draws import DrawRules, FormedDraw, PlacedSample, ReadableGroup, form_draw
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.group import fold_history
from turnlog.processors.core.fold_versions import LATEST
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.schemas.events import (
    BatchSkipped,
    DeadLetter,
    Event,
    GroupScored,
    GroupStatus,
    SampleBatchFormed,
    SegmentSample,
    StepCompleted,
    TokenSnapshot,
    TurnTreeAssembled,
    Weighting,
)
from turnlog.schemas.topics import DEAD_LETTERS, TOPIC_OF
from turnlog.schemas.types import BlobRef, TurnId

CUT = 40
"""[batcher] max_tokens: some samples lose their tail."""
FOLD = FoldRules(run_id="run", settings_sha256="", min_valid=1)
DRAW = DrawRules(
    prompts_per_draw=2, updates_per_draw=2, max_lag=9, max_tokens=CUT, weighting=Weighting.token, constant_length=1,
    version_mask="none", min_valid=1,
)  # fmt: skip


@dataclass
class Told:
    """A run's records by topic, in the order in which `Ledgers` wants them."""

    events: list[Event]
    parked: list[DeadLetter] = field(default_factory=list)
    cut: int = CUT

    def books(self) -> Books:
        return self.ledgers().close()

    def ledgers(self) -> Ledgers:
        ledgers = Ledgers("run", self.cut, LATEST)
        for letter in self.parked:
            ledgers.add(DEAD_LETTERS.name, 0, 0, letter)
        ends: Counter[str] = Counter()
        for event in self.events:
            topic = TOPIC_OF[type(event).__name__].name
            ledgers.add(topic, 0, ends[topic], event)
            ends[topic] += 1
        return ledgers

    def change(self, kind: type, change: Callable[[Event], list[Event]], nth: int = 0) -> Told:
        """The same history, where the nth record of a kind is another."""
        place = [index for index, event in enumerate(self.events) if isinstance(event, kind)][nth]
        return Told([*self.events[:place], *change(self.events[place]), *self.events[place + 1 :]], self.parked)


def told(seed: int, groups: int = 8, cut: int = CUT) -> Told:
    """Bad days, folded, drawn, trained; the last draw is not trained, the last groups are not drawn."""
    events = list(bad_days(random.Random(seed), groups=groups))
    ends: Counter[str] = Counter()
    records = []
    for event in events:
        topic = TOPIC_OF[type(event).__name__].name
        records.append((topic, 0, ends[topic], event))
        ends[topic] += 1
    history = fold_history(records, FOLD)
    parked = [letter(topic, offset, error) for topic, _, offset, error in history.refused]
    return Told([*events, *history.outputs, *drawn(history.outputs, cut)], parked, cut)


def letter(topic: str, offset: int, error: FoldError) -> DeadLetter:
    return DeadLetter(
        event_id="", run_id="run", topic=topic, partition=0, offset=offset, key=b"", value=b"", role="assembler",
        cause=type(error).__name__, message="",
    )  # fmt: skip


def drawn(outputs: list[Event], cut: int) -> list[Event]:
    """Manifests of two trained groups each, and steps of all draws but the last; one step is skipped."""
    samples: dict[str, list[PlacedSample]] = {}
    ready: list[ReadableGroup] = []
    for event in outputs:
        if isinstance(event, SegmentSample):
            samples.setdefault(event.group_id, []).append(PlacedSample(event, 0, 0))
        elif isinstance(event, GroupScored) and event.status is GroupStatus.trained:
            ready.append(ReadableGroup(event, tuple(samples.get(event.group_id, ()))))
    made: list[Event] = []
    rules = dataclasses.replace(DRAW, max_tokens=cut)
    for index in range(len(ready) // 2):
        taken = ready[2 * index : 2 * index + 2]
        first = sum(isinstance(event, SampleBatchFormed | BatchSkipped) for event in made)
        made += manifests(
            form_draw(taken, HeldVersion(0), rules), [group.score.group_id for group in taken], index, first
        )
    batches = [event for event in made if isinstance(event, SampleBatchFormed)]
    return [*made, *(step(batch, skips=batch.batch_index == 1) for batch in batches[:-1])]


def manifests(draw: FormedDraw, groups: list[str], index: int, first: int) -> list[Event]:
    if not draw.batches:
        return [
            BatchSkipped(
                event_id="", run_id="run", batch_index=first, draw_index=index, reason="", groups=tuple(groups),
                masked=draw.masked, dropped=draw.dropped, positions=(), settings_sha256="",
            )
        ]  # fmt: skip
    made: list[Event] = []
    for part, batch in enumerate(draw.batches):
        masked = Counter(batch.masked) + Counter({} if part else draw.masked)
        made.append(
            SampleBatchFormed(
                event_id="", run_id="run", batch_index=first + part, draw_index=index, part=part,
                parts=len(draw.batches), file=BlobRef("0", 0), rows_sha256="", samples=batch.samples,
                groups=tuple(groups), weighting=Weighting.token, prompts=1, trajectories=1,
                trained_tokens=batch.weights.trained_tokens, constant_length=0, masked=dict(masked),
                trainer_version=0, max_lag=0, dropped=() if part else draw.dropped, whitening_mean=None,
                whitening_std=None, positions=(), settings_sha256="",
            )
        )  # fmt: skip
    return made


def step(manifest: SampleBatchFormed, *, skips: bool) -> StepCompleted:
    return StepCompleted(
        event_id="", run_id="run", batch_index=manifest.batch_index, draw_index=manifest.draw_index, incarnation=0,
        step=0, loss=0.0, grad_norm=0.0, learning_rate=0.0, lag_max=0, tokens=0,
        trained_tokens=manifest.trained_tokens,
        masked={"step_skipped": manifest.trained_tokens} if skips else {}, skipped=skips, reward_mean=0.0,
        logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


@given(st.integers(0, 100_000))
def test_on_bad_days_every_level_adds_up_to_what_the_fold_said(seed: int) -> None:
    books = told(seed).books()
    assert books.imbalances == ()
    sums = {level: sum(account.sampled for account in books.levels[level].values()) for level in books.levels}
    assert sums["session"] == sums["group"] == sums["run"] > 0
    trained = {level: sum(account.trained for account in books.levels[level].values()) for level in books.levels}
    assert trained["session"] == trained["group"] == trained["batch"] == trained["run"]


def test_every_reason_of_a_hundred_bad_days_has_its_name() -> None:
    books = told(7, groups=100).books()
    run = books.levels["run"]["run"]
    assert books.imbalances == ()
    assert {"late", "not_named", "length_cut", "step_skipped", "unused"} <= set(run.masked)
    assert run.trained > 0


def test_samples_that_were_cut_off_whole_add_up_with_those_that_lost_their_tail() -> None:
    history = told(7, groups=40, cut=3)
    formed = [event for event in history.events if isinstance(event, SampleBatchFormed)]
    assert any(batch.masked and len(batch.dropped) > 1 for batch in formed)
    assert history.books().imbalances == ()


def lost_sample(history: Told) -> Told:
    return history.change(SegmentSample, lambda _: [])


def lost_snapshot(history: Told) -> Told:
    """Of a turn that a tree holds."""
    snapshots = [event for event in history.events if isinstance(event, TokenSnapshot)]
    tree = next(event for event in history.events if isinstance(event, TurnTreeAssembled) and event.nodes)
    about = (tree.session_id, tree.nodes[0].turn)
    nth = next(index for index, event in enumerate(snapshots) if (event.session_id, event.turn) == about)
    return history.change(TokenSnapshot, lambda _: [], nth)


def lost_snapshots(history: Told) -> Told:
    """All of a session that has a tree."""
    tree = next(event for event in history.events if isinstance(event, TurnTreeAssembled) and event.nodes)
    kept = [e for e in history.events if not isinstance(e, TokenSnapshot) or e.session_id != tree.session_id]
    return Told(kept, history.parked)


def lying_tree(history: Told) -> Told:
    def lie(tree: TurnTreeAssembled) -> list[Event]:
        return [dataclasses.replace(tree, books=dataclasses.replace(tree.books, sampled=tree.books.sampled + 1))]

    return history.change(TurnTreeAssembled, lie)


def lying_score(history: Told) -> Told:
    def lie(score: GroupScored) -> list[Event]:
        return [dataclasses.replace(score, books=dataclasses.replace(score.books, trained=score.books.trained + 1))]

    return history.change(GroupScored, lie)


def lying_manifest(history: Told) -> Told:
    return history.change(
        SampleBatchFormed, lambda manifest: [dataclasses.replace(manifest, masked={"version_mask": 3})]
    )


def lost_row(history: Told) -> Told:
    return history.change(
        SampleBatchFormed, lambda manifest: [dataclasses.replace(manifest, samples=manifest.samples[1:])]
    )


def row_again(history: Told) -> Told:
    rows = next(event.samples for event in history.events if isinstance(event, SampleBatchFormed))
    return history.change(
        SampleBatchFormed,
        lambda manifest: [dataclasses.replace(manifest, samples=(*manifest.samples, rows[0]))],
        nth=1,
    )


def lying_step(history: Told) -> Told:
    return history.change(
        StepCompleted, lambda done: [dataclasses.replace(done, trained_tokens=done.trained_tokens - 1)]
    )


@each(
    ("lie", "level", "says"),
    [
        (lost_sample, "session", "its samples hold"),
        (lost_snapshot, "session", "the snapshots hold"),
        (lost_snapshots, "session", "the snapshots hold 0"),
        (lying_tree, "session", "its tree counts"),
        (lying_score, "group", "GroupScored trains"),
        (lying_manifest, "batch", "says that it masks"),
        (lost_row, "batch", "its manifest trains"),
        (lost_row, "session", "no manifest says what became of it"),
        (row_again, "batch", "was in an earlier batch already"),
        (lying_step, "batch", "the step counted"),
    ],
)
def test_a_record_that_disagrees_is_named_with_its_level(lie: Callable[[Told], Told], level: str, says: str) -> None:
    history = told(3)
    before = history.books()
    assert before.balance
    books = lie(history).books()
    assert not books.balance
    named = [entry for entry in books.imbalances if entry.level == level and says in entry.says]
    assert named, books.imbalances
    told_of = {getattr(event, f"{level}_id", "") for event in history.events}
    assert {entry.id for entry in named} <= told_of | before.levels[level].keys()


def test_a_draw_that_lies_is_named_by_its_first_batch() -> None:
    history = told(3)
    formed = [event for event in history.events if isinstance(event, SampleBatchFormed)]
    second = next(nth for nth, batch in enumerate(formed) if batch.part == 1)

    def lie(batch: SampleBatchFormed) -> list[Event]:
        return [dataclasses.replace(batch, masked={"version_mask": 3})]

    found = history.change(SampleBatchFormed, lie, second).books().imbalances
    (draw,) = [entry for entry in found if "says that it masks" in entry.says]
    assert (draw.id, draw.says.split()[1]) == (str(formed[second - 1].batch_index), str(formed[second].draw_index))


def test_a_draw_that_loses_tokens_leaves_the_run_short() -> None:
    def short(manifest: SampleBatchFormed) -> list[Event]:
        return [dataclasses.replace(manifest, trained_tokens=manifest.trained_tokens - 1)]

    total = told(3).change(SampleBatchFormed, short).ledgers().run_books()
    assert not total.balance
    assert total.sampled == total.trained + sum(total.masked.values()) + 1


def test_manifests_are_walked_as_often_for_many_draws_as_for_one() -> None:
    class Walked(list[SampleBatchFormed]):
        walks = 0

        def __iter__(self) -> Iterator[SampleBatchFormed]:
            Walked.walks += 1
            return super().__iter__()

    def walks(draws: int) -> int:
        Walked.walks = 0
        empty = next(event for event in told(3).events if isinstance(event, SampleBatchFormed))
        empty = dataclasses.replace(empty, samples=(), dropped=(), masked={}, groups=(), trained_tokens=0)
        drawn_accounts({}, Walked(dataclasses.replace(empty, draw_index=draw) for draw in range(draws)), {})
        return Walked.walks

    assert walks(100) == walks(1)


def books_of(story: Any) -> Books:
    """Of a story: its records, what they fold to, and the letters of what was refused."""
    folded = story.fold(FOLD)
    ledgers = Ledgers("r", CUT, LATEST)
    for topic, offset, error in folded.refused:
        ledgers.add(DEAD_LETTERS.name, 0, 0, letter(topic, offset, error))
    for topic, offset, event in story.arrivals:
        ledgers.add(topic, 0, offset, event)
    for offset, output in enumerate(folded.outputs):
        ledgers.add(TOPIC_OF[type(output).__name__].name, 0, offset, output)
    return ledgers.close()


def unreadable_turn(s: Any) -> None:
    """Its TurnCompleted is refused: its base is itself."""
    s.turn("a", 0, "sq", "AB", base=0)
    s.end("a", reward=1.0)


def unreadable_empty_turn(s: Any) -> None:
    s.turn("a", 0, "sq", "", base=0)
    s.turn("a", 1, "sqr", "XX")
    s.end("a", reward=1.0, turns=[s.id("a", 0)])


def unreadable_snapshot(s: Any) -> None:
    s.turn("a", 0, "sq", "AB", prompt_sha256="0")
    s.end("a", reward=1.0)


def unknown_epoch(s: Any) -> None:
    s.turn("a", 0, "sq", "AB")
    s.end("a", reward=1.0, turns=[TurnId("nobody's", 0)])


@pytest.mark.parametrize("broken", [unreadable_turn, unreadable_empty_turn, unreadable_snapshot, unknown_epoch])
def test_a_session_that_was_refused_as_a_whole_disagrees_with_nothing(
    story: Any, broken: Callable[[Any], None]
) -> None:
    s = story(size=2)
    broken(s)
    s.turn("b", 0, "sq", "CCC")
    s.end("b", reward=0.0)
    books = books_of(s)
    assert books.imbalances == ()
    assert books.levels["session"]["b"].sampled == 3
    account = books.levels["session"].get("a")
    assert account is None or account.masked.keys() <= {"refused", "late"}


def test_a_turn_that_nobody_named_is_refused_if_its_snapshot_was_parked(story: Any) -> None:
    s = story(size=2)
    s.turn("a", 0, "sq", "AB")
    s.turn("a", 1, "sqABr", "X", base=0, prompt_sha256="0")
    s.end("a", reward=1.0, turns=[s.id("a", 0)])
    s.turn("b", 0, "sq", "CCC")
    s.end("b", reward=0.0)
    books = books_of(s)
    assert books.imbalances == ()
    assert books.levels["session"]["a"].masked == {"refused": 1, "unused": 2}
