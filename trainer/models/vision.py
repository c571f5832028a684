"""Images of a policy with vision: rows with images, and transformers' own tower, frozen, on the first pipeline stage.

The tower's features of an image replace the embeddings of its tokens; further ones may be added behind the decoder's
first layers. Positions have three axes, frame, row and column, which each rotate some pairs of a head's dimensions.
Text advances along all three at once; an image's tokens lie in a plane of one frame, and what follows continues where
its longer side ended (M-RoPE; Qwen2-VL, arXiv 2409.12191, 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.families.shape import VisionShape


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """An image of a row, preprocessed by the model's image processor."""

    sha256: str
    position: int
    """Index of its first token in the row."""
    rows: int
    """Height in tokens."""
    columns: int
    pixels: NDArray[np.float32]
    """[patches, values of a patch], the patches of a token adjacent."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PicturedRows(BatchRows):
    """Rows with their images."""

    pictures: tuple[tuple[RowImage, ...], ...]
    """[n] images by position; without those whose first token a rollout batch has cut off."""

    def among(self, kept: NDArray[np.bool_]) -> PicturedRows:
        """Return the rows of `kept`, with their images."""
        found = BatchRows.among(self, kept)
        return replace(found, pictures=tuple(self.pictures[row] for row in np.flatnonzero(kept)))


def attach_pictures(rows: BatchRows, pictures: Sequence[Sequence[RowImage]]) -> PicturedRows:
    """Return rows with images; `pictures` holds those of each row, by position."""
    return PicturedRows(**rows.columns(), pictures=tuple(map(tuple, pictures)))


def axes(length: int, pictures: Sequence[RowImage]) -> NDArray[np.int64]:
    """Return positions [length, 3] of a row's tokens: frame, row, column."""
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
class MicrobatchImages:
    """The images of a microbatch, each once."""

    pixels: torch.Tensor
    """[patches, values] float32."""
    grids: torch.Tensor
    """[images, 3] int64: frames, rows and columns of patches."""


def lay_out_images(
    rows: PicturedRows, microbatch: Sequence[int], positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, MicrobatchImages | None]:
    """Lay out the images of a microbatch whose rows have `positions` positions.

    Return the axes [b, s, 3]; 1 + the index of the image feature at each position [b, s], with 0 for the token's own
    embedding; and the images.
    """
    placed = np.zeros((len(microbatch), positions, 3), np.int64)
    features = np.zeros((len(microbatch), positions), np.int64)
    first: dict[str, int] = {}
    each: list[RowImage] = []
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
    return *laid, MicrobatchImages(pixels, torch.tensor(grids, device=device))


class VisionMicrobatch(Protocol):
    """The part of a microbatch that vision reads."""

    @property
    def features(self) -> torch.Tensor | None:
        """Feature indices, see `place_features`."""
        ...

    @property
    def images(self) -> MicrobatchImages | None:
        """The images of the microbatch, if any."""
        ...


@dataclass(frozen=True, slots=True)
class DeepFeatures:
    """Image features that are added behind the first layers of the decoder."""

    places: torch.Tensor
    """[s, b] feature indices of this rank's positions, see `place_features`."""
    features: Sequence[torch.Tensor]
    """[features, h] for each layer."""

    def add(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [s, b, h] that a layer leaves, with the features of their positions."""
        return hidden + place_features(self.places, self.features[layer], torch.zeros_like(hidden[:1, :1]))


def place_features(places: torch.Tensor, features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return [s, b, h]: of `features` [n, h] number p - 1 where `places` [s, b] is p, and `others` where it is 0."""
    return torch.where((places > 0)[..., None], features[(places - 1).clamp(min=0)], others)


class Sight:
    """Hooks that put images into the embedding and the first layers of the first pipeline stage."""

    def __init__(self, model: Any, vision: VisionShape) -> None:
        self._tower = model.vision
        self.microbatch: VisionMicrobatch | None = None
        """The microbatch that the next forward pass takes."""
        self._deep: DeepFeatures | None = None
        model.embedding.register_forward_hook(self._see)
        if vision.deep:
            model.decoder.register_forward_pre_hook(self._hand_over, with_kwargs=True)
        for layer, module in enumerate(model.decoder.layers[: len(vision.deep)]):
            module.register_forward_hook(functools.partial(_add_deep, layer), with_kwargs=True)

    def _see(self, _: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        """Replace embeddings [s, b, h] by image features; sequence-parallel ranks have their share of s each."""
        batch, self._deep = self.microbatch, None
        if batch is None or batch.images is None or batch.features is None:
            return embedded
        with torch.no_grad():
            found = self._tower(batch.images.pixels.to(embedded.dtype), batch.images.grids)
        places = batch.features.transpose(0, 1).contiguous()  # the output inherits its layout, and stages send it
        if embedded.size(0) < places.size(0):
            ranks = mcore.parallel_state.get_tensor_model_parallel_world_size()
            places = places.chunk(ranks)[mcore.parallel_state.get_tensor_model_parallel_rank()]
        if deep := getattr(found, "deepstack_features", None):
            self._deep = DeepFeatures(places, deep)
        return place_features(places, found.pooler_output, embedded)

    def _hand_over(self, _: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook: give the layers their features by an argument that our attention does not read.

        A layer that is computed again for the gradient, when other microbatches have passed, gets it again.
        """
        return arguments, {**named, "attention_bias": self._deep}


def _add_deep(
    layer: int, _: Any, __: Any, named: dict[str, Any], found: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Forward hook: add the image features of a layer to the hidden states that it leaves."""
    deep: DeepFeatures | None = named["attention_bias"]
    return found if deep is None else (deep.add(layer, found[0]), found[1])
