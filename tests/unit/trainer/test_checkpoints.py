"""Where checkpoints lie: complete or absent, newest by marker, closed to zombies."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from turnlog.trainer import CheckpointUnusable, Superseded
from turnlog.trainer.checkpoint import MARKERS, SUMS, Checkpoints, Cursor, check_files, cursor_values
from turnlog.trainer.checkpoints.state import regrouped


def opened(directory: Path, incarnation: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=keep)
    checkpoints.claim(incarnation)
    return checkpoints


def save(checkpoints: Checkpoints, step: int) -> Path:
    part = checkpoints.begin(Cursor(step=step))
    (part / "content").write_text(str(step))
    return checkpoints.seal(part)


def test_a_run_starts_without_one(tmp_path: Path) -> None:
    assert opened(tmp_path, 0).newest() is None


def test_the_newest_is_the_one_sealed_last(tmp_path: Path) -> None:
    first = opened(tmp_path, 0)
    save(first, 0)
    folder = save(first, 10)
    assert opened(tmp_path, 1).newest() == folder
    assert (folder / "content").read_text() == "10"


def test_a_checkpoint_killed_before_it_was_sealed_does_not_count(tmp_path: Path) -> None:
    first = opened(tmp_path, 0)
    folder = save(first, 0)
    part = first.begin(Cursor(step=10))
    second = opened(tmp_path, 1)
    assert second.newest() == folder
    assert not part.exists()


def test_a_sealed_checkpoint_is_not_touched_when_its_step_is_saved_again(tmp_path: Path) -> None:
    """A kill between its removal and the new one's name would leave the marker with nothing."""
    first = opened(tmp_path, 0)
    folder = save(first, 10)
    part = first.begin(Cursor(step=10, next_batch=12))
    (part / "content").write_text("again")
    assert first.seal(part) == folder
    assert (folder / "content").read_text() == "10"
    assert not part.exists()
    assert opened(tmp_path, 1).newest() == folder


def test_a_zombie_neither_begins_nor_seals(tmp_path: Path) -> None:
    zombie = opened(tmp_path, 0)
    save(zombie, 0)
    part = zombie.begin(Cursor(step=10))
    owner = opened(tmp_path, 1)
    newest = owner.newest()
    with pytest.raises(Superseded):
        zombie.seal(part)
    with pytest.raises(Superseded):
        zombie.begin(Cursor(step=20))
    assert owner.newest() == newest


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, 0, keep=2)
    for step in (0, 2, 4):
        save(checkpoints, step)
    checkpoints = opened(tmp_path, 1, keep=2)
    save(checkpoints, 3)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["step-00000003-i1", "step-00000004-i0"]


def test_a_marker_without_its_folder_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, 0)
    folder = save(checkpoints, 0)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointUnusable, match=re.escape(MARKERS)):
        checkpoints.newest()


def test_a_cursor_survives_as_plain_values() -> None:
    cursor = Cursor(next_batch=4, offset=17, step=4, draws=2)
    assert Cursor(**cursor_values(cursor)) == cursor  # type: ignore[arg-type]


def test_two_that_start_at_once_are_two_incarnations(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path, keep=3), Checkpoints(tmp_path, keep=3)
    assert (first.claim(4), second.claim(4)) == (4, 5)
    with pytest.raises(Superseded):
        first.begin(Cursor())


def test_a_zombie_that_wakes_up_within_seal_changes_nothing_that_its_successor_goes_on_from(tmp_path: Path) -> None:
    class Zombie(Checkpoints):
        """The one whose second look comes when it is too late."""

        sleeps = False

        def _mark(self, folder: str) -> None:
            nonlocal owner
            if self.sleeps:
                owner = opened(tmp_path, 1)
            super()._mark(folder)

    owner: Checkpoints | None = None
    zombie = Zombie(tmp_path, keep=1)
    zombie.claim(0)
    newest = save(zombie, 0)
    part = zombie.begin(Cursor(step=10))
    zombie.sleeps = True
    with pytest.raises(Superseded):
        zombie.seal(part)
    assert owner is not None
    assert owner.newest() == newest
    assert newest.is_dir()


def test_the_marker_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    folder = save(opened(tmp_path, 2), 10)
    shutil.move(tmp_path / "latest-i2.json", tmp_path / "latest.json")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"incarnation": 2, "folder": folder.name}
    later = Checkpoints(tmp_path, keep=3)
    assert later.claim(0) == 3
    assert later.newest() == folder


def test_an_optimizer_goes_on_whether_or_not_ranks_share_the_experts() -> None:
    """Megatron gives shared experts one of their own; shards are known by name, what is not sharded by place."""
    groups = [{"is_expert_parallel": False, "wd_mult": mult, "step": 3} for mult in (1.0, 0.0)]
    alone = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "all"}
    two = regrouped({**alone, 0: {"param_state": "a"}, 1: {"param_state": "b"}}, 2)
    assert two == {
        0: {"param_state": "a", **alone},
        1: {
            "param_state": "b",
            "optimizer": {"param_groups": [{**group, "is_expert_parallel": True} for group in groups]},
            "param_state_sharding_type": "all",
        },
    }
    own = {place: {name: one[name] for name in alone} for place, one in two.items()}
    assert regrouped({"param_state": "c", **own}, 1) == {"param_state": "c", **alone}
    assert regrouped(two, 2) is two
    assert regrouped(alone, 1) is alone


@pytest.mark.parametrize("damage", ["altered", "gone"])
def test_where_a_file_is_not_what_was_written_the_checkpoint_before_it_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path, 0)
    before, last = save(first, 10), save(first, 20)
    (last / "content").unlink() if damage == "gone" else (last / "content").write_text("2O")
    with pytest.raises(CheckpointUnusable, match=r"content (was altered|is gone)"):
        check_files(last)
    assert opened(tmp_path, 1).newest() == before
    assert f"{last.name} are taken again" in caplog.text
    assert str(last / "content") in caplog.text
    (before / "content").write_text("1O")
    with pytest.raises(CheckpointUnusable, match="which is damaged, and there is none before it"):
        opened(tmp_path, 2)


def test_what_came_after_a_damaged_checkpoint_was_left_is_gone_on_from(tmp_path: Path) -> None:
    first = opened(tmp_path, 0)
    save(first, 10)
    (save(first, 20) / "content").write_text("2O")
    second = opened(tmp_path, 1)
    again = save(second, 15)
    assert second.newest() == again == opened(tmp_path, 2).newest()


def test_a_checkpoint_of_a_release_that_kept_no_sums_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = save(opened(tmp_path, 0), 10)
    (folder / SUMS).unlink()
    assert opened(tmp_path, 1).newest() == folder
