"""Rules of the fold, from settings or from the RunConfigured event that recorded them, and the methods that they name.

Methods of other packages come by entry point (turnlog.infra.offers finds them; nothing is imported by name here). A
setting names a method and its numeric arguments: `clip:-1:1`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.fold_settings import FOLD_SECTIONS, OWN, AssemblerSettings, BatcherSettings, FoldSettings, Since
from turnlog.names import EntryPointGroup
from turnlog.processors.core.cheating.detectors import ACROSS, CheatDetector
from turnlog.processors.core.cheating.detectors import by_name as cheat_detectors
from turnlog.processors.core.errors import BrokenMethod
from turnlog.processors.core.fold_versions import FOLD_VERSION, fold_version
from turnlog.processors.core.methods.estimators import (
    ESTIMATORS,
    Advantages,
    Estimator,
    EstimatorOptions,
    Trajectory,
)
from turnlog.processors.core.methods.group_filters import FILTERS, ZERO_VARIANCE, GroupFilter
from turnlog.processors.core.methods.policies import Policies, Policy
from turnlog.processors.core.methods.reward_transforms import TRANSFORMS, RewardTransform
from turnlog.processors.core.methods.segments import PolicyOptions
from turnlog.setting_types import SettingsError, notes, value_of
from turnlog.settings import ERASURE, Settings, declarations, recorded_keys

Method = Estimator | GroupFilter | RewardTransform | CheatDetector


@dataclass(frozen=True, slots=True)
class ChosenFilter:
    """A group filter with its arguments."""

    filter: GroupFilter
    arguments: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Label in GroupScored: name/version:numbers."""
        return _label(self.filter, self.arguments)

    def discards(self, trajectories: Sequence[Trajectory], advantages: Advantages) -> bool:
        """Whether the group is not worth a place in a rollout batch."""
        return bool(self.filter.discards(trajectories, advantages, *self.arguments))


@dataclass(frozen=True, slots=True)
class ChosenTransform:
    """A reward transform with its arguments."""

    transform: RewardTransform
    arguments: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Label in GroupScored: name/version:numbers."""
        return _label(self.transform, self.arguments)

    def __call__(self, reward: float, tokens: int) -> float:
        """Return the transformed reward of what `tokens` sampled tokens earned. Raises BrokenMethod if it is not a
        finite number.
        """
        read = (reward, tokens) if self.transform.reads_tokens else (reward,)
        value = float(self.transform.transform(*read, *self.arguments))
        if not math.isfinite(value):
            raise BrokenMethod(f"reward transform {self.label}", f"makes {value} of the reward {reward}")
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Methods:
    """The available methods by name. Look-ups of unknown names raise SettingsError, which lists the available ones."""

    estimators: Mapping[str, Estimator] = field(default_factory=lambda: {one.name: one for one in ESTIMATORS})
    group_filters: Mapping[str, GroupFilter] = field(default_factory=lambda: {one.name: one for one in FILTERS})
    reward_transforms: Mapping[str, RewardTransform] = field(
        default_factory=lambda: {one.name: one for one in TRANSFORMS}
    )

    policies: Policies = field(default_factory=Policies)
    cheat_detectors: Mapping[str, CheatDetector] = field(default_factory=cheat_detectors)

    def estimator(self, name: str) -> Estimator:
        """Return the estimator that [fold] estimator names."""
        if name not in self.estimators:
            raise _unknown("fold.estimator", name, EntryPointGroup.ESTIMATORS, self.estimators)
        return self.estimators[name]

    def filters(self, specs: Sequence[str]) -> tuple[ChosenFilter, ...]:
        """Return the filters that [fold] group_filters names, in order."""
        chosen = []
        for spec in specs:
            name, arguments = split(spec, "fold.group_filters")
            if name not in self.group_filters:
                raise _unknown("fold.group_filters", name, EntryPointGroup.GROUP_FILTERS, self.group_filters)
            _check_count(self.group_filters[name], arguments, spec, "fold.group_filters")
            chosen.append(ChosenFilter(self.group_filters[name], arguments))
        return tuple(chosen)

    def transforms(self, specs: Sequence[str]) -> tuple[ChosenTransform, ...]:
        """Return the transforms that [fold] reward_transforms names, in order."""
        chosen = []
        for spec in specs:
            name, arguments = split(spec, "fold.reward_transforms")
            if name not in self.reward_transforms:
                raise _unknown(
                    "fold.reward_transforms", name, EntryPointGroup.REWARD_TRANSFORMS, self.reward_transforms
                )
            _check_count(self.reward_transforms[name], arguments, spec, "fold.reward_transforms")
            chosen.append(ChosenTransform(self.reward_transforms[name], arguments))
        return tuple(chosen)

    def detectors(self, names: Sequence[str]) -> tuple[CheatDetector, ...]:
        """Return the detectors that [fold] exclude_flagged names, each once and sorted by name."""
        for name in names:
            if name in ACROSS:
                raise SettingsError(
                    f"fold.exclude_flagged: {name} looks at several sessions, so what it finds depends on which it has "
                    "seen: it reports, and cannot exclude (docs/cheating.md)"
                )
            if name not in self.cheat_detectors:
                raise _unknown("fold.exclude_flagged", name, EntryPointGroup.CHEAT_DETECTORS, self.cheat_detectors)
        return tuple(self.cheat_detectors[name] for name in sorted({*names}))


BUILT_IN = Methods()


def split(spec: str, key: str) -> tuple[str, tuple[float, ...]]:
    """Split `name:number:...` into name and numbers. Raises SettingsError if a number is malformed or NaN."""
    name, *numbers = spec.split(":")
    try:
        values = tuple(float(number) for number in numbers)
    except ValueError:
        values = (math.nan,)
    if any(math.isnan(value) for value in values):
        raise SettingsError(f"{key}: {spec!r} must be a name and its numbers, like 'clip:-1:1'")
    return name, values


def estimate(estimator: Estimator, trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    """Run the estimator and check its result: one finite number per trajectory, and per turn if it is a per-turn
    estimator.

    Raises BrokenMethod, which names the estimator, if the result is malformed.
    """
    found = _as_floats(estimator.estimate(trajectories, options))
    about = f"estimator {estimator.label}"
    if len(found.values) != len(trajectories):
        raise BrokenMethod(about, f"gives {len(found.values)} advantages for {len(trajectories)} trajectories")
    turns = () if found.per_turn is None else found.per_turn
    wanted = [len(trajectory.turns) for trajectory in trajectories]
    if found.per_turn is not None and [len(one) for one in turns] != wanted:
        raise BrokenMethod(about, f"gives {[len(one) for one in turns]} advantages for trajectories of {wanted} turns")
    numbers = (*found.values, found.baseline, 0.0 if found.std is None else found.std)
    for value in (*numbers, *(value for one in turns for value in one)):
        if not math.isfinite(value):
            raise BrokenMethod(about, f"gives {value} for rewards {[one.reward for one in trajectories]}")
    return found


def _as_floats(found: Advantages) -> Advantages:
    """Convert to Python floats: a user's function may return lists or NumPy numbers, but records need Python's."""
    per_turn = found.per_turn
    return Advantages(
        tuple(map(float, found.values)),
        float(found.baseline),
        None if found.std is None else float(found.std),
        None if per_turn is None else tuple(tuple(map(float, turns)) for turns in per_turn),
    )


def _label(method: GroupFilter | RewardTransform, arguments: Sequence[float]) -> str:
    return ":".join([f"{method.name}/{method.version}", *(f"{number:g}" for number in arguments)])


def _check_count(method: GroupFilter | RewardTransform, arguments: Sequence[float], spec: str, key: str) -> None:
    if len(arguments) != len(method.arguments):
        wanted = ":".join([method.name, *(name.upper() for name in method.arguments)])
        raise SettingsError(f"{key}: {spec!r} must be {wanted}, numbers in place of the capitals")
    if isinstance(method, RewardTransform) and method.fault and (fault := method.fault(*arguments)):
        raise SettingsError(f"{key}: {spec!r}: {fault} ({':'.join([method.name, *map(str.upper, method.arguments)])})")


def _unknown(key: str, name: str, group: str, known: Mapping[str, Method]) -> SettingsError:
    return SettingsError(
        f"{key} must be one of {', '.join(sorted(known))}, or offered under the entry point group {group}, got {name!r}"
    )


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRules(PolicyOptions):
    """Rules by which turns become segments and rewards become advantages (docs/folds.md)."""

    run_id: str
    settings_sha256: str
    policy: str = "prefix"
    """Name of a trajectory rule in `methods.policies`."""
    estimator: str = "grpo"
    """Name of an estimator in `methods.estimators`."""
    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 for the sample's, 0 for the population's."""
    discount: float = 1.0
    """Discount of the estimator `step` per main turn, in [0, 1]."""
    min_valid: int = 0
    """Number of valid rollouts below which a group is discarded; if 0 or less, the number that the estimator needs."""
    zero_variance: str = "keep"
    """keep: advantage 0 | discard. Has no effect for estimators that do not compare within the group."""
    group_filters: tuple[str, ...] = ()
    """Filters applied in order to groups that would be trained: `name:number:...`"""
    reward_transforms: tuple[str, ...] = ()
    """Transforms applied in order to each reward: `name:number:...`"""
    truncated: str = "train"
    """Treatment of truncated sessions: train | mask_last_turn | exclude"""
    train_sub_agents: bool = True
    train_side_calls: bool = False
    train_compactions: bool = True
    exclude_flagged: tuple[str, ...] = ()
    """Detectors of cheating whose flags exclude a session."""
    flagged_above: float = 0.0
    """Reward above which detectors of cheating look at a session."""
    horizon_records: int = DEFAULTS.assembler.horizon_records
    """[assembler] horizon_records: a group whose first record comes later after its admission is late (LowWater)."""
    methods: Methods = BUILT_IN
    """The methods to which the names above refer."""

    @property
    def cutting(self) -> Policy:
        """The trajectory rule. Raises SettingsError if its name is unknown."""
        return self.methods.policies[self.policy]

    @property
    def detectors(self) -> tuple[CheatDetector, ...]:
        """The detectors of cheating that exclude. Raises SettingsError for an unknown name."""
        return self.methods.detectors(self.exclude_flagged)

    @property
    def needs_messages(self) -> bool:
        """Whether the fold reads the messages of turns."""
        return self.cutting.needs_messages or bool(self.exclude_flagged)

    @property
    def formula(self) -> Estimator:
        """The estimator. Raises SettingsError if its name is unknown."""
        return self.methods.estimator(self.estimator)

    @property
    def options(self) -> EstimatorOptions:
        """The settings that the estimator reads."""
        return EstimatorOptions(self.std_ddof, self.discount)

    @property
    def least_valid(self) -> int:
        """Number of valid rollouts that a group needs, at least 1."""
        return self.min_valid if self.min_valid > 0 else self.formula.min_valid

    @property
    def filters(self) -> tuple[ChosenFilter, ...]:
        """The group filters, zero variance first. Raises SettingsError for an unknown name."""
        flat = self.zero_variance == "discard" and self.formula.is_group_relative
        return ((ChosenFilter(ZERO_VARIANCE),) if flat else ()) + self.methods.filters(self.group_filters)

    @property
    def transforms(self) -> tuple[ChosenTransform, ...]:
        """The reward transforms. Raises SettingsError for an unknown name."""
        return self.methods.transforms(self.reward_transforms)


class RecordedSettingsError(SettingsError):
    """A RunConfigured body that this version of turnlog cannot read."""


def recorded_settings(
    settings_json: bytes, own: Settings = DEFAULTS, kinds: Mapping[str, type] = FOLD_SECTIONS
) -> tuple[FoldSettings, BatcherSettings, AssemblerSettings]:
    """Return the sections of a RunConfigured body; `kinds` maps section names to types.

    A key that the body's release did not record has the meaning of that release (`Since`), which may be the value in
    `own`, the settings of the reader. Operational keys, which old releases recorded, are ignored and have today's
    defaults. Values are accepted by their types alone, since a release checks bounds before it records. Raises
    RecordedSettingsError if the body is malformed or has sections, keys or names that this version does not know.
    """
    try:
        tables = json.loads(settings_json)
        unknown = sorted(set(tables) - set(kinds) - {ERASURE})
        if unknown:
            raise SettingsError(f"unknown section [{unknown[0]}]")
        fold, batcher, assembler = (
            _parse_section(name, kind, tables.get(name), getattr(own, name)) for name, kind in kinds.items()
        )
    except (ValueError, TypeError, SettingsError) as error:
        raise RecordedSettingsError(
            f"the recorded settings of the run cannot be read ({error}); use the turnlog version that recorded it"
        ) from error
    return fold, batcher, assembler


def _parse_section(name: str, kind: type, table: Any, own: Any) -> Any:
    hints = declarations(kind)
    if table is None and all(_since(hints[key]) for key in recorded_keys(kind)):
        table = {}  # recorded by a release that had no key of this section
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
    """Return the rules on which trees, segments and advantages depend.

    `version` is the fold version that the run recorded. `methods` resolves the names in [fold]; use
    `infra.offers.installed(fold)` if users bring their own. Raises SettingsError for a name, a specification or a
    version that cannot be used.
    """
    rules = FoldRules(
        run_id=run_id, settings_sha256=settings_sha256, version=fold_version(version), methods=methods,
        horizon_records=horizon_records, **dataclasses.asdict(fold),
    )  # fmt: skip
    _check(rules)
    return rules


def _check(rules: FoldRules) -> None:
    """Resolve every name that a group would need, so that errors are found before the first group comes."""
    assert rules.cutting is not None
    assert rules.formula is not None
    assert rules.filters is not None
    assert rules.transforms is not None
    assert rules.detectors is not None
