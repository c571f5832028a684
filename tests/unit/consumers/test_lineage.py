"""What made weights, and what a session has influenced: compared with a plain reading of every record of the log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.consumers.datasets import DatasetError
from turnlog.consumers.datasets.build import build as write_dataset
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.index import BadQuestion, NoIndex
from turnlog.consumers.index.indexer import build
from turnlog.consumers.index.influence import COMPARED, TRAINED, Influence, influence, ranges
from turnlog.consumers.index.lineage import GONE, Lineage, LineageReader, index_beside
from turnlog.consumers.index.lineage_text import lines_of
from turnlog.consumers.index.reader import Index
from turnlog.infra.code_version import code_version
from turnlog.infra.roles.runs import PARENT_FILE
from turnlog.processors.core.books import counting_steps
from turnlog.schemas import topics
from turnlog.schemas.events import (
    Event,
    GroupScored,
    RewardAssigned,
    RunParent,
    SampleBatchFormed,
    SessionStarted,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.settings import RunSettings, Settings


def settings_at(folder: Path, run: str = "run") -> Settings:
    """A run whose index lies in its own folder below `folder`."""
    return dataclasses.replace(SETTINGS, run=RunSettings(id=run, directory=str(folder / run)))


def step(
    batch: SampleBatchFormed, number: int, *, incarnation: int = 0, skipped: bool = False, masked: int = 0
) -> StepCompleted:
    """A step on a batch."""
    lost = {"step_skipped": batch.trained_tokens} if skipped else {"trainer_mask": masked} if masked else {}
    return StepCompleted(
        event_id=f"step-{number}-{incarnation}", run_id=batch.run_id, batch_index=batch.batch_index,
        draw_index=batch.draw_index, incarnation=incarnation, step=number, loss=0.0, grad_norm=0.0, learning_rate=0.0,
        lag_max=0, tokens=0, trained_tokens=batch.trained_tokens, masked=lost, skipped=skipped, reward_mean=0.0,
        logprob_gap_max=0.0, logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


def version(number: int, batch: int, step: int, *, incarnation: int = 0, run: str = "run") -> WeightVersionPublished:
    """Weights after a batch."""
    return WeightVersionPublished(
        event_id=f"version-{number}", run_id=run, version=number, step=step, batch_index=batch, incarnation=incarnation,
        kind="full", base_version=None, files=(), dtype="float32", checksums={}, checkpoint="",
    )  # fmt: skip


async def batches_of(run: TrainedRun) -> list[SampleBatchFormed]:
    """The manifests, in order."""
    return [each for each in await run.read(topics.BATCHES) if isinstance(each, SampleBatchFormed)]


async def made(folder: Path, run: TrainedRun) -> Settings:
    """The run's index, and the settings that find it."""
    own = settings_at(folder, run.settings.run.id)
    await build(run.role("index"), Path(own.run.directory) / "index.sqlite")
    return own


def lineage_of(own: Settings, number: int | None, since: int | None = None) -> Lineage:
    """What made these weights."""
    with LineageReader.open(index_beside(own)) as reader:
        return reader.weights(own.run.id, number, since)


def sessions_of(own: Settings, number: int | None, since: int | None = None) -> dict[str, int]:
    """Session -> trained tokens."""
    with LineageReader.open(index_beside(own)) as reader:
        return {row["session_id"]: row["tokens"] for row in reader.sessions(own.run.id, number, since)}


def influence_of(own: Settings, session: str, *, datasets: tuple[Path, ...] = ()) -> Influence:
    """What this session has influenced."""
    with Index.open(Path(own.run.directory) / "index.sqlite") as index:
        found = influence(index, session, own, datasets=datasets)
    assert found is not None
    return found


async def read_plainly(run: TrainedRun, number: int) -> dict[str, int]:
    """Session -> tokens that weights were trained on: every record of the log, in Python, without the index."""
    published = {each.version: each for each in await run.read(topics.WEIGHTS)
                 if isinstance(each, WeightVersionPublished)}[number]  # fmt: skip
    steps = [each for each in await run.read(topics.STEPS) if isinstance(each, StepCompleted)]
    taken = counting_steps(each for each in steps if each.incarnation <= published.incarnation)
    found = Counter[str]()
    for batch in await batches_of(run):
        done = taken.get(batch.batch_index)
        if batch.batch_index <= published.batch_index and done is not None and not done.skipped:
            for row in batch.samples:
                found[row.session_id] += row.trained_tokens
    return dict(found)


async def restarted(run: TrainedRun) -> None:
    """Steps of two generations: the first publishes version 3 and dies, the second takes step 2 and 3 again, and skips
    the third; then one step more, of which the trainer masks two tokens."""
    batches = await batches_of(run)
    assert len(batches) >= 4
    events: list[Event] = []
    for number, batch in enumerate(batches[:3], 1):
        events += [step(batch, number), version(number, batch.batch_index, number)]
    events.append(version(4, batches[0].batch_index, 1, incarnation=2))
    for number, batch in enumerate(batches[1:4], 2):
        events += [
            step(batch, number, incarnation=2, skipped=number == 3, masked=2 if number == 4 else 0),
            version(number + 3, batch.batch_index, number, incarnation=2),
        ]
    await run.append(events)


async def all_stepped(run: TrainedRun, *, inherited: int = 0) -> None:
    """A step and a version for each batch."""
    events: list[Event] = []
    for number, batch in enumerate(await batches_of(run), 1):
        events += [step(batch, inherited + number), version(number, batch.batch_index, inherited + number)]
    await run.append(events)


@pytest.fixture(params=range(3))
async def unlucky(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TrainedRun, Settings]:
    """A run of unlucky sessions: retries, zombies, late records, groups that were closed without some members."""
    run = TrainedRun()
    await run.bad_days(request.param, groups=24)
    await restarted(run)
    return run, await made(tmp_path, run)


async def test_every_trained_token_belongs_to_one_session_as_a_plain_reading_of_the_log_says(
    unlucky: tuple[TrainedRun, Settings],
) -> None:
    run, own = unlucky
    for number in range(8):
        plain = await read_plainly(run, number)
        found = lineage_of(own, number)
        assert sessions_of(own, number) == plain
        assert (found.total("sessions"), found.total("tokens")) == (len(plain), sum(plain.values()))
        for kind, shares in found.shares.items():
            if kind not in ("code", "engine", "task"):  # of which a session has several, or few are listed
                assert sum(share.tokens for share in shares) == sum(plain.values()), kind
                assert sum(share.sessions for share in shares) == len(plain), kind
        assert sum(link.tokens for link in found.runs[0].chain) == sum(plain.values()) - found.total("masked")
    assert lineage_of(own, None).body() == lineage_of(own, 7).body()


async def test_the_newest_weights_have_the_tokens_of_the_token_accounting(
    unlucky: tuple[TrainedRun, Settings],
) -> None:
    run, own = unlucky
    found = lineage_of(own, 7)
    batches = {batch.batch_index: batch for batch in await batches_of(run)}
    steps = counting_steps(each for each in await run.read(topics.STEPS) if isinstance(each, StepCompleted))
    trained = sum(batches[index].trained_tokens - sum(done.masked.values()) for index, done in steps.items())
    assert found.total("tokens") - found.total("masked") == trained
    assert (found.total("masked"), found.total("skipped"), found.total("steps")) == (2, 1, 4)


async def test_rewards_tasks_and_verifiers_are_those_of_the_records(unlucky: tuple[TrainedRun, Settings]) -> None:
    run, own = unlucky
    plain = await read_plainly(run, 7)
    started: dict[str, SessionStarted] = {}
    rewards: dict[str, float] = {}
    for event in await run.read(topics.SESSIONS):
        if isinstance(event, SessionStarted):
            started.setdefault(event.session_id, event)
        elif isinstance(event, RewardAssigned):
            rewards.setdefault(event.session_id, event.value)
    found = lineage_of(own, 7)
    known = [rewards[name] for name in plain if name in rewards]
    assert found.reward == pytest.approx(sum(known) / len(known))
    tokens = defaultdict[str, int](int)
    for name, count in plain.items():
        tokens[started[name].task_id] += count
    assert found.tasks == len(tokens)
    assert {share.value["task"]: share.tokens for share in found.shares["task"]} == tokens
    assert [share.value for share in found.shares["verifier"]] == [{"verifier": "example/1"}]
    assert [share.value["recipe"] for share in found.shares["source"]] == ["example"]
    codes = {(share.value["role"], share.value["code"]) for share in found.shares["code"]}
    roles = ("gateway", "rewards", "assembler", "batcher", "trainer")
    assert codes >= {(role, code_version()) for role in roles}
    assert ("feeder", None) in codes, "no RolloutRequested is on this log"


async def test_since_a_version_names_what_came_in_after_it(unlucky: tuple[TrainedRun, Settings]) -> None:
    run, own = unlucky
    batches = await batches_of(run)
    last = {row.session_id: row.trained_tokens for row in batches[3].samples}
    both = Counter[str]()
    for batch in (batches[1], batches[3]):
        both.update({row.session_id: row.trained_tokens for row in batch.samples})
    assert sessions_of(own, 7, 6).keys() == last.keys()
    assert sum(sessions_of(own, 7, 4).values()) == sum(both.values()), "the third batch was skipped"
    assert not lineage_of(own, 7, 4).runs[0].notes
    lost = lineage_of(own, 7, 3)
    assert sum(sessions_of(own, 7, 3).values()) == sum(both.values()), "batches that were trained again count as new"
    assert "2 of its steps were lost" in lost.runs[0].notes[0]
    assert [link.version for link in lost.runs[0].chain] == [4, 5, 6, 7]
    assert not sessions_of(own, 4, 1)
    with pytest.raises(BadQuestion, match="before 4"):
        lineage_of(own, 4, 4)


async def test_the_chain_leaves_out_versions_whose_steps_were_taken_again(
    unlucky: tuple[TrainedRun, Settings],
) -> None:
    _, own = unlucky
    (part,) = lineage_of(own, 7).runs
    assert [(link.version, link.incarnation, link.steps, link.skipped) for link in part.chain] == [
        (0, 0, 0, 0), (1, 0, 1, 0), (4, 2, 0, 0), (5, 2, 1, 0), (6, 2, 1, 1), (7, 2, 1, 0),
    ]  # fmt: skip
    assert [link.version for link in lineage_of(own, 3).runs[0].chain] == [0, 1, 2, 3]


async def test_a_session_names_every_version_that_contains_it(unlucky: tuple[TrainedRun, Settings]) -> None:
    run, own = unlucky
    contained = {number: (await read_plainly(run, number)).keys() for number in range(8)}
    scores = [each for each in await run.read(topics.SAMPLES) if isinstance(each, GroupScored)]
    valid = {
        member.session_id: {other.session_id for other in score.rollouts if other.advantage is not None}
        for score in scores
        for member in score.rollouts
        if member.advantage is not None
    }
    with Index.open(Path(own.run.directory) / "index.sqlite") as index:
        rows = index.sessions(limit=1000).rows
    for row in rows:
        found = influence_of(own, row.session_id)
        together = valid.get(row.session_id, set()) | {row.session_id}
        versions = {number for number, names in contained.items() if together & names}
        told = set(found.direct) | {each for first, last in found.indirect for each in range(first, last + 1)}
        assert told == versions, row.session_id
        assert found.siblings == len(together) - 1
        own_tokens = {effect.batch: effect.tokens for effect in found.effects if effect.how == TRAINED}
        if row.fate == "trained":
            assert own_tokens
            assert sum(own_tokens.values()) == row.trained_tokens
        assert all(effect.tokens == 0 for effect in found.effects if effect.how == COMPARED)
        later = [each for each in rows if each.version_max is not None and each.version_max in versions]
        assert found.later_sessions == len([each for each in later if each.session_id != row.session_id])
    assert any(each.fate == "not_member" for each in rows), "a retry, or a session of nobody"


async def test_a_member_without_trained_tokens_still_counts_in_the_baseline(tmp_path: Path) -> None:
    run = TrainedRun()
    await run.good_days(groups=4)
    await all_stepped(run)
    own = await made(tmp_path, run)
    assert lineage_of(own, 1).total("compared") == 0
    (batch, *_) = await batches_of(run)
    lone = batch.samples[0].session_id
    with Index.open(Path(own.run.directory) / "index.sqlite") as index:
        view = index.session(lone)
    assert view is not None
    shown = influence_of(own, lone)
    assert (shown.siblings, shown.direct, shown.indirect) == (1, [1], [(2, 2)])
    assert [(sample.disposition, sample.batch) for sample in shown.samples] == [("trained", 0)]


class ForkedRun(TrainedRun):
    """A run whose records all name it."""

    async def append(self, events: Iterable[Event]) -> None:
        """As its writers do."""
        await super().append(dataclasses.replace(event, run_id=self.settings.run.id) for event in events)


def name_parent(own: Settings, parent: RunParent) -> None:
    """What `turnlog run fork` leaves in the folder of the new run."""
    Path(own.run.directory).mkdir()
    (Path(own.run.directory) / PARENT_FILE).write_text(json.dumps(dataclasses.asdict(parent)))


def damage_parent(folder: Path) -> None:
    """The folder of a run whose parent cannot be read."""
    folder.mkdir()
    (folder / PARENT_FILE).write_text("{")


async def forked(folder: Path, name: str, of: str, steps: int, *, first: int) -> Settings:
    """A run of four groups, from group `first` on, that began from a checkpoint of another."""
    own = settings_at(folder, name)
    name_parent(own, RunParent(
        run_id=of, checkpoint=f"step-{steps:08}-i0", step=steps, draws=steps, dataset="", places=0, left=(),
    ))  # fmt: skip
    run = ForkedRun(own)
    await run.configure()
    await run.good_groups(groups=4, first=first)
    await run.fold()
    await run.draw()
    await all_stepped(run, inherited=steps)
    await build(run.role("index"), Path(own.run.directory) / "index.sqlite")
    return own


async def test_a_fork_goes_on_into_the_runs_before_it(tmp_path: Path) -> None:
    parent = TrainedRun()
    await parent.good_days(groups=8)
    await all_stepped(parent)
    grown = await made(tmp_path, parent)
    child = await forked(tmp_path, "child", "run", 2, first=100)
    grandchild = await forked(tmp_path, "grandchild", "child", 3, first=200)
    found = lineage_of(grandchild, 2)
    assert [(part.run, part.steps, part.sessions) for part in found.runs] == [
        ("grandchild", 2, 8), ("child", 1, 4), ("run", 2, 8),
    ]  # fmt: skip
    assert [part.started_from for part in found.runs[:2]] == ["child/step-00000003-i0", "run/step-00000002-i0"]
    assert sessions_of(grandchild, 2).keys() == (
        sessions_of(grandchild, 2, 0).keys() | sessions_of(child, 1).keys() | sessions_of(grown, 2).keys()
    )
    assert found.total("tokens") == sum(sessions_of(grandchild, 2).values())
    assert [part.run for part in lineage_of(grandchild, 2, 0).runs] == ["grandchild"]
    shutil.rmtree(tmp_path / "child")
    left = lineage_of(grandchild, 2)
    assert [(part.run, part.sessions) for part in left.runs] == [("grandchild", 8), ("child", 0)]
    assert "3 steps up to checkpoint step-00000003-i0" in left.runs[1].missing
    assert "is not known here" in "\n".join(lines_of(left))


async def test_a_session_names_the_forks_that_began_from_its_weights(tmp_path: Path) -> None:
    parent = TrainedRun()
    await parent.good_days(groups=8)
    await all_stepped(parent)
    own = await made(tmp_path, parent)
    await forked(tmp_path, "child", "run", 2, first=100)
    await forked(tmp_path, "grandchild", "child", 3, first=200)
    await asyncio.to_thread(damage_parent, tmp_path / "broken")
    early, late = (batch.samples[0].session_id for batch in (await batches_of(parent))[1:3])
    assert [(fork.run, fork.parent) for fork in influence_of(own, early).forks] == [
        ("child", "run"), ("grandchild", "child"),
    ]  # fmt: skip
    assert influence_of(own, late).forks == []
    assert "broken" in influence_of(own, late).notes[0]


async def test_a_dataset_names_the_sessions_of_its_rows_and_a_session_its_datasets(tmp_path: Path) -> None:
    run = TrainedRun()
    await run.good_days(groups=4)
    await all_stepped(run)
    own = await made(tmp_path, run)
    whole, first = tmp_path / "sets" / "all", tmp_path / "sets" / "early"
    await write_dataset(run.role("dataset"), Query(max_step=0), first, view="rl", format="parquet")
    await write_dataset(run.role("dataset"), Query(), whole, view="rl", format="arrow")
    with LineageReader.open(index_beside(own)) as reader:
        found = reader.dataset(first)
        rows = list(reader.dataset_sessions(first))
    assert {row["session_id"]: row["tokens"] for row in rows} == sessions_of(own, 1)
    assert (found.total("sessions"), found.total("tokens")) == (len(rows), sum(row["tokens"] for row in rows))
    assert found.shares["verifier"] == lineage_of(own, 1).shares["verifier"]
    assert "trainer" not in {share.value.get("role") for share in found.shares["code"]}
    early, late = (batch.samples[0].session_id for batch in (await batches_of(run))[:2])
    sets = (tmp_path / "sets",)
    assert influence_of(own, early, datasets=sets).datasets == [str(whole), str(first)]
    assert influence_of(own, late, datasets=sets).datasets == [str(whole)]
    shutil.rmtree(own.run.directory)
    with LineageReader.open(index_beside(own)) as reader:
        gone = reader.dataset(first)
    assert gone.total("sessions") == found.total("sessions")
    assert [share.value for share in gone.shares["verifier"]] == [{"verifier": GONE}]
    assert "is not there" in gone.runs[0].missing


@pytest.mark.parametrize("damage", ["no manifest", "not JSON", "a row less", "no file"])
async def test_a_damaged_dataset_is_refused(tmp_path: Path, damage: str) -> None:
    run = TrainedRun()
    await run.good_days(groups=2)
    own = settings_at(tmp_path)
    await write_dataset(run.role("dataset"), Query(), tmp_path / "set", view="rl", format="parquet")
    manifest = tmp_path / "set" / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "not JSON":
        manifest.write_text("{")
    elif damage == "a row less":
        body = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(body | {"rows": body["rows"] + 1}))
    else:
        for file in (tmp_path / "set" / "data").iterdir():
            file.unlink()
    with LineageReader.open(index_beside(own)) as reader, pytest.raises(DatasetError):
        reader.dataset(tmp_path / "set")


async def test_a_session_without_its_start_is_counted_as_gone(tmp_path: Path) -> None:
    run = TrainedRun()
    await run.good_days(groups=4)
    await all_stepped(run)
    own = await made(tmp_path, run)
    whole = lineage_of(own, 2)
    lost = next(iter(sessions_of(own, 2)))
    with contextlib.closing(sqlite3.connect(Path(own.run.directory) / "index.sqlite")) as sql:
        sql.execute("DELETE FROM sessions WHERE session_id = ?", (lost,))
        sql.commit()
    found = lineage_of(own, 2)
    assert (found.total("sessions"), found.total("tokens")) == (whole.total("sessions"), whole.total("tokens"))
    for kind in ("source", "verifier", "environment", "agent"):
        assert [share.sessions for share in found.shares[kind] if share.value == {kind: GONE}] == [1]
    assert [share.sessions for share in found.shares["task"] if share.value == {"task": GONE}] == [1]


def test_ranges_of_versions_are_joined() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == [(1, 3), (5, 5), (7, 8)]
    assert ranges(()) == []


async def test_what_is_asked_for_and_not_there_is_named(tmp_path: Path) -> None:
    own = settings_at(tmp_path)
    with pytest.raises(NoIndex, match="index build"):
        lineage_of(own, 1)
    run = TrainedRun()
    await run.good_days(groups=2)
    own = await made(tmp_path, run)
    with pytest.raises(BadQuestion, match="versions 0 to 0"):
        lineage_of(own, 9)
    found = lineage_of(own, 0)
    assert (found.total("sessions"), found.reward, found.tasks) == (0, None, 0)
    with Index.open(Path(own.run.directory) / "index.sqlite") as index:
        assert influence(index, "nobody", own) is None
