"""Extraction of archives. Filters of tarfile are no help: Python 3.9.2 and 3.11.2 have none, and each changes modes."""

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence


def unpack(
    archive: tarfile.TarFile, target: str, within: Sequence[str] = (), members: Iterable[tarfile.TarInfo] = ()
) -> None:
    """Extract an archive, or some of its members, into the folder `target`, with the modes, owners and links that they
    state. Raises TarError at a member that would be written outside of the folders `within` (none: of `target`)."""
    folders = [os.path.realpath(folder) for folder in within or (target,)]
    archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    archive.extractall(target, members=_checked_members(members or archive, target, folders))


def _checked_members(
    members: Iterable[tarfile.TarInfo], target: str, folders: Sequence[str]
) -> Iterator[tarfile.TarInfo]:
    """Yield a member when those before it have been extracted: a link among them may lead elsewhere."""
    for member in members:
        path = os.path.join(target, member.name)
        # A symbolic link replaces what is there, anything else is written through it.
        above, name = os.path.split(path)
        place = os.path.normpath(os.path.join(os.path.realpath(above), name))
        places = [place if member.issym() else os.path.realpath(path)]
        if member.islnk():
            places.append(os.path.realpath(os.path.join(target, member.linkname)))
        for place in places:
            if not any(os.path.commonpath([folder, place]) == folder for folder in folders):
                raise tarfile.TarError(f"{member.name} leads to {place}, which is not in {', '.join(folders)}")
        yield member
