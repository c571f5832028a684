"""Sessions of one group that are judged against each other: the choice of opponents, and each comparison requested
once.

Live, a session is judged before its group is complete: the other sessions may be at any point, or not have begun.
Callers that have the whole group pass it to judges as Means.group.

RecipeError
└── NeedsGroup   a verifier of the environment can judge only recorded groups
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

from turnlog.infra.environments.recipes import Episode, Judged, Recipe, RecipeError
from turnlog.infra.environments.verifiers.kinds import JudgeVerifier, WeightedSum
from turnlog.schemas import ids


class NeedsGroup(RecipeError):
    """A verifier with `opponents` cannot judge live. Remedy: `turnlog log reward rerun`, or compare with a
    `reference`."""


def live(recipe: Recipe) -> Recipe:
    """Return the recipe if its verifier judges a session by itself. Raises NeedsGroup."""
    if (found := _comparing(recipe.verifier)) is not None:
        raise NeedsGroup(f"recipe {recipe.name!r}: {why_not_live(found)}")
    return recipe


def why_not_live(verifier: JudgeVerifier) -> str:
    """Return the message for the user."""
    return (
        f"verifier {verifier.name!r} compares the sessions of a group with each other, but a session is judged before "
        "its group is complete: compare with a `reference`, or run the verifier on recorded groups with "
        "`turnlog log reward rerun`"
    )


def _comparing(verifier: Judged) -> JudgeVerifier | None:
    if isinstance(verifier, JudgeVerifier):
        return verifier if verifier.opponents else None
    parts = verifier.parts if isinstance(verifier, WeightedSum) else ()
    return next((found for part, _ in parts if (found := _comparing(part)) is not None), None)


class JudgedGroup:
    """All sessions of a group that can be judged, by session id."""

    def __init__(self, episodes: Mapping[str, Episode]) -> None:
        self.episodes = episodes
        self._circle = sorted(episodes, key=lambda session: ids.digest("opponents", session))
        self._found: dict[tuple[str, str, str], float] = {}
        self._asking: defaultdict[tuple[str, str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def opponents(self, session: str, most: int) -> tuple[str, ...]:
        """Return the session's opponents: its neighbors on a circle in hash order, half of them on each side.

        Every session therefore has the same number of opponents, the relation is symmetric, and the result does not
        depend on the order of arrival."""
        circle, at = self._circle, self._circle.index(session)
        reach = min((most + 1) // 2, len(circle) // 2)
        places = ((at + step) % len(circle) for away in range(1, reach + 1) for step in (away, -away))
        return tuple(dict.fromkeys(circle[place] for place in places))

    async def comparison_share(self, by: str, first: str, second: str, ask: Callable[[], Awaitable[float]]) -> float:
        """Return the share that verifier `by` gives `first` when it comes before `second`. It is requested once, and
        again for the other session of the pair if that failed. Raises what `ask` raises."""
        key = (by, first, second)
        async with self._asking[key]:
            if key not in self._found:
                self._found[key] = await ask()
        return self._found[key]
