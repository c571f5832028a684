"""A user's own policy, found by entry point.

A package offers one as `name = "module:POLICY"` under `turnlog.policies`; POLICY has the two members of
turnlog.processors.core.policies.Policy. Only the one that [fold] policy names is imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from turnlog.processors.core.policies import Policies, Policy
from turnlog.settings import OFFERED, SettingsError

GROUP = OFFERED["fold.policy"]


def installed_policies(name: str) -> Policies:
    """The built-in policies, and the one offered as `name` when it is none of them.

    Raises SettingsError for one that is unknown, does not import, or is no policy.
    """
    built_in = Policies()
    if name in built_in.named:
        return built_in
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        legal = ", ".join(sorted({*built_in.named, *points}))
        raise SettingsError(f"fold.policy must be one of {legal}, or offered under {GROUP}, got {name!r}")
    where = f"fold.policy {name!r}, entry point {points[name].value} of {GROUP}"
    try:
        found = points[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{where}: does not import: {error}") from error
    if not isinstance(found, Policy):
        raise SettingsError(f"{where}: must have needs_messages and cut(turns, tree, undelivered, rules)")
    return built_in.with_own({name: found})
