"""Weight versions of a run: which is the newest, and how far others lag behind it. A fold of weight-versions.

Lag is measured along the chain of publications that the current generation of the trainer builds on. Version numbers
are never reused, so a trainer that was killed publishes the weights of its checkpoint, and those of the steps that it
repeats, again under new numbers. The lag between two sets of weights does not change by that (ADR 24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from turnlog.schemas.events import Event, WeightVersionPublished
from turnlog.schemas.ids import environment_digest

OFF_CHAIN = 2**31 - 1
"""Lag of weights of a dead trainer generation that the current one has not reproduced: no limit lets them train."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version that the trainer holds when it trains a rollout batch, and the lags of other versions behind it."""

    number: int
    lags: Mapping[int, int] = field(default_factory=dict)
    """Version -> lag, for versions whose lag differs from the difference of the numbers."""

    def lag(self, version: int) -> int:
        """Return the number of publications between the weights of `version` and those held."""
        return self.lags.get(version, self.number - version)

    def recorded_lags(self, versions: Iterable[int]) -> dict[str, int]:
        """Return version -> lag for the manifest, so that its reader needs no other record to find the same lags."""
        return {str(version): self.lag(version) for version in sorted(set(versions))}


def recorded_version(number: int, lags: Mapping[str, int]) -> HeldVersion:
    """Return the inverse of `HeldVersion.recorded_lags`."""
    return HeldVersion(number, {int(version): lag for version, lag in lags.items()})


class WeightChain:
    """The fold of weight-versions. It stores three integers and a hash per version; repeated records change nothing."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest version; None before the first."""
        self.batch = -1
        """Last batch that the newest weights include; lower than before after a trainer went back to a checkpoint."""
        self.incarnation = -1
        self._places: dict[int, int] = {}
        """Version -> its place on the chain. Versions with the same bytes after the same step share one place."""
        self._links: list[tuple[int, str]] = []
        """Place -> (optimizer steps, hash of the tensors' checksums)."""
        self._heads: list[int] = []
        """Place -> the newest version there."""
        self._lost: dict[tuple[int, str], list[int]] = {}
        """Versions that are off the chain, by link."""
        self._steps: dict[int, int] = {}
        """Version -> optimizer steps taken up to its weights, whether it is on the chain or not."""

    @property
    def version(self) -> int:
        """`newest`, or -1 before the first version."""
        return -1 if self.newest is None else self.newest

    def apply(self, event: Event) -> None:
        """Fold one publication; ignore other records."""
        if not isinstance(event, WeightVersionPublished) or (self.newest is not None and event.version <= self.newest):
            return
        if event.incarnation > self.incarnation:
            self._go_back(event.step)
        self.newest, self.batch, self.incarnation = event.version, event.batch_index, event.incarnation
        link = event.step, environment_digest(event.checksums)
        if not self._links or self._links[-1] != link:
            self._links.append(link)
            self._heads.append(event.version)
        self._heads[-1], self._steps[event.version] = event.version, event.step
        for version in (event.version, *self._lost.pop(link, ())):
            self._places[version] = len(self._links) - 1

    def expected_version(self, ahead: int, versions: Iterable[int]) -> HeldVersion:
        """Return the version that the trainer will hold `ahead` publications from now, with the lags of `versions`.

        Raises ValueError before the first version.
        """
        if self.newest is None:
            raise ValueError("no weight version is published yet")
        number, end = self.newest + ahead, len(self._links) - 1 + ahead
        lags = {version: end - self._places[version] if version in self._places else OFF_CHAIN
                for version in versions if 0 <= version <= self.newest}  # fmt: skip
        return HeldVersion(number, {version: lag for version, lag in lags.items() if lag != number - version})

    def largest_lag(self, versions: Iterable[int]) -> int:
        """Return the largest lag of `versions` behind the newest version; 0 if there are none.

        For versions that the current trainer generation has not produced, the lag is the difference of the numbers.
        """
        wanted = set(versions)
        if not wanted:
            return 0
        held = self.expected_version(0, wanted)
        return max(held.number - version if held.lag(version) == OFF_CHAIN else held.lag(version) for version in wanted)

    def step_of(self, version: int) -> int | None:
        """Return the optimizer steps taken up to a version's weights; None if the current trainer generation has not
        produced them.
        """
        place = self._places.get(version)
        return None if place is None else self._links[place][0]

    def is_older(self, version: int, than: int) -> bool:
        """Whether the weights of `version` are older than those of `than`, which means that fewer optimizer steps led
        to them.

        A trainer that went back to a checkpoint publishes old weights under new numbers. The numbers are compared if
        the steps of either version are not known.
        """
        steps = self._steps
        return steps[version] < steps[than] if version in steps and than in steps else version < than

    def is_news(self, version: int, served: int) -> bool:
        """Whether an engine that serves version `served` should load `version`.

        While a trainer that went back to a checkpoint publishes weights older than `served`, the engine keeps its own:
        the trainer will produce them again.
        """
        return version > served and not self.is_older(version, served)

    def oldest(self, *, ahead: int, max_lag: int) -> int:
        """Return the version whose weights are `max_lag` publications behind those held `ahead` publications from now.

        The result is above `newest` if that version is not published yet, and -1 before the first version.
        """
        if self.newest is None:
            return -1
        place, end = max(len(self._links) - 1 + ahead - max_lag, 0), len(self._links) - 1
        return self._heads[place] if place <= end else self.newest + place - end

    def of_step(self, step: int) -> int | None:
        """Return the newest version if its weights have taken `step` optimizer steps, else None."""
        return self.newest if self.newest is not None and self.step_of(self.newest) == step else None

    def _go_back(self, step: int) -> None:
        """Take everything beyond the weights of `step` off the chain, because a new trainer generation starts from
        them.
        """
        kept = next((place for place, (steps, _) in enumerate(self._links) if steps > step), len(self._links))
        for version, place in list(self._places.items()):
            if place >= kept:
                self._lost.setdefault(self._links[place], []).append(version)
                del self._places[version]
        del self._links[kept:], self._heads[kept:]
