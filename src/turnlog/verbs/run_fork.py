"""`turnlog run fork`: start a new run from a checkpoint of another run, on any cluster.

Weights, optimizer and learning-rate schedule continue from the checkpoint. Rollout batches, batches and weight versions
are the new run's own and begin at 0. Its feeder begins after the part of the dataset that the checkpoint has seen. That
position is stored in the new run's RunConfigured, so that the parent's log is not needed any more.

ForkRefused   the new run has already begun differently, or would be in the same place as its parent
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from turnlog.infra import run_folder
from turnlog.infra.history import all_events
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import PARENT_FILE, life, parent_of
from turnlog.infra.roles.terminal import say
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.schemas.events import GroupRequested, Purpose, RunParent, RunPlace, SampleBatchFormed
from turnlog.settings import Settings, SettingsError, load
from turnlog.trainer.checkpoints.cursor import hand_on, open_checkpoint
from turnlog.verbs.run_loop import prepare_run

TASKS = "tasks.jsonl"
OWN = ("TURNLOG_RUN_", "TURNLOG_KAFKA_PREFIX", "TURNLOG_ARCHIVE_NAME")
"""Prefixes of environment variables that concern the new run; they are ignored when --from-settings is read."""


class ForkRefused(Exception):
    """The message names what is already in the new run's place. Remedy: another --run, another [kafka] prefix."""


def fork(settings: Settings, arguments: argparse.Namespace) -> int:
    """Create the run of `settings` from a checkpoint of --from, print what to do next, and return 0. If it is called
    again, it finds the run already created. Raises ForkRefused, SettingsError, CheckpointUnusable, NoEndpoints,
    NoArchive, LogUnavailable."""
    directory = _directory_of(arguments.parent, settings)
    parent = _parent_settings(arguments, directory)
    new = _new_settings(settings, arguments, parent)
    _check_apart(parent, new)
    beside = Path(new.run.directory).parent
    with open_checkpoint(parent, arguments.step, beside=beside, archive=arguments.archive) as (folder, cursor):
        about = run_verb(_about(parent, folder, cursor, archive=arguments.archive))
        if new.kafka.bootstrap:
            run_verb(_check_unbegun(new, about))
        _write(new, about, directory, folder, keep=arguments.settings is None)
    say(f"run {new.run.id!r} begins at step {about.step} of {about.run_id!r} ({about.checkpoint})")
    if about.dataset:
        say(f"its feeder begins {about.places} tasks into {about.dataset} and requests {len(about.left)} of them first")
    if new.kafka.bootstrap:
        say(*run_verb(_configure_run(new, about)))
    else:
        say(f"next: turnlog --run {new.run.id} up, then turnlog --run {new.run.id} run")
    return ExitStatus.DONE


def _directory_of(name: str, settings: Settings) -> Path:
    """Return the directory of the parent. A name with a slash is a path; a run id names a directory beside the new
    run's."""
    return Path(name) if "/" in name else Path(settings.run.directory).parent / name


def _parent_settings(arguments: argparse.Namespace, directory: Path) -> Settings:
    """Return the settings that the parent's roles have. Raises SettingsError."""
    if arguments.from_settings is not None:
        env = {key: value for key, value in os.environ.items() if not key.startswith(OWN)}
        found = load(arguments.from_settings, env)
    elif (kept := directory / run_folder.SETTINGS).exists():
        found = load(kept, {})
    else:
        raise SettingsError(f"{kept} is missing: name the settings of the parent with --from-settings FILE")
    return dataclasses.replace(found, run=dataclasses.replace(found.run, directory=str(directory)))


def _new_settings(settings: Settings, arguments: argparse.Namespace, parent: Settings) -> Settings:
    """Return the settings of --settings or of the new run's directory; else the parent's under the new run's names."""
    if arguments.settings is None and not (Path(settings.run.directory) / run_folder.SETTINGS).exists():
        archive = dataclasses.replace(parent.archive, name="")
        settings = dataclasses.replace(parent, run=settings.run, archive=archive)
    if arguments.to_prefix is not None:
        settings = dataclasses.replace(settings, kafka=dataclasses.replace(settings.kafka, prefix=arguments.to_prefix))
    if arguments.draws is not None:
        settings = dataclasses.replace(settings, feeder=dataclasses.replace(settings.feeder, draws=arguments.draws))
    return settings


def _check_apart(parent: Settings, new: Settings) -> None:
    """Check that the new run has another id, directory and prefix than its parent. Raises ForkRefused."""
    if new.run.id == parent.run.id or Path(new.run.directory).resolve() == Path(parent.run.directory).resolve():
        raise ForkRefused(f"run {parent.run.id!r} cannot be forked onto itself: give the new run an id with --run")
    ours, theirs = new.kafka, parent.kafka
    if ours.bootstrap and (ours.bootstrap, ours.prefix) == (theirs.bootstrap, theirs.prefix):
        raise ForkRefused(
            f"prefix {ours.prefix!r} of {ours.bootstrap} belongs to {parent.run.id!r}: give the new run one with "
            "--to-prefix, or settings of its own"
        )


async def _about(parent: Settings, folder: Path, cursor: Mapping[str, int | None], *, archive: bool) -> RunParent:
    """Return what the new run records of its parent, read from the parent's log."""
    async with open_role("fork", parent, archive=archive) as role:
        before = (await life(role)).parent
        batches = [event for event in await all_events(role, topics.BATCHES) if isinstance(event, SampleBatchFormed)]
        seen = {
            sample.group_id
            for batch in batches
            if batch.batch_index < (cursor["next_batch"] or 0)
            for sample in batch.samples
        }
        requests = await all_events(role, topics.GROUP_REQUESTS)
    dataset, places, left, last = position(requests, seen, before)
    return RunParent(
        run_id=parent.run.id, checkpoint=folder.name, step=cursor["step"] or 0, draws=cursor["draws"] or 0,
        dataset=dataset, places=places, left=left, last=last,
    )  # fmt: skip


def position(
    requests: Iterable[object], seen: Collection[str], before: RunParent | None
) -> tuple[str, int, tuple[RunPlace, ...], RunPlace | None]:
    """Return (dataset, how many of its tasks the checkpoint has passed, those of them of which no group is in `seen`,
    the last one passed). A task is passed if it or a later one has a group in `seen`.

    `requests` are those of the parent, in order. Tasks are first requested in the order of the dataset, so the order of
    their first groups is the dataset's order. `before` is what the parent inherited from its own parent.
    """
    asked = [one for one in requests if isinstance(one, GroupRequested) and one.purpose is Purpose.train]
    dataset = asked[0].dataset if asked else before.dataset if before else ""
    asked = [one for one in asked if one.dataset == dataset]  # of several, only the first one continues
    known = before if before is not None and before.dataset == dataset else None
    base, left = (known.places, set(known.left)) if known else (0, set())
    at = {one.group_id: RunPlace(one.dataset_epoch, one.index) for one in asked}
    trained = {place for group, place in at.items() if group in seen}
    fresh = list(dict.fromkeys(place for place in at.values() if place not in left))
    passed = max((number for number, place in enumerate(fresh, 1) if place in trained), default=0)
    behind = (left | set(fresh[:passed])) - trained
    last = fresh[passed - 1] if passed else known.last if known else None
    return dataset, base + passed, tuple(sorted(behind, key=lambda place: (place.epoch, place.row))), last


async def _check_unbegun(new: Settings, about: RunParent) -> None:
    """Check that the new run's log is empty, or holds only what this fork has written. Raises ForkRefused."""
    async with open_role("fork", new) as role:
        if topics.RUNS.name not in await role.log.topics():
            return
        _same_parent(await _recorded_parent(role), about, new)


async def _recorded_parent(role: Role) -> tuple[bool, RunParent | None]:
    """Return whether the log has begun, and the parent that it names."""
    found = await life(role)
    begun = found.configured is not None or bool(await all_events(role, topics.WEIGHTS))
    return begun, found.parent


def _same_parent(found: tuple[bool, RunParent | None], about: RunParent, new: Settings) -> None:
    begun, parent = found
    if begun and parent != about:
        whose = f"from {parent.run_id!r} at step {parent.step}" if parent else "without a parent"
        raise ForkRefused(
            f"run {new.run.id!r} has already begun (prefix {new.kafka.prefix!r}), {whose}: choose another --run, and "
            "on a shared cluster another --to-prefix"
        )


def _write(new: Settings, about: RunParent, parent: Path, checkpoint: Path, *, keep: bool) -> None:
    """Write the new run's directory. The file that names its parent comes last, so that a fork that died is started
    anew."""
    directory = Path(new.run.directory)
    found = parent_of(new)
    if found is not None:
        _same_parent((True, found), about, new)
        return
    run_folder.private_folder(directory)
    hand_on(checkpoint, directory / run_folder.CHECKPOINTS)
    if not new.feeder.dataset and (parent / TASKS).exists():
        shutil.copyfile(parent / TASKS, directory / TASKS)
    if keep:
        run_folder.write_settings(directory, new)
    part = directory / f"{PARENT_FILE}.part"
    part.write_text(json.dumps(dataclasses.asdict(about), indent=2) + "\n")
    part.replace(directory / PARENT_FILE)


async def _configure_run(new: Settings, about: RunParent) -> list[str]:
    """Configure the new run at once, so that its first role knows its parent. Raises ForkRefused."""
    async with open_role("fork", new) as role:
        done = await prepare_run(role)
        _same_parent(await _recorded_parent(role), about, new)
    return done.to_lines()
