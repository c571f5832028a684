"""Results of a rollout batch's forward passes, computed by the weights before its first update.

A rollout batch of several parts means several updates on samples of the same weights. The log-probs for ratios and for
the divergence from the reference are computed once for all parts, before the first update moves the weights, and are
retained by sample_id until each part has been stepped on. A checkpoint inside a rollout batch stores the rest, so that
a restart between two updates yields the same numbers, and with them the same losses, as no restart.
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
from turnlog.trainer.algorithms.objective import Floats, ForwardPassResults, Objective, Pass
from turnlog.trainer.learner import Learner

ForwardPass = Callable[[Learner, BatchRows], Floats]
Call = Callable[[ForwardPass, BatchRows], Awaitable[Floats]]
"""Runs a forward pass on all ranks and returns its result."""
Kept = dict[str, dict[str, torch.Tensor]]
"""Pass -> sample_id -> the column of its row."""
Rest = Callable[[SampleBatchFormed], Awaitable[Sequence[BatchRows]]]
"""Returns the rows of the parts after the first one of a rollout batch."""
Truncated = Callable[[SampleBatchFormed], Awaitable[NDArray[np.bool_]]]
"""Returns [n] whether the trajectory of each row of a batch was truncated."""
METHODS: Mapping[Pass, ForwardPass] = {
    "proximal": Learner.logprobs,
    "reference": Learner.reference_logprobs,
    "teacher": Learner.teacher_logprobs,
    "values": Learner.values,
}


class DrawPasses:
    """The forward passes of successive rollout batches."""

    def __init__(self, objective: Objective, call: Call, rest: Rest, truncated: Truncated, kept: Kept) -> None:
        """`kept` holds what a checkpoint inside a rollout batch stored; it is updated in place to what the next one
        must store.
        """
        self._objective, self._call, self._rest, self._kept = objective, call, rest, kept
        self._truncated = truncated

    async def numbers(self, manifest: SampleBatchFormed, rows: BatchRows) -> ForwardPassResults:
        """Return the columns of the next batch; `rows` are those of its rows that are computed.

        Raises CheckpointUnusable inside a rollout batch whose first update was made without these passes.
        """
        passes = self._objective.passes(manifest.parts)
        if passes and manifest.part == 0:
            self._kept.clear()
            self._kept.update({one: {} for one in sorted(passes)})
            for part in (rows, *map(self._objective.rows_to_compute, await self._rest(manifest))):
                for one in sorted(passes):
                    column = await self._call(METHODS[one], part)
                    each = (len(column) - len(part.token_ids)) // len(part)  # values of a row after those of its tokens
                    pieces = np.split(column, part.starts[1:] + each * np.arange(1, len(part)))
                    self._kept[one].update(zip(part.sample_ids, map(torch.from_numpy, pieces), strict=True))
        columns: dict[str, Any] = {one: self._column(one, manifest, rows) for one in passes}
        if self._objective.critic is not None and self._objective.critic.bootstrap:
            columns["truncated"] = await self._truncated(manifest)
        return ForwardPassResults(**columns, whitening_std=manifest.whitening_std, batch=manifest.batch_index)

    def release_batch(self, rows: BatchRows) -> None:
        """Release the columns of a batch that was stepped on."""
        for kept in self._kept.values():
            for sample in rows.sample_ids:
                kept.pop(sample, None)

    def _column(self, one: Pass, manifest: SampleBatchFormed, rows: BatchRows) -> Floats:
        kept = self._kept.get(one, {})
        if missing := [sample for sample in rows.sample_ids if sample not in kept]:
            what = one if one == "values" else f"{one} log-probs"
            raise CheckpointUnusable(
                f"batch {manifest.batch_index} is part {manifest.part} of rollout batch {manifest.draw_index}, but "
                f"the checkpoint before it holds no {what} of {missing[0]}: the rollout batch was begun with another "
                "[trainer] logprobs, kl, teacher or algorithm. Finish it with those settings, or start from a "
                "checkpoint between two rollout batches"
            )
        column: Floats = torch.cat([kept[sample] for sample in rows.sample_ids]).numpy()
        return column
