"""Routed experts (R3): which rows a turn owns, which rows make up a segment, and the resulting array.

Row i holds the experts that the engine chose at position i, whose output predicts token i + 1. A turn owns positions
max(base_len - 1, 0) to len - 2 of its prompt + output: earlier positions belong to its storage parent, and the model
never runs on the last token. A segment of n tokens needs rows 0 to n - 2, each from the turn of the segment that
sampled token i + 1 if there is one, else from the turn that stores it.

ExpertsError                base class of what a reader rejects
├── NoExperts               the sample has none; the message gives the reason
├── BrokenExperts           a blob that is not [rows, layers, top_k] of ids
└── ExpertsDoNotCover       the references do not cover positions 0 to tokens - 2 once each
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.errors import ExpertRowsDoNotCover
from turnlog.schemas.events import ExpertsLayout, SegmentSample, TokenSnapshot
from turnlog.schemas.types import BlobRef

MEDIA_TYPE = "application/x-npy"
DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
"""Name in ExpertsLayout -> dtype, narrowest first."""
WITHOUT_ROWS, LAYOUTS_DIFFER = "turn_without_rows", "layouts_differ"
"""Values of SegmentSample.experts_gap."""
DIMENSIONS = 3


class ExpertsError(Exception):
    """Base of the errors above; the message names the sample or the blob."""


class NoExperts(ExpertsError):
    """The sample has no routed experts to assemble."""


class BrokenExperts(ExpertsError):
    """Bytes that are not an array of expert ids."""


class ExpertsDoNotCover(ExpertsError):
    """Rows are missing or occur twice."""


EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of config.json that hold the number of experts per layer, in Qwen, DeepSeek and Mixtral models."""


def routing_of_model(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (experts, experts per token, layers) according to a model's config.json; a model without experts has a 0
    among them.
    """
    text = config.get("text_config") or config
    experts = max(int(text.get(name) or 0) for name in EXPERT_COUNTS)
    return experts, int(text.get("num_experts_per_tok") or 0), int(text.get("num_hidden_layers") or 0)


def own_rows(base_len: int, length: int) -> tuple[int, int]:
    """Return (first position, number of rows) of a turn whose prompt + output has `length` tokens, `base_len` from its
    parent.
    """
    start = max(base_len - 1, 0)
    return start, max(length - 1 - start, 0)


def check_layout(event: TokenSnapshot, length: int) -> None:
    """Check that a snapshot's rows are exactly the turn's own; `length` counts prompt + output.

    A record without a layout is accepted unchecked: its reader checks it. Raises ExpertRowsDoNotCover otherwise.
    """
    layout, blob = event.experts_layout, event.experts
    if layout is None:
        return
    start, count = own_rows(event.base_len, length)
    if blob is None or layout.rows != count:
        have = "no blob" if blob is None else f"{layout.rows} rows"
        raise ExpertRowsDoNotCover(
            event.session_id, event.turn, f"{have} for positions {start} to {length - 2}, {count} rows",
            "the gateway must store the turn's own rows and no others",
        )  # fmt: skip
    width = DTYPES[layout.dtype].itemsize if layout.dtype in DTYPES else 0
    needed = layout.rows * layout.layers * layout.top_k * width
    if min(width, layout.layers, layout.top_k) < 1 or blob.size < needed:
        raise ExpertRowsDoNotCover(
            event.session_id, event.turn,
            f"a blob of {blob.size} bytes cannot hold {layout.rows} x {layout.layers} x {layout.top_k} {layout.dtype}",
            f"dtype is one of {', '.join(DTYPES)}, and every position has layers x top_k ids",
        )  # fmt: skip


def pack_experts(rows: NDArray[np.int32]) -> tuple[bytes, ExpertsLayout]:
    """Pack a turn's rows, int32 [rows, layers, top_k], as a blob in the narrowest dtype, and return it with its layout.

    Raises BrokenExperts for an id below 0 or another number of dimensions.
    """
    if rows.ndim != DIMENSIONS or (rows.size and int(rows.min()) < 0):
        raise BrokenExperts(f"expert ids of shape {rows.shape}; they must be [rows, layers, top_k], from 0 on")
    largest = int(rows.max()) if rows.size else 0
    name = next(name for name, dtype in DTYPES.items() if largest <= np.iinfo(dtype).max)
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(rows, dtype=DTYPES[name]), allow_pickle=False)
    count, layers, top_k = rows.shape
    return file.getvalue(), ExpertsLayout(count, layers, top_k, name)


def unpack_experts(content: bytes) -> NDArray[Any]:
    """Unpack the rows of a blob, [rows, layers, top_k] in its own dtype. Raises BrokenExperts if it is not such an
    array.
    """
    try:
        rows: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BrokenExperts(f"a blob of {len(content)} bytes is not NumPy's npy format: {error}") from error
    if rows.ndim != DIMENSIONS or rows.dtype not in DTYPES.values():
        raise BrokenExperts(f"expert ids of shape {rows.shape} and dtype {rows.dtype}, not [rows, layers, top_k]")
    return rows


def assemble_experts(sample: SegmentSample, blobs: dict[BlobRef, NDArray[Any]]) -> NDArray[np.int32]:
    """Return the expert ids of a sample, int32 [tokens - 1, layers, top_k]. `blobs` holds every blob that it names,
    unpacked.

    Raises NoExperts, BrokenExperts, ExpertsDoNotCover.
    """
    about = f"sample {sample.sample_id}"
    if not sample.experts:
        raise NoExperts(f"{about} has no routed experts ({sample.experts_gap or 'none were recorded'})")
    size = sample.token_ids.size if isinstance(sample.token_ids, BlobRef) else len(sample.token_ids)
    shapes = {blobs[piece.rows].shape[1:] for piece in sample.experts}
    if len(shapes) > 1:
        raise BrokenExperts(f"{about}: its blobs have rows of shapes {sorted(shapes)}")
    out = np.empty((max(size // 4 - 1, 0), *shapes.pop()), dtype=np.int32)
    done = 0
    for piece in sorted(sample.experts, key=lambda piece: piece.target_start):
        rows, end = blobs[piece.rows], piece.row_start + piece.row_count
        if piece.target_start != done or piece.row_start < 0 or piece.row_count < 0 or end > len(rows):
            raise ExpertsDoNotCover(
                f"{about}: rows {piece.row_start} to {end} of a blob of {len(rows)} for position {piece.target_start}; "
                f"position {done} is next"
            )
        done += piece.row_count
        if done > len(out):
            break
        out[piece.target_start : done] = rows[piece.row_start : end]
    if done != len(out):
        raise ExpertsDoNotCover(f"{about}: {done} rows for {len(out)} positions")
    return out
