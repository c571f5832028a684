"""Routed experts of a sample: its blobs fetched and assembled into one array."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.blobs import Blobs
from turnlog.processors.core.experts import assembled, unpacked
from turnlog.schemas.events import SegmentSample


async def expert_rows(sample: SegmentSample, blobs: Blobs) -> NDArray[np.int32]:
    """Expert ids by position, int32 [tokens - 1, layers, top_k]; row i was chosen where token i + 1 was predicted. Each
    blob is fetched once.

    Raises NoExperts, BrokenExperts, ExpertsDoNotCover (processors.core.experts); BlobMissing, BlobCorrupt,
    StoreUnavailable.
    """
    refs = list(dict.fromkeys(piece.rows for piece in sample.experts))
    contents = await asyncio.gather(*(blobs.get(ref) for ref in refs))
    return assembled(sample, {ref: unpacked(content) for ref, content in zip(refs, contents, strict=True)})
