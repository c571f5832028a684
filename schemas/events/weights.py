"""Weight versions: integers, +1 per published weights, never reused."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import BlobRef


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of an exported model folder."""

    name: str
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersionPublished:
    """A Hugging Face model folder that engines can load."""

    event_id: str
    run_id: str
    version: int
    step: int
    """Optimizer steps behind these weights."""
    batch_index: int
    """Last batch trained; -1 for the initial weights."""
    incarnation: int
    kind: str
    """full | delta"""
    base_version: int | None
    files: tuple[WeightFile, ...]
    dtype: str
    checksums: dict[str, str]
    """Tensor name to hex sha256 of its bytes, with its shape: "sha256:2x3"."""
    checkpoint: str | None
    """Path or URI of the checkpoint that holds the same weights, if one was written."""
