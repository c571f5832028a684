"""Weight files are checked for everything that SGLang does not check, fetched once for all loaders of a machine,
and rebuilt from what changed."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tests.fakes.weights import Publications, version
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.tensors.files import TensorSpec
from turnlog.infra.tensors.fits import check_fits, model_shapes
from turnlog.infra.tensors.versions import (
    TURN,
    BaseMissing,
    ChecksumMismatch,
    DtypeMismatch,
    Held,
    QuantizedModel,
    ShapeMismatch,
    TensorsMismatch,
    Timer,
    TruncatedSafetensors,
    UnsafeName,
    Verification,
    WeightFolders,
    chain_of,
    seal,
)
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.types import BlobRef

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4)}
SHAPES = {"a": (2, 3), "b": (4,)}
CONTENT = save(TENSORS, {"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
async def event(blobs: MemoryBlobs, model: Path) -> WeightVersionPublished:
    return await version(TENSORS, 3, blobs, model)


def folder_of(tmp_path: Path, content: bytes) -> Path:
    folder = tmp_path / "fetched"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


async def verify(event: WeightVersionPublished, folder: Path) -> tuple[TensorSpec, ...]:
    verification = Verification(event, base=None)
    await verification.hash_file(folder / "model.safetensors")
    return verification.check()


async def test_what_the_trainer_exports_is_good(event: WeightVersionPublished, tmp_path: Path) -> None:
    check_fits(event, SHAPES)
    found = await verify(event, folder_of(tmp_path, CONTENT))
    assert {spec.name: spec.shape for spec in found} == SHAPES


@pytest.mark.parametrize("cut", [0, 7, 20, len(CONTENT) - 1])
async def test_a_file_cut_anywhere_is_truncated(event: WeightVersionPublished, tmp_path: Path, cut: int) -> None:
    with pytest.raises(TruncatedSafetensors):
        await verify(event, folder_of(tmp_path, CONTENT[:cut]))


@pytest.mark.parametrize(
    "content", [CONTENT + b"\0", struct.pack("<Q", 1 << 60) + CONTENT[8:]], ids=["bytes behind", "a header that lies"]
)
async def test_a_file_that_is_not_what_its_header_says_is_refused(
    event: WeightVersionPublished, tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(TruncatedSafetensors):
        await verify(event, folder_of(tmp_path, content))


async def test_a_version_of_another_model_is_refused_before_it_is_fetched(blobs: MemoryBlobs, model: Path) -> None:
    with pytest.raises(TensorsMismatch, match="the first is b"):
        check_fits(await version({"a": TENSORS["a"]}, 3, blobs, model), SHAPES)
    turned = {"a": TENSORS["a"].T.contiguous(), "b": TENSORS["b"]}
    with pytest.raises(ShapeMismatch, match=r"a is \(3, 2\)"):
        check_fits(await version(turned, 3, blobs, model), SHAPES)


async def test_a_version_fits_a_folder_of_the_hub_that_has_its_tensors_in_another_form(
    blobs: MemoryBlobs, model: Path
) -> None:
    """Experts of a layer in one tensor, a layer that predicts further tokens, an output layer that is the embedding."""
    experts = "model.layers.0.mlp.experts."
    stacked = {f"{experts}gate_up_proj": torch.ones(2, 6, 4), f"{experts}down_proj": torch.ones(2, 4, 3)}
    beside = {"model.layers.1.eh_proj.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(3, 4)}
    embedding = {"model.embed_tokens.weight": torch.ones(3, 4)}
    (model / "model.safetensors").write_bytes(save({**embedding, **stacked, **beside}))
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    parts = {"gate_proj": torch.ones(3, 4), "up_proj": torch.ones(3, 4), "down_proj": torch.ones(4, 3)}
    exported = {f"{experts}{at}.{part}.weight": matrix for at in (0, 1) for part, matrix in parts.items()} | embedding
    check_fits(await version(exported, 3, blobs, model), model_shapes(model))
    whole = dict(exported)
    del exported[f"{experts}1.up_proj.weight"]
    with pytest.raises(TensorsMismatch, match=r"1 tensors .*experts\.1\.up_proj"):
        check_fits(await version(exported, 4, blobs, model), model_shapes(model))
    (model / "model.safetensors").write_bytes(
        save({name: one.clone() for name, one in exported.items()})
    )  # as transformers writes it, but for one matrix
    with pytest.raises(TensorsMismatch, match=r"1 tensors .*experts\.1\.up_proj"):
        check_fits(await version(embedding | stacked, 5, blobs, model), model_shapes(model))
    (model / "model.safetensors").write_bytes(save({name: one.clone() for name, one in whole.items()}))
    check_fits(await version(embedding | stacked, 6, blobs, model), model_shapes(model))


async def test_a_version_for_engines_that_loaded_quantized_weights_is_refused_with_the_remedy(
    blobs: MemoryBlobs, model: Path
) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    quantized = {f"{experts}_{part}": torch.ones(2, 2, dtype=torch.uint8) for part in ("blocks", "scales")}
    (model / "model.safetensors").write_bytes(save(quantized))
    event = await version({experts: torch.ones(2, 2, 2)}, 3, blobs, model)
    with pytest.raises(QuantizedModel, match=r"down_proj_blocks.*let \[model\] path be a folder in bfloat16"):
        check_fits(event, model_shapes(model))


async def test_a_tensor_that_the_files_lack_is_named(event: WeightVersionPublished, tmp_path: Path) -> None:
    with pytest.raises(TensorsMismatch, match="the first is b"):
        await verify(event, folder_of(tmp_path, save({"a": TENSORS["a"]})))


async def test_another_dtype_than_published_is_refused_and_each_tensor_may_have_its_own(
    event: WeightVersionPublished, blobs: MemoryBlobs, model: Path, tmp_path: Path
) -> None:
    mixed = {"a": TENSORS["a"].bfloat16(), "b": TENSORS["b"]}
    folder = folder_of(tmp_path, save(mixed))
    both = await version(mixed, 3, blobs, model)
    assert (both.dtype, both.dtypes) == ("bfloat16+float32", {"a": "bfloat16", "b": "float32"})
    assert len(await verify(both, folder)) == 2
    with pytest.raises(DtypeMismatch, match="a is BF16, the event says float32"):
        await verify(event, folder)


async def test_a_flipped_bit_is_found(event: WeightVersionPublished, tmp_path: Path) -> None:
    flipped = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(ChecksumMismatch, match="b is"):
        await verify(event, folder_of(tmp_path, flipped))


class Machine:
    """One disk, and a store that counts."""

    def __init__(self, directory: Path, blobs: MemoryBlobs, *, patience_s: float = 5.0) -> None:
        self.directory, self.folders = directory, WeightFolders(directory, blobs, patience_s=patience_s)

    async def held(self, *chain: WeightVersionPublished) -> Held:
        return await self.folders.obtain_folder(chain, Timer())

    @property
    def there(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if path.is_dir())


class Counting(MemoryBlobs):
    """Says how many files were fetched."""

    fetched = 0

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        self.fetched += 1
        await asyncio.sleep(0)
        await super().get_file(ref, path)


async def test_a_file_name_cannot_leave_the_folder(event: WeightVersionPublished, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "weights", MemoryBlobs())
    with pytest.raises(UnsafeName):
        await machine.held(dataclasses.replace(event, files=(WeightFile("../x", BlobRef("0" * 64, 0)),)))
    assert machine.there == []


async def test_loaders_of_a_machine_share_one_download(model: Path, tmp_path: Path) -> None:
    blobs = Counting()
    event = await version(TENSORS, 3, blobs, model)
    machines = [Machine(tmp_path / "weights", blobs) for _ in range(3)]
    found = await asyncio.gather(*(machine.held(event) for machine in machines))
    assert blobs.fetched == len(event.files)
    assert len({held.path for held in found}) == 1
    assert model_shapes(found[0].path) == SHAPES


async def test_two_versions_stay_and_those_that_somebody_holds(blobs: MemoryBlobs, model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "weights", blobs)
    held = [await machine.held(await version(TENSORS, number, blobs, model)) for number in (8, 9, 10)]
    assert len(machine.there) == 3
    for one in held:
        one.release()
    last = await machine.held(await version(TENSORS, 11, blobs, model))
    assert machine.there == sorted([held[2].path.name, last.path.name])


async def test_what_a_dead_loader_left_half_done_goes(
    event: WeightVersionPublished, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "weights", blobs)
    (machine.directory / "2-left.part").mkdir()
    held = await machine.held(event)
    assert machine.there == [held.path.name]


async def test_a_loader_that_stopped_while_it_fetched_holds_no_other_up(
    event: WeightVersionPublished, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "weights", blobs, patience_s=0.2)
    with (machine.directory / TURN).open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert model_shapes((await machine.held(event)).path) == SHAPES


def matrix(step: int) -> dict[str, torch.Tensor]:
    large = torch.randn(100, 100, generator=torch.Generator().manual_seed(1))
    return {"a": large * (1 + 1e-3 * step), "b": torch.ones(4)}


class Chained:
    """Versions 0 to 3 of a trainer, each but the first what changed."""

    def __init__(self, events: list[WeightVersionPublished], blobs: Counting) -> None:
        self.blobs, self.known = blobs, {event.version: event for event in events}

    def chain(self, number: int) -> list[WeightVersionPublished]:
        return list(chain_of(self.known[number], self.known))

    def fetched(self) -> int:
        """Files since it was asked last."""
        count, self.blobs.fetched = self.blobs.fetched, 0
        return count


@pytest.fixture
async def chained(model: Path, tmp_path: Path) -> Chained:
    blobs = Counting()
    trainer = Publications(blobs, model, tmp_path / "exports", chain=10)
    return Chained([await trainer.version(matrix(number), number) for number in range(4)], blobs)


def holds(held: Held, step: int) -> bool:
    found = load_file(held.path / "model.safetensors")
    return all(torch.equal(found[name], tensor) for name, tensor in matrix(step).items())


async def test_a_version_is_rebuilt_from_the_newest_base_that_is_there(chained: Chained, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "weights", chained.blobs)
    first = await machine.held(*chained.chain(1))
    assert holds(first, 1)
    assert chained.fetched() == 4
    last = await machine.held(*chained.chain(3))
    assert holds(last, 3)
    assert chained.fetched() == 4
    assert sorted(path.name for path in last.path.iterdir()) == [".verified", "config.json", "model.safetensors"]


async def test_without_a_base_the_newest_full_version_is_fetched_and_what_changed_since(
    chained: Chained, tmp_path: Path
) -> None:
    held = await Machine(tmp_path / "weights", chained.blobs).held(*chained.chain(3))
    assert holds(held, 3)
    assert chained.fetched() == 8


def altered(held: Held) -> None:
    file = held.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    held.release()


async def test_weights_that_were_altered_on_disk_are_neither_loaded_nor_built_upon(
    chained: Chained, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "weights", chained.blobs)
    altered(await machine.held(*chained.chain(2)))
    chained.fetched()
    again = await machine.held(*chained.chain(2))
    assert holds(again, 2)
    assert chained.fetched() == 2, "the base of before is whole"
    altered(again)
    assert holds(await machine.held(*chained.chain(3)), 3)
    assert chained.fetched() == 4


async def test_a_folder_of_another_run_that_had_the_number_is_not_taken(
    blobs: MemoryBlobs, model: Path, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "weights", blobs)
    (await machine.held(await version(TENSORS, 3, blobs, model, run_id="before"))).release()
    held = await machine.held(await version({**TENSORS, "b": TENSORS["b"] + 1}, 3, blobs, model))
    assert torch.equal(load_file(held.path / "model.safetensors")["b"], TENSORS["b"] + 1)


async def test_a_base_whose_bytes_are_wrong_though_nobody_touched_it_is_fetched_anew(
    chained: Chained, tmp_path: Path
) -> None:
    machine = Machine(tmp_path / "weights", chained.blobs)
    held = await machine.held(*chained.chain(2))
    altered(held)
    seal(held.path, chained.known[2].event_id)
    chained.fetched()
    assert holds(await machine.held(*chained.chain(3)), 3)
    assert chained.fetched() == 2 + 8


async def test_a_difference_from_weights_that_nobody_knows_is_refused_by_name(chained: Chained) -> None:
    del chained.known[1]
    with pytest.raises(BaseMissing, match="version 3 builds on version 2 \\(delta of 1\\)"):
        chained.chain(3)
    with pytest.raises(BaseMissing, match="strange"):
        chain_of(dataclasses.replace(chained.known[0], kind="strange"), chained.known)


async def test_a_difference_that_is_another_versions_is_refused(chained: Chained, tmp_path: Path) -> None:
    wrong = dataclasses.replace(chained.known[3], files=chained.known[2].files)
    machine = Machine(tmp_path / "weights", chained.blobs)
    with pytest.raises(ChecksumMismatch, match="version 3: a is"):
        await machine.held(*chained.chain(2), wrong)
    assert not list(machine.directory.glob("3-*"))
