"""Which checkpoint counts: complete or absent, newest by marker, closed to zombies; in a folder and in a store."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from turnlog.infra.blobs import MANIFEST, Blobs
from turnlog.infra.s3 import S3Blobs
from turnlog.schemas.types import BlobRef
from turnlog.settings import SettingsError, StoreSettings
from turnlog.trainer import CheckpointDamaged, CheckpointUnusable, Superseded
from turnlog.trainer.checkpoints.cursor import Checkpoints, bring, check_not_stored, cursor_values, hand_on
from turnlog.trainer.checkpoints.places import (
    CACHE,
    MARKERS,
    SUMS,
    CheckpointStorage,
    FolderPlace,
    Marker,
    StorePlace,
    check_shards,
    file_sha256,
)
from turnlog.trainer.checkpoints.state import regroup_optimizers
from turnlog.trainer.manifests import Cursor


@dataclass
class Ground:
    """Where the checkpoints of a run lie."""

    place: Callable[[], CheckpointStorage]
    """As another process sees it, on a machine of its own where machines need not share a disk."""
    write: Callable[[str, bytes | None], None]
    """Give a file of a checkpoint (NAME/FILE) that content, or remove it, behind everybody's back."""

    def opened(self, incarnation: int, keep: int = 3) -> Checkpoints:
        checkpoints = Checkpoints(self.place(), keep=keep)
        checkpoints.claim(incarnation)
        return checkpoints

    def newest(self) -> str | None:
        folder = Checkpoints(self.place(), keep=3).newest()
        return folder.name if folder else None


def in_store(settings: StoreSettings, work: Callable[[Blobs], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        blobs = S3Blobs(settings)
        try:
            return await work(blobs)
        finally:
            await blobs.close()

    return asyncio.run(call())


@pytest.fixture(params=["folder", "s3"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Ground:
    if request.param == "folder":

        def written(file: str, content: bytes | None) -> None:
            path = tmp_path / file
            path.unlink() if content is None else path.write_bytes(content)

        return Ground(lambda: FolderPlace(tmp_path), written)
    settings: StoreSettings = request.getfixturevalue("store")
    prefix = f"owned/{uuid4().hex}/checkpoints"

    def put(file: str, content: bytes | None) -> None:
        name = f"{prefix}/{file}"
        in_store(settings, lambda b: b.remove(name) if content is None else b.put_named(name, content))

    return Ground(lambda: StorePlace(settings, prefix, tmp_path / uuid4().hex), put)


@pytest.fixture
def stored(store: StoreSettings, tmp_path: Path) -> StorePlace:
    """An empty one."""
    return StorePlace(store, f"owned/{uuid4().hex}/checkpoints", tmp_path / CACHE)


def begun(checkpoints: Checkpoints, step: int, said: str = "") -> Path:
    part = checkpoints.begin(Cursor(step=step))
    (part / "content").write_text(said or str(step))
    (part / "__0_0.distcp").write_text("tensors")
    return part


def save(checkpoints: Checkpoints, step: int, said: str = "") -> str:
    part = begun(checkpoints, step, said)
    checkpoints.finish(part, {}, {})
    return checkpoints.seal(part)


def test_a_run_starts_without_one(ground: Ground) -> None:
    assert ground.opened(0).newest() is None


def test_the_newest_is_the_one_sealed_last(ground: Ground) -> None:
    first = ground.opened(0)
    save(first, 0)
    name = save(first, 10)
    folder = ground.opened(1).newest()
    assert folder is not None
    assert folder.name == name
    assert (folder / "content").read_text() == "10"


def test_a_checkpoint_killed_before_it_was_sealed_does_not_count_and_goes(ground: Ground) -> None:
    first = ground.opened(0)
    name = save(first, 0)
    first.finish(begun(first, 10), {}, {})
    assert ground.opened(1).newest() is not None
    assert ground.newest() == name
    with pytest.raises(CheckpointDamaged, match=r"step-00000010-i0.* is gone"):
        ground.place().open_folder("step-00000010-i0")


def test_one_that_is_whole_counts_although_its_writer_was_killed_before_it_said_so(ground: Ground) -> None:
    first = ground.opened(0)
    save(first, 0)
    place = ground.place()
    part = begun(first, 10)
    place.store_files(part, {}, {})
    assert place.seal(part) == "step-00000010-i0" == ground.newest()


def test_a_sealed_checkpoint_is_not_touched_when_its_step_is_saved_again(tmp_path: Path) -> None:
    """A kill between its removal and the new one's name would leave the marker with nothing."""
    first = claimed(FolderPlace(tmp_path))
    name = save(first, 10)
    assert save(first, 10, "again") == name
    assert first.newest() == tmp_path / name
    assert (tmp_path / name / "content").read_text() == "10"


def test_a_fork_leaves_the_checkpoints_of_a_run_that_has_begun(tmp_path: Path) -> None:
    own = claimed(FolderPlace(tmp_path))
    name = save(own, 10)
    source = tmp_path / name
    with pytest.raises(CheckpointUnusable, match="a run that has already started"):
        hand_on(source, tmp_path)
    assert own.newest() == source


def test_a_zombie_neither_begins_nor_seals(ground: Ground) -> None:
    zombie = ground.opened(0)
    name = save(zombie, 0)
    part = begun(zombie, 10)
    owner = ground.opened(1)
    if part.exists():  # where it was not removed by its successor
        zombie.finish(part, {}, {})
    with pytest.raises(Superseded):
        zombie.seal(part)
    with pytest.raises(Superseded):
        zombie.begin(Cursor(step=20))
    found = owner.newest()
    assert found is not None
    assert found.name == name == ground.newest()


def test_only_the_newest_stay(ground: Ground) -> None:
    checkpoints = ground.opened(0, keep=2)
    for step in (0, 2, 4):
        save(checkpoints, step)
    save(ground.opened(1, keep=2), 3)
    assert sorted(ground.place().names()) == ["step-00000003-i1", "step-00000004-i0"]
    assert [marker.incarnation for marker in ground.place().markers().values()] == [1]


def test_a_marker_without_its_checkpoint_says_what_to_do(ground: Ground) -> None:
    name = save(ground.opened(0), 0)
    ground.place().drop(name)
    with pytest.raises(CheckpointUnusable, match=f"which is gone, .*{re.escape(MARKERS)}"):
        ground.newest()


@pytest.mark.parametrize(
    "content", [b"", b'{"incarnation": 0, "fol', b"[]", b"{}", b'{"incarnation": 0, "folder": 3}', b"\xff"]
)
def test_a_marker_that_cannot_be_read_is_named(ground: Ground, content: bytes) -> None:
    place = ground.place()
    save(claimed(place), 0)
    (marker,) = place.markers()
    ground.write(marker, content)
    with pytest.raises(CheckpointUnusable, match=rf"{marker} does not say which checkpoint to continue from"):
        ground.newest()


def test_a_cursor_survives_as_plain_values() -> None:
    cursor = Cursor(next_batch=4, offset=17, step=4, draws=2)
    assert Cursor(**cursor_values(cursor)) == cursor  # type: ignore[arg-type]


def test_two_that_start_at_once_are_two_incarnations(ground: Ground) -> None:
    first, second = (Checkpoints(ground.place(), keep=3) for _ in range(2))
    assert (first.claim(4), second.claim(4)) == (4, 5)
    with pytest.raises(Superseded):
        first.begin(Cursor())


def test_of_many_that_claim_side_by_side_each_has_a_number_of_its_own(stored: StorePlace) -> None:
    places = [StorePlace(stored.settings, stored.prefix, stored.cache) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda place: Checkpoints(place, keep=3).claim(0), places))
    assert len(set(numbers)) == 6


def test_a_claim_that_was_killed_before_it_was_confirmed_names_nothing(stored: StorePlace) -> None:
    name = save(claimed(stored), 10)
    in_store(
        stored.settings,
        lambda blobs: blobs.put_named(
            f"{stored.prefix}/latest-i1-dead.json", b'{"incarnation": 1, "folder": null, "confirmed": false}'
        ),
    )
    third = Checkpoints(stored, keep=3)
    assert third.claim(0) == 2
    folder = third.newest()
    assert folder is not None
    assert folder.name == name


def claimed(place: CheckpointStorage) -> Checkpoints:
    checkpoints = Checkpoints(place, keep=3)
    checkpoints.claim(0)
    return checkpoints


def test_a_zombie_that_wakes_up_within_seal_changes_nothing_that_its_successor_goes_on_from(ground: Ground) -> None:
    owner: Checkpoints | None = None

    class Sleeping:
        """The place of one whose second look comes when it is too late."""

        def __init__(self, place: CheckpointStorage) -> None:
            self._place = place
            self.sleeps = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._place, name)

        def mark(self, marker: Marker) -> None:
            nonlocal owner
            if self.sleeps:
                owner = ground.opened(1)
            self._place.mark(marker)

    place = Sleeping(ground.place())
    zombie = Checkpoints(place, keep=1)
    zombie.claim(0)
    save(zombie, 0)
    part = begun(zombie, 10)
    zombie.finish(part, {}, {})
    place.sleeps = True
    with pytest.raises(Superseded):
        zombie.seal(part)
    assert owner is not None
    found = owner.newest()
    assert found is not None
    assert found.name == ground.newest()
    assert (found / "content").exists()


def test_the_marker_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    name = save(claimed(FolderPlace(tmp_path)), 10)
    shutil.move(tmp_path / "latest-i0.json", tmp_path / "latest.json")
    assert json.loads((tmp_path / "latest.json").read_text()) == {"incarnation": 0, "folder": name}
    later = Checkpoints(FolderPlace(tmp_path), keep=3)
    assert later.claim(0) == 1
    assert later.newest() == tmp_path / name


def test_an_optimizer_goes_on_whether_or_not_ranks_share_the_experts() -> None:
    """Megatron gives shared experts one of their own; shards are known by name, what is not sharded by place."""
    groups = [{"is_expert_parallel": False, "wd_mult": mult, "step": 3} for mult in (1.0, 0.0)]
    alone = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "all"}
    two = regroup_optimizers({**alone, 0: {"param_state": "a"}, 1: {"param_state": "b"}}, 2)
    assert two == {
        0: {"param_state": "a", **alone},
        1: {
            "param_state": "b",
            "optimizer": {"param_groups": [{**group, "is_expert_parallel": True} for group in groups]},
            "param_state_sharding_type": "all",
        },
    }
    own = {place: {name: one[name] for name in alone} for place, one in two.items()}
    assert regroup_optimizers({"param_state": "c", **own}, 1) == {"param_state": "c", **alone}
    assert regroup_optimizers(two, 2) is two
    assert regroup_optimizers(alone, 1) is alone


@pytest.mark.parametrize("damage", [b"2O", None], ids=["altered", "gone"])
def test_where_a_file_is_not_what_was_written_the_checkpoint_before_it_is_taken(
    ground: Ground, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    first = ground.opened(0)
    before, last = save(first, 10), save(first, 20)
    ground.write(f"{last}/content", damage)
    with pytest.raises(CheckpointDamaged, match=f"{last}/content"):
        ground.place().open_folder(last)
    found = ground.opened(1).newest()
    assert found is not None
    assert found.name == before == ground.newest()
    assert f"{last} are repeated" in caplog.text
    assert f"{last}/content" in caplog.text
    ground.write(f"{before}/content", b"1O")
    with pytest.raises(CheckpointUnusable, match=r"which is damaged, and there is no earlier one"):
        ground.opened(2)


def test_what_came_after_a_damaged_checkpoint_was_left_is_gone_on_from(ground: Ground) -> None:
    first = ground.opened(0)
    save(first, 10)
    ground.write(f"{save(first, 20)}/content", b"2O")
    assert save(ground.opened(1), 15) == ground.newest()


def test_a_checkpoint_of_a_release_that_kept_no_sums_is_taken_as_it_is(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    name = save(claimed(place), 10)
    (tmp_path / name / SUMS).unlink()
    assert Checkpoints(place, keep=3).newest() == tmp_path / name


def test_shards_are_hashed_by_the_ranks_that_write_them_and_verified_by_those_that_load_them(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    checkpoints = claimed(place)
    part = begun(checkpoints, 10)
    for rank in (1, 2):
        (part / f"__{rank}_0.distcp").write_text(f"tensors of {rank}")
    shards = sorted(part.glob("*.distcp"))
    stored = {path.name: BlobRef(file_sha256(path), path.stat().st_size) for path in shards}
    shards[1].write_text("altered")  # whoever reads it again sees another hash
    checkpoints.finish(part, stored, {})
    folder = tmp_path / checkpoints.seal(part)
    assert Checkpoints(place, keep=3).newest() == folder
    for rank in (0, 2):
        check_shards(folder, rank, 3)
    with pytest.raises(CheckpointDamaged, match=r"__1_0\.distcp was altered"):
        check_shards(folder, 1, 3)
    with pytest.raises(CheckpointDamaged, match=r"__1_0\.distcp was altered"):
        place.all_of(folder.name)


def test_sums_that_list_no_files_are_damage(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    checkpoints = claimed(place)
    before, last = save(checkpoints, 10), save(checkpoints, 20)
    (tmp_path / last / SUMS).write_bytes(b"\xffgarbage\n")
    with pytest.raises(CheckpointDamaged, match=f"{SUMS} does not list checksums of files"):
        place.open_folder(last)
    assert Checkpoints(place, keep=3).newest() == tmp_path / before


def test_a_shard_that_a_rank_finds_damaged_is_found_by_who_needs_it_and_the_one_before_is_taken_for_good(
    stored: StorePlace, tmp_path: Path
) -> None:
    first = claimed(stored)
    before, last = save(first, 10), save(first, 20)
    shard = f"{last}/__0_0.distcp"
    in_store(stored.settings, lambda blobs: blobs.put_named(f"{stored.prefix}/{shard}", b"Tensors"))
    there = StorePlace(stored.settings, stored.prefix, tmp_path / "elsewhere")
    second = Checkpoints(there, keep=3)
    second.claim(1)
    folder = second.newest()
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["content"], "shards are fetched where they are needed"
    with pytest.raises(CheckpointDamaged, match=shard) as damage:
        there.fetch_files(folder.name, ["__0_0.distcp"])
    second.condemn(folder.name, damage.value)
    taken = second.newest()
    assert taken is not None
    assert taken.name == before
    assert Checkpoints(there, keep=3).newest() == taken, "whoever comes next begins there, too"


def test_what_is_there_and_whole_is_not_fetched_again_and_what_is_not_is(stored: StorePlace) -> None:
    name = save(claimed(stored), 10)
    folder = stored.cache / name
    written = (folder / "__0_0.distcp").stat().st_mtime_ns
    stored.all_of(name)
    assert (folder / "__0_0.distcp").stat().st_mtime_ns == written
    (folder / "__0_0.distcp").write_text("Tensors")
    stored.all_of(name)
    assert (folder / "__0_0.distcp").read_text() == "tensors"


def test_a_manifest_names_every_file_and_where_the_checkpoint_stands(stored: StorePlace) -> None:
    checkpoints = claimed(stored)
    part = begun(checkpoints, 10)
    put = {"__0_0.distcp": stored.put(part, "__0_0.distcp")}
    checkpoints.finish(part, put, {"cursor": {"step": 10}})
    name = checkpoints.seal(part)
    content = in_store(stored.settings, lambda blobs: blobs.get_named(f"{stored.prefix}/{name}/{MANIFEST}"))
    said = json.loads(content)
    assert said["cursor"] == {"step": 10}
    assert said["files"] == {
        file: {"bytes": ref.size, "sha256": ref.sha256} for file, ref in stored.manifest(name).items()
    }
    assert {file: ref.size for file, ref in stored.manifest(name).items()} == {"__0_0.distcp": 7, "content": 2}
    assert checkpoints.checkpoint_address(name) == f"s3://{stored.settings.bucket}/{stored.prefix}/{name}"


def test_a_machine_keeps_the_files_of_the_last_two(stored: StorePlace) -> None:
    for name in ("step-00000001-i0", "step-00000002-i0", "step-00000003-i0"):
        stored.here(name, "step-00000002-i0")
    assert sorted(path.name for path in stored.cache.iterdir()) == ["step-00000002-i0", "step-00000003-i0"]


def test_a_run_whose_checkpoints_went_to_a_folder_goes_on_in_its_store_and_not_back_without_being_told(
    stored: StorePlace, tmp_path: Path
) -> None:
    check_not_stored(tmp_path)
    before = Checkpoints(FolderPlace(tmp_path), keep=3)
    before.claim(4)
    part = before.begin(Cursor(step=10))
    mcore_common(part, {"cursor": {"step": 10}})
    before.finish(part, {}, {})
    name = before.seal(part)
    bring(tmp_path, stored)
    bring(tmp_path, stored)
    after = Checkpoints(stored, keep=3)
    assert after.claim(0) == 5
    folder = after.newest()
    assert folder is not None
    assert (folder.name, after.checkpoint_address(name)) == (name, stored.checkpoint_address(name))
    save(after, 20)
    bring(tmp_path, stored)
    newest = after.newest()
    assert newest is not None
    assert newest.name == "step-00000020-i5"
    with pytest.raises(SettingsError, match=r"set trainer\.checkpoints to s3 again"):
        check_not_stored(tmp_path)


def mcore_common(folder: Path, common: dict[str, Any]) -> None:
    """The files of a Megatron checkpoint without tensors."""
    import torch

    torch.save({"common": common}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
