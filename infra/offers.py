"""Plugins: objects that installed packages offer by entry point, such as a user's own policies, estimators, group
filters and reward transforms.

Each name must be offered by one package. If two offered it, the order of sys.path would decide, so that is an error.

A package offers an object as `name = "module:OBJECT"` under `turnlog.policies`, `turnlog.estimators`,
`turnlog.algorithms`, `turnlog.auxiliary_losses`, `turnlog.group_filters`, `turnlog.reward_transforms` or
`turnlog.cheat_detectors`. OBJECT is a Policy, or an Estimator, Algorithm, Auxiliary, GroupFilter, RewardTransform or
CheatDetector of that name. Only plugins that the settings name are imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from turnlog import setting_types
from turnlog.processors.core.cheating.detectors import ACROSS, CheatDetector
from turnlog.processors.core.methods.estimators import Estimator
from turnlog.processors.core.methods.group_filters import GroupFilter
from turnlog.processors.core.methods.policies import Policies, Policy
from turnlog.processors.core.methods.reward_transforms import RewardTransform
from turnlog.processors.core.methods.rules import BUILT_IN, Methods, split
from turnlog.settings import CheatingSettings, FoldSettings, SettingsError, TrainerSettings, declarations


class NamedPlugin(Protocol):
    """An object with a name."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=NamedPlugin)
GROUPS = {
    f"{section}.{key}": own.group
    for section, kind in (("fold", FoldSettings), ("trainer", TrainerSettings), ("cheating", CheatingSettings))
    for key, hint in declarations(kind).items()
    if (own := setting_types.find_offered(hint))
}
"""Setting that accepts plugins -> its entry point group."""


def find_plugins(
    group: str, what: str, ambiguous: type[Exception], ours: Mapping[str, str] | None = None
) -> dict[str, EntryPoint]:
    """Return name -> entry point, without importing anything (reading the metadata of all packages takes tens of ms).

    `what`: the kind of plugin, for error messages. `ambiguous`: the error that is raised if two packages offer one
    name. `ours`: name -> value of the objects that exist without any package. A package that is found twice (installed,
    and as a checkout) counts once.
    """
    points = {name: EntryPoint(name, value, group) for name, value in (ours or {}).items()}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise ambiguous(
                f"{what} {point.name!r}, entry points {other.value} and {point.value} of {group}: two packages offer "
                "the name; uninstall one"
            )
    return points


def load_methods(fold: FoldSettings) -> Methods:
    """Return the built-in methods and the plugins that `fold` names. Raises SettingsError if a plugin is unknown, does
    not import, is not such a method, or is offered by two packages."""
    filters = [split(spec, "fold.group_filters")[0] for spec in fold.group_filters]
    transforms = [split(spec, "fold.reward_transforms")[0] for spec in fold.reward_transforms]
    return Methods(
        estimators=_with_own(BUILT_IN.estimators, [fold.estimator], "fold.estimator", Estimator),
        group_filters=_with_own(BUILT_IN.group_filters, filters, "fold.group_filters", GroupFilter),
        reward_transforms=_with_own(BUILT_IN.reward_transforms, transforms, "fold.reward_transforms", RewardTransform),
        policies=installed_policies(fold.policy),
        cheat_detectors=_with_own(
            BUILT_IN.cheat_detectors,
            [name for name in fold.exclude_flagged if name not in ACROSS],
            "fold.exclude_flagged",
            CheatDetector,
        ),
    )


def load_detectors(cheating: CheatingSettings) -> tuple[CheatDetector, ...]:
    """Return the detectors of sessions that [cheating] detectors names. Raises SettingsError as `load_methods`."""
    key, names = "cheating.detectors", [name for name in cheating.detectors if name not in ACROSS]
    return tuple(one(name, BUILT_IN.cheat_detectors, key, CheatDetector) for name in names)


def installed_policies(name: str) -> Policies:
    """Return the built-in policies, and the plugin `name` if it is not one of them. Raises SettingsError as
    `load_methods`."""
    built_in = Policies()
    if name in built_in.named:
        return built_in
    found, where = _load_plugin(name, built_in.named, "fold.policy")
    if not isinstance(found, Policy):
        raise SettingsError(f"{where}: must have needs_messages and cut(turns, tree, undelivered, rules)")
    return built_in.with_own({name: found})


def _with_own(built_in: Mapping[str, M], names: Iterable[str], key: str, kind: type[M]) -> dict[str, M]:
    return {**built_in, **{name: one(name, built_in, key, kind) for name in names}}


def one(name: str, built_in: Mapping[str, M], key: str, kind: type[M]) -> M:
    """Return the method of that name, built in or a plugin. `key` is the setting that names it. Raises SettingsError as
    `load_methods`."""
    if name in built_in:
        return built_in[name]
    found, where = _load_plugin(name, built_in, key)
    if not isinstance(found, kind) or found.name != name:
        raise SettingsError(f"{where}: must be the {kind.__name__} named {name!r}, got {found!r}")
    return found


def _load_plugin(name: str, built_in: Mapping[str, object], key: str) -> tuple[Any, str]:
    """Return a plugin by name, and its description for error messages. Raises SettingsError."""
    points = find_plugins(GROUPS[key], key, SettingsError)
    if name not in points:
        legal = ", ".join(sorted({*built_in, *points}))
        raise SettingsError(
            f"{key} must be one of {legal}, or offered under the entry point group {GROUPS[key]}, got {name!r}"
        )
    where = f"{key} {name!r}, entry point {points[name].value} of {GROUPS[key]}"
    try:
        return points[name].load(), where
    except Exception as error:  # a module may raise anything while it is imported
        raise SettingsError(f"{where}: does not import: {type(error).__name__}: {error}") from error
