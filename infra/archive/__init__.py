"""The archive of a log: files of closed offset ranges in the store, their index (one small immutable object per file),
and a Log that reads them, so that every reader of topics works on an archive without Kafka and without a registry.
"""

from turnlog.infra.archive.archive_log import ArchiveLog as ArchiveLog
from turnlog.infra.archive.index import ArchiveDamaged as ArchiveDamaged
from turnlog.infra.archive.index import ArchivedRange as ArchivedRange
from turnlog.infra.archive.index import ArchiveError as ArchiveError
from turnlog.infra.archive.index import ArchiveIndex as ArchiveIndex
from turnlog.infra.archive.index import Cut as Cut
from turnlog.infra.archive.index import NoArchive as NoArchive
from turnlog.infra.archive.index import OffsetRange as OffsetRange
from turnlog.infra.archive.index import ReadOnlyArchive as ReadOnlyArchive
from turnlog.infra.archive.index import archive_name as archive_name
from turnlog.infra.archive.index import live_cut as live_cut
from turnlog.infra.archive.index import partitions_of as partitions_of
