"""Tools that installed packages offer, found by entry point: `name = "module:TOOL"` under `turnlog.tools`.

ToolOfferError
├── AmbiguousTool   two packages offer one name, or a package offers the name of a built-in tool
└── BrokenTool      what the entry point names does not import, or is no tool of that name
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from turnlog.infra.tool_schemas import BUILT_IN, UnknownTool
from turnlog.names import EntryPointGroup

GROUP: Final = EntryPointGroup.TOOLS


class ToolOfferError(Exception):
    """Base of the tree above."""


class AmbiguousTool(ToolOfferError):
    """Remedy: uninstall one, or give it another name."""


class BrokenTool(ToolOfferError):
    """Remedy: mend or uninstall the package that the entry point belongs to."""


def offered() -> dict[str, EntryPoint]:
    """Name -> entry point, nothing imported (reading every package's metadata takes tens of ms). Raises
    AmbiguousTool."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in BUILT_IN:
            raise AmbiguousTool(f"{described(point)}: {point.name} is a built-in tool; give it another name")
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            raise AmbiguousTool(
                f"tool {point.name!r}, entry points {other.value} and {point.value} of {GROUP}: two packages offer the "
                "name; uninstall one"
            )
    return points


def loaded(point: EntryPoint) -> Any:
    """The tool object. Raises BrokenTool."""
    try:
        found = point.load()
    except Exception as error:  # a module may raise anything while it is imported
        raise BrokenTool(f"{described(point)}: does not import: {type(error).__name__}: {error}") from error
    if getattr(found, "name", None) != point.name or not isinstance(getattr(found, "version", None), str):
        raise BrokenTool(f"{described(point)}: must be the Tool named {point.name!r}, got {found!r:.200}")
    return found


def described(point: EntryPoint) -> str:
    """How errors speak of an entry point."""
    return f"tool {point.name!r}, entry point {point.value} of {GROUP}"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Tool -> version, of built-in tools and of those that packages offer. Raises UnknownTool, ToolOfferError."""
    wanted = sorted(set(names))
    points = offered() if set(wanted) - BUILT_IN.keys() else {}
    for name in wanted:
        if name not in BUILT_IN and name not in points:
            legal = ", ".join([*BUILT_IN, *sorted(points)])
            raise UnknownTool(f"no tool {name!r}: built in or offered under the entry point group {GROUP} are {legal}")
    return {name: BUILT_IN[name].version if name in BUILT_IN else loaded(points[name]).version for name in wanted}
