"""Datasets: rows of a run as Parquet or Arrow files, with a manifest that says where each came from.

DatasetError
├── DatasetExists       there is something at OUT: another name, or --overwrite
├── NotADataset         OUT holds no manifest: never overwritten, never verified
├── BadQuery            a filter that cannot be used: names it and what is legal
├── NothingMatched      no row is left; says which filter removed how many
├── BrokenSample        tokens, spans and log-probs of a sample do not fit, or one is NaN: passed over and counted
├── UnreadableMessage   a recorded message is not OpenAI chat: its conversation is passed over and counted
├── MissingContent      a record names an object that the store no longer has
├── Unwritable          the disk is full or refuses us; what stood at OUT is untouched
└── DatasetDamaged      files, rows or counts are not those of the manifest
"""

from __future__ import annotations


class DatasetError(Exception):
    """Base of the tree above."""


class DatasetExists(DatasetError):
    """OUT is taken. Remedy: another name, or --overwrite."""


class NotADataset(DatasetError):
    """OUT has no manifest.json that this version reads."""


class BadQuery(DatasetError):
    """A filter or option that cannot be used."""


class NothingMatched(DatasetError):
    """No row is left after the filters."""


class BrokenSample(DatasetError):
    """A sample that is no training row."""


class UnreadableMessage(DatasetError):
    """A message that the chat columns cannot hold."""


class MissingContent(DatasetError):
    """An object that a record names is gone from the store. Remedy: restore it, or filter its rows out."""


class Unwritable(DatasetError):
    """The file system refused a write. Remedy: free space or another OUT."""


class DatasetDamaged(DatasetError):
    """A dataset is not what its manifest says. Remedy: build it again."""
