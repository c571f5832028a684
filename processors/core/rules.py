"""Rules of folds and draws, from settings or from the RunConfigured event that recorded them."""

from __future__ import annotations

import dataclasses
import json
import math

from turnlog.processors.core.fold_rules import FoldRules
from turnlog.processors.core.methods import BUILT_IN, Methods
from turnlog.processors.core.trimmed import DrawRules
from turnlog.schemas.events import Weighting
from turnlog.settings import FOLD_SECTIONS, BatcherSettings, FoldSettings, SettingsError, from_tables


class RecordedSettingsError(SettingsError):
    """A RunConfigured body that this version of turnlog cannot read."""


def recorded_settings(settings_json: bytes) -> tuple[FoldSettings, BatcherSettings]:
    """The sections of a RunConfigured body; a key that an older version did not have takes its default.

    A new key's default therefore does what the versions before it did. Raises RecordedSettingsError for what is no such
    body and for sections, keys and values that this version does not know.
    """
    try:
        tables = json.loads(settings_json)
        unknown = sorted(set(tables) - set(FOLD_SECTIONS))
        if unknown:
            raise SettingsError(f"unknown section [{unknown[0]}]")
        settings = from_tables(tables, {}, source="RunConfigured")
    except (ValueError, TypeError, SettingsError) as error:
        raise RecordedSettingsError(
            f"the recorded settings of the run cannot be read ({error}); use the turnlog version that recorded it"
        ) from error
    return settings.fold, settings.batcher


def fold_rules(fold: FoldSettings, *, run_id: str, settings_sha256: str, methods: Methods = BUILT_IN) -> FoldRules:
    """What trees, segments and advantages depend on.

    `methods`: what the names in [fold] mean, `infra.methods.installed(fold)` where users bring their own. Raises
    SettingsError for a name, a number or a specification that cannot be used.
    """
    rules = FoldRules(run_id=run_id, settings_sha256=settings_sha256, methods=methods, **dataclasses.asdict(fold))
    _check(rules)
    return rules


def draw_rules(fold: FoldSettings, batcher: BatcherSettings, methods: Methods = BUILT_IN) -> DrawRules:
    """What batches depend on. Raises SettingsError."""
    rules = fold_rules(fold, run_id="", settings_sha256="", methods=methods)
    for key in ("prompts_per_draw", "updates_per_draw", "max_tokens", "constant_length"):
        if getattr(batcher, key) < 1:
            raise SettingsError(f"batcher.{key} must be at least 1, got {getattr(batcher, key)}")
    if batcher.max_lag < 0:
        raise SettingsError(f"batcher.max_lag must be 0 (strictly on-policy) or more, got {batcher.max_lag}")
    return DrawRules(
        prompts_per_draw=batcher.prompts_per_draw,
        updates_per_draw=batcher.updates_per_draw,
        max_lag=batcher.max_lag,
        max_tokens=batcher.max_tokens,
        weighting=Weighting(batcher.weighting),
        constant_length=batcher.constant_length,
        version_mask=batcher.version_mask,
        min_valid=rules.least_valid,
        whiten=rules.formula.whiten,
    )


def _check(rules: FoldRules) -> None:
    """Every name and number that a group would need, before the first group comes."""
    assert rules.cutting is not None
    assert rules.formula is not None
    assert rules.filters is not None
    assert rules.transforms is not None
    if rules.std_ddof not in (0, 1):
        raise SettingsError(f"fold.std_ddof must be 0 (population) or 1 (sample), got {rules.std_ddof}")
    if not (math.isfinite(rules.discount) and 0.0 <= rules.discount <= 1.0):
        raise SettingsError(f"fold.discount must be in [0, 1], got {rules.discount}")
