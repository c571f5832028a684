"""Comparison of a run with another run, or with a refold of its own records: curves, settings, and samples that differ.

Samples with equal ids are the same data: those of a refold (`turnlog replay --out`), or of another index of the same
records. The samples of another run have other ids; its curves and settings can still be compared.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as arrow

from turnlog.consumers.datasets import NotADataset
from turnlog.consumers.datasets.manifest import NAME as MANIFEST
from turnlog.consumers.datasets.manifest import read_manifest
from turnlog.consumers.index import NoIndex
from turnlog.consumers.index.reader import Index, Row
from turnlog.consumers.index.rows import mask_of

FILE = "index.sqlite"
VIEW = "rl"
COLUMNS = ("sample_id", "advantage", "reward", "trained", "mask")
CHUNK = 500
"""Number of samples that are looked up in one query."""
MOST = 100
"""Maximum number of samples to list, those that differ most first."""
CONFIGURED = "SELECT settings, fold_version FROM runs WHERE kind = 'RunConfigured' ORDER BY place LIMIT 1"
SOUGHT = f"""SELECT {", ".join(COLUMNS)}, session_id, segment_index, (SELECT min(b.batch_index) FROM batch_rows b
    WHERE b.sample_id = s.sample_id) AS batch_index FROM samples s WHERE sample_id IN ({{}})"""


@dataclass(frozen=True, slots=True)
class Other:
    """The other side of a comparison: an index, or a dataset of the view `rl`."""

    path: Path
    """Path of the index file or of the dataset's folder."""

    @classmethod
    def at(cls, path: Path) -> Other:
        """Find what a path names: a run's folder, its index, or a dataset. Raises NoIndex, NotADataset."""
        if path.is_file():
            return cls(path)
        if (path / FILE).is_file():
            return cls(path / FILE)
        if not (path / MANIFEST).is_file():
            raise NoIndex(f"{path} has neither {FILE} nor {MANIFEST}: name an indexed run or a dataset")
        manifest = read_manifest(path)
        if manifest.view != VIEW:
            raise NotADataset(f"{path} has the view {manifest.view}, but only the view {VIEW} has samples")
        return cls(path)

    @property
    def is_run(self) -> bool:
        return self.path.is_file()

    def series(self) -> Sequence[Row]:
        """Return its steps in order; an empty list for a refold, because nobody trained on it. Raises IndexFailure."""
        if not self.is_run:
            return []
        with Index.open(self.path) as index:
            return index.series()[0]

    def settings(self, own: Mapping[str, str]) -> Mapping[str, str]:
        """Return its settings, as `settings_of` does. A refold has the settings of the run (`own`) with its changes.
        Raises IndexFailure, NotADataset."""
        if self.is_run:
            with Index.open(self.path) as index:
                return settings_of(index)
        query = read_manifest(self.path).provenance.query.get("refold", {})
        changed = flat({name: value for name, value in query.items() if name != "fold_version"})
        texts = {name: _match_type(value, own.get(name)) for name, value in changed.items()}
        version = query.get("fold_version")
        return {**own, **texts} | ({"fold_version": version} if version else {})

    def samples(self) -> Iterator[Sequence[Row]]:
        """Yield its samples with COLUMNS, up to CHUNK at a time, in no particular order. Raises IndexFailure,
        NotADataset."""
        if not self.is_run:
            wanted = ["sample_id", "advantage", "reward", "trained_tokens", "spans"]
            try:
                files = arrow.dataset(self.path / "data", format=read_manifest(self.path).format)
                for batch in files.to_batches(columns=wanted, batch_size=CHUNK):
                    yield [_to_index_row(row) for row in batch.to_pylist()]
            except (OSError, pa.ArrowException) as error:
                raise NotADataset(
                    f"{self.path} cannot be read ({error}): check it with `turnlog dataset verify`"
                ) from error
            return
        with Index.open(self.path) as index, index.snapshot():
            after = ""
            while rows := index.rows(
                f"SELECT {', '.join(COLUMNS)} FROM samples WHERE sample_id > ? ORDER BY sample_id LIMIT {CHUNK}", after
            ):
                yield rows
                after = rows[-1]["sample_id"]


def _to_index_row(row: Row) -> Row:
    """Convert a dataset row to the form of the index."""
    spans = ((span["start"], span["length"], span["trained"]) for span in row["spans"])
    return {**row, "trained": row["trained_tokens"], "mask": mask_of(spans)}


@dataclass(slots=True)
class Differences:
    """Differences between the samples of a run (first of each pair) and those of the other side (second)."""

    both: int = 0
    only: list[int] = field(default_factory=lambda: [0, 0])
    """Number of samples that only this run has, and that only the other side has."""
    advantage: int = 0
    """Samples on both sides whose advantages differ."""
    reward: int = 0
    mask: int = 0
    """Samples on both sides that train other tokens, or another number of tokens."""
    rows: Sequence[tuple[Row, Row]] = ()
    """Samples that differ most: by advantage, then by reward, then by trained tokens."""
    batches: dict[int, list[float]] = field(default_factory=dict)
    """Batch index of the run -> sums over the samples on both sides: their number, |advantage| here and there, trained
    tokens here and there."""

    @property
    def same(self) -> bool:
        return not (self.advantage or self.reward or self.mask or any(self.only))


def differences(index: Index, other: Other) -> Differences:
    """Compare every sample of both sides. Raises IndexFailure, NotADataset."""
    found = Differences()
    with index.snapshot():
        most = heapq.nlargest(MOST, _pairs(index, other, found), key=lambda pair: _apart(*pair))
        total = index.row("SELECT count(*) AS n FROM samples")
    assert total is not None, "an aggregate has one row"
    found.only[0] = total["n"] - found.both
    found.rows = most
    return found


def _pairs(index: Index, other: Other, found: Differences) -> Iterator[tuple[Row, Row]]:
    """Yield samples on both sides that differ, and count all samples."""
    for theirs in other.samples():
        marks = ",".join("?" * len(theirs))
        known = {row["sample_id"]: row for row in index.rows(SOUGHT.format(marks), *(r["sample_id"] for r in theirs))}
        for that in theirs:
            this = known.get(that["sample_id"])
            if this is None:
                found.only[1] += 1
                continue
            found.both += 1
            _sum(found.batches, this, that)
            differ = [not _close(this[name], that[name]) for name in ("advantage", "reward")]
            differ.append((this["trained"], this["mask"]) != (that["trained"], that["mask"]))
            found.advantage, found.reward, found.mask = (
                count + each
                for count, each in zip((found.advantage, found.reward, found.mask), differ, strict=True)
            )  # fmt: skip
            if any(differ):
                yield this, that


def _sum(batches: dict[int, list[float]], this: Row, that: Row) -> None:
    if this["batch_index"] is not None:
        sums = batches.setdefault(this["batch_index"], [0.0] * 5)
        each = (1, abs(this["advantage"]), abs(that["advantage"]), this["trained"], that["trained"])
        sums[:] = (one + more for one, more in zip(sums, each, strict=True))


def _close(one: float, other: float) -> bool:
    """Return whether two numbers are equal within single precision."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _apart(this: Row, that: Row) -> tuple[float, float, int]:
    apart = abs(this["advantage"] - that["advantage"])
    return apart if apart > 1e-9 else 0.0, abs(this["reward"] - that["reward"]), abs(this["trained"] - that["trained"])


def settings_of(index: Index) -> Mapping[str, str]:
    """Return the recorded settings that the records of a run depend on: section.key -> value as JSON."""
    row = index.row(CONFIGURED)
    if row is None:
        return {}
    return {**flat(json.loads(row["settings"] or "{}")), "fold_version": row["fold_version"]}


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Flatten nested objects: dotted path -> leaf as JSON."""
    if not isinstance(value, dict):
        return {path: json.dumps(value, ensure_ascii=False)}
    parts: Iterable[dict[str, str]] = (flat(each, f"{path}.{name}" if path else name) for name, each in value.items())
    return {name: text for part in parts for name, text in part.items()}


def _match_type(value: str, own: str | None) -> str:
    """Give a changed value the type of the recorded one. Changes are text, so "0.9" becomes a number if a number was
    recorded."""
    text: str = json.loads(value)
    if own is not None and not own.startswith('"'):
        with contextlib.suppress(json.JSONDecodeError):
            return json.dumps(json.loads(text))
    return value


def diff_settings(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """Return (setting, here, there) for settings that differ; None for a side that did not record it."""
    names = sorted({*ours, *theirs})
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]
