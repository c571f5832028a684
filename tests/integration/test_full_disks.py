"""Disks that are full, each a file system of its own: what writes there says so by name, loses nothing, and goes on
when there is room. That of sandboxes is in tests/unit/sandbox/test_full_disk.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.batches import synthetic_rows
from tests.integration.test_embedded_up import opened_log
from tests.small_disk import fill, mounted
from tests.unit.consumers.conftest import CODEC, TrainedRun
from tests.unit.consumers.test_index import content
from tests.unit.trainer.test_learner import ONE, random_weights
from tests.unit.trainer.test_publications import Rig
from turnlog.consumers.index import IndexFull
from turnlog.consumers.index.indexer import build, opened_writer
from turnlog.infra.embedded import NoSpace
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import NO_ROOM, wait_readable
from turnlog.infra.embedded.supervisor import ChildState
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Partition, TopicSpec
from turnlog.infra.run_folder import is_live, lacks_room
from turnlog.names import ExitStatus
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.settings import EngineSettings, RunSettings, Settings
from turnlog.trainer import CheckpointFailed, ExportFailed
from turnlog.trainer.checkpoints.cursor import Checkpoints, cursor_values
from turnlog.trainer.checkpoints.places import FolderPlace
from turnlog.trainer.checkpoints.saves import Saves
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.plan import imitation


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder):
        yield folder


@pytest.mark.kafka
@pytest.mark.long  # the suite has the supervisor's rule, and what it writes of itself, on /dev/full
async def test_a_log_on_a_full_disk_is_waited_for_and_holds_what_it_acknowledged(small_disk: Path) -> None:
    engine = EngineSettings(urls=(f"http://{HOST}:{free_ports(1)[0]}",))
    settings = Settings(run=RunSettings(id="r", directory=str(small_disk / "r")), engine=engine)
    with pytest.raises(NoSpace, match=f"the disk of {small_disk / 'r'} is full: .* 256 MiB are needed"):
        up(settings, (), say=silent)
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    up(settings, (), say=silent)
    place, acknowledged, broker = Partition("kept", 0), list[int](), kafka(settings)["pid"]
    try:
        filler = await written_until_full(settings, place, acknowledged)
        assert acknowledged
        await asyncio.sleep(5)  # what the supervisor does meanwhile, it can write nowhere
        assert is_live(small_disk / "r"), "the supervisor ended"
        assert "is full" in lacks_room(small_disk / "r")
        filler.unlink()
        async with asyncio.timeout(180):
            while kafka(settings)["state"] != ChildState.READY or kafka(settings)["pid"] == broker:  # noqa: ASYNC110
                await asyncio.sleep(0.5)  # a state in the supervisor's file is no event
        assert kafka(settings)["error_type"] == "DiskFull"
        async with opened_log(settings) as log:
            held = await values(log, place)
            assert [number for number in acknowledged if number not in held] == []
            await append(log, place.topic, acknowledged, most=len(acknowledged) + 10)
    finally:
        down(settings, say=silent)


async def written_until_full(settings: Settings, place: Partition, acknowledged: list[int]) -> Path:
    """Append until the broker has ended itself; what takes the room."""
    async with opened_log(settings) as log:
        await log.create_topics([TopicSpec(place.topic, 1, 1, {})])
        filler = fill(Path(settings.run.directory).parent, but=2**22)
        ended = asyncio.create_task(asyncio.to_thread(wait_for_end, kafka(settings)["pid"], 120.0))
        writing = asyncio.create_task(append(log, place.topic, acknowledged))
        await asyncio.wait([ended, writing], return_when=asyncio.FIRST_COMPLETED)
        assert await ended, "the broker has not ended of a full disk"
        writing.cancel()
        await asyncio.wait([writing])
    return filler


def kafka(settings: Settings) -> dict[str, Any]:
    """The broker, as the supervisor has written last."""
    return next(child for child in status_processes(settings) if child["name"] == "kafka")


def wait_for_end(pid: int, within_s: float) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        return wait_readable(pidfd, within_s)
    finally:
        os.close(pidfd)


async def append(log: KafkaLog, topic: str, acknowledged: list[int], most: int = 2**30) -> None:
    """Records of 64 KiB, numbered on from those that are acknowledged."""
    async with log.appender() as appender:
        while len(acknowledged) < most:
            number = len(acknowledged)
            await appender.append(topic, b"key", str(number).encode().ljust(2**16))
            acknowledged.append(number)


async def values(log: KafkaLog, place: Partition) -> set[int]:
    end, found = (await log.end_offsets([place]))[place], set[int]()
    async with log.reader() as reader:
        reader.assign({place: 0})
        while reader.position(place) < end:
            found |= {int(record.value) for record in await reader.poll()}
    return found


def silent(_: str) -> None:
    """Progress that nobody reads."""


def test_a_verb_that_meets_a_full_disk_says_so_in_a_line(small_disk: Path) -> None:
    fill(small_disk)
    argv = [sys.executable, "-m", "turnlog.cli", "recipe", "new", "my-game", "--into", str(small_disk)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode == ExitStatus.FAILED
    assert said.startswith(
        "turnlog recipe: NoSpace: [Errno 28] No space left on device: a disk that it writes to is full"
    )
    assert "Traceback" not in said


async def test_an_index_on_a_full_disk_says_so_and_goes_on_where_it_stopped(small_disk: Path, tmp_path: Path) -> None:
    run, path = TrainedRun(), small_disk / "index.sqlite"
    await run.good_days(groups=2)
    await build(run.role("index"), path)
    await run.bad_days(1, groups=6)
    await run.steps()
    filler = fill(small_disk)
    with pytest.raises(IndexFull, match=rf"the disk of {small_disk} is full") as met:
        await build(run.role("index"), path)
    assert NO_ROOM.search(str(met.value)), "its supervisor waits for room"
    filler.unlink()
    await build(run.role("index"), path)
    await build(run.role("index"), tmp_path / "another.sqlite")
    assert content(path) == content(tmp_path / "another.sqlite")


def test_an_index_that_begins_on_a_full_disk_is_not_called_damaged(small_disk: Path) -> None:
    fill(small_disk)
    with (
        pytest.raises(IndexFull, match="free some space"),
        opened_writer(small_disk / "index.sqlite", "run", FOLD_VERSION, CODEC),
    ):
        pass


@pytest.mark.parametrize("left", [0, 2**16])
async def test_a_checkpoint_on_a_full_disk_says_so_and_the_one_before_it_stands(small_disk: Path, left: int) -> None:
    """Whether its first file does not fit or its last: torch says `iostream error`, or that it is at another place."""
    checkpoints = Checkpoints(FolderPlace(small_disk / "checkpoints"), keep=3)
    checkpoints.claim(0)
    with process_group():
        learner = Learner(TINY, random_weights(TINY, 1), ONE)
        await saved(checkpoints, learner, 1)
        learner.step(synthetic_rows(0), imitation, 1e-2)
        filler = fill(small_disk, but=left)
        with pytest.raises(CheckpointFailed, match=r"the disk of .*step-00000002-i0\.part is full") as met:
            await saved(checkpoints, learner, 2)
        assert NO_ROOM.search(str(met.value)), "its supervisor waits for room"
        assert os.listdir(small_disk / "checkpoints") == ["latest-i0.json", "step-00000001-i0"]
        filler.unlink()
        await saved(checkpoints, learner, 2)
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.name == "step-00000002-i0"
        other = Learner(TINY, random_weights(TINY, 9), ONE)
        other.restore(newest)
        assert other.step(synthetic_rows(1), imitation, 1e-2) == learner.step(synthetic_rows(1), imitation, 1e-2)


async def saved(checkpoints: Checkpoints, learner: Learner, step: int) -> None:
    """A whole checkpoint, by the trainer's own way."""

    async def call(method: Any, *arguments: Any, **named: Any) -> Any:
        return method(learner, *arguments, **named)

    async def owned() -> None: ...

    async def nothing() -> frozenset[str]:
        return frozenset()

    saves = Saves(checkpoints, call, owned, nothing)
    await saves.begin(Cursor(step=step), {"cursor": cursor_values(Cursor(step=step))})
    await saves.settle()


async def test_weights_on_a_full_disk_say_so_and_go_out_when_there_is_room(small_disk: Path) -> None:
    rig = Rig(small_disk / "exports")
    rig.ranks.goes_on.set()
    async with rig.publications:
        filler = fill(small_disk)
        with pytest.raises(
            ExportFailed, match=rf"the disk of {small_disk}/exports/\S+ is full; free some space"
        ) as met:
            await rig.begin(1)
        assert NO_ROOM.search(str(met.value))
        filler.unlink()
        await rig.begin(1)
        await rig.publications.settle()
    assert [event.version for event in rig.log] == [1]
