"""How many bytes a restart would fold again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from turnlog.infra.log import Record


class OpenSpan:
    """Bytes between the low-water marks and the position, to the resolution of a batch."""

    def __init__(self) -> None:
        self._total: dict[str, int] = {}
        self._ends: dict[str, deque[tuple[int, int]]] = {}
        """Topic -> (next offset, total) after each batch."""

    def passed(self, records: Sequence[Record]) -> None:
        """One batch of a unit."""
        last: dict[str, int] = {}
        for record in records:
            self._total[record.topic] = self._total.get(record.topic, 0) + len(record.key) + len(record.value)
            last[record.topic] = record.offset
        for topic, offset in last.items():
            self._ends.setdefault(topic, deque([(0, 0)])).append((offset + 1, self._total[topic]))

    def above(self, low: Mapping[str, int]) -> int:
        """Bytes above the marks; forgets what lies below."""
        span = 0
        for topic, ends in self._ends.items():
            while len(ends) > 1 and ends[1][0] <= low[topic]:
                ends.popleft()
            span += self._total[topic] - ends[0][1]
        return span
