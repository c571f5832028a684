"""Checkpoints of a run: which one training resumes from, whoever was killed when, and the cursor inside each of them.

    step-00000010-i0      a Megatron checkpoint of generation 0, complete or absent
    latest-i0.json        the marker of generation 0: {"incarnation", "folder"}; the highest generation is effective,
                          with the newest checkpoint of its own, else with the one that its marker names

They lie in `checkpoints/` of the run's directory, written as `.part`, then renamed, or in the object store
(`checkpoints.places`).

The cursor is part of the checkpoint's common state, so cursor, optimizer and weights move together. A generation of the
trainer claims its number by creating its marker, which only one process can do. All names that it writes carry that
number, so a zombie changes nothing that its successor resumes from; a process that finds a higher marker is a zombie,
and ends.

The files of a checkpoint are verified against their checksums before training resumes from it: the shards by the
ranks, each some of them, the others here. If a file was altered or is missing, the checkpoint before it is used, and
the steps between the two are taken again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import open_role
from turnlog.schemas.canonical import canonical_text
from turnlog.settings import Settings, SettingsError
from turnlog.trainer import CheckpointDamaged, CheckpointUnusable, Superseded, mcore
from turnlog.trainer.checkpoints.places import (
    CACHE,
    MARKERS,
    PART,
    CheckpointStorage,
    FolderPlace,
    Marker,
    Stored,
    StorePlace,
    checkpoints_directory,
    store_place,
    write_sums,
)
from turnlog.trainer.checkpoints.state import read_common
from turnlog.trainer.manifests import Cursor

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, as one generation of its trainer sees them. All methods block."""

    def __init__(self, place: CheckpointStorage, *, keep: int) -> None:
        """`keep` is the number of newest checkpoints to retain, at least 1."""
        self._place = place
        self._keep = keep
        self._incarnation = -1
        self._sound: dict[str, Path] = {}
        """Name of the effective checkpoint -> the verified folder to resume from, so that its files are read only
        once.
        """
        self._damaged: set[str] = set()

    def newest(self) -> Path | None:
        """Return a folder with the newest effective checkpoint or, if its files are damaged, the newest one before it.

        None if there is no checkpoint at all. Raises CheckpointUnusable if none of them is usable.
        """
        found = sorted(self._place.names(), key=_age)
        named = self._effective_name(found)
        if named is None:
            return None
        if named in self._sound:
            return self._sound[named]
        candidates = [name for name in found if _age(name) <= _age(named) and name not in self._damaged]
        for name in reversed(candidates):
            try:
                folder = self._place.open_folder(name)
            except CheckpointDamaged as damage:
                log.warning("%s", damage)
                continue
            if name != named:
                log.warning("training continues from %s: the steps up to %s are repeated", name, named)
            self._sound[named] = folder
            return folder
        raise CheckpointUnusable(
            f"{self._place.where} names {named}, which is {'damaged' if named in found else 'gone'}, and there is no "
            f"earlier one; restore it, or remove {MARKERS} there to train from [model] path again"
        )

    def cursors(self) -> dict[str, Cursor]:
        """Return the cursors of all checkpoints by name, oldest first. Raises CheckpointDamaged."""
        return {name: Cursor(**_cursor(self._place, name)) for name in sorted(self._place.names(), key=_age)}

    def condemn(self, name: str, damage: CheckpointDamaged) -> None:
        """Mark a checkpoint that a rank found damaged: from now on `newest` returns another, also for later
        generations.
        """
        self.pass_over(name, damage)
        if (folder := self.newest()) is not None:
            self._place.mark(Marker(self._incarnation, folder.name))

    def pass_over(self, name: str, damage: CheckpointDamaged) -> None:
        """Ignore a damaged checkpoint: from now on `newest` returns another."""
        log.warning("%s", damage)
        self._damaged.add(name)
        self._sound.clear()

    def claim(self, least: int, folder: str | None = None) -> int:
        """Become the generation that owns the checkpoints, and start from the newest of them, or from `folder`.

        Return its number: `least`, or the successor of the highest number that was ever claimed here, whichever is
        higher. Older generations may no longer write.
        """
        while True:
            newest = self.newest()
            begun = folder or (newest.name if newest else None)
            self._incarnation = max(least, self._highest() + 1)
            if self._place.create_marker(Marker(self._incarnation, begun)):
                break  # else another process has just claimed it
        self._place.sweep()
        return self._incarnation

    def begin(self, cursor: Cursor) -> Path:
        """Return an empty folder for the checkpoint of `cursor`. Raises Superseded if a newer generation owns the
        checkpoints.
        """
        self._check_owner()
        return self._place.create_folder(folder_name(cursor.step, self._incarnation))

    def finish(self, folder: Path, stored: Stored, about: Mapping[str, Any]) -> None:
        """Upload what is left and compute checksums; see CheckpointStorage.store_files."""
        self._place.store_files(folder, stored, about)

    def seal(self, folder: Path, needed: Collection[str] = ()) -> str:
        """Finalize a complete checkpoint and return its name; remove old checkpoints except those in `needed`, by name.

        If there is already a checkpoint of this step, that one stays, since a marker may name it. The ownership is
        checked twice: whoever claims after the second check inherits what the marker names, which is never removed.
        Raises Superseded if a newer generation owns the checkpoints.
        """
        self._check_owner()
        name = self._place.seal(folder)
        self._place.mark(Marker(self._incarnation, name))
        self._check_owner()
        for old in sorted(self._place.names(), key=_age)[: -self._keep]:
            if old not in needed:
                self._place.drop(old)
        for marker, said in self._place.markers().items():
            if said.incarnation < self._incarnation:
                self._place.forget(marker)
        return name

    def checkpoint_address(self, name: str) -> str:
        return self._place.checkpoint_address(name)

    def _effective_name(self, found: list[str]) -> str | None:
        """Return the name of the effective checkpoint among `found`."""
        markers = (marker for marker in self._place.markers().values() if marker.confirmed)
        last = max(markers, key=lambda marker: marker.incarnation, default=Marker(-1, None))
        own = [name for name in found if _age(name)[0] == last.incarnation]
        return own[-1] if own else last.folder

    def _highest(self) -> int:
        return max((marker.incarnation for marker in self._place.markers().values()), default=-1)

    def _check_owner(self) -> None:
        if (highest := self._highest()) > self._incarnation:
            raise Superseded(f"incarnation {highest} owns {self._place.where}; this is {self._incarnation}")


def folder_name(step: int, incarnation: int) -> str:
    """Return the name of the checkpoint that a generation writes after `step` optimizer steps."""
    return f"step-{step:08}-i{incarnation}"


def cursor_values(cursor: Cursor) -> dict[str, int | None]:
    """Return plain values for the checkpoint's common state. Keys that earlier releases do not know are left out if
    they are 0.
    """
    values = dataclasses.asdict(cursor)
    return {key: value for key, value in values.items() if value or key not in ("inherited", "skipped", "critic_from")}


def cursor_of(common: Mapping[str, Any], *, critic: bool) -> Cursor:
    """Return the cursor in a checkpoint's common values. `critic`: whether there is to be a critic; it begins here if
    the checkpoint has none.
    """
    cursor = Cursor(**common["cursor"])
    return dataclasses.replace(cursor, critic_from=cursor.step) if critic and not common.get("critic") else cursor


def find(place: CheckpointStorage, step: int | None) -> tuple[Path, dict[str, int | None]]:
    """Return a folder with the checkpoint after `step` optimizer steps, of the newest generation that wrote one, and
    its cursor.

    `step` None means the checkpoint that training would resume from. Raises CheckpointUnusable, which names the
    available steps.
    """
    found = {_age(name)[1]: name for name in sorted(place.names(), key=_age)}
    folder = Checkpoints(place, keep=1).newest() if step is None else None
    if step in found:
        folder = place.open_folder(found[step])
    if folder is None:
        held = ", ".join(map(str, sorted(found))) or "none"
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointUnusable(f"{place.where} holds no {wanted}; it has checkpoints of steps: {held}")
    return folder, dict(read_common(folder)["cursor"])


@contextmanager
def readable(settings: Settings, *, beside: Path, archive: bool = False) -> Iterator[CheckpointStorage]:
    """Yield the storage of a run's checkpoints to a reader; fetched files lie in the folder `beside` while the block
    runs.

    `archive`: the run's log is the archived one in the object store. Raises NoEndpoints, LogUnavailable,
    StoreUnavailable.
    """
    if settings.trainer.checkpoints == "folder":
        yield FolderPlace(checkpoints_directory(settings))
        return

    async def ask(cache: Path) -> StorePlace:
        async with open_role("checkpoints", settings, archive=archive) as role:
            return await store_place(role, cache)

    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=beside) as cache:
        yield run_verb(ask(Path(cache)))


@contextmanager
def open_checkpoint(
    settings: Settings, step: int | None, *, beside: Path, archive: bool
) -> Iterator[tuple[Path, dict[str, int | None]]]:
    """Yield the result of `find` for a run, with all files, while the block runs. Raises the errors of `find` and
    `readable`.
    """
    with readable(settings, beside=beside, archive=archive) as place:
        folder, cursor = find(place, step)
        place.all_of(folder.name)
        yield folder, cursor


def hand_on(source: Path, directory: Path) -> None:
    """Copy a checkpoint to where another run's trainer finds it as the newest, with a cursor at that run's beginning.

    An interrupted copy is started again. Raises CheckpointUnusable if the source is removed meanwhile, or if a trainer
    has already begun in `directory`, whose checkpoints then stay.
    """
    if FolderPlace(directory).markers():
        raise CheckpointUnusable(
            f"{directory} holds the checkpoints of a run that has already started: give the new run another id"
        )
    held = Cursor(**read_common(source)["cursor"])
    step = held.step
    part = directory / f"{folder_name(step, 0)}{PART}"
    folder = part.with_suffix("")
    for path in (part, folder):
        shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.copytree(source, part)
        cursor = Cursor(step=step, inherited=step, critic_from=held.critic_from)
        begun = {"cursor": cursor_values(cursor), "draw": {}, "learning": {}}
        mcore.rewrite_common(part, {**read_common(part), **begun})
        source.stat()
    except (FileNotFoundError, shutil.Error) as error:
        raise CheckpointUnusable(
            f"{source} was removed while it was copied: choose a newer step, or raise [trainer] checkpoints_kept"
        ) from error
    write_sums(part)
    part.rename(folder)
    first = Checkpoints(FolderPlace(directory), keep=1)
    first.claim(0, folder.name)


def about(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest records of a checkpoint with these common values: its cursor, and a hash of its learning
    settings.
    """
    learning = canonical_text(common.get("learning", {}), spaces=True).encode()
    return {"cursor": common["cursor"], "learning_sha256": hashlib.sha256(learning).hexdigest()}


def bring(directory: Path, place: StorePlace) -> None:
    """Upload the newest checkpoint of a run's directory if it is of a later generation than the store's.

    This is the case for a fork, and for a run whose checkpoints went to a folder before. Raises CheckpointUnusable,
    StoreUnavailable.
    """
    here = FolderPlace(directory)
    theirs = _last_marker(here)
    if theirs.incarnation <= _last_marker(place).incarnation:
        return
    checkpoints = Checkpoints(here, keep=1)
    while (folder := checkpoints.newest()) is not None:
        try:
            here.all_of(folder.name)
        except CheckpointDamaged as damage:
            checkpoints.pass_over(folder.name, damage)
            continue
        log.info("copying %s to %s", folder, place.where)
        place.store_files(folder, {}, about(read_common(folder)))
        place.seal(folder)
        place.create_marker(Marker(theirs.incarnation, folder.name))
        return


def check_not_stored(directory: Path) -> None:
    """Raises SettingsError if this machine has seen later checkpoints of the run in its store than exist in
    `directory`.
    """
    cache = directory / CACHE
    seen = max((_age(path.name)[0] for path in cache.glob("step-*-i*")), default=-1)
    if seen > _last_marker(FolderPlace(directory)).incarnation:
        raise SettingsError(
            f"the run's checkpoints are in its store ({cache} belongs to trainer generation {seen}): set "
            f"trainer.checkpoints to s3 again, or remove {cache} to continue from the checkpoints in {directory}"
        )


def _cursor(place: CheckpointStorage, name: str) -> dict[str, Any]:
    """Return the cursor values of a checkpoint without fetching its weights, wherever it lies."""
    if isinstance(place, StorePlace):
        return place.cursor(name)
    return dict(read_common(Path(place.checkpoint_address(name)))["cursor"])


def _last_marker(place: CheckpointStorage) -> Marker:
    return max(place.markers().values(), key=lambda marker: marker.incarnation, default=Marker(-1, None))


def _age(name: str) -> tuple[int, int]:
    """Return (generation, step): the order in which checkpoints were written."""
    _, step, incarnation = name.split("-")
    return int(incarnation.removeprefix("i")), int(step)
