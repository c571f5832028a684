"""Images of a policy that sees: rows that have some, and transformers' own tower, frozen, on the first pipeline stage.

What the tower says of an image stands in place of the embeddings of its tokens. Positions have three axes, frame, row
and column, which rotate pairs of a head's dimensions each: text moves along all three at once, an image's tokens stand
in a plane of one frame, and what comes behind it goes on where its longer side ended (M-RoPE; Qwen2-VL,
arXiv 2409.12191, 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.shape import ModelShape, tower_json


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image of a row, as the model's image processor lays it out."""

    sha256: str
    position: int
    """Of its first token in the row."""
    rows: int
    """Of tokens."""
    columns: int
    pixels: NDArray[np.float32]
    """[patches, values of one], the patches of a token behind one another"""

    @property
    def tokens(self) -> int:
        """How many it takes."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PicturedRows(BatchRows):
    """Rows with their images."""

    pictures: tuple[tuple[Picture, ...], ...]
    """[n] by position; none of those whose first token a draw has cut off."""

    def among(self, kept: NDArray[np.bool_]) -> PicturedRows:
        """See BatchRows.among."""
        found = BatchRows.among(self, kept)
        return replace(found, pictures=tuple(self.pictures[row] for row in np.flatnonzero(kept)))


def pictured(rows: BatchRows, pictures: Sequence[Sequence[Picture]]) -> PicturedRows:
    """`pictures`: of each row, by position."""
    return PicturedRows(**rows.columns(), pictures=tuple(map(tuple, pictures)))


def axes(length: int, pictures: Sequence[Picture]) -> NDArray[np.int64]:
    """[length, 3] positions of a row's tokens: frame, row, column."""
    parts: list[NDArray[np.int64]] = []
    at = shown = 0
    for picture in pictures:
        text = picture.position - at
        parts.append(np.repeat(np.arange(shown, shown + text)[:, None], 3, 1))
        plane = np.indices((1, picture.rows, picture.columns)).reshape(3, -1).T
        parts.append(plane + shown + text)
        shown += text + max(picture.rows, picture.columns)
        at = picture.position + picture.tokens
    parts.append(np.repeat(np.arange(shown, shown + max(0, length - at))[:, None], 3, 1))
    return np.concatenate(parts)[:length]


@dataclass(frozen=True, slots=True)
class Shown:
    """The images of a microbatch, each once."""

    pixels: torch.Tensor
    """[patches, values] float32"""
    grids: torch.Tensor
    """[images, 3] int64: frames, rows and columns of patches"""


def shown(
    rows: PicturedRows, microbatch: Sequence[int], positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Shown | None]:
    """Of rows of so many positions: their axes [b, s, 3], which of the images' features stands at each [b, s], counted
    from 1 (0: the token's own embedding), and the images."""
    placed = np.zeros((len(microbatch), positions, 3), np.int64)
    features = np.zeros((len(microbatch), positions), np.int64)
    first: dict[str, int] = {}
    each: list[Picture] = []
    held = 1
    for entry, row in enumerate(microbatch):
        placed[entry] = axes(positions, rows.pictures[row])
        for picture in rows.pictures[row]:
            if picture.sha256 not in first:
                first[picture.sha256] = held
                each.append(picture)
                held += picture.tokens
            there = features[entry, picture.position : picture.position + picture.tokens]
            there[:] = first[picture.sha256] + np.arange(len(there))
    laid = (torch.from_numpy(placed).to(device), torch.from_numpy(features).to(device))
    if not each:
        return *laid, None
    pixels = torch.from_numpy(np.concatenate([picture.pixels for picture in each])).to(device)
    sides = [round((len(picture.pixels) / picture.tokens) ** 0.5) for picture in each]  # patches of a token's side
    grids = [(1, one.rows * side, one.columns * side) for one, side in zip(each, sides, strict=True)]
    return *laid, Shown(pixels, torch.tensor(grids, device=device))


def tower(shape: ModelShape, dtype: torch.dtype) -> Any:
    """transformers' module, without weights that mean something; it takes no gradient."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    assert shape.vision is not None
    config = Qwen2_5_VLVisionConfig(**tower_json(shape.vision, shape.hidden))
    made: Any = Qwen2_5_VisionTransformerPretrainedModel
    return made._from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False).eval()


class Microbatch(Protocol):
    """What a forward pass takes."""

    @property
    def features(self) -> torch.Tensor | None:
        """See `shown`."""
        ...

    @property
    def images(self) -> Shown | None:
        """Those that it shows, if any."""
        ...


class Sight:
    """The embedding of the first pipeline stage, with images in it."""

    def __init__(self, model: Any) -> None:
        self._tower = model.vision
        self.microbatch: Microbatch | None = None
        """The one that the next forward pass takes."""
        model.embedding.register_forward_hook(self._see)

    def _see(self, _: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        """[s, b, h], of sequence-parallel ranks each its share of s."""
        batch = self.microbatch
        if batch is None or batch.images is None or batch.features is None:
            return embedded
        with torch.no_grad():
            found = self._tower(batch.images.pixels.to(embedded.dtype), batch.images.grids).pooler_output
        places = batch.features.transpose(0, 1).contiguous()  # what is made of it lies as it does, and stages send it
        if embedded.size(0) < places.size(0):
            ranks = mcore.parallel_state.get_tensor_model_parallel_world_size()
            places = places.chunk(ranks)[mcore.parallel_state.get_tensor_model_parallel_rank()]
        return torch.where((places > 0)[..., None], found[(places - 1).clamp(min=0)], embedded)
