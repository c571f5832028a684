"""Estimators, group filters and reward transforms by name, and the ones that the [fold] settings choose.

Methods of other packages come by entry point (turnlog.infra.offers finds them; nothing is imported by name here). A
setting names a method and its numeric arguments: `clip:-1:1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnlog.names import EntryPointGroup
from turnlog.processors.core.errors import BrokenMethod
from turnlog.processors.core.methods.estimators import (
    ESTIMATORS,
    Advantages,
    Estimator,
    EstimatorOptions,
    Trajectory,
)
from turnlog.processors.core.methods.group_filters import FILTERS, GroupFilter
from turnlog.processors.core.methods.policies import Policies
from turnlog.processors.core.methods.reward_transforms import TRANSFORMS, RewardTransform
from turnlog.settings import SettingsError

Method = Estimator | GroupFilter | RewardTransform


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

    def __call__(self, reward: float) -> float:
        """Return the transformed reward. Raises BrokenMethod if it is not a finite number."""
        value = float(self.transform.transform(reward, *self.arguments))
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


def _unknown(key: str, name: str, group: str, known: Mapping[str, Method]) -> SettingsError:
    return SettingsError(
        f"{key} must be one of {', '.join(sorted(known))}, or offered under the entry point group {group}, got {name!r}"
    )
