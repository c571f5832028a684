"""Each rank writes, hashes, compares and uploads its own files of a version, beside training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.batches import synthetic_rows
from turnlog.infra.blobs import StoreUnavailable
from turnlog.infra.s3 import S3Blobs
from turnlog.schemas.types import BlobRef
from turnlog.settings import StoreSettings
from turnlog.trainer import ExportFailed
from turnlog.trainer.checkpoints.exports import ExportedVersion, Exports
from turnlog.trainer.checkpoints.places import RunBlobs
from turnlog.trainer.export import WeightExport
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, imitation
from turnlog.trainer.warm_start import random_weights


@dataclass(frozen=True)
class SlowBlobs(RunBlobs):
    """Uploads end once they are let go on."""

    settings: StoreSettings = field(default_factory=StoreSettings)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def put_files(self, files: Mapping[Path, str], folder: str) -> dict[str, BlobRef]:
        self.goes_on.wait()
        return {path.name: BlobRef(sha256 or "0" * 64, path.stat().st_size) for path, sha256 in files.items()}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def learner_with(exports: Exports) -> Learner:
    return Learner(TINY, random_weights(TINY, 1), LearnerOptions(), exports=exports)


def finished(learner: Learner) -> ExportedVersion:
    done = learner.finish_export(True)
    assert done is not None
    return done


def test_a_step_is_taken_while_files_go_out_and_they_hold_the_weights_before_it(tmp_path: Path) -> None:
    store = SlowBlobs()
    learner = learner_with(Exports(store, chain=1))
    before = learner.export()
    learner.begin_export(tmp_path / "exports" / "0")
    assert not learner.step(synthetic_rows(0), imitation, 1e-2).skipped
    assert learner.find_export() is None
    assert learner.finish_export(False) is None
    store.goes_on.set()
    assert [file.name for file in finished(learner).stored] == ["model.safetensors"]
    held = load_file(tmp_path / "exports" / "0" / "model.safetensors")
    assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())


def test_a_version_after_another_holds_what_changed_and_the_older_files_are_gone(tmp_path: Path) -> None:
    store = SlowBlobs()
    store.goes_on.set()
    learner = learner_with(Exports(store, chain=1))
    kinds = []
    for version in range(3):
        learner.begin_export(tmp_path / "exports" / str(version), "merged", version)
        done = finished(learner)
        kinds.append([file.name for file in done.stored])
        assert (done.difference is None) == (version == 0)
        assert done.difference is None or done.difference.base == version - 1
        assert done.written.checksums == learner.checksums("merged")
    assert kinds == [["model.safetensors"], ["model.safetensors.delta"], ["model.safetensors"]]
    assert [path.relative_to(tmp_path) for path in sorted(tmp_path.rglob("*.*"))] == [
        Path("exports/2/model.safetensors")
    ]


async def test_files_are_in_the_folder_of_the_run_and_without_a_chain_none_stays_on_disk(
    tmp_path: Path, store: StoreSettings
) -> None:
    learner = learner_with(Exports(RunBlobs(store), chain=0))
    before = learner.export()

    def export() -> ExportedVersion:
        learner.begin_export(tmp_path / "exports" / "0", "merged", 0, "owned/a/prefix=/run=r")
        return finished(learner)

    (file,) = (await asyncio.to_thread(export)).stored
    blobs = S3Blobs(store)
    blobs.folder = "owned/a/prefix=/run=r"
    await blobs.get_file(file.blob, tmp_path / file.name)
    await blobs.close()
    held = load_file(tmp_path / file.name)
    assert all(torch.equal(tensor, held[name]) for name, tensor in before.items())
    assert not list((tmp_path / "exports").iterdir())


def test_a_store_that_is_away_is_named_and_the_learner_goes_on(tmp_path: Path) -> None:
    learner = learner_with(Exports(RunBlobs(StoreSettings(endpoint="http://127.0.0.1:9", secret_key="key")), chain=0))
    learner.begin_export(tmp_path / "exports" / "0")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        learner.finish_export(True)
    assert not learner.step(synthetic_rows(0), imitation, 1e-2).skipped


def test_a_full_disk_fails_an_export_and_leaves_no_file(tmp_path: Path) -> None:
    learner = learner_with(Exports(None, chain=0))
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(ExportFailed, match=r"the disk of .* is full"):
        learner.begin_export(tmp_path)
    assert not tmp_path.exists()
    assert learner.export_files(tmp_path) is not None


def test_files_of_an_earlier_generation_are_removed(tmp_path: Path) -> None:
    store = SlowBlobs()
    store.goes_on.set()
    (tmp_path / "exports" / "7-x").mkdir(parents=True)
    learner = learner_with(Exports(store, chain=1))
    learner.begin_export(tmp_path / "exports" / "0")
    finished(learner)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["0"]


@pytest.mark.parametrize("limit", [1 << 16, 1 << 20])
def test_digests_do_not_depend_on_buckets(limit: int) -> None:
    learner = learner_with(Exports(None, chain=0))
    assert WeightExport(learner.policy.model, TINY, limit=limit).digests() == learner.plan_export().digests()
