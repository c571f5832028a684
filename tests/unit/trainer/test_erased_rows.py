"""Batches whose sessions were erased after they were formed go through the trainer like others, and train nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.batches import synthetic_manifest, synthetic_rows
from tests.fakes.memory_log import MemoryLog
from tests.unit.trainer.test_draws import DECOUPLED, Run
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.role import session_keys
from turnlog.settings import ErasureSettings

BATCHES = 3


class SealedTraining(Run):
    """A run that encrypts the tokens of its rows."""

    def __init__(self, folder: Path, **trainer: Any) -> None:
        super().__init__(folder, **trainer)
        self.settings = dataclasses.replace(
            self.settings,
            erasure=ErasureSettings(master_keys="0123456789abcdef"),
            feeder=dataclasses.replace(self.settings.feeder, draws=BATCHES),
        )

    def events(self) -> Any:
        return EventLog.open(
            MemoryLog(self.log.broker), self.registry, writer="trainer", keys=session_keys(self.settings)
        )


@pytest.mark.parametrize("trainer", [DECOUPLED, {"token_files_every": 1}], ids=["decoupled", "token files"])
async def test_a_batch_of_erased_sessions_alone_trains_nothing_and_the_run_goes_on(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    run = SealedTraining(tmp_path, **trainer)
    await run.begin()
    async with run.events() as events:
        for index in range(BATCHES):
            rows = synthetic_rows(index)
            for session in sorted(set(rows.session_ids)):
                await events.keys.prepare(session)
            file = await run.blobs.put(write_rows(rows, events.keys), media_type=MEDIA_TYPE)
            await events.append(synthetic_manifest(rows, file, "run", index))
        for session in sorted(set(synthetic_rows(1).session_ids)):
            await events.keys.erase(session, "an operator")
    await run.train()
    first, erased, last = await run.steps(BATCHES)
    assert erased.masked == {"erased": int(synthetic_rows(1).trained.sum())}
    assert (erased.loss, erased.grad_norm, erased.skipped) == (0.0, 0.0, False)
    figures = (erased.logprob_gap_max, erased.logprob_gap_mean, erased.clip_fraction, *erased.metrics.values())
    assert all(map(math.isfinite, figures)), erased.metrics
    for step in (first, last):
        assert step.masked == {}
        assert step.grad_norm > 0.0
    assert [step.step for step in (first, erased, last)] == [1, 2, 3]
