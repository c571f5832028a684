"""A run beside another one, or beside a refold of its own records: curves, settings, and the samples that differ.

Samples are the same data where their ids are equal: those of a refold (`turnlog replay --out`), and of another index of
the same records. Another run's are its own; its curves and settings are compared all the same.
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
"""Samples that are sought at once."""
MOST = 100
"""Samples that are shown: those that differ most."""
CONFIGURED = "SELECT settings, fold_version FROM runs WHERE kind = 'RunConfigured' ORDER BY place LIMIT 1"
SOUGHT = f"""SELECT {", ".join(COLUMNS)}, session_id, segment_index, (SELECT min(b.batch_index) FROM batch_rows b
    WHERE b.sample_id = s.sample_id) AS batch_index FROM samples s WHERE sample_id IN ({{}})"""


@dataclass(frozen=True, slots=True)
class Other:
    """What a run is compared with: an index, or a dataset of the view `rl`."""

    path: Path
    """The file, or the dataset's folder."""

    @classmethod
    def at(cls, path: Path) -> Other:
        """A run's folder, its index or a dataset. Raises NoIndex, NotADataset."""
        if path.is_file():
            return cls(path)
        if (path / FILE).is_file():
            return cls(path / FILE)
        if not (path / MANIFEST).is_file():
            raise NoIndex(f"{path} has neither {FILE} nor {MANIFEST}: name a run that is indexed, or a dataset")
        manifest = read_manifest(path)
        if manifest.view != VIEW:
            raise NotADataset(f"{path} is of the view {manifest.view}: samples are in the view {VIEW}")
        return cls(path)

    @property
    def is_run(self) -> bool:
        return self.path.is_file()

    def series(self) -> Sequence[Row]:
        """Its steps in order; none of a refold, which nobody trained on. Raises IndexFailure."""
        if not self.is_run:
            return []
        with Index.open(self.path) as index:
            return index.series()[0]

    def settings(self, own: Mapping[str, str]) -> Mapping[str, str]:
        """As `settings_of`; a refold has those of the run (`own`) but for what was changed. Raises IndexFailure,
        NotADataset."""
        if self.is_run:
            with Index.open(self.path) as index:
                return settings_of(index)
        query = read_manifest(self.path).provenance.query.get("refold", {})
        changed = flat({name: value for name, value in query.items() if name != "fold_version"})
        texts = {name: _typed(value, own.get(name)) for name, value in changed.items()}
        version = query.get("fold_version")
        return {**own, **texts} | ({"fold_version": version} if version else {})

    def samples(self) -> Iterator[Sequence[Row]]:
        """Its samples by the CHUNK, in no order, with COLUMNS. Raises IndexFailure, NotADataset."""
        if not self.is_run:
            wanted = ["sample_id", "advantage", "reward", "trained_tokens", "spans"]
            try:
                files = arrow.dataset(self.path / "data", format=read_manifest(self.path).format)
                for batch in files.to_batches(columns=wanted, batch_size=CHUNK):
                    yield [_refolded(row) for row in batch.to_pylist()]
            except (OSError, pa.ArrowException) as error:
                raise NotADataset(
                    f"{self.path} cannot be read ({error}): `turnlog dataset verify` looks at it"
                ) from error
            return
        with Index.open(self.path) as index, index.snapshot():
            after = ""
            while rows := index.rows(
                f"SELECT {', '.join(COLUMNS)} FROM samples WHERE sample_id > ? ORDER BY sample_id LIMIT {CHUNK}", after
            ):
                yield rows
                after = rows[-1]["sample_id"]


def _refolded(row: Row) -> Row:
    """A row of a dataset as the index has it."""
    spans = ((span["start"], span["length"], span["trained"]) for span in row["spans"])
    return {**row, "trained": row["trained_tokens"], "mask": mask_of(spans)}


@dataclass(slots=True)
class Differences:
    """Of the samples of a run (the first of each pair) and of another (the second)."""

    both: int = 0
    only: list[int] = field(default_factory=lambda: [0, 0])
    """Samples that the other has not."""
    advantage: int = 0
    """Samples of both whose advantages differ."""
    reward: int = 0
    mask: int = 0
    """Samples of both of which other tokens train, or other numbers of them."""
    rows: Sequence[tuple[Row, Row]] = ()
    """Those that differ most: by advantage, then by trained tokens."""
    batches: dict[int, list[float]] = field(default_factory=dict)
    """Of each batch of the run, sums over samples of both: of them, |advantage| here and there, tokens here and
    there."""

    @property
    def same(self) -> bool:
        return not (self.advantage or self.reward or self.mask or any(self.only))


def differences(index: Index, other: Other) -> Differences:
    """Looks at every sample of both. Raises IndexFailure, NotADataset."""
    found = Differences()
    with index.snapshot():
        most = heapq.nlargest(MOST, _pairs(index, other, found), key=lambda pair: _apart(*pair))
        total = index.row("SELECT count(*) AS n FROM samples")
    assert total is not None, "an aggregate has one row"
    found.only[0] = total["n"] - found.both
    found.rows = most
    return found


def _pairs(index: Index, other: Other, found: Differences) -> Iterator[tuple[Row, Row]]:
    """Samples of both that differ; counts all of them on the way."""
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
    """But for what single precision leaves out."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _apart(this: Row, that: Row) -> tuple[float, float, int]:
    apart = abs(this["advantage"] - that["advantage"])
    return apart if apart > 1e-9 else 0.0, abs(this["reward"] - that["reward"]), abs(this["trained"] - that["trained"])


def settings_of(index: Index) -> Mapping[str, str]:
    """What a run recorded of the settings that its records depend on: section.key -> value as JSON."""
    row = index.row(CONFIGURED)
    if row is None:
        return {}
    return {**flat(json.loads(row["settings"] or "{}")), "fold_version": row["fold_version"]}


def flat(value: Any, path: str = "") -> dict[str, str]:
    """The leaves of nested objects by their dotted path, as JSON."""
    if not isinstance(value, dict):
        return {path: json.dumps(value, ensure_ascii=False)}
    parts: Iterable[dict[str, str]] = (flat(each, f"{path}.{name}" if path else name) for name, each in value.items())
    return {name: text for part in parts for name, text in part.items()}


def _typed(value: str, own: str | None) -> str:
    """A change is text, however the run recorded its value: 0.9 is a number where a number stood."""
    text: str = json.loads(value)
    if own is not None and not own.startswith('"'):
        with contextlib.suppress(json.JSONDecodeError):
            return json.dumps(json.loads(text))
    return value


def changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """(setting, here, there) of those that differ; None where it is not recorded."""
    names = sorted({*ours, *theirs})
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]
