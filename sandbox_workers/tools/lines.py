"""Texts that come in parts: some of their lines are kept, all are counted, and none of it takes more memory than a part
and what is kept."""

from __future__ import annotations


class Lines:
    """Those from number `first` on, `most` of them at most, as many as fit `room` bytes with an end each."""

    def __init__(self, first: int, most: int | None, room: int) -> None:
        self.first = first
        self.taken: list[bytes] = []
        self.count = 0
        """Of the whole text; what stands behind the last line's end is no line."""
        self._most = most
        self._room = room
        self._over = False
        self._begun = b""
        self._open = False

    @property
    def ended(self) -> bool:
        """The text ends with the end of a line."""
        return self.count > 0 and not self._open

    def feed(self, part: bytes) -> None:
        """The text's next bytes, one at least."""
        ends = part.count(b"\n")
        skipped = self.first - 1 - self.count
        start = 0 if skipped <= 0 else len(part) if ends < skipped else _after(part, skipped)
        while start < len(part) and not self._over:
            end = part.find(b"\n", start)
            self._begun += part[start : end if end >= 0 else len(part)]
            start = end + 1 if end >= 0 else len(part)
            if end >= 0:
                self._take()
            self._over = self._over or len(self._begun) > self._room
        self.count += ends
        self._open = not part.endswith(b"\n")

    def finish(self) -> None:
        """There are no more parts."""
        if self._begun and not self._over:
            self._take()
        self.count += self._open

    def _take(self) -> None:
        self._room -= len(self._begun) + 1
        if self._room >= 0:
            self.taken.append(self._begun)
        self._over = self._room < 0 or len(self.taken) == self._most
        self._begun = b""


def _after(part: bytes, ends: int) -> int:
    """Where the text goes on behind so many ends of lines, which are there."""
    low, high = 0, len(part)
    while high - low > 1:
        middle = (low + high) // 2
        if (found := part.count(b"\n", low, middle)) >= ends:
            high = middle
        else:
            ends -= found
            low = middle
    return high
