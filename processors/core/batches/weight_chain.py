"""How far weights are apart: along the chain of publications that the live incarnation of the trainer stands on.

Numbers are never reused, so a trainer that was killed publishes the weights of its checkpoint, and those of the steps
that it repeats, once more under new numbers. The distance between two sets of weights does not change by that (ADR 24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.ids import environment_digest

OFF_CHAIN = 2**31 - 1
"""Lag of weights of a dead incarnation that the live one has not made: no bound lets them train."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version that the trainer holds at a draw, and how far behind it others are."""

    number: int
    lags: Mapping[int, int] = field(default_factory=dict)
    """Version -> lag, where it is not the difference of the numbers."""

    def lag(self, version: int) -> int:
        """Publications between the weights of a version and those held."""
        return self.lags.get(version, self.number - version)

    def recorded(self, versions: Iterable[int]) -> dict[str, int]:
        """What a manifest says of the versions that sampled for it: a reader of it alone finds the same lags."""
        return {str(version): self.lag(version) for version in sorted(set(versions))}


def recorded_version(number: int, lags: Mapping[str, int]) -> HeldVersion:
    """The inverse of `HeldVersion.recorded`."""
    return HeldVersion(number, {int(version): lag for version, lag in lags.items()})


class WeightChain:
    """The fold of weight-versions: two integers and a hash per version. Repeats change nothing."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest version; None before the first."""
        self.incarnation = -1
        self._places: dict[int, int] = {}
        """Version -> its place on the chain; weights that are the same bytes after the same step share one."""
        self._links: list[tuple[int, str]] = []
        """By place: (optimizer steps, hash of the tensors' checksums)."""
        self._lost: dict[tuple[int, str], list[int]] = {}
        """Versions that are off the chain, by link."""

    def apply(self, event: WeightVersionPublished) -> None:
        """Fold one publication."""
        if self.newest is not None and event.version <= self.newest:
            return
        if event.incarnation > self.incarnation:
            self._go_back(event.step)
        self.newest, self.incarnation = event.version, event.incarnation
        link = event.step, environment_digest(event.checksums)
        if not self._links or self._links[-1] != link:
            self._links.append(link)
        for version in (event.version, *self._lost.pop(link, ())):
            self._places[version] = len(self._links) - 1

    def held(self, ahead: int, versions: Iterable[int]) -> HeldVersion:
        """The version that the trainer will hold `ahead` publications from now, with the lags of `versions`.

        Raises ValueError before the first version.
        """
        if self.newest is None:
            raise ValueError("no weight version is published yet")
        number, end = self.newest + ahead, len(self._links) - 1 + ahead
        lags = {version: end - self._places[version] if version in self._places else OFF_CHAIN
                for version in versions if 0 <= version <= self.newest}  # fmt: skip
        return HeldVersion(number, {version: lag for version, lag in lags.items() if lag != number - version})

    def largest_lag(self, versions: Iterable[int]) -> int:
        """Of versions against the newest; by number where they are of no step of the live incarnation. 0 of none."""
        wanted = set(versions)
        if not wanted:
            return 0
        held = self.held(0, wanted)
        return max(held.number - version if held.lag(version) == OFF_CHAIN else held.lag(version) for version in wanted)

    def _go_back(self, step: int) -> None:
        """A new incarnation starts from the weights of `step`: what the chain holds beyond them is off it."""
        kept = next((place for place, (steps, _) in enumerate(self._links) if steps > step), len(self._links))
        for version, place in list(self._places.items()):
            if place >= kept:
                self._lost.setdefault(self._links[place], []).append(version)
                del self._places[version]
        del self._links[kept:]
