"""Tokens of another model than the trainer's end it before the step: ids that it lacks, ids of another tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.batches import synthetic_manifest, synthetic_rows
from tests.fakes.sessions import GroupName, SessionStory
from tests.unit.trainer.test_draws import Run
from turnlog.infra.batch_files import write_rows
from turnlog.infra.log import Partition
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.topics import STEPS
from turnlog.trainer import TokensUnfit


async def begun(folder: Path, sessions: dict[str, str], rows: BatchRows) -> Run:
    """A run of one draw, whose sessions began with these tokenizers: run -> sha256."""
    run = Run(folder)
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=1))
    await run.begin()
    async with run.events() as events:
        for name, sha256 in sessions.items():
            started = SessionStory(GroupName(name, "group", 0, 1), 0, np.random.default_rng(0)).started()
            await events.append(dataclasses.replace(started, tokenizer_sha256=sha256))
        await events.append(synthetic_manifest(rows, await run.blobs.put(write_rows(rows)), "run", 0))
    return run


async def test_tokens_of_sessions_with_another_tokenizer_are_refused_by_both_and_others_train(tmp_path: Path) -> None:
    run = await begun(tmp_path / "bad", {"run": "f" * 64}, synthetic_rows(0))
    with pytest.raises(TokensUnfit, match=rf"batch 0 .* sha256 {'f' * 64}, .*tokenizer.json has .*\[model\] path"):
        await run.train()
    own = hashlib.sha256((tmp_path / "bad/model/tokenizer.json").read_bytes()).hexdigest()
    run = await begun(tmp_path / "good", {"run": own, "another run": "f" * 64}, synthetic_rows(0))
    await run.train()
    assert [step.batch_index for step in await run.steps(1)] == [0]


async def test_a_token_that_the_model_lacks_ends_the_trainer_before_the_step(tmp_path: Path) -> None:
    rows = synthetic_rows(0)
    rows.token_ids[7] = 400
    run = await begun(tmp_path, {}, rows)
    with pytest.raises(TokensUnfit, match="has token 400"):
        await run.train()
    async with run.events() as events:
        assert list((await events.log.end_offsets([Partition(STEPS.name, 0)])).values()) == [0]
