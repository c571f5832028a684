"""Rules of the fold, from settings or from the RunConfigured event that recorded them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnlog.fold_settings import FOLD_SECTIONS, OWN, AssemblerSettings, BatcherSettings, FoldSettings, Since
from turnlog.processors.core.fold_versions import FOLD_VERSION, fold_version
from turnlog.processors.core.methods.catalogue import BUILT_IN, ChosenFilter, ChosenTransform, Methods
from turnlog.processors.core.methods.estimators import Estimator, EstimatorOptions
from turnlog.processors.core.methods.group_filters import ZERO_VARIANCE
from turnlog.processors.core.methods.policies import Policy
from turnlog.processors.core.methods.segments import PolicyOptions
from turnlog.setting_types import SettingsError, notes, value_of
from turnlog.settings import Settings, declarations, recorded_keys

DEFAULTS = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRules(PolicyOptions):
    """How turns become segments and rewards become advantages (docs/folds.md)."""

    run_id: str
    settings_sha256: str
    policy: str = "prefix"
    """A name in `methods.policies`."""
    estimator: str = "grpo"
    """A name in `methods.estimators`."""
    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 sample, 0 population."""
    discount: float = 1.0
    """Of `step`: per main turn, in [0, 1]."""
    min_valid: int = 0
    """Valid rollouts below which a group is discarded; 0 or less: what the estimator needs."""
    zero_variance: str = "keep"
    """keep: advantage 0 | discard; without a meaning for estimators that do not compare within the group"""
    group_filters: tuple[str, ...] = ()
    """Applied in order to groups that would be trained: `name:number:...`"""
    reward_transforms: tuple[str, ...] = ()
    """Applied in order to each reward: `name:number:...`"""
    truncated: str = "train"
    """train | mask_last_turn | exclude"""
    train_sub_agents: bool = True
    train_side_calls: bool = False
    horizon_records: int = DEFAULTS.assembler.horizon_records
    """Of [assembler]: what comes later is late (LowWater)."""
    methods: Methods = BUILT_IN
    """What the names above mean."""

    @property
    def cutting(self) -> Policy:
        """The policy. Raises SettingsError."""
        return self.methods.policies[self.policy]

    @property
    def formula(self) -> Estimator:
        """The estimator. Raises SettingsError."""
        return self.methods.estimator(self.estimator)

    @property
    def options(self) -> EstimatorOptions:
        """What the estimator reads of the settings."""
        return EstimatorOptions(self.std_ddof, self.discount)

    @property
    def least_valid(self) -> int:
        """Valid rollouts that a group needs, at least 1."""
        return self.min_valid if self.min_valid > 0 else self.formula.min_valid

    @property
    def filters(self) -> tuple[ChosenFilter, ...]:
        """The group filters, zero variance first. Raises SettingsError."""
        flat = self.zero_variance == "discard" and self.formula.centred
        return ((ChosenFilter(ZERO_VARIANCE),) if flat else ()) + self.methods.filters(self.group_filters)

    @property
    def transforms(self) -> tuple[ChosenTransform, ...]:
        """The reward transforms. Raises SettingsError."""
        return self.methods.transforms(self.reward_transforms)


class RecordedSettingsError(SettingsError):
    """A RunConfigured body that this version of turnlog cannot read."""


def recorded_settings(
    settings_json: bytes, own: Settings = DEFAULTS, kinds: Mapping[str, type] = FOLD_SECTIONS
) -> tuple[FoldSettings, BatcherSettings, AssemblerSettings]:
    """The sections of a RunConfigured body. A key that its release did not record means what that release did
    (`Since`), which may be what `own`, the settings of who reads, say; operational keys, which old releases recorded,
    are passed over and have today's defaults. `kinds`: of the sections.

    Values are taken by their types: a release checks bounds before it records. Raises RecordedSettingsError for what is
    no such body and for sections, keys and names that this version does not know.
    """
    try:
        tables = json.loads(settings_json)
        unknown = sorted(set(tables) - set(kinds))
        if unknown:
            raise SettingsError(f"unknown section [{unknown[0]}]")
        fold, batcher, assembler = (
            _recorded(name, kind, tables.get(name), getattr(own, name)) for name, kind in kinds.items()
        )
    except (ValueError, TypeError, SettingsError) as error:
        raise RecordedSettingsError(
            f"the recorded settings of the run cannot be read ({error}); use the turnlog version that recorded it"
        ) from error
    return fold, batcher, assembler


def _recorded(name: str, kind: type, table: Any, own: Any) -> Any:
    hints = declarations(kind)
    if table is None and all(_since(hints[key]) for key in recorded_keys(kind)):
        table = {}  # of a release that recorded no key of it
    if not isinstance(table, dict):
        raise SettingsError(f"section [{name}] is missing")
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise SettingsError(f"unknown key {name}.{unknown[0]}")
    values = {}
    for key in recorded_keys(kind):
        if key in table:
            values[key] = value_of(f"{name}.{key}", hints[key], table[key], "RunConfigured", bounded=False)
            continue
        since = _since(hints[key])
        if since is None:
            raise SettingsError(f"{name}.{key}, which every release records, is missing")
        values[key] = getattr(own, key) if since.before == OWN else since.before
    return kind(**values)


def _since(hint: Any) -> Since | None:
    return next((note for note in notes(hint) if isinstance(note, Since)), None)


def fold_rules(
    fold: FoldSettings, *, run_id: str, settings_sha256: str, version: str = FOLD_VERSION, methods: Methods = BUILT_IN,
    horizon_records: int = DEFAULTS.assembler.horizon_records,
) -> FoldRules:  # fmt: skip
    """What trees, segments and advantages depend on.

    `version`: as the run recorded it. `methods`: what the names in [fold] mean, `infra.offers.installed(fold)` where
    users bring their own. Raises SettingsError for a name, a specification or a version that cannot be used.
    """
    rules = FoldRules(
        run_id=run_id, settings_sha256=settings_sha256, version=fold_version(version), methods=methods,
        horizon_records=horizon_records, **dataclasses.asdict(fold),
    )  # fmt: skip
    _check(rules)
    return rules


def _check(rules: FoldRules) -> None:
    """Every name that a group would need, before the first group comes."""
    assert rules.cutting is not None
    assert rules.formula is not None
    assert rules.filters is not None
    assert rules.transforms is not None
