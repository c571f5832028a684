"""What the passes of a draw give its batches, from the weights before its first update.

A draw of several parts is several updates on samples of the same weights. What its ratios are taken against, and how
far it has gone from the reference, is computed once for all parts, before the first of them moves anything, and kept
by sample_id until each part is stepped on. A checkpoint inside a draw holds what is left, so that the same numbers,
and with them the same losses, come of a restart between two updates as of none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import SampleBatchFormed
from turnlog.trainer import CheckpointUnusable
from turnlog.trainer.algorithms.objective import Floats, Numbers, Objective, Pass
from turnlog.trainer.gang.calls import Ranks

Kept = dict[str, dict[str, torch.Tensor]]
"""Pass -> sample_id -> the numbers of its row."""
Call = Callable[..., Awaitable[Any]]
"""(method of Ranks, arguments) -> its result"""
Rest = Callable[[SampleBatchFormed], Awaitable[Sequence[BatchRows]]]
"""The rows of the parts behind a draw's first one."""
Truncated = Callable[[SampleBatchFormed], Awaitable[NDArray[np.bool_]]]
"""Of each row of a batch, whether its trajectory was."""
METHODS: Mapping[Pass, Callable[[Ranks, BatchRows], Floats]] = {
    "proximal": Ranks.logprobs,
    "reference": Ranks.reference_logprobs,
    "teacher": Ranks.teacher_logprobs,
    "values": Ranks.values,
}


class DrawPasses:
    """The passes of one draw after another."""

    def __init__(self, objective: Objective, call: Call, rest: Rest, truncated: Truncated, kept: Kept) -> None:
        """`kept`: what a checkpoint inside a draw holds; from then on what the next one has to."""
        self._objective, self._call, self._rest, self._kept = objective, call, rest, kept
        self._truncated = truncated

    async def numbers(self, manifest: SampleBatchFormed, rows: BatchRows) -> Numbers:
        """Of the batch that is next; `rows`: those of it that are computed. Raises CheckpointUnusable inside a draw
        whose first update was made without."""
        passes = self._objective.passes(manifest.parts)
        if passes and manifest.part == 0:
            self._kept.clear()
            self._kept.update({one: {} for one in sorted(passes)})
            for part in (rows, *map(self._objective.computed, await self._rest(manifest))):
                for one in sorted(passes):
                    column = await self._call(METHODS[one], part)
                    each = (len(column) - len(part.token_ids)) // len(part)  # numbers of a row behind those of tokens
                    pieces = np.split(column, part.starts[1:] + each * np.arange(1, len(part)))
                    self._kept[one].update(zip(part.sample_ids, map(torch.from_numpy, pieces), strict=True))
        columns: dict[str, Any] = {one: self._column(one, manifest, rows) for one in passes}
        if self._objective.critic is not None and self._objective.critic.bootstrap:
            columns["truncated"] = await self._truncated(manifest)
        return Numbers(**columns, whitening_std=manifest.whitening_std)

    def stepped(self, rows: BatchRows) -> None:
        """Let go of what a batch needed."""
        for kept in self._kept.values():
            for sample in rows.sample_ids:
                kept.pop(sample, None)

    def _column(self, one: Pass, manifest: SampleBatchFormed, rows: BatchRows) -> Floats:
        kept = self._kept.get(one, {})
        if missing := [sample for sample in rows.sample_ids if sample not in kept]:
            what = one if one == "values" else f"{one} log-probs"
            raise CheckpointUnusable(
                f"batch {manifest.batch_index} is part {manifest.part} of draw {manifest.draw_index}, and the "
                f"checkpoint before it holds no {what} of {missing[0]}: the draw was begun under another "
                "[trainer] logprobs, kl, teacher or algorithm. End the draw under those, or start from a checkpoint "
                "between two draws"
            )
        column: Floats = torch.cat([kept[sample] for sample in rows.sample_ids]).numpy()
        return column
