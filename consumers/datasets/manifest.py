"""The manifest of a dataset: the query, what was read, what was written, and hashes of all files and rows."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnlog.consumers.datasets import NotADataset
from turnlog.infra.history import ReadStatistics
from turnlog.infra.log import Partition

NAME = "manifest.json"
FORMAT_VERSION = 1
"""Version of the manifest format; readers reject a higher one."""


@dataclass(slots=True)
class Provenance:
    """Origin of the rows. The reader of the log (or a refold of it) fills it in, and it is written to the manifest."""

    query: dict[str, Any] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    reading: ReadStatistics = field(default_factory=ReadStatistics)
    """Offsets, schemas, and counts of undecodable records."""
    settings_sha256: set[str] = field(default_factory=set)
    fold_versions: set[str] = field(default_factory=set)
    removed: Counter[str] = field(default_factory=Counter)
    """Filter -> number of candidates that it removed. Each candidate counts under the first filter that it failed."""
    command: str = ""
    """Command line that makes the dataset, for its card; not in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of rows; its name is relative to the dataset."""

    name: str
    rows: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCounts:
    """Numbers of rows and tokens. `trained_tokens` is 0 for views without token masks."""

    rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """The content of manifest.json. Two builds of the same query over the same records give equal manifests."""

    view: str
    format: str
    counts: DatasetCounts
    rows_sha256: str
    """Hash of the canonical bytes of the rows; independent of their order and of the file format (columns.py)."""
    files: tuple[DataFile, ...]
    provenance: Provenance

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        came = self.provenance
        return {
            "manifest": FORMAT_VERSION,
            "view": self.view,
            "format": self.format,
            "runs": sorted(came.runs),
            "query": came.query,
            **dataclasses.asdict(self.counts),
            "rows_sha256": self.rows_sha256,
            "files": [dataclasses.asdict(file) for file in self.files],
            "read": [
                {"topic": place.topic, "partition": place.number, "start": start, "end": end}
                for place, (start, end) in sorted(came.reading.read.items())
            ],
            "schemas": [
                {"record": record, "sha256": sha256, "records": count}
                for (record, sha256), count in sorted(came.reading.schemas.items())
            ],
            "settings_sha256": sorted(came.settings_sha256),
            "fold_versions": sorted(came.fold_versions),
            "removed": dict(sorted(came.removed.items())),
            "undecodable": dict(sorted(came.reading.undecodable.items())),
        }


def read_manifest(dataset: Path) -> DatasetManifest:
    """Read the manifest of a dataset. Raises NotADataset."""
    path = dataset / NAME
    try:
        body = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise NotADataset(f"{dataset} has no {NAME}: it is not a dataset, or its build did not finish") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotADataset(f"{path} is not JSON ({error}): build the dataset again") from error
    try:
        if body["manifest"] > FORMAT_VERSION:
            raise NotADataset(f"{path} is of version {body['manifest']}; this turnlog reads up to {FORMAT_VERSION}")
        return _manifest(body)
    except (KeyError, TypeError) as error:
        raise NotADataset(f"{path} has no valid {error}: build the dataset again") from error


def _manifest(body: dict[str, Any]) -> DatasetManifest:
    came = Provenance(
        query=body["query"],
        runs=set(body["runs"]),
        reading=ReadStatistics(
            read={Partition(each["topic"], each["partition"]): (each["start"], each["end"]) for each in body["read"]},
            schemas=Counter({(each["record"], each["sha256"]): each["records"] for each in body["schemas"]}),
            undecodable=Counter(body["undecodable"]),
        ),
        settings_sha256=set(body["settings_sha256"]),
        fold_versions=set(body["fold_versions"]),
        removed=Counter(body["removed"]),
    )
    return DatasetManifest(
        view=body["view"],
        format=body["format"],
        counts=DatasetCounts(rows=body["rows"], tokens=body["tokens"], trained_tokens=body["trained_tokens"]),
        rows_sha256=body["rows_sha256"],
        files=tuple(DataFile(**each) for each in body["files"]),
        provenance=came,
    )
