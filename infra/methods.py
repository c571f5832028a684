"""A user's own estimators, group filters and reward transforms, found by entry point.

A package offers one as `name = "module:OBJECT"` under `turnlog.estimators`, `turnlog.group_filters` or
`turnlog.reward_transforms`; OBJECT is an Estimator, GroupFilter or RewardTransform of that name. Only what the settings
name is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from turnlog.infra.policies import installed_policies
from turnlog.processors.core.estimators import Estimator
from turnlog.processors.core.group_filters import GroupFilter
from turnlog.processors.core.methods import BUILT_IN, Methods, split
from turnlog.processors.core.reward_transforms import RewardTransform
from turnlog.settings import OFFERED, FoldSettings, SettingsError

M = TypeVar("M", Estimator, GroupFilter, RewardTransform)


def installed(fold: FoldSettings) -> Methods:
    """The built-in methods and those that `fold` names beyond them. Raises SettingsError for one that is unknown,
    does not import, or is no such method."""
    filters = [split(spec, "fold.group_filters")[0] for spec in fold.group_filters]
    transforms = [split(spec, "fold.reward_transforms")[0] for spec in fold.reward_transforms]
    return Methods(
        estimators=_with_own(BUILT_IN.estimators, [fold.estimator], "fold.estimator", Estimator),
        group_filters=_with_own(BUILT_IN.group_filters, filters, "fold.group_filters", GroupFilter),
        reward_transforms=_with_own(BUILT_IN.reward_transforms, transforms, "fold.reward_transforms", RewardTransform),
        policies=installed_policies(fold.policy),
    )


def _with_own(built_in: Mapping[str, M], names: Iterable[str], key: str, kind: type[M]) -> dict[str, M]:
    return {**built_in, **{name: _own(name, built_in, key, kind) for name in names if name not in built_in}}


def _own(name: str, built_in: Mapping[str, M], key: str, kind: type[M]) -> M:
    points: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=OFFERED[key])}
    if name not in points:
        legal = ", ".join(sorted({*built_in, *points}))
        raise SettingsError(
            f"{key} must be one of {legal}, or offered under the entry point group {OFFERED[key]}, got {name!r}"
        )
    offers = sorted({point.value for point in entry_points(group=OFFERED[key], name=name)})
    where = f"{key} {name!r}, entry point {' and '.join(offers)} of {OFFERED[key]}"
    if len(offers) > 1:
        raise SettingsError(f"{where}: two packages offer the name; uninstall one")
    try:
        found = points[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{where}: does not import: {error}") from error
    if not isinstance(found, kind) or found.name != name:
        raise SettingsError(f"{where}: must be the {kind.__name__} named {name!r}, got {found!r}")
    return found
