"""A checkpoint is written while training goes on, and is there whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from turnlog.trainer import CheckpointFailed, Superseded
from turnlog.trainer.checkpoints.cursor import Checkpoints
from turnlog.trainer.checkpoints.places import FolderPlace
from turnlog.trainer.checkpoints.saves import Saves
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor

COMMON = {"cursor": {"step": 4}}


class Writing:
    """Ranks that write what they are given when the test says so."""

    def __init__(self) -> None:
        self.parts: list[Path] = []
        self.written = False

    async def call(self, method: Any, *arguments: Any, **_: Any) -> Any:
        if method is Learner.begin_save:
            part, common, _ = arguments
            self.parts.append(part)
            (part / "content").write_text(str(common))
            self.written = False
            return None
        assert method is Learner.finish_save
        return {} if self.written or arguments[0] else None


async def owned() -> None: ...


async def nothing() -> frozenset[str]:
    return frozenset()


def claimed(directory: Path) -> Checkpoints:
    checkpoints = Checkpoints(FolderPlace(directory), keep=3)
    checkpoints.claim(0)
    return checkpoints


async def sealed(saves: Saves, step: int) -> None:
    """Look until the checkpoint of `step` has its name, as the loop does between its steps."""
    while saves.saved is None or saves.saved.step < step:
        await saves.look()
        if saves._open is not None and saves._open.sums is not None:
            await saves._open.sums


async def test_steps_go_on_until_every_rank_has_written_and_then_it_counts(tmp_path: Path) -> None:
    ranks, checkpoints = Writing(), claimed(tmp_path)
    saves = Saves(checkpoints, ranks.call, owned, nothing)
    await saves.begin(Cursor(step=4), COMMON)
    for _ in range(3):
        await saves.look()
    assert (saves.saved, checkpoints.newest()) == (None, None)
    ranks.written = True
    await sealed(saves, 4)
    folder = checkpoints.newest()
    assert folder is not None
    assert (saves.saved, folder.name) == (Cursor(step=4), "step-00000004-i0")
    assert FolderPlace(tmp_path).all_of(folder.name) == folder
    assert saves.waited_s() > 0
    assert saves.waited_s() == 0


async def test_the_next_one_waits_until_the_one_before_it_is_whole(tmp_path: Path) -> None:
    ranks, checkpoints = Writing(), claimed(tmp_path)
    saves = Saves(checkpoints, ranks.call, owned, nothing)
    await saves.begin(Cursor(step=4), COMMON)
    await saves.begin(Cursor(step=8), COMMON)
    assert saves.saved == Cursor(step=4)
    assert [part.name for part in ranks.parts] == ["step-00000004-i0.part", "step-00000008-i0.part"]
    await saves.settle()
    newest = Checkpoints(FolderPlace(tmp_path), keep=3).newest()
    assert newest is not None
    assert newest.name == "step-00000008-i0"


async def test_one_that_lost_the_run_while_it_wrote_seals_nothing(tmp_path: Path) -> None:
    async def lost() -> None:
        raise Superseded("another one has the fence")

    ranks, checkpoints = Writing(), claimed(tmp_path)
    saves = Saves(checkpoints, ranks.call, lost, nothing)
    await saves.begin(Cursor(step=4), COMMON)
    with pytest.raises(Superseded):
        await saves.settle()
    assert checkpoints.newest() is None


async def test_what_the_disk_refuses_ends_the_trainer_with_its_reason(tmp_path: Path) -> None:
    ranks, checkpoints = Writing(), claimed(tmp_path)
    saves = Saves(checkpoints, ranks.call, owned, nothing)
    await saves.begin(Cursor(step=4), COMMON)
    shutil.rmtree(ranks.parts[0])
    with pytest.raises(CheckpointFailed, match=r"step-00000004-i0\.part could not be written"):
        await saves.settle()
    assert checkpoints.newest() is None


def steps(folder: Path) -> set[int]:
    return {int(path.name.split("-")[1]) for path in folder.glob("step-*-i0")}


async def test_what_evaluations_need_stays_beside_the_newest(tmp_path: Path) -> None:
    async def best() -> frozenset[str]:
        return frozenset({"step-00000002-i0", "step-00000099-i0"})

    ranks, checkpoints = Writing(), claimed(tmp_path)
    saves = Saves(checkpoints, ranks.call, owned, best)
    for step in range(1, 8):
        await saves.begin(Cursor(step=step), {"cursor": {"step": step}})
    await saves.settle()
    assert steps(tmp_path) == {2, 5, 6, 7}
