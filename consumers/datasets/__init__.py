"""Datasets: rows of a run as Parquet or Arrow files, with a manifest that records the origin of each row.

DatasetError
├── DatasetExists       OUT exists already: choose another name, or --overwrite
├── NotADataset         OUT has no manifest: it is neither overwritten nor verified
├── BadQuery            an unusable filter; the message names it and the legal values
├── NothingMatched      no row is left; the message says how many each filter removed
├── BrokenSample        tokens, spans and log-probs of a sample do not fit, or one is NaN: skipped and counted
├── UnreadableMessage   a recorded message is not OpenAI chat: its conversation is skipped and counted
├── MissingContent      a record references an object that the store no longer has
├── Unwritable          the disk is full or refuses a write; what was at OUT is unchanged
└── DatasetDamaged      files, rows or counts differ from the manifest
"""

from __future__ import annotations


class DatasetError(Exception):
    """Base of the tree above."""


class DatasetExists(DatasetError):
    """A dataset exists at OUT. Remedy: another name, or --overwrite."""


class NotADataset(DatasetError):
    """No manifest.json that this version can read is in OUT."""


class BadQuery(DatasetError):
    """A filter or option is unusable."""


class NothingMatched(DatasetError):
    """No row is left after filtering."""


class BrokenSample(DatasetError):
    """A sample cannot be a training row."""


class UnreadableMessage(DatasetError):
    """The chat columns cannot represent a message."""


class MissingContent(DatasetError):
    """An object that a record references is missing from the store. Remedy: restore it, or filter its rows out."""


class Unwritable(DatasetError):
    """The file system refused a write. Remedy: free space or another OUT."""


class DatasetDamaged(DatasetError):
    """A dataset does not match its manifest. Remedy: build it again."""
