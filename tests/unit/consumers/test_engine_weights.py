"""Weight files are checked for everything that SGLang does not check."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from turnlog.consumers.loader import (
    ChecksumMismatch,
    DtypeMismatch,
    ShapeMismatch,
    TensorsMismatch,
    TruncatedSafetensors,
    UnsafeName,
    fetch,
    model_shapes,
    parse_safetensors,
    verify,
    write,
)
from turnlog.infra.blobs import MemoryBlobs
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.types import BlobRef
from turnlog.trainer.checkpoint import Cursor
from turnlog.trainer.weights import published

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4)}
SHAPES = {"a": (2, 3), "b": (4,)}
CONTENT = save(TENSORS, {"format": "pt"})


def event(tensors: dict[str, torch.Tensor] = TENSORS) -> WeightVersionPublished:
    return published(tensors, (), run_id="run", version=3, incarnation=0, cursor=Cursor(), checkpoint=None)


def test_what_the_trainer_exports_is_good() -> None:
    verify(event(), {"model.safetensors": CONTENT, "config.json": b"{}"}, SHAPES)


@pytest.mark.parametrize("cut", [0, 7, 20, len(CONTENT) - 1])
def test_a_file_cut_anywhere_is_truncated(cut: int) -> None:
    with pytest.raises(TruncatedSafetensors):
        parse_safetensors("model.safetensors", CONTENT[:cut])


def test_bytes_behind_the_data_are_refused() -> None:
    with pytest.raises(TruncatedSafetensors):
        parse_safetensors("model.safetensors", CONTENT + b"\0")


def test_a_header_that_lies_about_its_length_is_refused() -> None:
    with pytest.raises(TruncatedSafetensors):
        parse_safetensors("model.safetensors", struct.pack("<Q", 1 << 60) + CONTENT[8:])


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(TensorsMismatch, match="the first is b"):
        verify(event({"a": TENSORS["a"]}), {"model.safetensors": save({"a": TENSORS["a"]})}, SHAPES)


def test_a_wrong_shape_is_named() -> None:
    turned = {"a": TENSORS["a"].T.contiguous(), "b": TENSORS["b"]}
    with pytest.raises(ShapeMismatch, match=r"a is \(3, 2\)"):
        verify(event(turned), {"model.safetensors": save(turned)}, SHAPES)


def test_another_dtype_than_published_is_refused() -> None:
    with pytest.raises(DtypeMismatch):
        verify(dataclasses.replace(event(), dtype="bfloat16"), {"model.safetensors": CONTENT}, SHAPES)


def test_a_flipped_bit_is_found() -> None:
    flipped = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(ChecksumMismatch, match="b is"):
        verify(event(), {"model.safetensors": flipped}, SHAPES)


async def test_a_file_name_cannot_leave_the_folder() -> None:
    ref = BlobRef("0" * 64, 0)
    with pytest.raises(UnsafeName):
        await fetch(dataclasses.replace(event(), files=(WeightFile("../x", ref),)), MemoryBlobs())


def test_two_versions_stay_on_disk(tmp_path: Path) -> None:
    folders = [write({"model.safetensors": CONTENT}, tmp_path, version) for version in (8, 9, 10)]
    assert set(tmp_path.iterdir()) == set(folders[1:])
    assert model_shapes(folders[2]) == SHAPES


def test_two_loaders_of_an_engine_never_share_a_folder(tmp_path: Path) -> None:
    first, second = (write({"model.safetensors": CONTENT}, tmp_path, 3) for _ in range(2))
    assert first != second
    assert model_shapes(first) == model_shapes(second) == SHAPES
