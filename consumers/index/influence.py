"""Everything that a session has influenced: batches, steps, weight versions, datasets, forks, and later sessions.

A session influences weights in two ways. Its own tokens are trained, or its reward moves the baseline that an estimator
subtracts from the rewards of its group, and so the advantages of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from turnlog.consumers.datasets import DatasetError
from turnlog.consumers.datasets.build import session_rows
from turnlog.consumers.datasets.manifest import NAME, read_manifest
from turnlog.consumers.index import BadQuestion
from turnlog.consumers.index.lineage import ALONE, CHECKPOINT, GENERATIONS, is_on_chain
from turnlog.consumers.index.reader import AsOf, Index, Row, SessionView
from turnlog.infra.roles.runs import PARENT_FILE, parent_of
from turnlog.schemas.events import RunParent
from turnlog.settings import Settings

TRAINED: Final = "trained"
"""Tokens of the session are in the batch."""
COMPARED: Final = "compared"
"""The session's reward is part of the advantages of other sessions of its group, whose tokens are in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A training row of the session, and what became of it."""

    sample_id: str
    disposition: str
    """trained | step_skipped | unused (drawn, not stepped on) | waiting | the reason why no batch trains it."""
    tokens: int
    """Tokens of the row that the batch trains, or that would have trained."""
    batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A step on a batch that the session influenced. A generation that takes a step again adds another effect."""

    batch: int
    step: int
    incarnation: int
    how: str
    """TRAINED or COMPARED."""
    tokens: int
    """Tokens of the session itself."""
    skipped: bool
    """True if the step changed nothing, because the gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A run that began from weights that the session influenced."""

    run: str
    parent: str
    checkpoint: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """Everything that a session has influenced, as far as the index has read."""

    run: str
    session: str
    group: str
    disposition: str
    """Column `fate` of the index."""
    reward: float | None
    samples: Sequence[Sample]
    effects: Sequence[Effect]
    siblings: int
    """Other sessions of the group whose advantages its reward shifted."""
    direct: Sequence[int]
    """Weight versions that are the first with such a step."""
    indirect: Sequence[tuple[int, int]]
    """Later versions made from those, as ranges of first and last version."""
    later_sessions: int
    """Other sessions with a token that was sampled from these versions."""
    datasets: Sequence[str]
    """Folders of the datasets that contain the session."""
    searched: Sequence[str]
    """Folders in which datasets were searched for."""
    forks: Sequence[Fork]
    notes: Sequence[str]
    as_of: AsOf

    def body(self) -> dict[str, Any]:
        """Return the influence as a JSON object (docs/lineage.md)."""
        unread = dataclasses.replace(self, as_of=AsOf("", 0, {}))  # whose keys are no JSON
        return dataclasses.asdict(unread) | {"as_of": self.as_of.body()}


def influence(index: Index, session_id: str, settings: Settings, *, datasets: Sequence[Path] = ()) -> Influence | None:
    """Return what a session has influenced, or None if the index does not contain it. Datasets are searched for in the
    folders `datasets` and their subfolders, and forks in the folders beside the run's own. Raises IndexFailure."""
    with index.snapshot() as as_of:
        view = index.session(session_id)
        if view is None:
            return None
        siblings = _compared_sessions(view)
        effects = list(_effects(index, view, siblings))
        reached = list(_versions(index, effects))
        numbers = [row["version"] for row, _ in reached]
        later = _later_sessions(index, session_id, numbers)
    notes = list[str]()
    forks = list(_forks(settings, effects, notes))
    return Influence(
        run=as_of.run_id, session=session_id, group=view.row.group_id, disposition=view.row.fate,
        reward=view.row.reward, samples=list(_samples(view)), effects=effects, siblings=len(siblings),
        direct=[row["version"] for row, direct in reached if direct],
        indirect=ranges(row["version"] for row, direct in reached if not direct), later_sessions=later,
        datasets=list(_datasets(as_of.run_id, session_id, datasets, notes)), searched=[str(each) for each in datasets],
        forks=forks, notes=notes, as_of=as_of,
    )  # fmt: skip


def _samples(view: SessionView) -> Iterator[Sample]:
    """Yield the samples of the session in order of their segments."""
    rows = {row["sample_id"]: row for row in view.batch_rows}
    drops = {row["sample_id"]: row for row in view.drops}
    for sample in view.samples:
        name = sample["sample_id"]
        if (row := rows.get(name)) is not None:
            became = "unused" if row["step"] is None else "step_skipped" if row["step_skipped"] else TRAINED
            yield Sample(sample_id=name, disposition=became, tokens=row["trained_tokens"], batch=row["batch_index"])
        elif (drop := drops.get(name)) is not None:
            tokens, batch = drop["sampled_tokens"], drop["batch_index"]
            yield Sample(sample_id=name, disposition=drop["reason"], tokens=tokens, batch=batch)
        else:
            yield Sample(sample_id=name, disposition="waiting", tokens=sample["trained"], batch=None)


def _compared_sessions(view: SessionView) -> list[str]:
    """Return the sessions of the group whose advantages the reward of this one shifted: none if the session is not
    valid, the group does not train, or the estimator takes each reward by itself."""
    score = view.score
    if score is None or view.row.advantage is None or score["estimator"] in ALONE:
        return []
    members = msgspec.json.decode(score["rollouts"])
    valid = [each["session_id"] for each in members if each["advantage"] is not None]
    return [name for name in valid if name != view.row.session_id]


def _effects(index: Index, view: SessionView, siblings: Sequence[str]) -> Iterator[Effect]:
    """Yield an effect for each step on a batch with tokens of the session, or of sessions that it is compared with."""
    own = dict[int, int]()
    for row in view.batch_rows:
        own[row["batch_index"]] = own.get(row["batch_index"], 0) + row["trained_tokens"]
    others = index.rows(
        "SELECT DISTINCT batch_index FROM batch_rows WHERE session_id IN (SELECT value FROM json_each(?))",
        msgspec.json.encode(siblings).decode(),
    )
    batches = sorted(own.keys() | {row["batch_index"] for row in others})
    steps = index.rows(
        "SELECT batch_index, incarnation, step, skipped, place FROM steps_records "
        "WHERE batch_index IN (SELECT value FROM json_each(?)) ORDER BY batch_index, incarnation, place",
        msgspec.json.encode(batches).decode(),
    )
    latest = {(row["batch_index"], row["incarnation"]): row for row in steps}
    for (batch, incarnation), row in latest.items():
        yield Effect(
            batch=batch, step=row["step"], incarnation=incarnation, how=TRAINED if batch in own else COMPARED,
            tokens=own.get(batch, 0), skipped=bool(row["skipped"]),
        )  # fmt: skip


def _of_generation(effects: Iterable[Effect], incarnation: int) -> dict[int, Effect]:
    """Return the effect on each batch that counts for weights of a generation: that of the latest one up to it."""
    found = dict[int, Effect]()
    for effect in sorted(effects, key=lambda each: each.incarnation):
        if effect.incarnation <= incarnation:
            found[effect.batch] = effect
    return found


def _versions(index: Index, effects: Sequence[Effect]) -> Iterator[tuple[Row, bool]]:
    """Yield each version that contains an effect, in order, and whether it is the first of its chain to do so."""
    if not effects:
        return
    generations = [(row["incarnation"], row["first"]) for row in index.rows(GENERATIONS.format(log=""), 2**62)]
    first = dict[int, list[Row]]()
    since = min(effect.batch for effect in effects)
    for row in index.rows(
        "SELECT version, batch_index, incarnation FROM versions WHERE batch_index >= ? ORDER BY version", since
    ):
        own = [each for each in generations if each[0] <= row["incarnation"]]
        contained = [
            batch
            for batch, effect in _of_generation(effects, row["incarnation"]).items()
            if batch <= row["batch_index"] and not effect.skipped
        ]
        new = [batch for batch in contained if not any(is_on_chain(known, own) for known in first.get(batch, ()))]
        for batch in new:
            first.setdefault(batch, []).append(row)
        if contained:
            yield row, bool(new)


def _later_sessions(index: Index, session_id: str, versions: Sequence[int]) -> int:
    """Count the other sessions with a token from one of these versions."""
    if not versions:
        return 0
    values = msgspec.json.encode(versions).decode()
    found = index.row(LATER, values, versions[0], session_id)
    assert found is not None
    return int(found["sessions"])


LATER: Final = """WITH reached AS MATERIALIZED (SELECT value AS version FROM json_each(?1))
    SELECT count(*) AS sessions FROM sessions s WHERE s.version_max >= ?2 AND s.session_id <> ?3 AND (
        s.version_max IN (SELECT version FROM reached) OR s.version_min IN (SELECT version FROM reached)
        OR EXISTS (SELECT 1 FROM snapshots_records t, json_each(t.version_spans) v WHERE t.session_id = s.session_id
            AND t.counts AND json_extract(v.value, '$[0]') IN (SELECT version FROM reached)))"""
"""SQL. The first and last version decide most sessions. Only if neither is among those asked for are their spans
read, which happens around a restart of the trainer."""


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Join consecutive ascending numbers to (first, last)."""
    found = list[tuple[int, int]]()
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def _forks(settings: Settings, effects: Sequence[Effect], notes: list[str]) -> Iterator[Fork]:
    """Yield the forks of this run from a checkpoint that contains an effect, and all forks of these."""
    own, found = settings.run.id, list[tuple[str, RunParent]]()
    for path in sorted(Path(settings.run.directory).parent.glob(f"*/{PARENT_FILE}")):
        run = dataclasses.replace(settings.run, directory=str(path.parent))
        try:
            parent = parent_of(dataclasses.replace(settings, run=run))
        except (msgspec.MsgspecError, OSError) as error:
            notes.append(f"{path} cannot be read, so its run may be a fork that is not listed: {error}")
            continue
        if parent is not None:
            found.append((path.parent.name, parent))
    reached = {own}
    changed = True
    while changed:
        changed = False
        for name, parent in found:
            inherits = parent.run_id in reached and (parent.run_id != own or _contains(parent, effects))
            if name not in reached and inherits:
                reached.add(name)
                changed = True
                yield Fork(run=name, parent=parent.run_id, checkpoint=parent.checkpoint, step=parent.step)


def _contains(parent: RunParent, effects: Sequence[Effect]) -> bool:
    """Return whether the checkpoint of a fork contains an effect."""
    written = CHECKPOINT.fullmatch(parent.checkpoint)
    counted = _of_generation(effects, int(written[2]) if written else 2**62).values()
    return any(effect.step <= parent.step and not effect.skipped for effect in counted)


def _datasets(run: str, session_id: str, folders: Sequence[Path], notes: list[str]) -> Iterator[str]:
    """Yield the folders of datasets that contain the session."""
    for folder in folders:
        if not folder.is_dir():
            raise BadQuestion(f"--in {folder}: there is no such folder")
        for path in sorted(folder.rglob(NAME)):
            dataset = path.parent
            try:
                manifest = read_manifest(dataset)
                rows = session_rows(dataset, manifest) if run in manifest.provenance.runs else iter(())
                if any((run, session_id) == each[:2] for row in rows for each in row):
                    yield str(dataset)
            except DatasetError as error:
                notes.append(f"a dataset was not searched: {error}")
