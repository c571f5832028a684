"""The recorded draws formed again under other rules: one Arrow file per batch, with its weight columns.

Which groups were drawn together, and the version that the trainer held, are recorded decisions and stay; lengths,
masks, admission, weights and the cut into batches follow the rules.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.batch_files import sealed
from turnlog.infra.history import events
from turnlog.infra.role import Role
from turnlog.processors.core.batches.draws import DrawRules, FormedBatch, ReadableGroup, form_draw
from turnlog.processors.core.batches.weight_chain import HeldVersion, recorded_version
from turnlog.schemas.events import SampleBatchFormed
from turnlog.schemas.topics import BATCHES

FOLDER = "batches"
INDEX = "index.jsonl"
"""One line per batch: what its manifest would say."""
GroupOf = Callable[[str], ReadableGroup | None]


@dataclass(slots=True)
class Draw:
    """A recorded draw."""

    index: int
    held: HeldVersion
    groups: list[str]
    """In the order of its parts."""


async def recorded_draws(role: Role, until_ms: int | None) -> AsyncIterator[Draw]:
    """Draws that gave a batch, in order. A draw that was skipped names no version of the trainer."""
    draw: Draw | None = None
    async for record, manifest in events(role, BATCHES):
        if not isinstance(manifest, SampleBatchFormed) or (until_ms is not None and record.timestamp_ms > until_ms):
            continue
        if draw is not None and draw.index != manifest.draw_index:
            yield draw
            draw = None
        draw = draw or Draw(manifest.draw_index, recorded_version(manifest.trainer_version, manifest.lags), [])
        draw.groups += [group for group in manifest.groups if group not in draw.groups]
    if draw is not None:
        yield draw


class DrawWriter:
    """Writes batches below OUT/batches; one that was killed goes on behind the last whole draw."""

    def __init__(self, out: Path, rules: DrawRules, group_of: GroupOf) -> None:
        self._rules = rules
        self._group_of = group_of
        self._part = out / f"{FOLDER}.part"
        self._done = out / FOLDER
        self._part.mkdir(parents=True, exist_ok=True)
        self._lines = self._whole_draws()
        self.batches = sum(bool(line["rows"]) for line in self._lines)

    def _whole_draws(self) -> list[dict[str, object]]:
        """Lines of draws whose every batch is there; the last one counts only if it says so."""
        index = self._part / INDEX
        text = index.read_text() if index.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        while lines and not lines[-1]["last"]:
            lines.pop()
        index.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return lines

    def write(self, draw: Draw) -> None:
        """Form and write one draw. Raises WeightsDoNotAddUp, OSError."""
        if self._lines and draw.index <= int(str(self._lines[-1]["draw"])):
            return
        groups = [group for name in draw.groups if (group := self._group_of(name)) is not None]
        formed = form_draw(groups, draw.held, self._rules)
        dropped = [{"sample_id": row.sample_id, "reason": row.reason} for row in formed.dropped]
        lines: list[dict[str, object]] = [self._batch(draw, part, batch) for part, batch in enumerate(formed.batches)]
        lines = lines or [{"draw": draw.index, "rows": 0}]
        for part, line in enumerate(lines):
            line |= {"dropped": [] if part else dropped, "last": part == len(lines) - 1}
        with (self._part / INDEX).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self._lines += lines

    def close(self) -> None:
        """Everything is there."""
        os.replace(self._part, self._done)

    def _batch(self, draw: Draw, part: int, batch: FormedBatch) -> dict[str, object]:
        name = f"batch-{self.batches:06d}.arrow"
        self.batches += 1
        content, sha256 = sealed(batch, self._rules.weighting)
        (self._part / name).write_bytes(content)
        weights = batch.weights
        return {
            "draw": draw.index,
            "part": part,
            "file": name,
            "rows": len(batch.rows),
            "rows_sha256": sha256,
            "groups": list(batch.groups),
            "weighting": self._rules.weighting.value,
            "prompts": weights.prompts,
            "trajectories": weights.trajectories,
            "trained_tokens": weights.trained_tokens,
            "constant_length": weights.constant_length,
            "trainer_version": draw.held.number,
            "max_lag": batch.max_lag,
            "masked": batch.masked,
        }
