"""Rules of folds and draws, from settings or from the RunConfigured event that recorded them."""

from __future__ import annotations

import dataclasses
import json

from turnlog.processors.core.fold_rules import FoldRules
from turnlog.processors.core.trimmed import DrawRules
from turnlog.schemas.events import Weighting
from turnlog.settings import BatcherSettings, FoldSettings


def recorded_settings(settings_json: bytes) -> tuple[FoldSettings, BatcherSettings]:
    """The sections of a RunConfigured body. Raises TypeError for keys that this version does not know."""
    sections = json.loads(settings_json)
    return FoldSettings(**sections["fold"]), BatcherSettings(**sections["batcher"])


def fold_rules(fold: FoldSettings, *, run_id: str, settings_sha256: str) -> FoldRules:
    """What trees, segments and advantages depend on."""
    return FoldRules(run_id=run_id, settings_sha256=settings_sha256, **dataclasses.asdict(fold))


def draw_rules(fold: FoldSettings, batcher: BatcherSettings) -> DrawRules:
    """What batches depend on."""
    return DrawRules(
        prompts_per_draw=batcher.prompts_per_draw,
        updates_per_draw=batcher.updates_per_draw,
        max_lag=batcher.max_lag,
        max_tokens=batcher.max_tokens,
        weighting=Weighting(batcher.weighting),
        constant_length=batcher.constant_length,
        version_mask=batcher.version_mask,
        min_valid=fold.min_valid,
    )
