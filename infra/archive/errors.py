"""Errors of archives.

ArchiveError
├── ArchiveDamaged    the index has a gap or an overlap, or a file is not the one that the index names
├── NoArchive         the store has no archive of that name
└── ReadOnlyArchive   an archive accepts no records
"""

from __future__ import annotations

from turnlog.infra.log import LogError


class ArchiveError(LogError):
    """Base class of all errors of archives; see the module docstring."""


class ArchiveDamaged(ArchiveError):
    """The archive is inconsistent. Remedy: restore the object that the message names from a copy of the store."""


class NoArchive(ArchiveError):
    """The archive does not exist. Remedy: check [archive] name and [store]; `turnlog role archive` writes one."""


class ReadOnlyArchive(ArchiveError):
    """An archive cannot do what only a live log can. Records are written to topics; the archive role copies them."""
